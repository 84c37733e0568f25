"""Which models are traced, planned and run at parity.

    scripts/model_coverage [MODEL ...] [--no-plan] [--no-run]

Per model of `model_zoo.py`: the published size traced on meta (CPU seconds, operators, how many of
them lie in blocks that repeat, how many have a sharding rule) and planned for 8 and 64 H100; the
small size run on 4 CPU ranks, under the plan that is chosen and under forced ones, beside plain
PyTorch on one device. Under forced layouts links cost nothing, so that everything is sharded that a
rule lets be. A table in Markdown goes to stdout, progress and reasons of failures to stderr.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

from meshwright import Cluster, auto_parallelize
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.errors import TraceError
from meshwright.planner.plan import describe
from meshwright.planner.tracing import trace
from scripts.zoo.coverage_runs import LAYOUTS, RANKS, run
from scripts.zoo.models import PUBLISHED, SMALL, ZOO, Built
from tests.helpers.ranks import attempt, end_all

NODES = (1, 8)  # of 8 H100 each
EXACT = 1e-4  # largest relative error of a loss, gradient or buffer that counts as parity
TIMEOUT_S = 300  # of a cell
TRACED_ROWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What tracing found: CPU seconds, operators, blocks and classes of them, the shares of
    operators in blocks that occur more than once and of those with a rule, and how often each
    operator without one occurs."""

    parameters: int
    seconds: float
    operators: int
    blocks: int
    classes: int
    repeated: float
    ruled: float
    unruled: Mapping[str, int]


def built(name: str, size: str, rows: int) -> Built:
    """A model of the zoo; published ones on meta."""
    torch.manual_seed(0)
    with torch.device("meta" if size == PUBLISHED else "cpu"):
        return ZOO[name].build(size, rows)


def traced(name: str, size: str) -> Traced:
    made = built(name, size, TRACED_ROWS)
    started = time.process_time()
    graph = trace(made.model, made.batch, loss_fn=made.loss_fn)
    seconds = time.process_time() - started
    table = analyse(graph)
    graph = cut_blocks(graph, table)
    unruled = Counter(op.target for op in graph.ops if not table.ops[op.name].known)
    count = len(graph.ops)
    return Traced(
        parameters=sum(p.numel() for p in made.model.parameters()),
        seconds=seconds,
        operators=count,
        blocks=len(graph.blocks),
        classes=len({block.class_id for block in graph.blocks}),
        repeated=_repeated(graph),
        ruled=1 - sum(unruled.values()) / count,
        unruled=dict(unruled.most_common()),
    )


