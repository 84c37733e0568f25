"""One rank of a launch of batches of other shapes: models under layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.parity.parity_launch import on_ranks, run_all
from tests.user_code.shapes.shape_runs import LAYOUTS, ON_RANKS, RANKS, run


def main(folder: Path) -> None:
    runs = {
        f"{kind}, {layout}": partial(run, kind, LAYOUTS[layout], RANKS) for kind, layout in ON_RANKS
    }
    run_all(runs, folder, "")


if __name__ == "__main__":
    on_ranks(main)
