"""The page: the report's data in a template, in one file with all that draws it, whose policy names
scripts by their digest and lets nothing be fetched."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import html
import importlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from meshwright.planner.page import front
from meshwright.planner.page.cells import Row, between, many, sent, share, stage_words, time
from meshwright.planner.page.tables import busiest_stage, compared, diagrams, tables, without_plan
from meshwright.planner.plan import counted, seconds, slower
from meshwright.profiles.inputs import NotInstalledError, write_text
from meshwright.profiles.store import default_path

FOLDER = Path(__file__).parent
SCHEMA = 3  # of `Report.to_dict()`: another number where a key changes its meaning or goes
BUNDLER = "vl-convert-python"
NEEDED = ("altair", "vl_convert", "jinja2")
POLICY = (
    "default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
HEIGHT = 800  # pixels, in a notebook
MOST_NUMBERED = 64  # ranks whose numbers are written
TICKS = 1_000_000  # of a window: its events are drawn to this part of it


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
    own = [(FOLDER / name).read_text(encoding="utf-8") for name in ("timeline.js", "page.js")]
    scripts, drawn = [_library(), "\n".join(own)], timeline(data)
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
        made=_made(data),
        sentence=front.sentence(data),
        picture=front.picture(data),
        numbered=_ranks_of(data) <= MOST_NUMBERED,
        tiles=front.tiles(data),
        more_numbers=front.more_numbers(data),
        fit=front.fit_answers(data),
        left_out=front.left_out(data),
        tables=tables(data),
        diagrams=diagrams(data),
        charts=charts,
        charts_json=_embedded(charts),
        timeline=drawn,
        timeline_json=_embedded(drawn),
        plan_json=json.dumps(data["plan"], indent=2),
        commands=front.commands(data),
        proofs=[_proof(row) for row in data["solver"]],
        style=(FOLDER / "style.css").read_text(encoding="utf-8"),
        scripts=scripts,
        policy=POLICY.format(digests=" ".join(map(_digest, scripts))),
    )
    return text


def _training(data: Row) -> str:
    """Batch, precision and optimizer; reports of before say less."""
    plan, training = data["plan"], data.get("training", {})
    length = data["throughput"]["sequence_length"]
    tokens = f" of {length:,} tokens" if length else ""
    optimizer = f", {training['optimizer']}" if "optimizer" in training else ""
    return f"{plan['global_batch_size']:,} rows{tokens} a step, {plan['precision']}{optimizer}"


def _made(data: Row) -> list[str]:
    """Date and versions; reports of before have none."""
    made = data.get("made", {})
    if "date" not in made:
        return []
    return [made["date"], f"meshwright {made['meshwright']}, torch {made['torch']}"]


def _ranks_of(data: Row) -> int:
    ranks: int = data["cluster"]["num_nodes"] * data["cluster"]["devices_per_node"]
    return ranks


def _embedded(data: Any) -> str:
    """Data for an element of a script."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def timeline(data: Row) -> dict[str, Any]:
    """The simulated step for `timeline.js`: boxes are [group, stage, kind, micro-batch or "",
    start, length], from the window's start in units of its `unit_s`."""
    windows = data["timeline"]["windows"]
    events = [[*csv.DictReader(window["events_csv"].splitlines())] for window in windows]
    kinds = [*dict.fromkeys(event["kind"] for of in events for event in of)]
    drawn = []
    for window, of in zip(windows, events, strict=True):
        start_s = window["start_s"]
        unit_s = (window["end_s"] - start_s) / TICKS or 1.0
        boxes: list[tuple[int | str, ...]] = []
        for event in of:
            start, end = (
                round((float(event[name]) - start_s) / unit_s) for name in ("start_s", "end_s")
            )
            microbatch = event["microbatch"] and int(event["microbatch"])
            where = int(event["group"]), int(event["stage"]), kinds.index(event["kind"])
            boxes.append((*where, microbatch, start, end - start))
        name, complete = window["window"], data["timeline"]["complete"]
        ends = {"first": complete or name == "first", "last": complete or name == "last"}
        drawn.append({"start_s": start_s, "unit_s": unit_s, "boxes": boxes, **ends})
    return {
        "groups": [stage_words(group["stages"]) for group in data["device_groups"]],
        "stages": [[*group["stages"]] for group in data["device_groups"]],
        "colours": front.COLOURS,
        "kinds": kinds,
        "ticks": TICKS,
        "communication_s": data["timeline"].get("communication_s", []),
        "windows": drawn,
    }


def framed_page(data: Row) -> str:
    """The page in a frame, for a notebook."""
    page = html.escape(render_page(data))
    style = f"width:100%;height:{HEIGHT}px;border:0"
    return f'<iframe title="Meshwright report" style="{style}" srcdoc="{page}"></iframe>'


