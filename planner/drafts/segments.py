"""Segments that a search may choose, where single blocks don't free enough or the user says so."""

from __future__ import annotations

from meshwright.costmodel.blocks import in_segments
from meshwright.planner.overrides import Restrictions

SIZES = (2, 4, 8, 16, 32, 64)  # blocks in one
INSIDE = ("none", "pointwise", "full")  # policies in segments, from the fastest


def may_segment(over: Restrictions, *, free: bool) -> bool:
    """Whether a plan may have segments; `free`: wherever the user decided nothing."""
    return free or any(own is not None and own > 1 for own in over.segments)


def with_segments(over: Restrictions, *, free: bool) -> tuple[str, ...]:
    """The recompute policies that are left, and behind them those in segments, from the fastest
    on."""
    given = over.uniform("segments")
    if not may_segment(over, free=free) or given == 1:
        return over.policies
    inside = [policy for policy in INSIDE if policy in over.policies] or over.policies[:1]
    found = tuple(
        in_segments(policy, size) for policy in inside for size in ((given,) if given else SIZES)
    )
    return found if given else (*over.policies, *found)


def given_segments(over: Restrictions, start: int, stop: int) -> int | None:
    """Blocks in a segment of a stage of blocks start..stop-1, where the user decided it."""
    return next((own for own in over.segments[start:stop] if own is not None), None)
