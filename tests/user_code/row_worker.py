"""One rank of a launch of losses over split rows: every loss under every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.parity.parity_launch import on_ranks, run_all
from tests.user_code.row_runs import EXACT_NAMES, FEWER, LAYOUTS, MEANS, MEET, RANKS, TOGETHER, run


def main(folder: Path) -> None:
    runs = {f"{n}, {key}": (n, over) for n in EXACT_NAMES for key, over in LAYOUTS.items()}
    runs |= {f"{n}, {key}": (n, over) for n in MEET for key, over in TOGETHER.items()}
    few = {
        f"{name}, 3 rows, {key}": partial(run, name, over, RANKS, 3)
        for name in FEWER
        for key, over in LAYOUTS.items()
    }
    few |= {
        f"{name}, 6 rows, {key}": partial(run, name, over, RANKS, 6)
        for name in MEANS
        for key, over in TOGETHER.items()
    }
    run_all(few | {key: partial(run, *each, RANKS) for key, each in runs.items()}, folder, "")


if __name__ == "__main__":
    on_ranks(main)
