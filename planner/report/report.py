"""Report: a plan, its costs, why not another one, and what was assumed, as text and as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Protocol

from meshwright.planner.page import framed_page, render_page
from meshwright.planner.plan import GIB, Plan, counted, seconds
from meshwright.planner.report.components import Components
from meshwright.planner.report.details import Details, cost_of

SCHEMA = 2  # of `Report.to_dict()`: another number where a key changes its meaning or goes
MAX_REFUSALS = 2  # products that an alternative can't split, in the text

Row = Mapping[str, Any]


class DeferredAnswers(Protocol):
    """Answers that take more planning, so that they wait until a report is asked for them."""

    def alternatives(self) -> Sequence[Row]: ...

    def overrides(self) -> Sequence[Row]: ...

    def sensitivity(self) -> Sequence[Row]: ...

    def advice(self) -> Sequence[Row]: ...

    def proof(self) -> Row: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a rehearsal of the plan found, as `lines` of text and as `data`."""

    lines: Sequence[str]
    data: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything to know about a plan. `str()` is the text, `to_dict()` the same as data.

    `excluded` are the products that tensor-parallel degrees of a node can't split, and why.
    `alternatives`, `overrides`, `advice` and `sensitivity()` are `deferred`: found when they are
    first asked for, of several ranks by the one that priced the plan; so are `details`: memory by
    what holds it, communication by axis and link, throughput. `rehearsed` is there after a
    rehearsal of this plan: the summary's verdict on memory rests on it then.
    """

    plan: Plan
    summary: Row
    stages: Sequence[Row]
    components: Components
    runners_up: Sequence[Row]
    solver: Sequence[Row]
    assumptions: Sequence[str]
    notes: Sequence[str]
    phases_s: Mapping[str, float]
    timeline: Mapping[str, Any]
    excluded: Sequence[Row] = ()
    rehearsed: Rehearsed | None = None
    details: Details | None = field(default=None, repr=False, compare=False)
    deferred: DeferredAnswers | None = field(default=None, repr=False, compare=False)

    @property
    def alternatives(self) -> Sequence[Row]:
        """The best plan of each family that the chosen one does not belong to: its step time, how
        much `slower`, seconds more by component (`components_s`); or what it lacks
        (`shortfall_bytes`), or takes at least (`bound_s`)."""
        return self.deferred.alternatives() if self.deferred else []

    @property
    def overrides(self) -> Sequence[Row]:
        """What the given overrides cost, all together and each, against doing without."""
        return self.deferred.overrides() if self.deferred else []

    @property
    def advice(self) -> Sequence[Row]:
        """What the user may change beyond the plan: a `kind` (batch, size, logits), a sentence
        (`advice`) and its numbers."""
        return self.deferred.advice() if self.deferred else []

    def sensitivity(self) -> Sequence[Row]:
        """Which property of the cluster, scaled by how much, would flip the decision and to what;
        the plans known from the search are priced again, so that it takes seconds."""
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
        self, *, tokens: float | None = None, price_per_hour: float | None = None
    ) -> Row | None:
        """Device-hours of a step and of `tokens`, days, and money where a price per device and hour
        is given; None on ranks that did not price the plan. Raises ValueError as `cost_of`."""
        if self.details is None:
            return None
        return cost_of(self.details, tokens=tokens, price_per_hour=price_per_hour)

    def html(
        self,
        path: str | Path,
        *,
        sensitivity: bool = False,
        tokens: float | None = None,
        price_per_hour: float | None = None,
    ) -> Path | None:
        """Write the report as one HTML file, with `sensitivity()` and the `cost` where they are
        asked for; a step of too many events for it goes into a trace beside it. Does nothing on
        ranks that did not price the plan. Raises ImportError without `meshwright[report]`."""
        if self.details is None:
            return None
        data, path, trace = self.to_dict(), Path(path), ""
        if sensitivity:
            data["sensitivity"] = [dict(row) for row in self.sensitivity()]
        if tokens is not None or price_per_hour is not None:
            data["cost"] = self.cost(tokens=tokens, price_per_hour=price_per_hour)
        if not data["timeline"]["complete"]:
            trace = path.with_suffix(".trace.json").name
            self.trace(path.with_name(trace))
        path.write_text(render_page(data, trace=trace), encoding="utf-8")
        return path

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
        Path(path).write_text(json.dumps(self.timeline))

    def __str__(self) -> str:
        parts = [
            self._head(),
            self._stage_table(),
            self._rehearsed(),
            self._where(),
            self._overrides(),
            self._others(),
            _bullets("Advice", [a["advice"] for a in self.advice]),
            _bullets("Notes", self.notes),
            _bullets("Assumed", self.assumptions),
            self._shardings(),
            self._solver(),
            self._phases(),
        ]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _head(self) -> list[str]:
        s = self.summary
        return [
            f"{counted(s['parameters'])} parameters on {s['cluster']}",
            f"Chosen: {s['chosen']}",
            f"  step {seconds(s['step_time_s'])}, {s['rows_per_s']:.4g} rows/s, "
            f"MFU {s['mfu']:.1%}, bubble {s['bubble_fraction']:.1%}, "
            f"peak memory {max(s['peak_memory_bytes']) / GIB:.1f} of "
            f"{s['memory_bytes'] / GIB:.1f} GiB",
            self._intervals(),
            *self._proof(),
        ]

    def _intervals(self) -> str:
        """What other models' measurements make of the step and the memory."""
        s = self.summary
        step = " to ".join(map(seconds, s["step_interval_s"]))
        return f"  with 80 %: {step}; {self.memory}: {s['memory_verdict']}"

    @property
    def memory(self) -> str:
        """What the verdict on memory rests on."""
        s = self.summary
        if s["memory_verdict_by"] == "price":
            low, high = (x / GIB for x in s["memory_interval_bytes"])
            course = max(s.get("course_bytes") or (0,)) / GIB
            beside = f", {course:.1f} in the course of a step" if course else ""
            return f"{low:.1f} to {high:.1f} GiB{beside}"
        tensors, beside = (s[x] / GIB for x in ("rehearsed_tensor_bytes", "bytes_beside_tensors"))
        around = f" and {beside:.3g} GiB of context and communicators" if beside else ""
        memory = (
            f"of {s['memory_bytes'] / GIB:.1f} GiB, {s['memory_margin']:.0%} left for fragments"
        )
        return f"rehearsed {tensors:.3g} GiB of tensors{around} {memory}"

    def _proof(self) -> list[str]:
        s = self.summary
        if "bound_s" not in s:
            late = "the time limit ended the search before a bound on all other plans was found"
            return [] if s.get("complete", True) else [f"  {late}"]
        early = "" if s["complete"] else "; the time limit ended the search before that was closed"
        bounds = f"{seconds(s['bound_s'])} at these prices: gap {s['gap']:.1%}"
        proof = self.deferred.proof() if self.deferred else {}
        if proof and proof["equal_gap"] < s["gap"]:
            equal = seconds(proof["equal_bound_s"])
            bounds += f"; none with equal stages faster than {equal}: gap {proof['equal_gap']:.1%}"
        return [f"  no plan of the space is faster than {bounds}{early}"]

    def _stage_table(self) -> list[str]:
        head = "stage blocks ranks mesh zero recompute forward backward comm memory"
        rows: list[tuple[str, ...]] = [tuple(head.split())]
        for k, s in enumerate(self.stages):
            decided = (str(k), ", ".join(s["blocks"]), s["ranks"], s["mesh"])
            within = f" within {s['dp_shard']}" if s["dp_shard"] else ""
            modes = (f"{s['zero']}{within}", s["recompute"])
            times = (s["forward_s"], s["backward_s"], s["communication_s"])
            memory = f"{s['memory_bytes'] / GIB:.1f} GiB"
            rows.append((*decided, *modes, *map(seconds, times), memory))
        return [
            *table(rows),
            "  (per micro-batch; comm is the exposed part of forward and backward)",
        ]

    def _rehearsed(self) -> list[str]:
        if self.rehearsed is None:
            return []
        line, *rest = self.rehearsed.lines
        return [line[:1].upper() + line[1:], *(f"  {x}" for x in rest)]

    def _where(self) -> list[str]:
        total = sum(self.components.as_dict().values()) or 1.0
        parts = [
            f"{name} {seconds(value if value > total * 1e-9 else 0.0)} ({value / total:.0%})"
            for name, value in self.components.as_dict().items()
        ]
        return ["Where the step goes (busiest devices)", "  " + ", ".join(parts)]

    def _overrides(self) -> list[str]:
        if not self.overrides:
            return []
        return ["Overrides", *(f"  {o['override']}: {o['effect']}" for o in self.overrides)]

    def _others(self) -> list[str]:
        """Alternatives and runners-up, fastest first, one line per plan; then what has none."""
        found: dict[str, tuple[tuple[str, ...], Row]] = {}
        for row in (*self.alternatives, *self.runners_up):
            if row.get("plan"):
                names, first = found.get(row["plan"], ((), {}))
                found[row["plan"]] = (*names, *_family(row)), {**row, **first}
        rows = sorted(found.values(), key=lambda item: item[1]["step_time_s"])
        without = [row for row in self.alternatives if not row["plan"]]
        if not rows and not without:
            return []
        return [
            "Why not something else (the best found of each family)",
            *(
                f"  {', '.join(names) or 'next best'}: {seconds(r['step_time_s'])} "
                f"({r['slower']:+.1%}), {r['why']}\n    {r['plan']}" + _refusals(r)
                for names, r in rows
            ),
            *(f"  {row['family']}: {row['why']}" + _refusals(row) for row in without),
        ]

    def _shardings(self) -> list[str]:
        lines = []
        for k, stage in enumerate(self.plan.stages):
            if stage.shardings and (k == 0 or stage.shardings != self.plan.stages[k - 1].shardings):
                lines += [
                    f"  stage {k}: {name}: {text}" for name, text in sorted(stage.shardings.items())
                ]
        return ["Shardings on the tensor axis (the rest follows)", *lines] if lines else []

    def _solver(self) -> list[str]:
        if not self.solver:
            return []
        lines = []
        for s in self.solver:
            how = "relaxation integral" if s["integral_relaxation"] else "by branch and bound"
            lines.append(
                f"  {s['block']}: objective {seconds(s['objective_s'])}, "
                f"gap {max(s['gap'], 0.0):.1e}, {s['solver']} in {s['time_s']:.2f} s, {how}"
            )
        return ["Intra-op program, proved by the solver", *lines]

    def _phases(self) -> list[str]:
        spent = ", ".join(f"{name} {s:.1f} s" for name, s in self.phases_s.items())
        return [f"Planned in {sum(self.phases_s.values()):.1f} s: {spent}"]


def _family(row: Row) -> list[str]:
    return [row["family"]] if "family" in row else []


def _refusals(row: Row) -> str:
    """What an alternative's degree can't split, a line each."""
    return "".join(f"\n    {text}" for text in row.get("excluded", ())[:MAX_REFUSALS])


def sensitivity_lines(rows: Sequence[Row]) -> list[str]:
    """What `Report.sensitivity` found, as text."""
    lines = []
    for row in rows:
        if row["factor"] is None:
            said = "no flip between 1/4 and 4"
        elif row["plan"] is None:
            said = f"times {row['factor']:.3g}: no plan known from the search fits"
        else:
            said = f"times {row['factor']:.3g}: {row['plan']}"
        lines.append(f"  {row['property']} {said}")
    return ["What would flip the decision", *lines]


def _bullets(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  - {text}" for text in lines)] if lines else []


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned; the second one shortened to 36 characters."""
    rows = [
        [cell if i != 1 or len(cell) <= 36 else cell[:33] + "..." for i, cell in enumerate(row)]
        for row in rows
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
