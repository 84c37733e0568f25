"""`meshwright explain GLOB`: why operators are split as they are on the tensor axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright.planner.alternatives import Explained, instead
from meshwright.planner.plan import Plan, describe, seconds, sized, slower
from meshwright.planner.report import Report

Collectives = Mapping[str, tuple[int, float]]


def explained(report: Report, pattern: str) -> list[Explained]:
    """The operators that a pattern names in a report's plan. Raises `PlanError` where it names
    nothing."""
    details = report.details
    assert details is not None  # this process priced the plan
    return instead(report.plan, details.problem, details.assignments, pattern)


def text(found: Sequence[Explained], plan: Plan) -> str:
    """A paragraph an operator."""
    if not found:
        return (
            f"{describe(plan)}: no tensor axis (tp 1), so that no operator is split on it; "
            "`meshwright plan` says why, by the alternative tp=2"
        )
    return "\n\n".join("\n".join(_lines(each)) for each in found)


def _lines(each: Explained) -> Iterator[str]:
    alike = f" and {each.blocks - 1} blocks alike" if each.blocks > 1 else ""
    chosen = each.chosen
    yield f"{each.operator} of {each.block}{alike}, stage {each.stage}, tp {each.tp}"
    yield f"  chosen {chosen.strategy}: block {_said(chosen.seconds)}; {_told(chosen.collectives)}"
    for way in each.others:
        if way.seconds is None or chosen.seconds is None:
            yield f"  {way.strategy}: not possible between the states at the block's ends"
            continue
        more = way.seconds - chosen.seconds
        part = f" ({slower(more / chosen.seconds)})" if chosen.seconds else ""
        cost = f"{'-' if more < 0 else '+'}{seconds(abs(more))}{part}"
        yield f"  {way.strategy}: {cost}; {_saved(chosen.collectives, way.collectives)}"


def _said(value: float | None) -> str:
    return "not priced" if value is None else f"{seconds(value)} a step"


def _told(collectives: Collectives) -> str:
    parts = [
        f"{calls} {kind} of {sized(nbytes / calls)}"
        for kind, (calls, nbytes) in collectives.items()
    ]
    return ", ".join(parts) or "no collectives"


def _saved(chosen: Collectives, other: Collectives) -> str:
    """What another way would send, beside what is sent."""
    parts = []
    for kind in sorted({*chosen, *other}):
        (ours, own), (theirs, nbytes) = chosen.get(kind, (0, 0)), other.get(kind, (0, 0))
        if (ours, own) != (theirs, nbytes):
            sign = "+" if nbytes >= own else "-"
            parts.append(f"{theirs - ours:+d} {kind}, {sign}{sized(abs(nbytes - own))}")
    return "; ".join(parts) or "the same collectives"
