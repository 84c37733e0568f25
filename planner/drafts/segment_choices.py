"""Segments that a search may choose, where single blocks don't free enough or the user says so."""

from __future__ import annotations

import numpy as np

from meshwright.costmodel.recompute import in_segments
from meshwright.planner.overrides import Restrictions

SIZES = (2, 4, 8, 16, 32, 64)  # blocks in one
INSIDE = ("none", "pointwise", "full")  # policies in segments, from the fastest


def may_segment(over: Restrictions, *, free: bool) -> bool:
    """Whether a plan may have segments; `free`: wherever the user decided nothing."""
    return free or any(size is not None and size > 1 for size in over.segments)


def with_segments(over: Restrictions, *, free: bool) -> tuple[str, ...]:
    """The recompute policies that are left, then those in segments, from the fastest on."""
    asked = over.uniform("segments")
    if not may_segment(over, free=free) or asked == 1:
        return over.policies
    inside = [policy for policy in INSIDE if policy in over.policies] or over.policies[:1]
    sizes = (asked,) if asked else SIZES
    segmented = tuple(in_segments(policy, size) for policy in inside for size in sizes)
    return segmented if asked else (*over.policies, *segmented)


def undecided(over: Restrictions) -> bool:
    """Whether the user said nothing of segments."""
    return all(size is None for size in over.segments)


def legal_stages(over: Restrictions) -> np.ndarray:
    """(K+1, K+1): stages whose blocks agree on what the user said of segments."""
    masks = [over.stage_mask("segments", size) for size in {*over.segments} - {None}]
    return np.asarray(np.any(masks or [np.ones((len(over.blocks) + 1,) * 2, bool)], axis=0))


def given_segments(over: Restrictions, start: int, stop: int) -> int | None:
    """Blocks in a segment of a stage of blocks start..stop-1, where the user decided it."""
    return next((size for size in over.segments[start:stop] if size is not None), None)
