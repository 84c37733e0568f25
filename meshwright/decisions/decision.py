"""What the user asked for, and what was decided for it: the values that planning passes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import Plan
from meshwright.planner.pricing import Prediction
from meshwright.planner.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `auto_parallelize` was asked beyond the `Problem`: its arguments of these names."""

    global_batch_size: int
    overrides: Overrides
    objective: str
    memory_margin: float
    time_limit_s: float | None
    compile: bool | str
    tf32: bool
    check_replicas: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan, why, and what it is expected to do.

    Pickled for the other ranks it leaves behind what stays on the rank that searched: the report's
    details and deferred answers, and whatever a subclass adds.
    """

    plan: Plan
    report: Report
    prediction: Prediction

    def __reduce__(self) -> tuple[Any, ...]:
        report = replace(self.report, details=None, deferred=None)
        return _received, (self.plan, report, self.prediction)


def _received(plan: Plan, report: Report, prediction: Prediction) -> Decision:
    return Decision(plan=plan, report=report, prediction=prediction)
