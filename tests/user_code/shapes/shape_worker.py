"""One rank of a launch of batches of other shapes: every model under every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.parity.parity_launch import on_ranks, run_all
from tests.user_code.shapes.shape_runs import LAYOUTS, MEGATRON, RANKS, run


def main(folder: Path) -> None:
    runs = {
        f"{kind}, {key}": partial(run, kind, overrides, RANKS)
        for kind in MEGATRON
        for key, overrides in LAYOUTS.items()
    }
    run_all(runs, folder, "")


if __name__ == "__main__":
    on_ranks(main)
