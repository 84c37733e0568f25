"""Combinations of one mesh: their bounds, and their cuts, against every cut there is, simulated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import pytest

from meshwright.costmodel.schedules.schedule import in_flight
from meshwright.planner.drafts.candidates import PipelineSetup, PlanDraft, make_draft
from meshwright.planner.drafts.combinations import Combination, MeshChoice, StageDraft, StageSetup
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.search.search import Search
from tests.helpers.enumeration import Enumeration, instance, limited
from tests.helpers.planning import problem_of
from tests.helpers.tiers import tiered

INSTANCES, SOME = range(14), range(4)
Key = tuple[StageSetup, str, int, int, int]


def every_cut(
    search: Search, way: StageSetup, schedule: str, m: int, groups: int, each: int
) -> Iterator[PlanDraft]:
    """Every cut into so many stages, each with the least recompute that fits its place."""
    equal, stages = search.equal, groups * each
    count, levels = len(search.problem.graph.blocks), equal.levels(way, schedule)
    step = PipelineSetup(
        global_batch_size=search.global_batch_size,
        num_microbatches=m,
        schedule=schedule,
        stages_per_group=each,
    )
    for inner in itertools.combinations(range(1, count), stages - 1):
        spans = list(itertools.pairwise((0, *inner, count)))
        if not all(equal.legal[i, j] for i, j in spans):
            continue
        drafted = []
        for k, (i, j) in enumerate(spans):
            held = in_flight(
                schedule, stage=k, num_stages=stages, num_microbatches=m, num_devices=groups
            )
            room = equal.room / each
            drafted.append(
                StageDraft(
                    start=i,
                    stop=j,
                    setup=way,
                    levels=levels,
                    chosen=levels.choose(held, room),
                    in_flight=held,
                )
            )
        yield make_draft(search.programs.coster, drafted, step, search.space.memory_bytes)


@cache
def searches(seeds: range = INSTANCES) -> list[Search]:
    """Instances with ample memory, and with as little as a lean plan needs."""
    found = []
    for seed in seeds:
        of, on, batch, rng = instance(seed)
        peaks = Enumeration(of=of, cluster=on, batch=batch).peaks(16)
        for memory_bytes in (2.0**40, rng.choice(peaks[:8])):
            small = limited(on, memory_bytes)
            found.append(Search(problem_of(of, small), batch, Overrides()))
    return found


def slots(search: Search) -> list[MeshChoice]:
    return [s for m in search.space.microbatch_counts() for s in search.equal.mesh_choices(m)]


def cuts(search: Search, node: Combination) -> list[PlanDraft]:
    found = every_cut(
        search, node.setup, node.schedule, node.num_microbatches, node.groups, node.stages_per_group
    )
    return [draft for draft in found if draft.fits]


@pytest.mark.parametrize(
    "seeds", tiered([SOME, INSTANCES], SOME.__eq__, "more instances of the same")
)
def test_no_cut_is_faster_than_the_bound_of_its_combination(seeds: range) -> None:
    for search in searches(seeds):
        for slot in slots(search):
            for node in search.equal.combinations(slot):
                assert slot.bound_s <= node.bound_s * (1 + 1e-9)
                for draft in cuts(search, node):
                    assert node.bound_s <= draft.step_time_s * (1 + 1e-9), draft.plan


def test_what_is_left_out_does_not_fit() -> None:
    """Combinations without an estimate. Hardly any would: their states are judged by what blocks
    hold in the states they prefer, which a whole stage may have to leave for leaner ones."""
    left = fitting = 0
    for search in searches():
        equal, space = search.equal, search.space
        for slot in slots(search):
            m, groups = slot.num_microbatches, slot.groups
            kept = {
                (id(n.setup.chain), n.setup.zero, n.schedule, n.stages_per_group)
                for n in equal.combinations(slot)
            }
            for way in equal.setups(slot.mesh, m):
                for schedule, each in space.schedules(groups, m, way.zero):
                    if (id(way.chain), way.zero, schedule, each) not in kept:
                        every = every_cut(search, way, schedule, m, groups, each)
                        fitting += any(draft.fits for draft in every)
                        left += 1
    assert left > 50
    assert fitting <= 0.05 * left


def test_the_cut_is_nearly_the_fastest() -> None:
    """The objective knows neither what once-per-step work overlaps nor that two stages are slowest
    in different passes."""
    excess = []
    for search in searches():
        for slot in slots(search):
            for node in search.equal.combinations(slot):
                solved, every = search.equal.solve(node, float("inf")), cuts(search, node)
                if not every:
                    continue
                assert solved is not None
                best = search.draft(node, solved[1])
                fastest = min(draft.step_time_s for draft in every)
                assert (
                    best.fits or node.stages_per_group > 1
                )  # stages of one group may share the room unevenly
                if best.fits:
                    excess.append(best.step_time_s / fastest - 1)
    assert min(excess) >= -1e-9
    assert len(excess) > 400
    assert sum(x <= 1e-9 for x in excess) >= 0.9 * len(excess)
    assert sum(x <= 0.02 for x in excess) >= 0.95 * len(excess)
