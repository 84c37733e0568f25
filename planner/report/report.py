"""Report: a plan, its costs, the alternatives and the assumptions, as text and as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Protocol

from meshwright.planner.document import Document
from meshwright.planner.page import framed_page, render_page
from meshwright.planner.plan import Plan, sized
from meshwright.planner.report.components import Components, busiest
from meshwright.planner.report.details import Details, Row, cost_of
from meshwright.planner.report.text import full_text, short_text
from meshwright.profiles.inputs import checked_path, write_text

SCHEMA = 3  # of `Report.to_dict()`: another number where a key changes its meaning or goes


class DeferredAnswers(Protocol):
    """Answers that take more planning, so that they wait until a report is asked for them."""

    def alternatives(self) -> Sequence[Row]: ...

    def known_alternatives(self) -> Sequence[Row]: ...

    def runners_up(self) -> Sequence[Row]: ...

    def overrides(self) -> Sequence[Row]: ...

    def sensitivity(self) -> Sequence[Row]: ...

    def advice(self) -> Sequence[Row]: ...

    def proof(self) -> Row: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Findings of a rehearsal of the plan, as `lines` of text and as `data`."""

    lines: Sequence[str]
    data: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything to know about a plan: `str()` is the text to decide from, `text(full=True)` all of
    it, `to_dict()` the same as data.

    `excluded` are the products that tensor-parallel degrees of a node can't split, and why.
    `alternatives`, `runners_up`, `overrides`, `advice` and `sensitivity()` are `deferred`: searched
    when they are first asked for, of several ranks by the one that priced the plan; so are the
    `details`. `rehearsed` is there after a rehearsal, on which the summary's verdict on memory then
    rests. `aside` are the `notes` on other plans.
    """

    plan: Plan
    summary: Row
    stages: Sequence[Row]
    device_groups: Sequence[Components]
    solver: Sequence[Row]
    assumptions: Sequence[str]
    notes: Sequence[str]
    phases_s: Mapping[str, float]
    timeline: Mapping[str, Any]
    excluded: Sequence[Row] = ()
    aside: Sequence[str] = ()
    rehearsed: Rehearsed | None = None
    details: Details | None = field(default=None, repr=False, compare=False)
    deferred: DeferredAnswers | None = field(default=None, repr=False, compare=False)

    @property
    def components(self) -> Components:
        """Seconds of a step by component, on the busiest devices."""
        return busiest(self.device_groups)

    @property
    def alternatives(self) -> Sequence[Row]:
        """The best plan of each family that the chosen plan does not belong to, under the overrides
        that it `asks` for: step time, how much `slower`, seconds more by component
        (`components_s`); or what it lacks (`shortfall_bytes`), or takes at least (`bound_s`) where
        the time was too short; with a `smaller_margin` what memory forbids."""
        return self.deferred.alternatives() if self.deferred else []

    @property
    def known_alternatives(self) -> Sequence[Row]:
        """Rows like `alternatives`, of the families that are searched in a moment; of the others
        that they were not."""
        return self.deferred.known_alternatives() if self.deferred else []

    @property
    def runners_up(self) -> Sequence[Row]:
        """The next best plans that fit, whatever their families."""
        return self.deferred.runners_up() if self.deferred else []

    @property
    def overrides(self) -> Sequence[Row]:
        """The cost of the overrides, all together and one by one, against doing without."""
        return self.deferred.overrides() if self.deferred else []

    @property
    def advice(self) -> Sequence[Row]:
        """Changes beyond the plan: a `kind` (batch, size, logits), a sentence (`advice`) and its
        numbers."""
        return self.deferred.advice() if self.deferred else []

    def sensitivity(self) -> Sequence[Row]:
        """Properties of the cluster, the factors on them that would flip the decision, and the
        plans then chosen, of those known from the search, which are priced again: seconds."""
        return self.deferred.sensitivity() if self.deferred else []

    def to_dict(self) -> dict[str, Any]:
        """Plain data: seconds, bytes, names, as docs/report.md says; `schema` is its version."""
        return {
            "schema": SCHEMA,
            "summary": dict(self.summary),
            "proof": dict(self.deferred.proof()) if self.deferred else {},
            "stages": [dict(s) for s in self.stages],
            **({"rehearsal": dict(self.rehearsed.data)} if self.rehearsed else {}),
            **(self.details.to_dict() if self.details else {}),
            "components_s": self.components.as_dict(),
            "runners_up": [dict(r) for r in self.runners_up],
            "alternatives": [dict(a) for a in self.alternatives],
            "overrides": [dict(o) for o in self.overrides],
            "advice": [dict(a) for a in self.advice],
            "solver": [dict(s) for s in self.solver],
            "excluded": [dict(e) for e in self.excluded],
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
            "planning_s": dict(self.phases_s),
            "plan": json.loads(self.plan.to_json()),
        }

    def cost(
        self,
        *,
        tokens: float | None = None,
        price_per_hour: float | None = None,
        power_watts: float | None = None,
    ) -> Row | None:
        """Device-hours of a step and of `tokens`, days, money where a price per device and hour is
        given, and energy where a power per device is; None on ranks that did not price the plan.
        Raises ValueError as `cost_of`."""
        if self.details is None:
            return None
        rates = {"price_per_hour": price_per_hour, "power_watts": power_watts}
        return cost_of(self.details, tokens=tokens, **rates)

    def html(
        self,
        path: str | Path,
        *,
        sensitivity: bool = False,
        tokens: float | None = None,
        price_per_hour: float | None = None,
        power_watts: float | None = None,
    ) -> Path | None:
        """Write the report as one HTML file, with `sensitivity()` and the `cost` where they are
        asked for; a step of too many events for it goes into a trace beside it. Does nothing on
        ranks that did not price the plan. Raises ImportError without `meshwright[report]`."""
        if self.details is None:
            return None
        data, path, trace = self.to_dict(), checked_path(path, "report.html: path"), ""
        if sensitivity:
            data["sensitivity"] = [dict(row) for row in self.sensitivity()]
        asked = {"tokens": tokens, "price_per_hour": price_per_hour, "power_watts": power_watts}
        if any(value is not None for value in asked.values()):
            data["cost"] = self.cost(**asked)
        if not data["timeline"]["complete"]:
            trace = path.with_suffix(".trace.json").name
            self.trace(path.with_name(trace))
        return write_text(path, render_page(data, trace=trace), "report.html: path")

    def _repr_html_(self) -> str | None:
        """The page in a notebook's frame; without `meshwright[report]`, the text."""
        if self.details is None:
            return None
        try:
            return framed_page(self.to_dict())
        except ImportError as error:
            return f"<pre>{escape(str(self))}\n\n{escape(str(error))}</pre>"

    def trace(self, path: str | Path) -> None:
        """Write the simulated step as a Chrome trace (chrome://tracing, Perfetto)."""
        write_text(path, json.dumps(self.timeline), "report.trace: path")

    def document(self, *, full: bool = False) -> Document:
        """`text` with its tables, which a terminal draws."""
        return full_text(self) if full else short_text(self)

    def text(self, *, full: bool = False) -> str:
        """The text to decide from; `full` is all there is, whose answers take seconds to find."""
        return str(self.document(full=full))

    def __str__(self) -> str:
        return self.text()

    @property
    def memory(self) -> str:
        """The bytes that the verdict on memory rests on."""
        s = self.summary
        if s["memory_verdict_by"] == "price":
            return " to ".join(map(sized, s["memory_interval_bytes"]))
        tensors, beside = s["rehearsed_tensor_bytes"], s["bytes_beside_tensors"]
        around = f" and {sized(beside)} of context and communicators" if beside else ""
        return f"rehearsed {sized(tensors)} of tensors{around} of {sized(s['memory_bytes'])}"
