"""A whole plan as overrides: what they leave is that plan alone."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.blocks.policies import RECOMPUTE
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.operators.problem import Problem
from meshwright.costmodel.schedules.schedule import SCHEDULES, stages_of_devices
from meshwright.costmodel.sharding.context_axis import ALL_GATHER, CONTEXT_KINDS
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import Entry
from meshwright.planner.overrides.fitting import check_overrides
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.pinned import plan_overrides
from meshwright.planner.overrides.restrictions import Restrictions, restrict
from meshwright.planner.plan.check import check_plan, fingerprint
from meshwright.planner.plan.plan import PLACEMENTS, Plan, PlanError, StagePlan, recompute_of
from meshwright.planner.plan.shardings import resolve_shardings
from meshwright.planner.search.search import Search
from tests.helpers.tiny import cut, net, plan_for, slow_host, with_stage

few = settings(max_examples=40)
known: dict[Any, Any] = {}  # checked blocks of the tiny model
SHARDINGS = ({}, {"layers.*.up": "colwise"}, {"layers.**": "replicate", "head": "colwise"})


@cache
def model() -> tuple[Graph, FactorTable]:
    return cut(net())


def placed(placement: str, sizes: list[int], inner: int, group: int) -> tuple[int, ...]:
    """Ranks of a device group: filled one after the other, or `inner` at a time in turns."""
    if placement == "tp,dp,pp":
        return tuple(range(sum(sizes[:group]), sum(sizes[: group + 1])))
    turns = [g for _ in range(sizes[0] // inner) for g in range(len(sizes)) for _ in range(inner)]
    return tuple(rank for rank, owner in enumerate(turns) if owner == group)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Legal plans of the tiny model, most of which the executor does not run."""
    graph, _ = model()
    names = [block.name for block in graph.blocks]
    schedule = draw(st.sampled_from([n for n, s in SCHEDULES.items() if s.copies == 1]))
    each = SCHEDULES[schedule].stages_per_device or draw(st.integers(1, 2))
    groups = draw(st.integers(1, 5 // each))
    ends = sorted(draw(st.permutations(range(1, 5)))[: groups * each - 1])
    placement = draw(st.sampled_from(PLACEMENTS))
    tokens, kind = draw(st.sampled_from((1, 3))), draw(st.sampled_from(CONTEXT_KINDS))
    mesh = st.tuples(*[st.sampled_from((1, 2))] * 2, st.just(tokens))
    equal = draw(st.booleans()) or placement != PLACEMENTS[0]
    meshes = [draw(mesh)] * groups if equal else [draw(mesh) for _ in range(groups)]
    owner = {
        k: g
        for g, own in enumerate(
            stages_of_devices(schedule, num_stages=groups * each, num_devices=groups)
        )
        for k in own
    }
    stages = []
    for k, (start, stop) in enumerate(zip([0, *ends], [*ends, 5], strict=True)):
        tp, dp, cp = meshes[owner[k]]
        blocks, zero = tuple(names[start:stop]), draw(st.integers(0, 3))
        shards = draw(st.sampled_from([n for n in range(1, dp * cp + 1) if dp * cp % n == 0]))
        policies = [draw(st.sampled_from(RECOMPUTE)) for _ in blocks]
        shardings = draw(st.sampled_from(SHARDINGS)) if len(blocks) == 5 and tp == 2 else {}
        stages.append(
            StagePlan(
                blocks=blocks,
                dp=dp,
                tp=tp,
                cp=cp,
                cp_kind=kind if cp > 1 else ALL_GATHER,
                zero=zero,
                dp_shard=shards if zero else None,
                ranks=placed(placement, [t * d * c for t, d, c in meshes], tp * cp, owner[k]),
                recompute=recompute_of(blocks, policies),
                shardings=shardings,
            )
        )
    return Plan(
        model=fingerprint(graph),
        global_batch_size=16,
        schedule=schedule,
        precision="fp32",
        num_microbatches=draw(st.sampled_from((1, 2, 4, 8))),
        stages=tuple(stages),
    )


def rebuilt(found: Restrictions) -> Plan:
    """The one plan that restrictions leave: fails where they leave a choice."""
    assert found.cuts is not None and found.pp is not None and found.virtual_stages is not None
    assert found.num_microbatches is not None and None not in found.recompute
    (schedule,), (placement,) = found.schedules, found.placements
    count = found.pp * found.virtual_stages
    owner = {
        k: g
        for g, own in enumerate(
            stages_of_devices(schedule, num_stages=count, num_devices=found.pp)
        )
        for k in own
    }  # fmt: skip
    meshes: dict[int, tuple[int, ...]] = {}
    stages: list[dict[str, Any]] = []
    for k, (start, stop) in enumerate(zip([0, *found.cuts], found.cuts, strict=False)):
        one = {}
        for name in ("tp", "dp", "cp", "ep", "zero", "dp_shard", "hpz"):
            (one[name],) = set(getattr(found, name)[start:stop])
        whole = one["dp_shard"] or one["dp"] * one["cp"]  # as many: no secondary shard
        one["hpz"] = None if one["hpz"] == whole else one["hpz"]
        blocks = found.blocks[start:stop]
        policies = [policy for policy in found.recompute[start:stop] if policy]
        stages.append({**one, "blocks": blocks, "recompute": recompute_of(blocks, policies)})
        meshes.setdefault(owner[k], (one["tp"], one["dp"], one["cp"]))
    sizes = [meshes[g][0] * meshes[g][1] * meshes[g][2] for g in range(found.pp)]
    return Plan(
        model=fingerprint(model()[0]),
        global_batch_size=16,
        precision="fp32",
        schedule=schedule,
        num_microbatches=found.num_microbatches,
        stages=tuple(
            StagePlan(
                **s,
                cp_kind=found.cp_kind or ALL_GATHER,
                ranks=placed(placement, sizes, s["tp"] * s["cp"], owner[k]),
            )
            for k, s in enumerate(stages)
        ),
    )


@few
@given(plans())
def test_a_pinned_plan_is_all_that_is_left(plan: Plan) -> None:
    graph, table = model()
    check_plan(plan, graph, table, known)
    pinned = plan_overrides(plan, graph)
    check_overrides(pinned, num_devices=plan.num_ranks, global_batch_size=16, num_blocks=5)
    found = restrict(pinned, graph)
    bare = dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(s, shardings={}) for s in plan.stages)
    )
    assert rebuilt(found) == bare
    for k, stage in enumerate(plan.stages):
        assert found.stage_mask("tp", stage.tp)[([0, *found.cuts][k], found.cuts[k])]  # type: ignore[misc]


