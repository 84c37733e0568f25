"""Components: where the step time of a plan goes, and which of them make another plan slower."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.costmodel.stages import StageCosts
from meshwright.planner.plan import passes_of, seconds
from meshwright.planner.pricing import Evaluation

SHOWN = 1e-6  # part of a step from which on a difference is one
TOLD = 5e-4  # from which on it is told beside a larger one


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Seconds of the busiest device group by what it does; the sum is the step time."""

    compute_s: float
    communication_s: float
    bubble_s: float
    gradient_reduction_s: float
    optimizer_s: float

    def as_dict(self) -> dict[str, float]:
        return {
            "compute": self.compute_s,
            "exposed communication": self.communication_s,
            "bubble": self.bubble_s,
            "gradient reduction": self.gradient_reduction_s,
            "optimizer": self.optimizer_s,
        }


def breakdown(evaluation: Evaluation) -> Components:
    """Components of the device group that is busy longest; it may run several stages."""

    def busy(ranks: tuple[int, ...]) -> float:
        return sum(s.forward_s + s.backward_s for s in _stages(evaluation, ranks))

    return of_group(evaluation, max(evaluation.plan.devices, key=busy))


def of_group(evaluation: Evaluation, ranks: tuple[int, ...]) -> Components:
    """Components of the device group of these ranks; it waits in the rest of the step."""
    group, m = _stages(evaluation, ranks), passes_of(evaluation.plan)

    def total(*names: str) -> float:
        return float(sum(getattr(s, name) for s in group for name in names))

    communication = m * total("forward_comm_s", "backward_comm_s")
    busy = m * total("forward_s", "backward_s")
    once = total("reduce_s"), total("optimizer_s")
    bubble = max(0.0, evaluation.prediction.step_time_s - busy - sum(once))
    return Components(
        compute_s=busy - communication,
        communication_s=communication,
        bubble_s=bubble,
        gradient_reduction_s=once[0],
        optimizer_s=once[1],
    )


def _stages(evaluation: Evaluation, ranks: tuple[int, ...]) -> list[StageCosts[float]]:
    plan = evaluation.plan
    return [s for s, own in zip(evaluation.stages, plan.stages, strict=True) if own.ranks == ranks]


def why_slower(chosen: Components, other: Components) -> str:
    """The components that cost the other plan most, against the chosen one."""
    ours, theirs = chosen.as_dict(), other.as_dict()
    step_s = sum(ours.values())
    most_s = max(abs(theirs[k] - ours[k]) for k in ours)
    least = (TOLD if most_s > TOLD * step_s else SHOWN) * step_s
    losses = sorted(((theirs[k] - ours[k], k) for k in ours), reverse=True)
    parts = [f"+{seconds(d)} {k}" for d, k in losses[:2] if d > least]
    gains = [f"-{seconds(-d)} {k}" for d, k in losses[::-1][:1] if d < -least]
    return "; ".join([*parts, *gains]) or "equal in every component"
