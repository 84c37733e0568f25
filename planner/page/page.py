"""The page: the report's data, put into a template with its charts and what draws them.

Everything is in one file, and its policy forbids it to ask for more: scripts are named by their
digest, nothing is fetched.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import importlib
import json
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from meshwright.planner.page.answers import answers
from meshwright.planner.page.blocks import diagrams
from meshwright.planner.page.cells import Row
from meshwright.planner.page.tables import compared, facts, tables, without_plan
from meshwright.planner.page.words import WORDS
from meshwright.planner.plan import counted, seconds
from meshwright.profiles.inputs import NotInstalledError, write_text
from meshwright.profiles.store import default_path

FOLDER = Path(__file__).parent
BUNDLER = "vl-convert-python"
NEEDED = ("altair", "vl_convert", "jinja2")
POLICY = (
    "default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
HEIGHT = 800  # pixels, in a notebook


def render_page(data: Row, *, trace: str = "") -> str:
    """The page of a report's `data`, as `Report.to_dict()` gives it; where it has them, with its
    `sensitivity` and `cost`. `trace` names the file with all events of the step, beside the page.

    Raises ImportError where the packages of the extra are not installed.
    """
    jinja2 = _needed("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    plans = compared(data)
    _needed("altair")
    specs = importlib.import_module(f"{__package__}.specs")
    charts = specs.charts({**data, "compared": plans})
    scripts = [_library(), (FOLDER / "page.js").read_text(encoding="utf-8")]
    text: str = environment.get_template("page.html.j2").render(
        data=data,
        trace=trace,
        plans=plans,
        words=WORDS,
        training=_training(data),
        parameters=counted(data["summary"]["parameters"]),
        bound=seconds(data["summary"].get("bound_s", 0.0)),
        without_plan=without_plan(data),
        answers=answers(data),
        facts=facts(data),
        tables=tables(data),
        diagrams=diagrams(data),
        charts=charts,
        charts_json=_embedded(charts),
        plan_json=json.dumps(data["plan"], indent=2),
        commands=_commands(data),
        proofs=[_proof(row) for row in data["solver"]],
        style=(FOLDER / "style.css").read_text(encoding="utf-8"),
        scripts=scripts,
        policy=POLICY.format(digests=" ".join(map(_digest, scripts))),
    )
    return text


def _training(data: Row) -> str:
    """What a step trains on; reports of before say less."""
    plan, more = data["plan"], data.get("training", {})
    rows = f"{plan['global_batch_size']:,} rows"
    if length := data["throughput"]["sequence_length"]:
        rows += f" of {length:,} tokens"
    by = f", {more['optimizer']}" if "optimizer" in more else ""
    return f"{rows} a step, {plan['precision']}{by}"


def framed_page(data: Row) -> str:
    """The page in a frame, for a notebook."""
    page = html.escape(render_page(data))
    style = f"width:100%;height:{HEIGHT}px;border:0"
    return f'<iframe title="Meshwright report" style="{style}" srcdoc="{page}"></iframe>'


def _needed(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotInstalledError(
            f" needs {', '.join(NEEDED)}, and {error.name or name} is not installed",
            place="the report's page",
            way_out="`pip install 'meshwright[report]'` installs them, print(report) needs none",
        ) from error


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed, of the version that Altair writes for: bundled once, and kept
    in the cache with their digest."""
    version = ".".join(_needed("altair").SCHEMA_VERSION.split(".")[:2])
    bundler = _needed("vl_convert")
    kept = default_path() / f"vega-lite-{version}-vl-convert-{metadata.version(BUNDLER)}.js"
    with contextlib.suppress(OSError, UnicodeError):
        digest, _, code = kept.read_text(encoding="utf-8").partition("\n")
        if digest == _digest(code):
            return code
    made: str = bundler.javascript_bundle("window.vegaEmbed = vegaEmbed;", version)
    code = made.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    with contextlib.suppress(OSError, ValueError):  # without a cache it is made each time
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, f"{_digest(code)}\n{code}", "cache")
    return code


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _embedded(charts: Row) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c")


def _proof(row: Row) -> str:
    how = "relaxation integral" if row["integral_relaxation"] else "by branch and bound"
    return (
        f"{row['block']}: objective {row['objective_s']:.4g} s, gap {max(row['gap'], 0.0):.1e}, "
        f"{row['solver']} in {row['time_s']:.2f} s, {how}"
    )


def _commands(data: Row) -> list[tuple[str, str]]:
    """What to type to use the plan, and what for."""
    cluster, plan = data["cluster"], data["plan"]
    nodes = cluster["num_nodes"]
    several = f"--nnodes {nodes} " if nodes > 1 else ""
    asked = (
        f"MODULE:FUNCTION --cluster {cluster.get('flag') or 'CLUSTER'} "
        f"--batch {plan['global_batch_size']}"
    )
    return [
        (
            "train by it",
            f"torchrun {several}--nproc-per-node {cluster['devices_per_node']} -m meshwright "
            f"run {asked} --precision {plan['precision']} --plan plan.json",
        ),
        ("this page", f"meshwright report plan.json {asked} -o plan.html"),
        ("in a script", 'auto_parallelize(model, cluster, ..., plan="plan.json")'),
    ]
