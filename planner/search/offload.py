"""States and weights in host memory: where nothing fits without, and where they make steps faster.

The search itself knows no host memory. Where no plan fits, it is made again with all states there
that the hosts hold, and then with all weights, too, where still nothing fits or what does computes
again or by small micro-batches; each stage of what it finds takes back to its devices what they
have room for. Where a plan fits and recomputes, memory binds: the mesh of the plan is drafted with
the states in host memory and less recompute, if the step would be faster even without any.

Where the hosts hold no more than a part of all states, and flash the rest, all are off the devices
instead, with as many in files as must be (ZeRO-Infinity), where nothing fits otherwise or it pays;
last all weights, too, with as few states in host memory as that takes.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from meshwright.costmodel.memory import FP32, optimizer_bytes
from meshwright.costmodel.operators import HostParts
from meshwright.planner.drafts import Candidate, priced_fits
from meshwright.planner.plan import Plan, sized
from meshwright.planner.plan.offload import parts, trained_sizes
from meshwright.planner.pricing import evaluate

if TYPE_CHECKING:
    from meshwright.planner.search.result import SearchResult
    from meshwright.planner.search.search import Search

TIE = 1.01  # of steps, below which the plan with less off its devices is taken
PAYS = 0.95  # of the step without: no host link was measured, and the simpler plan wins


def held_by_hosts(search: Search) -> float:
    """The part of all states that the hosts hold, each element once; 0 where nothing may lie there:
    on CPU ranks, whose memory it is, and where the user, the target or the cluster says so."""
    problem = search.problem
    host, given = problem.cluster.host, search.restrictions.host_states
    known = host is not None and problem.cluster.device.kind == "cuda"
    validated = search.restrictions.post_validation
    if not known or given is not None or validated or not problem.target.gradients_come:
        return 0.0
    assert host is not None
    states = _trained(search) * (2 * FP32 + optimizer_bytes(problem.optimizer))
    return min(1.0, problem.cluster.num_nodes * host.memory_bytes / max(states, 1))


def _trained(search: Search) -> int:
    """Elements of all trained parameters."""
    graph = search.problem.graph
    values = (graph.values[v] for v in graph.parameters)
    return sum(math.prod(value.shape) for value in values if value.requires_grad)


def held_by_flash(search: Search) -> float:
    """The part of all states, each element once, that files on the nodes' flash hold, or more than
    all; 0 where nothing is known of it."""
    cluster, host = search.problem.cluster, search.problem.cluster.host
    if host is None or not host.has_flash:
        return 0.0
    filed = FP32 + optimizer_bytes(search.problem.optimizer)
    return cluster.num_nodes * host.nvme_bytes / (filed * max(_trained(search), 1))


def with_host(
    search: Search, otherwise: Callable[[Search], SearchResult | None]
) -> SearchResult | None:
    """The result of a search with optimizer states in host memory, or what may be found `otherwise`
    there; None where nothing fits so, either: `search.host_said` says what lacks then."""
    part = held_by_hosts(search)
    if not part or search.space.host.states or search.programs.time.over():
        return None
    best: SearchResult | None = None
    there = search
    for choice in _choices(search, part):
        enough = best is not None and (not _weights_bind(best) or (choice.files and part == 1))
        if enough or search.programs.time.over():
            break
        there = search.offloading(choice)
        found = there.attempt() or (None if best is not None else otherwise(there))
        if found is not None:
            found = _lessened(there, found)
            if best is None or found.best.step_time_s < PAYS * best.best.step_time_s:
                best = found
    if best is not None:
        return best
    _say_what_lacks(search, there)
    return None


def _choices(search: Search, part: float) -> Iterator[HostParts]:
    """What is tried in turn where the hosts hold this part of all states, each element once."""
    yield HostParts(states=part)
    if part == 1:
        yield HostParts(states=1.0, weights=1.0)
    if room := min(held_by_flash(search), 1.0):  # as many as there can be: they are lessened
        yield HostParts(states=1.0, files=room)
        yield HostParts(states=1.0, weights=1.0, files=room)


def _say_what_lacks(search: Search, there: Search) -> None:
    """Note why nothing fits with so much in host memory, as the search `there` found."""
    cluster, part = search.problem.cluster, there.space.host.states
    host = cluster.host
    assert host is not None
    search.host_said = (
        f"With {'all' if part == 1 else f'{part:.0%}'} of the optimizer states "
        f"{'and all weights ' if there.space.host.weights else ''}in host memory"
        f"{' and files on flash' if there.space.host.files else ''} nothing fits, either"
    )
    lacks = [draft.evaluation.prediction for draft in there.drafts]
    short = [p.host_shortfall(cluster) for p in lacks if p.host_shortfall(cluster)]
    filed = [p.flash_shortfall(cluster) for p in lacks if p.flash_shortfall(cluster)]
    if part < 1:
        lacking = host.memory_bytes * (1 / part - 1)
        search.host_said += f": for all of them a host lacks {sized(lacking)}"
    elif short:
        search.host_said += f": the closest plan lacks {sized(min(short))} of a host's memory"
    elif filed:
        search.host_said += f": the closest plan lacks {sized(min(filed))} of a node's flash"
    search.host_said += f" ({sized(host.memory_bytes)} a node"
    search.host_said += f", {sized(host.nvme_bytes)} of flash)" if host.has_flash else ")"


def _weights_bind(found: SearchResult) -> bool:
    """Whether a plan with weights or states on its devices gives something else up for memory."""
    plan = found.best.plan
    again = plan.num_microbatches > 1 or any({*s.policies} != {"none"} for s in plan.stages)
    return again and any(stage.zero < 3 for stage in plan.stages)


def if_it_pays(search: Search, found: SearchResult) -> SearchResult:
    """The result, or a faster one that recomputes less, with optimizer states in host memory."""
    part, best = held_by_hosts(search), found.best
    plan, policies = best.plan, {p for stage in best.plan.stages for p in stage.policies}
    alike = {(s.dp, s.tp, s.cp, s.ep) for s in plan.stages}
    if not part or found.host.states or policies == {"none"} or len(alike) > 1:
        return found
    if search.programs.time.over() or not _may_pay(search, best):
        return found
    there = search.offloading(HostParts(states=part))
    if (written := there.on_meshes_of(plan)) is None:
        return found
    other = with_less(there, written)
    if other.step_time_s >= PAYS * best.step_time_s:
        return found
    return found.led_by(other, part)


def _may_pay(search: Search, best: Candidate) -> bool:
    """Whether the plan would be faster with as little as one block's states in host memory, and
    nothing recomputed."""
    stages = [
        dataclasses.replace(
            stage,
            recompute="none",
            segments=1,
            offload={
                **stage.offload,
                "optimizer": parts(trained_sizes(stage, search.problem.graph))[1],
            },
        )
        for stage in best.plan.stages
    ]
    plan = dataclasses.replace(best.plan, stages=tuple(stages))
    priced = evaluate(plan, search.problem, best.assignments, search.programs.coster)
    return priced.prediction.step_time_s < PAYS * best.step_time_s


def _lessened(search: Search, found: SearchResult) -> SearchResult:
    return found.led_by(with_less(search, found.best), found.host.states)


def with_less(search: Search, given: Candidate) -> Candidate:
    """The plan with as few states in host memory as fit, stage by stage, or where weights lie
    there, too, with as few of these: they come in each pass. Then with as few states in files as
    the hosts have no room for: alike on all stages, and less on those with the most."""
    sizes = [trained_sizes(stage, search.problem.graph) for stage in given.plan.stages]
    best = given
    for k, stage in enumerate(given.plan.stages):
        kind = "weights" if stage.offload.get("weights") else "optimizer"
        levels = [p for p in parts(sizes[k]) if p <= stage.offload.get(kind, 0.0)]
        best = _least(search, best, levels, {k: kind})
    held = {k: float(costs.flash_bytes) for k, costs in enumerate(given.evaluation.stages)}
    filed = sorted((k for k in held if held[k]), key=held.__getitem__, reverse=True)
    for own in (*([filed] if len(filed) > 1 else []), *([k] for k in filed)):
        levels = sorted({p for k in own for p in parts(sizes[k])})
        most = max(best.plan.stages[k].offload.get("nvme", 0.0) for k in own)
        count = bisect.bisect_right(levels, most) + 1  # whole blocks, which reach the next level
        best = _least(search, best, levels[:count], dict.fromkeys(own, "nvme"))
    return best if best.step_time_s <= TIE * given.step_time_s else given


def _least(
    search: Search, best: Candidate, levels: Sequence[float], kinds: Mapping[int, str]
) -> Candidate:
    """The plan with the least of the rising `levels` of each stage's kind that fits; the plan
    itself where none does."""
    low, high = 0, len(levels)  # from `high` on all fit, as what was found does
    while low < high and not search.programs.time.over():
        middle = (low + high) // 2
        other = _at(search, best, {k: {kind: levels[middle]} for k, kind in kinds.items()})
        if other.fits:
            best, high = other, middle
        else:
            low = middle + 1
    return best


def _at(search: Search, best: Candidate, given: Mapping[int, Mapping[str, float]]) -> Candidate:
    """The plan with other parts of some stages off their devices."""
    stages = list(best.plan.stages)
    for k, parts_of in given.items():
        there = {**stages[k].offload, **parts_of}
        if "nvme" in there:  # a part of those off the devices
            there["nvme"] = min(there["nvme"], there.get("optimizer", 0.0))
        there = {name: part for name, part in there.items() if part}
        stages[k] = dataclasses.replace(stages[k], offload=there)
    return priced_again(search, best, dataclasses.replace(best.plan, stages=tuple(stages)))


def priced_again(search: Search, known: Candidate, plan: Plan) -> Candidate:
    """A plan with the shardings of another, priced."""
    priced = evaluate(plan, search.problem, known.assignments, search.programs.coster)
    fits = priced_fits(priced, search.problem.cluster, search.space.memory_bytes)
    return Candidate(evaluation=priced, assignments=known.assignments, fits=fits)
