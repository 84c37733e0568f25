"""`meshwright explain GLOB`: why operators are split as they are on the tensor axis."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from meshwright.planner.alternatives import Explained, instead
from meshwright.planner.plan import Plan, describe, seconds, sized, slower
from meshwright.planner.report import Report
from meshwright.shell.commands import flags
from meshwright.shell.commands.parallelized import parallelized
from meshwright.shell.terminal import Answer

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


def text(operators: Sequence[Explained], plan: Plan) -> str:
    """A paragraph an operator, and how to read them."""
    if not operators:
        return (
            f"{describe(plan)}: no tensor axis (tp 1), so that no operator is split on it; "
            "`meshwright plan` says why, by the alternative tp=2"
        )
    return "\n\n".join([*("\n".join(_lines(op)) for op in operators), LEGEND])


def _lines(op: Explained) -> Iterator[str]:
    alike = f" and {op.blocks - 1} blocks alike" if op.blocks > 1 else ""
    chosen = op.chosen
    block = "not priced" if chosen.seconds is None else f"{seconds(chosen.seconds)} a step"
    sent = (f"{n} {kind} of {sized(b / n)}" for kind, (n, b) in chosen.collectives.items())
    yield f"{op.operator} of {op.block}{alike}, stage {op.stage}, tp {op.tp}"
    yield (
        f"  chosen {chosen.strategy}: block {block}; {chosen.states}; "
        f"{', '.join(sent) or 'no collectives'}"
    )
    yield from _gain(op)
    for way in op.others:
        if way.seconds is None or chosen.seconds is None:
            yield f"  {way.strategy}: not possible between the states at the block's ends"
            continue
        more = way.seconds - chosen.seconds
        part = f" ({slower(more / chosen.seconds)})" if chosen.seconds else ""
        cost = f"{'-' if more < 0 else '+'}{seconds(abs(more))}{part}"
        yield (
            f"  {way.strategy}: {cost}; {way.states}; {_saved(chosen.collectives, way.collectives)}"
        )


def _gain(op: Explained) -> Iterator[str]:
    """Seconds that the chosen way saves against the next best one."""
    chosen, other = op.chosen.seconds, next(iter(op.others), None)
    if chosen is None or other is None or other.seconds is None:
        return
    saved = other.seconds - chosen
    if saved < 0:
        yield (
            f"  {other.strategy} would take {seconds(-saved)} a step less in this block alone: the "
            "search counts memory, and states that blocks share, too"
        )
        return
    in_all = f", {seconds(saved * op.blocks)} in all {op.blocks} blocks" * (op.blocks > 1)
    yield f"  saves {seconds(saved)} a step against the next best, {other.strategy}{in_all}"


def _saved(chosen: Collectives, other: Collectives) -> str:
    """Collectives of another way, less those of the chosen one."""
    parts = []
    for kind in sorted({*chosen, *other}):
        (calls, nbytes), (others, other_bytes) = chosen.get(kind, (0, 0)), other.get(kind, (0, 0))
        more, more_bytes = others - calls, other_bytes - nbytes
        if more or more_bytes:
            count = f"{more:+d} {kind}," if more else kind
            sign = "-" if more_bytes < 0 else "+"
            parts.append(f"{count} {sign}{sized(abs(more_bytes))}")
    return "; ".join(parts) or "the same collectives"
