"""Reliefs: what a plan may give up, beside running blocks again, so that it fits a device.

Every candidate that has to run blocks again, or does not fit, is completed by each of these in
turn: parts of its states, weights and activations in host memory or on flash, or segments of blocks
that run again. What the chosen plan then has room for comes back to its devices, stage by stage
(`planner/drafts/away.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.costmodel.memory import FP32, optimizer_bytes
from meshwright.costmodel.operators import NOT_AWAY, HostParts, Problem
from meshwright.planner.drafts.segments import undecided
from meshwright.planner.overrides import Restrictions

SENT = (0.25, 0.5, 0.75, 1.0)  # parts of the blocks whose activations are tried in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """The parts that lie in host memory, and whether blocks may run again in segments."""

    host: HostParts = NOT_AWAY
    segmented: bool = False


NO_RELIEF = Relief()


def reliefs(problem: Problem, over: Restrictions) -> tuple[Relief, ...]:
    """What the user decided, or nothing; then what may be given up, the least first."""
    host = HostParts(
        states=over.host_states or 0.0,
        weights=over.host_weights,
        activations=over.host_activations or 0.0,
        files=over.host_files,
    )
    free = undecided(over) and "none" not in over.recompute
    found = [Relief(host=host)]
    found += [Relief(host=host, segmented=True)] * (free and not host.weights)
    found += (Relief(host=each) for each in _away(problem, over) if each != host)
    return tuple(found)


def _away(problem: Problem, over: Restrictions) -> Iterator[HostParts]:
    """Parts to try in host memory, where the user left that open."""
    held = held_by_hosts(problem, over)
    sent = SENT if over.host_activations is None and held else ()
    yield from (HostParts(activations=part) for part in sent)
    if held:
        yield HostParts(states=held)
        yield from (HostParts(states=held, activations=part) for part in sent)
    if held == 1:
        yield HostParts(states=1.0, weights=1.0)
        yield from (HostParts(states=1.0, weights=1.0, activations=part) for part in sent)
    if held and (filed := min(held_by_flash(problem), 1.0)):  # all that may be: it is lessened
        yield HostParts(states=1.0, files=filed)
        yield HostParts(states=1.0, weights=1.0, files=filed)


def held_by_hosts(problem: Problem, over: Restrictions) -> float:
    """The part of all states that the hosts hold, each element once; 0 where nothing may lie there:
    on CPU ranks, whose memory it is, and where the user, the target or the cluster says so."""
    host = problem.cluster.host
    if host is None or problem.cluster.device.kind != "cuda" or not problem.target.gradients_come:
        return 0.0
    if over.host_states is not None:
        return 0.0
    states = problem.graph.num_trained() * (2 * FP32 + optimizer_bytes(problem.optimizer))
    return min(1.0, problem.cluster.num_nodes * host.memory_bytes / max(states, 1))


def held_by_flash(problem: Problem) -> float:
    """The part of all states, each element once, that files on the nodes' flash hold, or more than
    all; 0 where nothing is known of it."""
    cluster, host = problem.cluster, problem.cluster.host
    if host is None or not host.has_flash:
        return 0.0
    filed = FP32 + optimizer_bytes(problem.optimizer)
    return cluster.num_nodes * host.nvme_bytes / (filed * max(problem.graph.num_trained(), 1))
