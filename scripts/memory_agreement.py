"""How far the peak that the search goes by is from that of the plan written out.

    python -m scripts.memory_agreement [--plans 300] [--seed 0]

Plans of four models with drawn decisions (pipeline and schedule, tensor axis, ZeRO, micro-batches,
recompute, segments, what lies in host memory) are searched; what does not fit, or can't be, is
drawn again. Of each plan the fullest device group counts: the draft's bytes over those of the plan
written out. Shown are all of them, how many are within 1 and 2 %, and quantiles.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from meshwright import Overrides
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner.drafts import Candidate, PlanDraft
from meshwright.planner.search import Search
from scripts.record_plans import planned
from scripts.recording.cases import Case, gpt2, llama, mixtral, nodes

BATCH, NEAR = 64, (0.01, 0.02)
MODELS = {
    "llama 4096": lambda: llama(16, 4096, 4096, 32),
    "llama 2048": lambda: llama(12, 2048, 2048, 16),
    "gpt2 2048": lambda: gpt2(12, 2048, 1024),
    "mixtral 2048": lambda: mixtral(6, 2048, 2048),
}
CLUSTERS = ("h100-sxm", "dgx-a100")
DRAWN: Mapping[str, tuple[Any, ...]] = {
    "pp": (1, 2, 4),
    "tp": (1, 1, 2),
    "zero": (0, 1, 2, 3),
    "num_microbatches": (1, 2, 4, 8),
    "schedule": tuple(SCHEDULES),
    "recompute": (None, None, "none", "pointwise", "widening", "full"),
    "segments": (None, None, None, 2),
    "offload": (None, None, None, {"optimizer": 0.5}, {"activations": 0.5}),
}


@dataclass(slots=True)
class Agreement:
    """A drawn plan: its model and decisions, and the draft's bytes over the written ones."""

    model: str
    decisions: Mapping[str, Any]
    ratio: float


class Watching(Search):
    """A search that keeps what it writes out, and of what (`PAIRS`)."""

    def written(self, draft: PlanDraft) -> Candidate:
        found = super().written(draft)
        PAIRS.append((draft, found))
        return found


PAIRS: list[tuple[PlanDraft, Candidate]] = []


@cache
def problem_of(model: str, node: str) -> Problem:
    """The traced model on a node."""
    case = Case(model=MODELS[model], cluster=nodes(node), batch=BATCH)
    return planned(case, overrides=Overrides(zero=3)).report.details.problem


def drawn(rng: random.Random) -> dict[str, Any]:
    """Decisions, those that are left open left out."""
    found = {name: rng.choice(values) for name, values in DRAWN.items()}
    if found["pp"] == 1:
        del found["schedule"]
    return {name: value for name, value in found.items() if value is not None}


def agreements(count: int, seed: int) -> Iterator[Agreement]:
    """So many plans that fit."""
    rng = random.Random(seed)
    while count:
        model, node, decisions = rng.choice([*MODELS]), rng.choice(CLUSTERS), drawn(rng)
        PAIRS.clear()
        try:
            Watching(problem_of(model, node), BATCH, Overrides(**decisions)).run()
        except ValueError:  # can't be, or doesn't fit
            continue
        draft, written = PAIRS[-1]
        ours, theirs = (max(x.evaluation.prediction.peak_memory_bytes) for x in (draft, written))
        yield Agreement(model=model, decisions=decisions, ratio=ours / theirs)
        count -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = []
    for one in agreements(args.plans, args.seed):
        found.append(one)
        sys.stdout.write(f"{one.ratio:.4f} {one.model} {one.decisions}\n")
        sys.stdout.flush()
    off = np.array([one.ratio - 1 for one in found])
    low, middle, high = np.quantile(off, [0.05, 0.5, 0.95])
    near = ", ".join(f"{(abs(off) <= part).mean():.0%} within {part:.0%}" for part in NEAR)
    sys.stdout.write(
        f"{len(off)} plans: {near}; 5 %, 50 %, 95 %: {low:+.2%}, {middle:+.2%}, {high:+.2%}; "
        f"from {off.min():+.1%} to {off.max():+.1%}\n"
    )


if __name__ == "__main__":
    main()