def check_installed() -> None:
    """Raise ImportError where the packages of the extra are not installed."""
    for name in NEEDED:
        _needed(name)


def _needed(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotInstalledError(
            f" needs {', '.join(NEEDED)}, and {error.name or name} is not installed",
            place="the report's page",
            way_out="`pip install altair vl-convert-python jinja2` installs them; print(report) "
            "needs none",
        ) from error


@cache
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed, of the version that Altair writes for: bundled once, and kept
    in the cache with their digest."""
    version = ".".join(_needed("altair").SCHEMA_VERSION.split(".")[:2])
    bundler = _needed("vl_convert")
    cached = default_path() / f"vega-lite-{version}-vl-convert-{metadata.version(BUNDLER)}.js"
    with contextlib.suppress(OSError, UnicodeError):
        digest, _, code = cached.read_text(encoding="utf-8").partition("\n")
        if digest == _digest(code):
            return code
    bundle: str = bundler.javascript_bundle("window.vegaEmbed = vegaEmbed;", version)
    code = bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    with contextlib.suppress(OSError, ValueError):  # without a cache it is bundled each time
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_text(cached, f"{_digest(code)}\n{code}", "cache")
    return code


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _proof(row: Row) -> str:
    how = "relaxation integral" if row["integral_relaxation"] else "by branch and bound"
    return (
        f"{row['block']}: objective {row['objective_s']:.4g} s, gap {max(row['gap'], 0.0):.1e}, "
        f"{row['solver']} in {row['time_s']:.2f} s, {how}"
    )


# --- words, for who reads one for the first time --------------------------------------------------


WORDS: Mapping[str, str] = MappingProxyType({
    "rank": "one process, which drives one device; ranks are numbered node by node",
    "row": "one example of the batch: a sequence, an image",
    "micro-batch": "the part of a batch that goes forward and backward at a time; gradients add up",
    "dp": "data parallelism: so many groups of ranks take rows of their own",
    "tp": "tensor parallelism: so many ranks share each operator out",
    "pp": "pipeline parallelism: so many groups of ranks run parts of the model in turn",
    "cp": "context parallelism: so many ranks share out the tokens of a row",
    "ep": "expert parallelism: so many ranks of the data axis share out the experts",
    "mesh": "a stage's ranks as a product of degrees, dp × cp × tp, with ep for experts within",
    "ZeRO": (
        "what ranks of the data axis divide among them rather than hold each: 0 nothing, 1 the "
        "optimizer's states, 2 gradients too, 3 weights too"
    ),
    "block": "a run of operators, mostly one layer; stages are made of blocks",
    "stage": "consecutive blocks that the same ranks run",
    "device group": "the ranks that run the same stage, or several of an interleaved schedule",
    "in flight": "micro-batches that a stage has gone forward with and not yet backward",
    "schedule": (
        "the order of a pipeline's forwards and backwards: gpipe all forwards first; 1f1b in turn; "
        "eager_1f1b the same, further ahead; interleaved_1f1b several stages on each group; "
        "zb_h1, zb_h2 and zb_v put gradients of weights off to fill gaps; chimera and dualpipe run "
        "two copies of the model in opposite directions"
    ),
    "recompute": (
        "what a backward makes again rather than keeps, of how many blocks: none; selective "
        "(attention that is written out); pointwise (norms, activations, casts); widening "
        "(products larger than what goes in); products; full; alternate (every other block in "
        "full); regather: also what was gathered from tensor-parallel ranks is gathered again"
    ),
    "MFU": "the model's FLOPs a second over what the device can do at most",
    "HFU": "the same with the FLOPs of recompute",
    "exposed communication": "seconds in which a device waits for others, with nothing to compute",
    "hidden": "seconds of communication during which the device computes",
    "gradient reduction": "seconds of summing gradients over the data axis that nothing hides",
    "bubble": "the part of a pipeline's time in which its devices wait, on average",
    "waiting": "seconds in which a device group waits for the others",
    "activations": "what forwards keep for backwards, of all micro-batches in flight",
    "buffers": "messages between stages",
    "transient": "what a backward makes again, gathers, or works on, at the fullest moment",
    "reserved": "the device's context and the communicators' buffers",
    "predicted peak": "what is held at the fullest moment of a step; plans are chosen by it",
    "rehearsed": (
        "of the plan's own steps, run on tensors without values; what a device reserves is added"
    ),
    "price": "what the cost model predicts; nothing was run on the devices",
    "interval": (
        "measured over predicted is between these for 80 % of the published measurements of "
        "models and plans like this"
    ),
    "gap": "how much more than the bound the plan takes; the bound is no plan, and may be too low",
    "family": "plans with one decision in common that the chosen one hasn't, as tp=2 or ZeRO-2",
    "runner-up": "a plan that came near the chosen one, of its own families",
    "tie": "a difference smaller than prices resolve; the simpler plan of those is chosen",
    "measured": "seconds of operators that were measured on this device (meshwright profile)",
    "interpolated": "seconds between measured sizes",
    "modelled": "seconds from the device's speed and a curve of efficiency, of the catalog",
})  # fmt: skip


# --- answers to the question of each view, from the report's data ---------------------------------


LEAST = 1e-3  # of a step: smaller parts are in the table alone


def answers(data: Row) -> dict[str, str]:
    """Sentences by the name of the view."""
    return {
        **({"rehearsal": _rehearsed(data["rehearsal"])} if "rehearsal" in data else {}),
        "alternatives": _alternatives(data),
        "memory": f"Most are {front.decides(data)}",
        "components": _components(data),
        "timeline": _timeline(data),
        "communication": _communication(data),
        "blocks": f"{len(data['blocks'])} distinct blocks; blocks that do the same are one.",
        "ranks": _ranks(data),
        "sources": _sources(data),
    }


def _alternatives(data: Row) -> str:
    others = [row for row in compared(data) if not row["chosen"]]
    if not others:
        searched = "complete" in data["summary"]
        return "No other plan was found." if searched else "The plan was given, not searched."
    first, step_s = others[0], data["summary"]["step_time_s"]
    more_s = first["step_time_s"] - step_s
    takes = f"takes {time(abs(more_s)).text} {'more' if more_s >= 0 else 'less'} a step"
    if abs(more_s) < LEAST * step_s:
        takes = "takes as long"
    return (
        f"The fastest of the {len(others)} others, {first['plan']}, {takes} "
        f"({slower(first['slower'])}){', less than prices resolve: a tie' * first['tie']}."
    )


def _components(data: Row) -> str:
    parts = data["components_s"]
    total = sum(parts.values()) or 1.0
    listed = ", ".join(
        f"{name} {time(value).text} ({share(value / total).text})"
        for name, value in sorted(parts.items(), key=lambda part: -part[1])
        if value >= LEAST * total
    )
    step = between(time, data["summary"]["step_interval_s"])
    return f"Of the busiest devices' step: {listed}. The 80 % interval of the whole is {step}."


def _timeline(data: Row) -> str:
    timeline = data["timeline"]
    if timeline["complete"]:
        return f"All {timeline['events']:,} events of the simulated step."
    return (
        f"{timeline['events']:,} events are too many for a page: the first, the steady and the "
        "last window."
    )


def _communication(data: Row) -> str:
    rows = data["communication"]
    if not rows:
        return "No rank communicates."
    stage = busiest_stage(rows)
    exposed, total, nbytes = (
        sum(row[key] for row in rows if row["stage"] == stage)
        for key in ("exposed_s", "seconds", "sent_bytes")
    )
    return (
        f"Stage {stage} waits longest: {time(exposed).text} of {time(total).text} are exposed; "
        f"a rank sends {sent(nbytes).text} a step."
    )


def _ranks(data: Row) -> str:
    cluster, groups = data["cluster"], data["device_groups"]
    count = cluster["num_nodes"] * cluster["devices_per_node"]
    return (
        f"{many(count, 'rank')} on {many(cluster['num_nodes'], 'node')} of "
        f"{cluster['devices_per_node']} {cluster['device']}, in "
        f"{many(len(groups), 'device group')}."
    )


def _sources(data: Row) -> str:
    error = data["uncertainty"]
    step, memory = error["step"], error["memory"]
    spent = sum(data["planning_s"].values())
    return (
        f"Planned in {time(spent).text}. "
        f"A measured step was {step['low']:.2f} to {step['high']:.2f} times the predicted with "
        f"{error['level']:.0%} ({step['rows']} measurements: {step['of']}); memory "
        f"{memory['low']:.2f} to {memory['high']:.2f} times ({memory['rows']}: {memory['of']})."
    )


def _rehearsed(rehearsal: Row) -> str:
    """The ranks that were rehearsed, and whether they agree."""
    ranks, wrong = rehearsal["ranks"], len(rehearsal["mismatches"])
    count = sum(row["stands_for"] for row in ranks.values())
    agree = f"{wrong:,} do not match" if wrong else "all match"
    return (
        f"{len(ranks):,} of {count:,} ranks, one of each kind, ran the plan's own step here on "
        f"tensors without values, in {time(rehearsal['seconds']).text}. Of their collectives, "
        f"messages and parts of a checkpoint {agree}."
    )
