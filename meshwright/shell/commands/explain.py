"""`meshwright explain GLOB`: why operators are split as they are on the tensor axis."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from meshwright.planner.alternatives import Explained, instead
from meshwright.planner.plan import Plan, describe, seconds, sized, slower
from meshwright.planner.report import Report
from meshwright.shell.answer import Answer
from meshwright.shell.commands import flags
from meshwright.shell.commands.planned import parallelized

Collectives = Mapping[str, tuple[int, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser)
    parser.add_argument("glob", help="modules, operators (with `:`) or parameters")
    parser.add_argument("--plan", help="plan file; without it a plan is searched")
    flags.add_search(parser)


def run(args: argparse.Namespace) -> Answer:
    report = parallelized(args)[0].report
    operators = explained(report, args.glob)
    return Answer(
        data=lambda: [op.as_dict() for op in operators], text=lambda: text(operators, report.plan)
    )


def explained(report: Report, pattern: str) -> list[Explained]:
    """The operators that a pattern names in a report's plan. Raises `PlanError` where it names
    nothing."""
    details = report.details
    assert details is not None  # this process priced the plan
    return instead(details.evaluation, details.problem, pattern)


LEGEND = """How to read it
  block: seconds of the operator's block on a rank in a step. Every other way: what the block takes
  more or less with this operator split so, the rest of the block at its best and the states at the
  block's ends as they are, and the collectives that a rank then has more (+) or less (-) a step.
  Ways: colwise and rowwise split a product's weight by outputs and by inputs, vocab splits a table
  by entries, replicate runs the operator whole on every rank, partial takes operands that are yet
  to be summed; others are named by the dim or factor that they split.
  operands -> results: R replicated, Rp the same with a gradient to be summed, S(d) split along dim
  d, S(d/k) within each of k parts, P partial sums, on the tensor axis."""


def text(found: Sequence[Explained], plan: Plan) -> str:
    """A paragraph an operator, and how to read them."""
    if not found:
        return (
            f"{describe(plan)}: no tensor axis (tp 1), so that no operator is split on it; "
            "`meshwright plan` says why, by the alternative tp=2"
        )
    return "\n\n".join([*("\n".join(_lines(each)) for each in found), LEGEND])


def _lines(each: Explained) -> Iterator[str]:
    alike = f" and {each.blocks - 1} blocks alike" if each.blocks > 1 else ""
    chosen = each.chosen
    yield f"{each.operator} of {each.block}{alike}, stage {each.stage}, tp {each.tp}"
    yield (
        f"  chosen {chosen.strategy}: block {_said(chosen.seconds)}; {chosen.states}; "
        f"{_told(chosen.collectives)}"
    )
    yield from _gain(each)
    for way in each.others:
        if way.seconds is None or chosen.seconds is None:
            yield f"  {way.strategy}: not possible between the states at the block's ends"
            continue
        more = way.seconds - chosen.seconds
        part = f" ({slower(more / chosen.seconds)})" if chosen.seconds else ""
        cost = f"{'-' if more < 0 else '+'}{seconds(abs(more))}{part}"
        yield (
            f"  {way.strategy}: {cost}; {way.states}; {_saved(chosen.collectives, way.collectives)}"
        )


def _gain(each: Explained) -> Iterator[str]:
    """Saving of the chosen way against the next best one."""
    chosen, other = each.chosen.seconds, next(iter(each.others), None)
    if chosen is None or other is None or other.seconds is None:
        return
    saved = other.seconds - chosen
    if saved < 0:
        yield (
            f"  {other.strategy} would take {seconds(-saved)} a step less in this block alone: the "
            "search counts memory, and states that blocks share, too"
        )
        return
    every = f", {seconds(saved * each.blocks)} in all {each.blocks} blocks" * (each.blocks > 1)
    yield f"  saves {seconds(saved)} a step against the next best, {other.strategy}{every}"


def _said(value: float | None) -> str:
    return "not priced" if value is None else f"{seconds(value)} a step"


def _told(collectives: Collectives) -> str:
    parts = [
        f"{calls} {kind} of {sized(nbytes / calls)}"
        for kind, (calls, nbytes) in collectives.items()
    ]
    return ", ".join(parts) or "no collectives"


def _saved(chosen: Collectives, other: Collectives) -> str:
    """Bytes that another way would send, beside those that are sent."""
    parts = []
    for kind in sorted({*chosen, *other}):
        (ours, own), (theirs, nbytes) = chosen.get(kind, (0, 0)), other.get(kind, (0, 0))
        if (ours, own) != (theirs, nbytes):
            sign = "+" if nbytes >= own else "-"
            calls = f"{theirs - ours:+d} {kind}," if theirs != ours else kind
            parts.append(f"{calls} {sign}{sized(abs(nbytes - own))}")
    return "; ".join(parts) or "the same collectives"
