"""Random plans of random models on one rank, each compared with the single device on rank 0."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

from fuzzing import Draw
from parity_launch import on_ranks, run_all
from parity_reference import compare, runtime_loop
from random_models import case_of

from executor import launch


def run_draw(folder: Path, seed: str) -> dict[str, Any]:
    draw: Draw = pickle.loads((folder / f"{seed}.draw").read_bytes())
    found = runtime_loop(case_of(draw.spec), draw.plan, draw.of)
    return compare(found, draw.wanted) if launch.rank() == 0 else {}


def main(folder: Path, *seeds: str) -> None:
    run_all({seed: partial(run_draw, folder, seed) for seed in seeds}, folder, "")


if __name__ == "__main__":
    on_ranks(main)
