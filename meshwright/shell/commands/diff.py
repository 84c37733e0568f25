"""`meshwright diff A B`: what two plans decide otherwise, block by block, and what that costs where
both are reports (`meshwright plan --json`), which have prices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    made_words,
    seconds,
    sized,
    slower,
)
from meshwright.shell.named import no_report, saved_json
from meshwright.shell.terminal import Answer

ABSENT = "not there"
# of a column whose decision has a word for it
_ABSENT_IN_COLUMNS = {d.column or name: d.off for name, d in DECISIONS.items() if d.off == "none"}
EQUAL = 1e-9  # part of a number up to which two are the same

SAME, DIFFERENT = 0, 4  # exit status

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="plan file, or a report (`plan --json`)")
    parser.add_argument("b", metavar="B", help="the same of another plan")


def run(args: argparse.Namespace) -> Answer:
    difference = between(args.a, args.b)
    code = DIFFERENT if difference else SAME
    return Answer(data=difference.as_dict, text=difference.document, code=code)


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
        """The number in A, in B, and how much more."""
        words = {"s": seconds, "bytes": sized}[self.unit]
        part = f" ({slower(self.more / self.a)})" if self.a else ""
        sign = "+" if self.more > 0 else "-"
        return words(self.a), words(self.b), f"{sign}{words(abs(self.more))}{part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Decisions and prices that differ; prices are None where A or B is a plan alone. `made` are
    the model's name, date and versions of both."""

    changes: tuple[Change, ...]
    prices: tuple[Price, ...] | None
    made: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})

    def __bool__(self) -> bool:
        return bool(self.changes or self.prices)

    def as_dict(self) -> dict[str, Any]:
        prices = None
        if self.prices is not None:
            prices = [{**asdict(price), "more": price.more} for price in self.prices]
        changes = [asdict(change) for change in self.changes]
        a, b = map(dict, self.made)
        return {"same": not self, "made": {"a": a, "b": b}, "changes": changes, "prices": prices}

    def __str__(self) -> str:
        return str(self.document())

    def document(self) -> Document:
        """Models and dates of A and B; decisions, and their costs, as tables."""
        both = zip("AB", self.made, strict=True)
        parts: list[Part] = [
            f"{name}: {made.get('model') or 'a model'} {made_words(made)}"
            for name, made in both
            if made
        ]
        if not self:
            return Document((*parts, "no difference"))
        parts.append("Decisions")
        if self.changes:
            changes = [(c.what, c.a, c.b) for c in self.changes]
            plain = [*map(str, self.changes)]
            parts.append(Table(heads=("what", "A", "B"), rows=changes, plain=plain))
        else:
            parts.append("  the same")
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


def between(first: str | Path, second: str | Path) -> Difference:
    """The difference of two files, plans or reports. Raises `PlanError` for what is neither."""
    a, b = _read(first), _read(second)
    with no_report(first, second):
        return difference(a, b)


def difference(a: tuple[Plan, Row | None], b: tuple[Plan, Row | None]) -> Difference:
    """The difference of two plans, with their reports where they have them."""
    (plan_a, report_a), (plan_b, report_b) = both = a, b
    models = () if plan_a.model == plan_b.model else _models(*both)
    changes, prices = [*models, *_changes(plan_a, plan_b)], None
    if report_a is not None and report_b is not None:
        changes += _setups(report_a, report_b)
        prices = tuple(price for price in _prices(report_a, report_b) if price.differs)
    made = [plan.made if report is None else report.get("made", {}) for plan, report in both]
    return Difference(changes=tuple(changes), prices=prices, made=(made[0], made[1]))


def _read(path: str | Path) -> tuple[Plan, Row | None]:
    """A file's plan, and the report that it is of, if it is one."""
    data = saved_json(path)
    if not isinstance(data, dict) or "plan" not in data:
        return Plan.load(path), None
    plan = Plan.from_json(json.dumps(data["plan"]), name=f"{path}: plan")
    return plan, data if "summary" in data else None


