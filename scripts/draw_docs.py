"""Draw the pictures of the documents, and list the systems of docs/systems/ in its index.

    python -m scripts.draw_docs [NAME ...] [--folder FOLDER]

Every picture is drawn from what the product computes; equal code gives equal files. Without a NAME
all are drawn, into docs/images/, and the index is written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

from meshwright.costmodel.schedules import SCHEDULES
from scripts.drawing import one_process, pipelines, placements, prices, queues, systems

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"


def _of_models(module: str, function: str) -> str:
    """A picture whose module imports torch."""
    drawn: str = getattr(import_module(f"scripts.drawing.{module}"), function)()
    return drawn


PICTURES: Mapping[str, Callable[[], str]] = {
    **{
        f"schedule-{name}": partial(pipelines.timeline, name)
        for name, record in SCHEDULES.items()
        if record.flushes
    },
    "schedule-colours": pipelines.timeline_legend,
    "in-flight": pipelines.in_flight,
    "all-reduce": prices.all_reduce,
    "products": prices.products,
    "states": prices.states,
    "data-parallel": one_process.exchanges,
    "placements": placements.runs_of_blocks,
    "ampnet": queues.in_order_of_arrival,
    "causal": partial(_of_models, "tokens", "causal"),
    "frontier": partial(_of_models, "searches", "frontier"),
    "peaks": partial(_of_models, "searches", "peaks"),
    "segments": partial(_of_models, "recompute", "segments"),
    "fragments": partial(_of_models, "allocator", "fragments"),
}


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m scripts.draw_docs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--folder", type=Path, default=IMAGES, help="for the pictures")
    options = parser.parse_args()
    unknown = {*options.names} - {*PICTURES}
    if unknown:
        parser.error(f"no picture is called {min(unknown)}; there are {', '.join(PICTURES)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        path = options.folder / f"{name}.svg"
        path.write_text(PICTURES[name](), encoding="utf-8")
        print(path)
    if not options.names:
        path = DOCS / "systems" / "index.md"
        path.write_text(systems.with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