def said(found: dict[str, Entry], graph: Graph, stage: StagePlan) -> dict[str, Entry]:
    """What entries say about the blocks of a stage."""
    own = [block for block in graph.blocks if block.name in stage.blocks]
    names = {name for b in own for name in (*(op.name for op in b.ops), *b.parameters)}
    return {n: entry for n, entry in found.items() if n in names and entry != Entry()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"layers.*.up": "colwise"}, {"layers.*.up": "colwise"}),
        ({"layers.*.up": "colwise"}, {"layers.*.up": "rowwise"}),
        ({"layers.*.up": "colwise"}, {}),
        ({}, {"layers.**": "replicate", "head": "colwise"}),
        ({"layers.*.up": "colwise", "layers.1.up": "follow", "embed": "vocab"}, {}),
    ],
)
def test_globs_of_a_stage_stay_with_its_blocks(
    first: dict[str, str], second: dict[str, str]
) -> None:
    graph, table = model()
    plan = plan_for(graph, stages=2)
    blocks = tuple(block.name for block in graph.blocks)
    for k, (own, shardings) in enumerate(((blocks[:3], first), (blocks[3:], second))):
        plan = with_stage(plan, k, blocks=own, shardings=shardings)
    check_plan(plan, graph, table)
    pinned = resolve_shardings(graph, graph.blocks, plan_overrides(plan, graph).shardings)
    for stage in plan.stages:
        own = [block for block in graph.blocks if block.name in stage.blocks]
        stated = resolve_shardings(graph, own, stage.shardings)
        assert said(pinned, graph, stage) == said(stated, graph, stage)


def test_the_state_of_what_leaves_a_stage_is_not_pinned() -> None:
    """It is whole there: the glob of its repeats says otherwise, and may."""
    graph, table = model()
    plan = plan_for(graph, stages=2)
    blocks = tuple(block.name for block in graph.blocks)
    for k, own in enumerate((blocks[:3], blocks[3:])):
        plan = with_stage(plan, k, blocks=own, shardings={"layers.*:add": "-> S(2)"})
    check_plan(plan, graph, table)
    assert plan_overrides(plan, graph).shardings == {
        "layers.*:add": "-> S(2)",
        "layers.1:add": "follow",
    }


