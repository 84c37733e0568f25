"""Many random plans in few launches: draws, their single-device references, what went wrong.

Everything random is drawn in one process from the seed and handed to the ranks in a file, so that
they can't disagree about it.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from meshwright.planner.plan.plan import Plan
from tests.helpers.launching import launch
from tests.models.models import Traced, traced
from tests.models.random_models import ROWS, Spec, case_of, draw_microbatches, draw_plan, draw_spec
from tests.parity.parity_reference import Reference, plain_loop

TOLERANCE = 1e-4  # random models have no tuned sizes; what is wrong is wrong by percents
TIMEOUT_S = 900
WORKER = Path(__file__).with_name("fuzz_worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A random plan of a random model, and what it has to give."""

    spec: Spec
    of: Traced
    plan: Plan
    wanted: Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A seed whose plan did not equal the single device, why, and what was drawn."""

    seed: int
    reason: str
    draw: Draw


def draw(seed: int, ranks: int) -> Draw:
    """Everything that a seed stands for."""
    random = Random(seed)
    spec = draw_spec(random)
    microbatches = draw_microbatches(random)
    case = case_of(spec)
    of = traced(case, ROWS // microbatches)
    plan = draw_plan(random, of, ranks=ranks, microbatches=microbatches)
    parts = microbatches if spec.batch_statistics else 1
    return Draw(spec=spec, of=of, plan=plan, wanted=plain_loop(case, ROWS, parts=parts))


def fuzz(folder: Path, seeds: Sequence[int], ranks: int) -> list[Failure]:
    """Run the plans of all seeds; a launch that dies is a failure of the seed it was at, and the
    others go on in the next."""
    drawn = {seed: draw(seed, ranks) for seed in seeds}
    for seed, made in drawn.items():
        (folder / f"{seed}.draw").write_bytes(pickle.dumps(made))
    failures: list[Failure] = []
    left = list(seeds)
    while left:
        written = folder / "results.json"
        written.unlink(missing_ok=True)
        run = launch(WORKER, str(folder), *map(str, left), ranks=ranks, timeout_s=TIMEOUT_S)
        results = json.loads(written.read_text()) if written.exists() else {}
        reasons = {seed: _wrong(results[str(seed)]) for seed in left if str(seed) in results}
        if len(reasons) < len(left):
            reasons[left[len(reasons)]] = f"the launch died\n{run.tail()}"
        failures += [
            Failure(seed=seed, reason=reason, draw=drawn[seed])
            for seed, reason in reasons.items()
            if reason
        ]
        left = left[len(reasons) :]
    return failures


def _wrong(result: dict[str, Any]) -> str:
    """What is wrong with one result; "" for nothing."""
    for end in ("refused", "failed"):
        if end in result:
            return f"{end}: {result[end]}"
    if result["loss"] > TOLERANCE:
        return f"losses differ by {result['loss']:.1e}"
    for kind in ("gradient", "state"):
        error, where = result[kind]
        if error > TOLERANCE:
            return f"{kind} of {where} differs by {error:.1e}"
    return f"names of one side only: {result['names']}" if result["names"] else ""
