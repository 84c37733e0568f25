"""One rank of a launch of packed documents: models under layouts, each way to keep them apart."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.meshwright.data.packing_runs import ON_RANKS, run
from tests.parity.parity_launch import on_ranks, run_all


def main(folder: Path) -> None:
    run_all({", ".join(names): partial(run, *names) for names in ON_RANKS}, folder, "")


if __name__ == "__main__":
    on_ranks(main)