def _models(*both: tuple[Plan, Row | None]) -> Iterator[Change]:
    """Parameters of two models where reports have them, numbers of blocks, those in one alone; then
    the plans in a line, since blocks of different models can't be compared one by one."""
    plans = [plan for plan, _ in both]
    blocks = [[name for stage in plan.stages for name in stage.blocks] for plan in plans]
    sizes = []
    for (plan, report), names in zip(both, blocks, strict=True):
        parameters = f"{counted(report['summary']['parameters'])} parameters, " if report else ""
        sizes.append(f"{parameters}{len(names)} blocks (fingerprint {plan.model})")
    yield from _change("another model", *sizes)
    lacking = [[n for n in names if n not in others] for names, others in (blocks, blocks[::-1])]
    texts = (", ".join(compress_names(names)) if names else "none" for names in lacking)
    yield from _change("blocks that the other lacks", *texts)
    yield from _change("plan", *map(describe, plans))


def _changes(a: Plan, b: Plan) -> Iterator[Change]:
    of_plan = [name for name, one in DECISIONS.items() if one.acts == "plan" and hasattr(a, name)]
    for name in ("precision", "global_batch_size", *of_plan):
        yield from _change(name, str(getattr(a, name)), str(getattr(b, name)))
    yield from _change("stages", str(len(a.stages)), str(len(b.stages)))
    blocks_a, blocks_b = _by_block(a), _by_block(b)
    runs: dict[tuple[str, str, str], list[str]] = {}
    for name in (name for name in blocks_a if name in blocks_b):
        block_a, block_b = blocks_a[name], blocks_b[name]
        for what in dict.fromkeys([*block_a, *block_b]):
            absent = _ABSENT_IN_COLUMNS.get(what, ABSENT)
            key = what, block_a.get(what, absent), block_b.get(what, absent)
            runs.setdefault(key, []).append(name)
    for (what, before, after), names in runs.items():
        yield from _change(f"{what} of {', '.join(compress_names(names))}", before, after)
    splits_a, splits_b = _shardings(a), _shardings(b)
    # what names modules of one model decides nothing in another
    patterns = splits_a.keys() | splits_b if a.model == b.model else splits_a.keys() & splits_b
    for pattern in sorted(patterns):
        before, after = (splits.get(pattern, ABSENT) for splits in (splits_a, splits_b))
        yield from _change(f"sharding of {pattern}", before, after)


def _change(what: str, a: str, b: str) -> Iterator[Change]:
    if a != b:
        yield Change(what=what, a=a, b=b)


def _by_block(plan: Plan) -> dict[str, dict[str, str]]:
    """Decisions of each block, in words."""
    return {
        name: {"ranks": compress_ranks(stage.ranks), **decision_words(stage, policy)}
        for stage in plan.stages
        for name, policy in zip(stage.blocks, stage.policies, strict=True)
    }


def _shardings(plan: Plan) -> dict[str, str]:
    """Decisions by pattern; all of them where stages differ."""
    splits: dict[str, list[str]] = {}
    for stage in plan.stages:
        for pattern, text in stage.shardings.items():
            splits.setdefault(pattern, []).append(text)
    return {pattern: ", ".join(dict.fromkeys(texts)) for pattern, texts in splits.items()}


def _setups(a: Row, b: Row) -> Iterator[Change]:
    """Cluster and software that prices are for."""
    yield from _change("cluster", *(report["summary"]["cluster"] for report in (a, b)))
    yield from _change("software", *(_software(report["assumptions"]) for report in (a, b)))


def _software(assumptions: Sequence[str]) -> str:
    texts = (text for text in assumptions if text.startswith(("target ", "corrected by ")))
    return "; ".join(texts) or ABSENT


def _prices(a: Row, b: Row) -> Iterator[Price]:
    """Step, its components, the fullest device's memory and what holds it."""
    steps, peaks, fullest = [], [], []
    for report in (a, b):
        steps.append({"step": report["summary"]["step_time_s"], **report["components_s"]})
        peaks.append({"peak memory": max(report["summary"]["peak_memory_bytes"])})
        rows = report.get("memory", ())
        fullest.append(max(rows, key=lambda row: row["priced_bytes"], default=None))
    yield from _each("s", "", *steps)
    yield from _each("bytes", "", *peaks)
    if fullest[0] and fullest[1]:
        yield from _each("bytes", "memory: ", fullest[0]["parts"], fullest[1]["parts"])


def _each(unit: str, prefix: str, a: Row, b: Row) -> Iterator[Price]:
    for name in dict.fromkeys([*a, *b]):
        yield Price(what=prefix + name, unit=unit, a=a.get(name, 0.0), b=b.get(name, 0.0))
