"""Many random plans in few launches: draws, their single-device references, what went wrong.

Everything random is drawn in one process from the seed and handed to the ranks, so that
they can't disagree about it.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from meshwright.executor.ranks import launch
from meshwright.planner.plan.plan import Plan
from tests.helpers.ranks import attempt
from tests.models.models import Traced, traced
from tests.models.random_models import ROWS, Spec, case_of, draw_microbatches, draw_plan, draw_spec
from tests.parity.parity_reference import Reference, compare, plain_loop, runtime_loop

TOLERANCE = 1e-4  # random models have no tuned sizes; what is wrong is wrong by percents
TIMEOUT_S = 120


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


def fuzz(seed: int, ranks: int) -> Failure | None:
    """Run the plan of a seed; what was wrong with it."""
    made = draw(seed, ranks)
    found, failure = attempt(ranks, run_draw, made, timeout_s=TIMEOUT_S)
    reason = failure or _wrong(found)
    return Failure(seed=seed, reason=reason, draw=made) if reason else None


def run_draw(draw: Draw) -> dict[str, Any]:
    found = runtime_loop(case_of(draw.spec), draw.plan, draw.of)
    return {} if launch.rank() else compare(found, draw.wanted)


def _wrong(result: dict[str, Any]) -> str:
    """What is wrong with one result; "" for nothing."""
    if result["loss"] > TOLERANCE:
        return f"losses differ by {result['loss']:.1e}"
    for kind in ("gradient", "state"):
        error, where = result[kind]
        if error > TOLERANCE:
            return f"{kind} of {where} differs by {error:.1e}"
    return f"names of one side only: {result['names']}" if result["names"] else ""
