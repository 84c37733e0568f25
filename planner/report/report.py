"""Report: a plan, its costs, the alternatives and the assumptions, as text and as data."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Protocol

from meshwright.planner.document import Document, Part, Table
from meshwright.planner.page import SCHEMA, check_installed, framed_page, render_page
from meshwright.planner.plan import (
    Plan,
    counted,
    layout_words,
    made_words,
    peak_words,
    seconds,
    sized,
    slower,
)
from meshwright.planner.report.components import Components, busiest
from meshwright.planner.report.details import Details, Row, cost_of
from meshwright.profiles.inputs import checked_path, write_text


class DeferredAnswers(Protocol):
    """Answers that take more planning, so that they wait until a report is asked for them."""

    def alternatives(self) -> Sequence[Row]: ...

    def known_alternatives(self) -> Sequence[Row]: ...

    def runners_up(self) -> Sequence[Row]: ...

    def overrides(self) -> Sequence[Row]: ...

    def sensitivity(self) -> Sequence[Row]: ...

    def advice(self) -> Sequence[Row]: ...

    def proof(self) -> Row: ...

    def surely_fits(self) -> Row: ...


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
    rests. `aside` are the `notes` on other plans. `made` are the model's name, the date and the
    versions of meshwright and torch, and what the command line was given: `module`, `cluster`.
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
    made: Mapping[str, str] = field(default_factory=dict, compare=False)
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

    @property
    def surely_fits(self) -> Row:
        """Row like `alternatives` of the fastest plan that fits with 90 % or more, and the
        `memory_margin` that finds it, where the chosen one may not fit."""
        return self.deferred.surely_fits() if self.deferred else {}

    def sensitivity(self) -> Sequence[Row]:
        """Properties of the cluster, the factors on them that would flip the decision, and the
        plans then chosen, of those known from the search, which are priced again: seconds."""
        return self.deferred.sensitivity() if self.deferred else []

    def to_dict(self) -> dict[str, Any]:
        """Plain data: seconds, bytes, names (docs/reference/report_data.md); `schema` is its
        version."""
        return {
            "schema": SCHEMA,
            "made": dict(self.made),
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
            "surely_fits": dict(self.surely_fits),
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
        check_installed()
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
            check_installed()
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


# --- text -----------------------------------------------------------------------------------------

# The text of a report: short, to decide from, with what is known already; full, all of it, with
# the answers that take more planning.


MAX_REFUSALS = 2  # products that an alternative can't split
MAX_STAGES = 8  # rows of the short stage table
MAX_OTHERS = 5  # plans that the short text compares with
WIDTH = 150  # of a line that may be long
MAX_PARTS = 3  # parts of a stage's memory by name
BAR, BARS = "\u2588", 20  # of a step
LEAST_PHASE_S = 0.05  # of planning: shorter phases are in the sum alone
LEAST_PART = 5e-4  # of a step: smaller parts are left out of the short text
_OF_HARDWARE = re.compile(r"^(\S+): \S+ = .* is (assumed|fitted) \(", re.DOTALL)


# --- short and full ------------------------------------------------------------------------------


def short_text(report: Report) -> Document:
    """Headline, stages, where the time goes, alternatives, notes on this plan."""
    notes = [note for note in report.notes if note not in report.aside]
    return Document.of(
        _head(report, proof={}),
        _stage_table(report, _shown_stages(report.stages)),
        _memory_parts(report),
        _rehearsed(report),
        _where(report, LEAST_PART),
        _nearest(report),
        _bullets("Notes", notes),
        _grouped_assumptions(report.assumptions),
        _left_out(report),
    )


def full_text(report: Report) -> Document:
    """Everything, as text."""
    deferred = report.deferred
    return Document.of(
        _head(report, proof=deferred.proof() if deferred else {}),
        _stage_table(report, range(len(report.stages))),
        _memory_parts(report),
        _rehearsed(report),
        _where(report, 0.0),
        _overrides(report),
        _families(report),
        _bullets("Advice", [a["advice"] for a in report.advice]),
        _bullets("Notes", report.notes),
        _bullets("Assumed", report.assumptions),
        _shardings(report),
        _solver(report),
        [_planned_in(report)],
    )


# --- the plan ------------------------------------------------------------------------------------


def _head(report: Report, proof: Row) -> list[str]:
    s, rows_per_s = report.summary, report.summary["rows_per_s"]
    rows = counted(rows_per_s) if rows_per_s >= 1000 else f"{rows_per_s:.4g}"
    tokens = f"{counted(s['tokens_per_s'])} tokens/s, " if s.get("tokens_per_s") else ""
    name = f"{report.made['model']}, " if report.made.get("model") else ""
    return [
        f"{name}{counted(s['parameters'])} parameters on {s['cluster']}",
        f"Chosen: {s['chosen']}",
        f"  step {seconds(s['step_time_s'])}, {rows} rows/s, {tokens}"
        f"MFU {s['mfu']:.1%}, bubble {s['bubble_fraction']:.1%}, "
        f"peak memory {_peak(s)} of {sized(s['memory_bytes'])}",
        *_layout(report),
        _intervals(report),
        *_bounds(report, proof),
    ]


def _layout(report: Report) -> list[str]:
    """The blocks of a pipeline's stages, and Megatron's notation of them."""
    if "layout" not in report.summary:
        return []
    blocks = f"blocks of stages by device group: {layout_words(report.plan)}"
    lines = textwrap.wrap(blocks, WIDTH, initial_indent="  ", subsequent_indent="    ")
    notation = report.summary["megatron_layout"]
    return lines + [f'  Megatron: --pipeline-model-parallel-layout "{notation}"'] * bool(notation)


def _peak(summary: Row) -> str:
    """The peak that the verdict is about."""
    priced = sized(max(summary["peak_memory_bytes"]))
    if summary["memory_verdict_by"] == "price":
        return priced
    return f"{sized(max(summary['rehearsed_memory_bytes']))} (rehearsed; price {priced})"


def _intervals(report: Report) -> str:
    """80 % intervals of the step and the memory, with the measurements that they rest on."""
    s, errors = report.summary, report.details.uncertainty if report.details else {}
    by = {"step": "", "memory": ""}
    for name in by if errors else ():
        rows = f"{errors[name]['rows']} measured: " if errors[name]["rows"] else ""
        by[name] = f" (by {rows}{errors[name]['of']})"
    memory = report.memory
    if s["memory_verdict_by"] == "price":
        memory = f"memory {memory}{by['memory']}"
    step = " to ".join(map(seconds, s["step_interval_s"])) + by["step"]
    verdict = f"{s['memory_verdict']}: {s['memory_probability']:.0%}"
    return f"  80 % interval: {step}; {memory}; {verdict}"


def _bounds(report: Report, proof: Row) -> list[str]:
    s = report.summary
    if "bound_s" not in s:
        late = "the time limit ended the search before a bound on all other plans was found"
        return [] if s.get("complete", True) else [f"  {late}"]
    early = "" if s["complete"] else "; the time limit ended the search before that was closed"
    bounds = f"{seconds(s['bound_s'])} at these prices: {gap_words(s['gap'])}"
    if proof and proof["equal_gap"] < s["gap"]:
        equal = seconds(proof["equal_bound_s"])
        bounds += f"; none with equal stages faster than {equal}: {gap_words(proof['equal_gap'])}"
    return [f"  no plan of the space is faster than {bounds}{early}"]


def gap_words(gap: float) -> str:
    """The part by which a step may exceed the fastest there is."""
    return f"gap {gap:.1%}" if gap <= 1 else f"this one takes {slower(gap)} that"


def _shown_stages(stages: Sequence[Row]) -> list[int]:
    """The slowest of many stages, the fullest, the last, and the first ones."""
    every = range(len(stages))
    first = [
        max(every, key=lambda k: stages[k]["forward_s"] + stages[k]["backward_s"]),
        max(every, key=lambda k: stages[k]["memory_bytes"]),
        every[-1],
    ]
    return sorted([*dict.fromkeys([*first, *every])][:MAX_STAGES])


def _stage_table(report: Report, shown: Sequence[int]) -> list[Part]:
    host = any(stage["host_bytes"] for stage in report.stages)
    files = any(stage["flash_bytes"] for stage in report.stages)
    columns = dict.fromkeys(name for stage in report.stages for name in stage["decided"])
    rows: list[dict[str, str]] = []
    for k in shown:
        s = report.stages[k]
        row = {"stage": str(k), "blocks": ", ".join(s["blocks"]), "ranks": s["ranks"]}
        row |= {name: s["decided"].get(name, "") for name in columns}
        row |= {"forward": seconds(s["forward_s"]), "backward": seconds(s["backward_s"])}
        row |= {"comm": seconds(s["communication_s"]), "memory": sized(s["memory_bytes"])}
        row |= {"host memory": sized(s["host_bytes"])} if host else {}  # instead of the decision
        row |= {"files": sized(s["flash_bytes"])} if files else {}
        rows.append(row)
    stages = Table(heads=tuple(rows[0]), rows=[tuple(row.values()) for row in rows])
    what = "slice, on average" if report.plan.slices else "micro-batch"
    per = f"  (per {what}; comm is the exposed part of forward and backward)"
    lines: list[Part] = [stages, per]
    if len(shown) < len(report.stages):
        lines.append(
            f"  ({len(shown)} of {len(report.stages)} stages: the first, the slowest, the fullest "
            "and the last)"
        )
    return lines


def _memory_parts(report: Report) -> list[Part]:
    """Memory of the fullest device group by what holds it, and of the others that differ."""
    if report.details is None:
        return []
    rows = sorted(report.details.memory, key=lambda row: -row["priced_bytes"])
    names = [name for name in rows[0]["parts"] if any(row["parts"][name] for row in rows)]
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[_parts_of(row)].append(row)
    more = len(groups) - MAX_PARTS
    lines, cells = list[str](), list[tuple[str, ...]]()
    for text, group in list(groups.items())[: MAX_PARTS if more > 1 else None]:
        ranks, parts = ", ".join(row["ranks"] for row in group), group[0]["parts"]
        lines.append(f"  ranks {ranks}: {text}")
        cells.append((ranks, *(sized(parts[n]) for n in names), sized(group[0]["priced_bytes"])))
    table = Table(heads=("ranks", *names, "in all"), rows=cells, plain=lines)
    others = [] if more <= 1 else [f"  and {more} less full device groups"]
    moment = f"  (the peak comes in the {peak_words(rows[0]['moment'], rows[0]['block'])})"
    return ["What holds the memory", table, *others, moment]


def _parts_of(row: Row) -> str:
    parts = sorted(row["parts"].items(), key=lambda part: -part[1])
    rest = sum(nbytes for _, nbytes in parts[MAX_PARTS:])
    named = [f"{name} {sized(nbytes)}" for name, nbytes in parts[:MAX_PARTS] if nbytes]
    return ", ".join(named) + (f", other {sized(rest)}" if rest else "")


def _rehearsed(report: Report) -> list[str]:
    if report.rehearsed is None:
        return []
    first, *rest = report.rehearsed.lines
    return [first[:1].upper() + first[1:], *(f"  {line}" for line in rest)]


def _where(report: Report, least: float) -> list[Part]:
    parts = report.components.as_dict()
    total = sum(parts.values()) or 1.0
    rows = [
        (name, seconds(s), f"{s / total:.0%}", BAR * round(BARS * (s / total)))
        for name, s in parts.items()
        if s >= least * total
    ]
    plain = ["  " + ", ".join(f"{name} {time} ({share})" for name, time, share, _ in rows)]
    table = Table(heads=("", "a step", "share", ""), rows=rows, plain=plain)
    return ["Where the step goes (busiest devices)", table]


# --- other plans ---------------------------------------------------------------------------------


def _nearest(report: Report) -> list[Part]:
    """The fastest other plans that are known; the families that are not."""
    known = report.known_alternatives
    rows = _by_plan((*known, *report.runners_up))
    shown = [(names, {**row, "excluded": ()}) for names, row in rows[:MAX_OTHERS]]
    late = ", ".join(row["family"] for row in known if "bound_s" in row)
    lines: list[Part] = [_compared(shown)] if rows else []
    lines += [f"  not searched for this text: {late}"] * bool(late)
    return ["Why not something else (the nearest)", *lines] if lines else []


def _families(report: Report) -> list[Part]:
    """Alternatives and runners-up, fastest first, one line per plan; then families without one."""
    rows = _by_plan((*report.alternatives, *report.runners_up))
    parts: list[Part] = [_compared(rows)] if rows else []
    for row in report.alternatives:
        if not row["plan"]:
            parts += [f"  {row['family']}: {row['why']}", *_refusals(row)]
    return ["Why not something else (the best found of each family)", *parts] if parts else []


def _by_plan(rows: Sequence[Row]) -> list[tuple[tuple[str, ...], Row]]:
    """Families and row of each plan, fastest first."""
    plans: dict[str, tuple[tuple[str, ...], Row]] = {}
    for row in rows:
        if row.get("plan"):
            names, first = plans.get(row["plan"], ((), {}))
            family = [row["family"]] if "family" in row else []
            plans[row["plan"]] = ((*names, *family), {**row, **first})
    return sorted(plans.values(), key=lambda plan: plan[1]["step_time_s"])


def _compared(plans: Sequence[tuple[tuple[str, ...], Row]]) -> Table:
    """Plans with their families beside the chosen one."""
    rows, plain = list[tuple[str, ...]](), list[str]()
    for names, row in plans:
        name, tie = ", ".join(names) or "next best", ", a tie" if row.get("tie") else ""
        step, more, refused = seconds(row["step_time_s"]), slower(row["slower"]), _refusals(row)
        plain += [f"  {name}: {step} ({more}{tie}), {row['why']}", f"    {row['plan']}", *refused]
        plan = "\n".join([f"{name}: {row['plan']}", *map(str.strip, refused)])
        rows.append((plan, step, more + tie, row["why"]))
    heads = ("plan", "step", "slower", "why: more (+) and less (-) a step")
    return Table(heads=heads, rows=rows, plain=plain)


def _refusals(row: Row) -> list[str]:
    """Products that an alternative's degree can't split, a line each."""
    return [f"    {text}" for text in row.get("excluded", ())[:MAX_REFUSALS]]


def _overrides(report: Report) -> list[str]:
    lines = [f"  {row['override']}: {row['effect']}" for row in report.overrides]
    return ["Overrides", *lines] if lines else []


def sensitivity_parts(rows: Sequence[Row]) -> list[Part]:
    """Rows of `Report.sensitivity`, as text."""
    cells = []
    for row in rows:
        times, then = "", "no flip between 1/4 and 4"
        if row["factor"] is not None:
            times = f"times {row['factor']:.3g}"
            then = row["plan"] or "no plan known from the search fits"
        cells.append((row["property"], times, then))
    plain = [f"  {name} {times}{': ' if times else ''}{then}" for name, times, then in cells]
    heads = ("property", "scaled", "then chosen")
    return ["What would flip the decision", Table(heads=heads, rows=cells, plain=plain)]


# --- what it rests on ----------------------------------------------------------------------------


def _grouped_assumptions(lines: Sequence[str]) -> list[str]:
    """Assumptions, of which numbers of the catalog that nobody measured are only counted."""
    matches = [_OF_HARDWARE.match(line) for line in lines]
    kinds = Counter(match[2] for match in matches if match)
    names = dict.fromkeys(match[1] for match in matches if match)
    rest = [line for line, match in zip(lines, matches, strict=True) if not match]
    counts = " and ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
    grouped = [f"numbers of {' and '.join(names)}: {counts}"] if kinds else []
    return _bullets("Assumed", [*grouped, *rest])


def _left_out(report: Report) -> list[str]:
    aside = len(report.aside)
    more = f", {aside} note{'s' * (aside > 1)} on other plans" if aside else ""
    return [
        _planned_in(report),
        "`--full`, or report.text(full=True): the best of each family, what overrides cost, "
        f"advice, every assumption, shardings, proofs{more}",
    ]


def _shardings(report: Report) -> list[str]:
    stages = report.plan.stages
    lines = [
        f"  stage {k}: {name}: {text}"
        for k, stage in enumerate(stages)
        if k == 0 or stage.shardings != stages[k - 1].shardings
        for name, text in sorted(stage.shardings.items())
    ]
    return ["Shardings on the tensor axis (the rest follows)", *lines] if lines else []


def _solver(report: Report) -> list[str]:
    lines = []
    for s in report.solver:
        how = "relaxation integral" if s["integral_relaxation"] else "by branch and bound"
        lines.append(
            f"  {s['block']}: objective {seconds(s['objective_s'])}, "
            f"gap {max(s['gap'], 0.0):.1e}, {s['solver']} in {s['time_s']:.2f} s, {how}"
        )
    return ["Intra-op program, proved by the solver", *lines] if lines else []


def _planned_in(report: Report) -> str:
    phases = {name: s for name, s in report.phases_s.items() if s >= LEAST_PHASE_S}
    spent = ", ".join(f"{name} {s:.1f} s" for name, s in phases.items())
    by = f" {made_words(report.made)}" if report.made else ""
    planned = f"Planned in {sum(report.phases_s.values()):.1f} s{by}"
    return planned + (f": {spent}" if spent else "")


def _bullets(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  - {text}" for text in lines)] if lines else []
