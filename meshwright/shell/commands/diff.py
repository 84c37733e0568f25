"""`meshwright diff A B`: what two plans decide otherwise, block by block, and what that costs where
both are reports (`meshwright plan --json`), which have prices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.planner.decisions import DECISIONS
from meshwright.planner.document import Document, Part, Table
from meshwright.planner.plan import (
    Plan,
    compress_names,
    compress_ranks,
    counted,
    decision_words,
    describe,
    seconds,
    sized,
    slower,
)
from meshwright.shell.answer import Answer
from meshwright.shell.named import no_report, saved_json

ABSENT = "not there"
EQUAL = 1e-9  # part of a number up to which two are the same

SAME, DIFFERENT = 0, 4  # exit status

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="plan file, or a report (`plan --json`)")
    parser.add_argument("b", metavar="B", help="the same of another plan")


def run(args: argparse.Namespace) -> Answer:
    changes = between(args.a, args.b)
    code = DIFFERENT if changes else SAME
    return Answer(data=changes.as_dict, text=changes.document, code=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A difference: `what` (of the plan, of blocks or of a pattern), in A and in B."""

    what: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"  {self.what}: {self.a} -> {self.b}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A number of both reports; `more` is B's less A's."""

    what: str
    unit: str
    a: float
    b: float

    @property
    def more(self) -> float:
        return self.b - self.a

    @property
    def differs(self) -> bool:
        return abs(self.more) > EQUAL * max(abs(self.a), abs(self.b))

    def __str__(self) -> str:
        a, b, more = self.cells
        return f"  {self.what}: {a} -> {b}, {more}"

    @property
    def cells(self) -> tuple[str, str, str]:
        """In A, in B, and how much more."""
        said = {"s": seconds, "bytes": sized}[self.unit]
        part = f" ({slower(self.more / self.a)})" if self.a else ""
        sign = "+" if self.more > 0 else "-"
        return said(self.a), said(self.b), f"{sign}{said(abs(self.more))}{part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Decisions and prices that differ; prices are None where A or B is a plan alone."""

    changes: tuple[Change, ...]
    prices: tuple[Price, ...] | None

    def __bool__(self) -> bool:
        return bool(self.changes or self.prices)

    def as_dict(self) -> dict[str, Any]:
        prices = None
        if self.prices is not None:
            prices = [
                {"what": p.what, "unit": p.unit, "a": p.a, "b": p.b, "more": p.more}
                for p in self.prices
            ]
        changes = [{"what": c.what, "a": c.a, "b": c.b} for c in self.changes]
        return {"same": not self, "changes": changes, "prices": prices}

    def __str__(self) -> str:
        return str(self.document())

    def document(self) -> Document:
        """Decisions, and what they cost, as tables."""
        if not self:
            return Document(("no difference",))
        parts: list[Part] = ["Decisions", "  the same"]
        if self.changes:
            changes = [(c.what, c.a, c.b) for c in self.changes]
            plain = [*map(str, self.changes)]
            parts[1] = Table(heads=("what", "A", "B"), rows=changes, plain=plain)
        if self.prices is None:
            parts.append(
                "(a plan file has no prices: two of `meshwright plan --json` tell what this costs)"
            )
        elif self.prices:
            prices = [(p.what, *p.cells) for p in self.prices]
            plain = [*map(str, self.prices)]
            heads = ("what", "A", "B", "B less A")
            parts += ["", "Costs of a step", Table(heads=heads, rows=prices, plain=plain)]
        return Document(tuple(parts))


def between(a: str | Path, b: str | Path) -> Difference:
    """The difference of two files, plans or reports. Raises `PlanError` for what is neither."""
    ours, theirs = _read(a), _read(b)
    with no_report(a, b):
        return _between(ours, theirs)


def _between(ours: tuple[Plan, Row | None], theirs: tuple[Plan, Row | None]) -> Difference:
    (plan_a, report_a), (plan_b, report_b) = ours, theirs
    models = () if plan_a.model == plan_b.model else _models((plan_a, report_a), (plan_b, report_b))
    changes, prices = [*models, *_changes(plan_a, plan_b)], None
    if report_a is not None and report_b is not None:
        changes += _setups(report_a, report_b)
        prices = tuple(price for price in _prices(report_a, report_b) if price.differs)
    return Difference(changes=tuple(changes), prices=prices)


def _read(path: str | Path) -> tuple[Plan, Row | None]:
    """A file's plan, and the report that it is of, if it is one."""
    data = saved_json(path)
    if not isinstance(data, dict) or "plan" not in data:
        return Plan.load(path), None
    plan = Plan.from_json(json.dumps(data["plan"]), name=f"{path}: plan")
    return plan, data if "summary" in data else None


