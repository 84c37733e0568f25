"""Random plans of random models on one rank, each compared with the single device on rank 0."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.executor.ranks import launch
from tests.models.random_models import case_of
from tests.parity.fuzzing import Draw
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_reference import compare, runtime_loop


def run_draw(folder: Path, seed: str) -> dict[str, Any]:
    draw: Draw = pickle.loads((folder / f"{seed}.draw").read_bytes())
    found = runtime_loop(case_of(draw.spec), draw.plan, draw.of)
    return compare(found, draw.wanted) if launch.rank() == 0 else {}


def main(folder: Path, *seeds: str) -> None:
    run_all({seed: partial(run_draw, folder, seed) for seed in seeds}, folder, "")


if __name__ == "__main__":
    on_ranks(main)
