"""Reliefs: what a plan may give up, beside running blocks again, so that it fits a device.

Every candidate that has to run blocks again, or does not fit, is completed by each of these in
turn: parts of its states, weights and activations in host memory or on flash, or segments of blocks
that run again. As much of it as the chosen plan has room for comes back (`Drafter.written`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from meshwright.costmodel.mesh import NOT_AWAY, HostParts
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.recompute import in_segments
from meshwright.costmodel.stages import held_bytes
from meshwright.planner.overrides import Restrictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """The parts in host memory, the part of the blocks that may send their activations there, and
    whether blocks may run again in segments. With the `fewest` states there, or weights where
    these are there, too, blocks run again by the policy with which both take least."""

    host: HostParts = NOT_AWAY
    sends: float = 0.0
    segmented: bool = False
    fewest: bool = False

    @property
    def most(self) -> HostParts:
        """The most that may lie in host memory."""
        return replace(self.host, activations=max(self.host.activations, self.sends))

    def with_last(self, part: float) -> HostParts:
        """Parts in host memory with such a part of the weights there, or else of the states."""
        if self.host.weights:
            return replace(self.host, weights=part * self.host.weights)
        return replace(self.host, states=part * self.host.states)


NO_RELIEF = Relief()


def reliefs(problem: Problem, over: Restrictions) -> tuple[Relief, ...]:
    """Reliefs by how much they give up: first what the user decided, or nothing."""
    host = HostParts(
        states=over.host_states or 0.0,
        weights=over.host_weights,
        activations=over.host_activations or 0.0,
        files=over.host_files,
    )
    free = undecided(over) and "none" not in over.recompute
    choices = [Relief(host=host)]
    choices += [Relief(host=host, segmented=True)] * (free and not host.weights)
    held = held_by_hosts(problem, over)
    for parts in (NOT_AWAY, *_held(problem, held)) if held else ():
        choices += [Relief(host=parts, fewest=True)] * bool(parts and not parts.files)
        choices += [Relief(host=parts)] * (parts != host)
        choices += [Relief(host=parts, sends=1.0)] * (not parts.files)
    return tuple(choices)


def _held(problem: Problem, held: float) -> Iterator[HostParts]:
    """States and weights to try in host memory that holds such a part of all states."""
    yield HostParts(states=held)
    if held == 1:
        yield HostParts(states=1.0, weights=1.0)
    if filed := min(held_by_flash(problem), 1.0):  # all that may be: it is lessened
        yield HostParts(states=1.0, files=filed)
        yield HostParts(states=1.0, weights=1.0, files=filed)


def held_by_hosts(problem: Problem, over: Restrictions) -> float:
    """The part of all states that the hosts hold, each element once; 0 where nothing may lie there:
    on CPU ranks, whose memory it is, and where the user, the target, the optimizer or the cluster
    says so."""
    cluster, host = problem.cluster, problem.cluster.host
    may = cluster.device.kind == "cuda" and problem.target.gradients_come
    may = may and problem.stepped.matrices is None  # which are stepped whole, on devices
    if host is None or not may or over.host_states is not None:
        return 0.0
    states = problem.graph.num_trained() * held_bytes(problem)
    return min(1.0, cluster.num_nodes * host.room_bytes / max(states, 1))


def held_by_flash(problem: Problem) -> float:
    """The part of all states that files on the nodes' flash hold, or more than all."""
    cluster, host = problem.cluster, problem.cluster.host
    if host is None or not host.has_flash:
        return 0.0
    filed = problem.stepped.state_bytes
    return cluster.num_nodes * host.flash_room_bytes / (filed * max(problem.graph.num_trained(), 1))


# --- segments -------------------------------------------------------------------------------------

# Segments that a search may choose, where single blocks don't free enough or the user says so.


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