def test_values_that_differ_are_pinned_by_ranges_of_blocks() -> None:
    graph, _ = model()
    plan = plan_for(graph, stages=2, dp=2, tp=2, schedule="gpipe")
    plan = with_stage(plan, 0, zero=2, dp_shard=1, recompute={"full": ("layers.0", "layers.1")})
    assert plan_overrides(plan, graph).given() == {
        "tp": 2, "dp": 2, "cp": 1, "ep": 1, "pp": 2, "virtual_stages": 1,
        "zero": {"embed": 2, "layers.0-2": 2, "head": 0},
        "dp_shard": {"embed": 1, "layers.0-2": 1}, "quantized": "none",
        "recompute": {"embed": "none", "layers.2": "none", "head": "none", "layers.0-1": "full"},
        "num_microbatches": 2, "schedule": "gpipe", "placement": "tp,dp,pp",
        "stages": [["embed", "layers.0-2"], ["head"]],
    }  # fmt: skip


def test_ranks_that_no_placement_gives_are_refused() -> None:
    graph, table = model()
    plan = plan_for(graph, stages=2)
    for first, second in (((4, 5, 6, 7), (0, 1, 2, 3)), ((2, 3, 6, 7), (0, 1, 4, 5))):
        moved = with_stage(with_stage(plan, 0, ranks=first), 1, ranks=second)
        check_plan(moved, graph, table)
        with pytest.raises(
            PlanError, match=r"which no placement gives; legal: tp,dp,pp .*tp,pp,dp"
        ):
            plan_overrides(moved, graph)


def test_a_pipeline_inside_the_node_may_go_on_in_the_next() -> None:
    """Four groups, two to a node of four devices."""
    graph, table = model()
    plan = plan_for(graph, stages=4, dp=2, tp=1)
    for k, ranks in enumerate(((0, 2), (1, 3), (4, 6), (5, 7))):
        plan = with_stage(plan, k, ranks=ranks)
    check_plan(plan, graph, table)
    assert plan_overrides(plan, graph).placement == "tp,pp,dp"
    crossed = with_stage(with_stage(plan, 1, ranks=(4, 6)), 2, ranks=(1, 3))
    check_plan(crossed, graph, table)
    with pytest.raises(PlanError, match=r"ranks 0,2; 4,6; 1,3; 5,7, which no placement gives"):
        plan_overrides(crossed, graph)


def test_larger_groups_may_come_first() -> None:
    """Stages are moved where a part of a node would straddle two."""
    graph, table = model()
    plan = plan_for(graph, stages=2, dp=2, tp=1)
    plan = with_stage(with_stage(plan, 0, ranks=(4, 5)), 1, ranks=(0, 1, 2, 3), tp=2)
    check_plan(plan, graph, table)
    assert plan_overrides(plan, graph).placement == "tp,dp,pp"


def test_most_of_what_stages_offload_is_pinned() -> None:
    graph, _ = model()
    plan = plan_for(graph, stages=2)
    assert plan_overrides(plan, graph).offload is None
    for k, part in enumerate((0.25, 0.5)):
        plan = with_stage(plan, k, offload={"optimizer": part, "weights": 0.1 * k})
    found = plan_overrides(plan, graph).offload
    assert found == {"optimizer": 0.5, "weights": 0.1, "activations": 0.0, "nvme": 0.0}


def test_two_groups_inside_a_node_do_not_share_out_three() -> None:
    graph, _ = model()
    plan = plan_for(graph, stages=3, dp=2, tp=1)
    for k, ranks in enumerate(((0, 2), (1, 3), (4, 6))):
        plan = with_stage(plan, k, ranks=ranks)
    with pytest.raises(PlanError, match="which no placement gives"):
        plan_overrides(plan, graph)


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"tp": 2, "pp": 2, "schedule": "gpipe"},
        {"dp": 4, "zero": 1, "recompute": "full"},
        {"tp": 4, "num_microbatches": 2},
        {"pp": 2, "virtual_stages": 2},
        {"dp": 4, "zero": 3, "dp_shard": 2},
        {"dp": 4, "zero": 3, "hpz": 2},
        {"pp": 2, "tp": {"embed": 1, "head": 2}, "recompute": {"layers.*": "selective"}},
        {"pp": 2, "tp": 1, "zero": {"embed": 0, "head": 1}, "schedule": "gpipe"},
    ],
    ids=str,
)
def test_searching_under_a_pinned_plan_gives_it_back(wanted: dict[str, Any]) -> None:
    graph, table = model()

    def search(overrides: Overrides) -> Plan:
        problem = Problem(graph=graph, factors=table, cluster=slow_host(4), precision="fp32")
        found = Search(problem, 16, overrides).run()
        return found.best.plan

    plan = search(Overrides(**wanted))
    assert search(plan_overrides(plan, graph)) == plan