def _repeated(graph: Graph) -> float:
    occurrences = Counter(block.class_id for block in graph.blocks)
    inside = (len(b.ops) for b in graph.blocks if occurrences[b.class_id] > 1)
    return sum(inside) / len(graph.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan chosen for one cluster, or why there is none; CPU seconds, tracing included."""

    seconds: float
    plan: str
    step_s: float | None


def planned(name: str, nodes: int) -> Planned:
    cluster = Cluster.from_catalog("h100-sxm", num_nodes=nodes)
    made = built(name, PUBLISHED, TRACED_ROWS)
    rows = ZOO[name].rows_per_device * cluster.num_devices
    started = time.process_time()
    try:
        result = auto_parallelize(
            made.model,
            cluster,
            example_inputs=made.batch,
            global_batch_size=rows,
            loss_fn=made.loss_fn,
        )
    except ValueError as error:
        seconds = time.process_time() - started
        print(f"{name}, {cluster.num_devices} H100: {error}", file=sys.stderr)
        return Planned(seconds=seconds, plan=type(error).__name__, step_s=None)
    seconds = time.process_time() - started
    return Planned(
        seconds=seconds, plan=describe(result.plan), step_s=result.prediction.step_time_s
    )


def executed(cells: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, dict[str, Any]]:
    """Results of cells `NAME/LAYOUT` by cell, of one launch; a cell that fails leaves the others
    alone, which go on in the next."""
    results: dict[str, dict[str, Any]] = {}
    for cell in cells:
        found, failure = attempt(RANKS, run, *cell.rsplit("/", 1), timeout_s=timeout_s)
        results[cell] = {"failed": failure} if failure else found
    end_all()
    return results


def error_of(result: Mapping[str, Any]) -> float | None:
    """The largest relative error of a cell; None where it did not run."""
    if "failed" in result or "refused" in result:
        return None
    if result["extra"]:
        return float("inf")  # gradients of parameters that have none
    return max(result["loss"], result["gradient"][0], result["buffers"][0])


# --- the table ------------------------------------------------------------------------------------


def cell_text(layout: str, result: Mapping[str, Any]) -> str:
    """The largest error, and under tp the share of its stage's parameters that a rank holds."""
    error = error_of(result)
    if error is None:
        return "refused" if "refused" in result else "**failed**"
    shown = f"{error:.0e}" if error <= EXACT else f"**{error:.0e}**"
    return shown + (f", {result['held']:.2f}" if "tp" in layout else "")


def row(name: str, plan: bool, run: bool) -> tuple[list[str], bool]:
    """The cells of a model's row, and whether all went well: a plan that can't fit is no failure,
    whatever is not traced or not at parity is."""
    try:
        small, published = traced(name, SMALL), traced(name, PUBLISHED)
    except TraceError as error:
        print(f"{name}: {error}", file=sys.stderr)
        right = bool(ZOO[name].refused) and ZOO[name].refused in str(error)
        return [name, ZOO[name].library, "refused" if right else "**not traced**"], right
    except Exception:  # noqa: BLE001 - of whatever kind: the table says that it failed
        print(f"{name}: {traceback.format_exc()}", file=sys.stderr)
        return [name, ZOO[name].library, "**not traced**"], False
    texts = [
        name, ZOO[name].library, f"{published.parameters / 1e9:.2f}",
        f"{published.seconds:.1f}", f"{published.operators}",
        f"{published.blocks} / {published.classes}", f"{100 * published.repeated:.0f}",
        f"{100 * min(small.ruled, published.ruled):.1f}",
    ]  # fmt: skip
    for target, count in published.unruled.items():
        print(f"{name}: no rule for {target}, {count} times", file=sys.stderr)
    for nodes in NODES if plan else ():
        found = planned(name, nodes)
        step = f": {found.step_s:.3g} s" if found.step_s is not None else ""
        plan_text = found.plan.replace("|", "\\|")  # a bar ends a cell
        texts += [f"{found.seconds:.1f}", f"{plan_text}{step}"]
        gc.collect()
    well = True
    if run:
        results = executed(f"{name}/{layout}" for layout in LAYOUTS)
        for cell, result in results.items():
            reason = result.get("failed") or result.get("refused")
            if reason:
                print(f"{cell}: {reason}", file=sys.stderr)
        well = all((error_of(r) or 0.0) <= EXACT and "failed" not in r for r in results.values())
        texts += [cell_text(layout, results[f"{name}/{layout}"]) for layout in LAYOUTS]
    return texts, well


def headings(plan: bool, run: bool) -> list[str]:
    found = [
        "model",
        "from",
        "parameters, 1e9",
        "traced, s",
        "operators",
        "blocks / classes",
        "repeated, %",
        "with a rule, %",
    ]
    if plan:
        found += [text for n in NODES for text in ("s", f"plan and step on {8 * n} H100")]
    return found + (list(LAYOUTS) if run else [])


def versions() -> str:
    names = ("torch", "transformers", "torchvision", "timm")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(ZOO)} (all)")
    parser.add_argument("--no-plan", action="store_true", help="don't plan the published sizes")
    parser.add_argument("--no-run", action="store_true", help="don't run the small sizes")
    options = parser.parse_args(argv)
    unknown = [name for name in options.models if name not in ZOO]
    if unknown:
        parser.error(f"no model {', '.join(unknown)}; legal: {', '.join(ZOO)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("MESHWRIGHT_TIMEOUT_S", "120")
    plan, run = not options.no_plan, not options.no_run
    names = headings(plan, run)
    print(f"{date.today()}, {versions()}\n")
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)
    failed = 0
    for name in options.models or ZOO:
        texts, well = row(name, plan, run)
        failed += not well
        print(f"| {' | '.join(texts)} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
