"""Activations in host memory: where nothing fits without, and where they make a step faster.

Where no plan fits, with optimizer states in host memory neither, the search is made again with the
activations of all blocks there, with the states as well, and with the weights. Where a plan fits
and recomputes, by block or in segments, memory binds: the same plan is priced with less recompute,
and as many blocks' activations in host memory as it takes to fit. How many that are of each device
group is found by halving, of all groups at once: the peak of a device depends on its own stages
alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshwright.costmodel.blocks import parts_of, segment_policy
from meshwright.costmodel.operators import HostParts
from meshwright.costmodel.stages import fits
from meshwright.planner.drafts import Candidate
from meshwright.planner.plan import Plan, StagePlan, recompute_of
from meshwright.planner.search.offload import PAYS, held_by_hosts, priced_again, with_less

if TYPE_CHECKING:
    from meshwright.planner.search.result import SearchResult
    from meshwright.planner.search.search import Search

LEAST = 1 / 8  # of a stage's blocks: what frees less pays for little


def may_send(search: Search) -> bool:
    """Whether activations may lie in host memory, and nobody decided that."""
    given = search.restrictions.host_activations
    return given is None and not search.space.host.activations and held_by_hosts(search) > 0


def with_activations(search: Search) -> SearchResult | None:
    """The result of a search with activations in host memory, then with the optimizer's states
    too, then with weights; None where nothing fits so, either. All blocks repeat what they can at
    first: of what that takes least memory, the plan then repeats less as it pays."""
    if not may_send(search):
        return None
    full = search
    if _free(search) and "full" in search.restrictions.policies:
        full = search.like(overrides=dataclasses.replace(search.overrides, recompute="full"))
    held = held_by_hosts(search)
    for states, weights in ((0.0, 0.0), (held, 0.0), (held, 1.0))[: 2 + (held == 1)]:
        if search.programs.time.over():
            break
        there = HostParts(states=states, weights=weights, activations=1.0)
        if found := full.offloading(there).attempt():
            best = least_sent(search, found.best.plan, found.best) or found.best
            return found.led_by(with_less(search, _faster(search, best) or best), states)
    search.host_said += "; nor does anything with activations there" * bool(search.host_said)
    return None


def if_activations_pay(search: Search, found: SearchResult) -> SearchResult:
    """The result, or a faster plan that recomputes less, with activations in host memory."""
    faster = _faster(search, found.best) if may_send(search) else None
    return found if faster is None else found.led_by(faster, found.host.states)


def _free(search: Search, *, segmented: bool = False) -> bool:
    """Whether what blocks repeat, by themselves or `segmented`, is left to the search."""
    over = search.restrictions
    segments = over.segments if segmented else ()
    return all(own is None for own in (*over.recompute, *segments))


def _faster(search: Search, best: Candidate) -> Candidate | None:
    """The plan with less recompute, if it is faster with as many activations in host memory as that
    takes."""
    plan, fastest = best.plan, best
    repeats = {policy for stage in plan.stages for policy in stage.policies} - {"none"}
    segmented = any(stage.segments > 1 for stage in plan.stages)
    if not (repeats or segmented) or not _free(search, segmented=segmented):
        return None
    gathered = any(stage.tp > 1 for stage in plan.stages)
    allowed = (segment_policy(p)[0] for p in search.space.policies(plan.schedule))
    tried = [p for p in dict.fromkeys(allowed) if gathered or not parts_of(p)[1]]
    if not segmented and len(repeats) == 1:
        tried = [policy for policy in tried if policy not in repeats]
    for policy in tried:
        if search.programs.time.over():
            break
        other = dataclasses.replace(plan, stages=tuple(_with(s, policy) for s in plan.stages))
        limit_s = min(PAYS * best.step_time_s, fastest.step_time_s)
        least = _at(search, other, best, [LEAST] * len(plan.stages))
        if least.step_time_s < limit_s:
            fastest = least_sent(search, other, best, limit_s) or fastest
    return None if fastest is best else fastest


def least_sent(
    search: Search, plan: Plan, known: Candidate, limit_s: float = math.inf
) -> Candidate | None:
    """The plan with as few activations in host memory as fit, by device group; None where all of
    them are not enough, or surely take `limit_s`. Of `known` are the assignments."""
    room, blocks = search.space.memory_bytes, max(len(stage.blocks) for stage in plan.stages)

    def at(counts: Mapping[tuple[int, ...], int]) -> Candidate:
        return _at(search, plan, known, [counts[s.ranks] / blocks for s in plan.stages])

    def fit(priced: Candidate) -> list[bool]:
        return [fits(peak, room) for peak in priced.evaluation.prediction.peak_memory_bytes]

    low, high = dict.fromkeys(plan.devices, -1), dict.fromkeys(plan.devices, blocks)
    if not all(fit(at(high))):
        return None
    while any(high[ranks] - low[ranks] > 1 for ranks in plan.devices):
        middle = {ranks: (max(low[ranks], 0) + high[ranks]) // 2 for ranks in plan.devices}
        priced = at(middle)
        enough = fit(priced)
        if not any(enough) and priced.step_time_s >= limit_s:
            return None  # what fits sends more, everywhere
        for ranks, own in zip(plan.devices, enough, strict=True):
            (high if own else low)[ranks] = middle[ranks]
    found = at(high)
    return found if found.fits and found.step_time_s < limit_s else None


def _with(stage: StagePlan, policy: str) -> StagePlan:
    """A stage whose blocks that run again do so by this policy, each by itself."""
    kept = "none" if stage.segments == 1 else policy
    policies = [kept if own == "none" else policy for own in stage.policies]
    return dataclasses.replace(stage, recompute=recompute_of(stage.blocks, policies), segments=1)


def _at(search: Search, plan: Plan, known: Candidate, parts: Sequence[float]) -> Candidate:
    """The plan with these parts of its stages' activations in host memory."""
    stages = []
    for stage, part in zip(plan.stages, parts, strict=True):
        offload = {k: v for k, v in stage.offload.items() if k != "activations"}
        offload |= {"activations": part} if part else {}
        stages.append(dataclasses.replace(stage, offload=offload))
    return priced_again(search, known, dataclasses.replace(plan, stages=tuple(stages)))