def _models(*both: tuple[Plan, Row | None]) -> Iterator[Change]:
    """Differences of two models: parameters where reports have them, numbers of blocks, blocks of
    one alone; then the plans as a whole, since blocks of different models can't be compared one by
    one."""
    plans = [plan for plan, _ in both]
    names = [tuple(name for stage in plan.stages for name in stage.blocks) for plan in plans]
    sides = []
    for (plan, report), names_of in zip(both, names, strict=True):
        size = f"{counted(report['summary']['parameters'])} parameters, " if report else ""
        sides.append(f"{size}{len(names_of)} blocks (fingerprint {plan.model})")
    yield Change(what="another model", a=sides[0], b=sides[1])
    alone = [[n for n in names_of if n not in other] for names_of, other in (names, names[::-1])]
    if any(alone):
        told = [", ".join(compress_names(names_of)) if names_of else "none" for names_of in alone]
        yield Change(what="blocks that the other lacks", a=told[0], b=told[1])
    yield from _change("plan", *map(describe, plans))


def _changes(a: Plan, b: Plan) -> Iterator[Change]:
    of_plan = [
        name for name, decision in DECISIONS.items() if decision.acts == "plan" and hasattr(a, name)
    ]
    for name in ("precision", "global_batch_size", *of_plan):
        yield from _change(name, str(getattr(a, name)), str(getattr(b, name)))
    yield from _change("stages", str(len(a.stages)), str(len(b.stages)))
    ours, theirs = _by_block(a), _by_block(b)
    runs: dict[tuple[str, str, str], list[str]] = {}
    for name in [name for name in ours if name in theirs]:
        decision, other = ours.get(name, {}), theirs.get(name, {})
        for what in dict.fromkeys([*decision, *other]):
            pair = decision.get(what, ABSENT), other.get(what, ABSENT)
            if pair[0] != pair[1]:
                runs.setdefault((what, *pair), []).append(name)
    for (what, before, right), names in runs.items():
        yield Change(what=f"{what} of {', '.join(compress_names(names))}", a=before, b=right)
    ours_split, theirs_split = _shardings(a), _shardings(b)
    patterns = {*ours_split, *theirs_split}
    if a.model != b.model:  # what names modules of one model decides nothing in another
        patterns = {*ours_split} & {*theirs_split}
    for pattern in sorted(patterns):
        before, right = (split.get(pattern, ABSENT) for split in (ours_split, theirs_split))
        yield from _change(f"sharding of {pattern}", before, right)


def _change(what: str, a: str, b: str) -> Iterator[Change]:
    if a != b:
        yield Change(what=what, a=a, b=b)


def _by_block(plan: Plan) -> dict[str, dict[str, str]]:
    """Decisions for each block, in words."""
    return {
        name: {"ranks": compress_ranks(stage.ranks), **decision_words(stage, policy)}
        for stage in plan.stages
        for name, policy in zip(stage.blocks, stage.policies, strict=True)
    }


def _shardings(plan: Plan) -> dict[str, str]:
    """Decisions by pattern; of stages that decide otherwise all."""
    patterns: dict[str, list[str]] = {}
    for stage in plan.stages:
        for pattern, text in stage.shardings.items():
            patterns.setdefault(pattern, []).append(text)
    return {pattern: ", ".join(dict.fromkeys(texts)) for pattern, texts in patterns.items()}


def _setups(a: Row, b: Row) -> Iterator[Change]:
    """Setting of the prices: the cluster, and the assumptions about software."""
    yield from _change("cluster", a["summary"]["cluster"], b["summary"]["cluster"])
    ours, theirs = (_software(report["assumptions"]) for report in (a, b))
    yield from _change("software", ours, theirs)


def _software(assumptions: Sequence[str]) -> str:
    return (
        "; ".join(text for text in assumptions if text.startswith(("target ", "corrected by ")))
        or ABSENT
    )


def _prices(a: Row, b: Row) -> Iterator[Price]:
    """Step, its components, the fullest device's memory and what holds it."""
    sums = [report["summary"] for report in (a, b)]
    yield Price(what="step", unit="s", a=sums[0]["step_time_s"], b=sums[1]["step_time_s"])
    yield from _each("s", "", a["components_s"], b["components_s"])
    peaks = [max(summary["peak_memory_bytes"]) for summary in sums]
    yield Price(what="peak memory", unit="bytes", a=peaks[0], b=peaks[1])
    fullest = [
        max(report.get("memory", ()), key=lambda row: row["priced_bytes"], default=None)
        for report in (a, b)
    ]
    if fullest[0] and fullest[1]:
        yield from _each("bytes", "memory: ", fullest[0]["parts"], fullest[1]["parts"])


def _each(unit: str, prefix: str, a: Row, b: Row) -> Iterator[Price]:
    for name in dict.fromkeys([*a, *b]):
        yield Price(what=prefix + name, unit=unit, a=a.get(name, 0.0), b=b.get(name, 0.0))
