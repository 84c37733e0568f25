"""Request of the user, and the decision for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

from meshwright.costmodel.graph import Graph
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import Plan
from meshwright.planner.pricing import Prediction
from meshwright.planner.report import Report
from meshwright.profiles import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Arguments of `auto_parallelize` beyond the `Problem`."""

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
    """A plan, its report and its prediction. Pickled for the other ranks it leaves behind what
    stays on the rank that searched: the report's details and deferred answers, and whatever a
    subclass adds."""

    plan: Plan
    report: Report
    prediction: Prediction

    def __reduce__(self) -> tuple[Any, ...]:
        report = replace(self.report, details=None, deferred=None)
        decision = partial(Decision, plan=self.plan, report=report, prediction=self.prediction)
        return decision, ()


def made_now(graph: Graph) -> dict[str, str]:
    """The model's name, today's date (UTC), and the versions that a plan and its report carry."""
    return {
        "model": graph.name,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "meshwright": VERSION,
        "torch": version("torch"),
    }
