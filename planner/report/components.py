"""Components of a plan's step time, and those that make another plan slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.plan import seconds
from meshwright.planner.pricing import Evaluation

SHOWN = 1e-6  # part of a step from which on a difference is one
TOLD = 5e-4  # from which on it is told beside a larger one
OF_PASSES = ("forward_s", "backward_s", "forward_comm_s", "backward_comm_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Seconds of a device group's step; `forward_s` and `backward_s` are of all micro-batches, of
    which `communication_s` are exposed; the sum is the step time,
    with a part of each of the replicas' `meetings_s`."""

    forward_s: float
    backward_s: float
    forward_comm_s: float
    backward_comm_s: float
    waiting_s: float
    gradient_reduction_s: float
    optimizer_s: float
    meetings_s: float = 0.0

    @property
    def communication_s(self) -> float:
        """Exposed communication of both passes."""
        return self.forward_comm_s + self.backward_comm_s

    @property
    def compute_s(self) -> float:
        """The rest of both passes."""
        return self.forward_s + self.backward_s - self.communication_s

    def as_dict(self) -> dict[str, float]:
        return {
            "compute": self.compute_s,
            "exposed communication": self.communication_s,
            "waiting": self.waiting_s,
            "gradient reduction": self.gradient_reduction_s,
            "optimizer": self.optimizer_s,
            **({"meetings of replicas": self.meetings_s} if self.meetings_s else {}),
        }


def device_groups(evaluation: Evaluation) -> list[Components]:
    """Components of each device group, which may run several stages; it waits in the rest of the
    step."""
    plan, m, groups = evaluation.plan, evaluation.plan.passes, []
    met_s = evaluation.meetings_s
    for ranks in plan.devices:
        pairs = zip(evaluation.stages, plan.stages, strict=True)
        stages = [costs for costs, stage in pairs if stage.ranks == ranks]
        names = (*OF_PASSES, "reduce_s", "optimizer_s")
        of = {name: float(sum(getattr(costs, name) for costs in stages)) for name in names}
        passes = {name: m * of[name] for name in OF_PASSES}
        once = {"gradient_reduction_s": of["reduce_s"], "optimizer_s": of["optimizer_s"]}
        busy = passes["forward_s"] + passes["backward_s"] + sum(once.values())
        waiting = max(0.0, evaluation.prediction.step_time_s - busy - met_s)
        groups.append(Components(**passes, **once, waiting_s=waiting, meetings_s=met_s))
    return groups


def busiest(groups: Sequence[Components]) -> Components:
    """Components of the device group whose passes take longest."""
    return max(groups, key=lambda group: group.forward_s + group.backward_s)


def why_slower(chosen: Components, other: Components) -> str:
    """The components that cost the other plan most, against the chosen one."""
    ours, theirs = chosen.as_dict(), other.as_dict()
    step_s = sum(ours.values())
    kinds = ours | theirs
    ours, theirs = ({k: of.get(k, 0.0) for k in kinds} for of in (ours, theirs))
    most_s = max(abs(theirs[k] - ours[k]) for k in ours)
    least = (TOLD if most_s > TOLD * step_s else SHOWN) * step_s
    losses = sorted(((theirs[k] - ours[k], k) for k in ours), reverse=True)
    parts = [f"+{seconds(d)} {k}" for d, k in losses[:2] if d > least]
    gains = [f"-{seconds(-d)} {k}" for d, k in losses[::-1][:1] if d < -least]
    return "; ".join([*parts, *gains]) or "equal in every component"
