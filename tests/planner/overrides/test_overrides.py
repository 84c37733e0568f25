"""Overrides: what each may be, which contradict each other, what they do to the search, what a
report says of those without an effect; a whole plan as overrides, which leave that plan alone."""

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.mesh import ALL_GATHER, CONTEXT_KINDS
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.recompute import RECOMPUTE
from meshwright.costmodel.schedules import SCHEDULES, stages_of_devices
from meshwright.costmodel.sharding.layouts import Entry
from meshwright.planner.decisions import PLACEMENTS, forbiddable
from meshwright.planner.overrides import without_effect
from meshwright.planner.overrides.overrides import (
    OverrideError,
    Overrides,
    check_overrides,
    each_dropped,
)
from meshwright.planner.overrides.pinned import plan_overrides
from meshwright.planner.overrides.restrictions import Restrictions, restrict
from meshwright.planner.plan import PlanError, check_plan
from meshwright.planner.plan.plan import Plan, StagePlan, recompute_of
from meshwright.planner.plan.ranges import compress_ranks
from meshwright.planner.plan.shardings import resolve_shardings
from meshwright.planner.search.search import Search, SearchResult
from tests.helpers import tiny
from tests.helpers.refusals import refusals, refused
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import plan_for, slow_host, with_stage
from tests.planner.plan.test_check import model

Knobs = dict[str, Any]
ROWS = 16
REFUSED = Path(__file__).with_name("refused.txt")


def search(devices: int = 4, **knobs: Any) -> SearchResult:
    graph, factors = model()
    problem = Problem(graph=graph, factors=factors, cluster=slow_host(devices), precision="fp32")
    overrides = Overrides(**knobs)
    return Search(problem, ROWS, overrides).run()


# --- one override --------------------------------------------------------------------------------


@pytest.mark.parametrize(("knobs", "says"), refusals(REFUSED, "Overrides"))
def test_what_cannot_be_is_refused(knobs: Knobs, says: str) -> None:
    """Values by themselves, by block, and two that contradict each other."""
    with refused(OverrideError, says):
        Overrides(**knobs)


def test_only_what_is_set_is_given() -> None:
    assert Overrides(forbid=forbiddable()[:3]).forbid == ("dp", "tp", "cp")
    assert Overrides().given() == {}
    assert Overrides(shardings={}, forbid=[]).given() == {}
    assert Overrides(tp=2, zero=0, forbid=["pp"]).given() == {"tp": 2, "zero": 0, "forbid": ["pp"]}


# --- two overrides -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs",
    [
        {"tp": 1, "forbid": ["tp"]},
        {"zero": 0, "recompute": {"a": "none"}, "forbid": ["zero", "recompute"]},
        {"zero": {"a": 0}, "dp_shard": {"b": 4}},
        {"dp_shard": {"a": 2}, "zero": {"a": 3, "b": 0}},
        {"schedule": "interleaved_1f1b", "virtual_stages": 1},
        {"schedule": "zb_v", "pp": 2, "stages": [["a"]] * 4},
        {"schedule": "interleaved_1f1b", "pp": 2, "stages": [["a"]] * 6},
        {"tp": {"a": 2, "b": 2}, "forbid": ["unequal_meshes"]},
        {"dp": {"a": 2}, "microbatch_size": 2},
        {"virtual_stages": 1, "forbid": ["pp", "virtual_stages"]},
        {"placement": "tp,dp,pp", "forbid": ["placement"]},
    ],
    ids=str,
)
def test_what_can_hold_together_is_taken(knobs: Knobs) -> None:
    assert Overrides(**knobs).given() == knobs


def test_forbidding_leaves_the_value_that_does_without() -> None:
    overrides = Overrides(forbid=["tp", "zero", "recompute"], dp=2)
    values = [overrides.everywhere(name) for name in ("tp", "dp", "pp", "zero", "recompute")]
    assert values == [1, 2, None, 0, "none"]
    assert Overrides(tp=1, forbid=["tp"]).everywhere("tp") == 1
    assert Overrides(tp={"head": 2}).everywhere("tp") is None
    assert Overrides(forbid=["full", "zero-2"]).left("recompute") == RECOMPUTE[:-1]


def equal_stages_exist(tp: int | None, dp: int | None, pp: int | None, devices: int) -> bool:
    """Whether stages of (tp, dp), or of any mesh where one is free, can use all devices."""
    sizes = [
        t * d
        for t in ([tp] if tp else range(1, devices + 1))
        for d in ([dp] if dp else range(1, devices + 1))
    ]
    reachable = {0: {0}}  # stages -> devices used
    for count in range(1, (pp or devices) + 1):
        reachable[count] = {used + s for used in reachable[count - 1] for s in sizes}
    return any(devices in reachable[n] for n in ([pp] if pp else range(1, devices + 1)))


def test_degrees_must_fit_the_devices() -> None:
    choices = (None, 1, 2, 3, 4, 6)
    for devices, tp, dp, pp in product((1, 4, 6), choices, choices, choices):
        refused = ""
        try:
            check_overrides(
                Overrides(tp=tp, dp=dp, pp=pp), num_devices=devices, global_batch_size=12,
                num_blocks=9, sequences=False,
            )  # fmt: skip
        except OverrideError as error:
            refused = str(error)
        assert bool(refused) != equal_stages_exist(tp, dp, pp, devices), (tp, dp, pp, devices)
        for name, value in (("tp", tp), ("dp", dp)):
            assert not refused or value is None or f"{name}={value}" in refused


FITTING = {"num_devices": 8, "global_batch_size": ROWS, "num_blocks": 5}


@pytest.mark.parametrize(
    ("sequences", "knobs", "says"),
    [(True, *case.values) for case in refusals(REFUSED, "check_overrides")]
    + [(False, *case.values) for case in refusals(REFUSED, "check_overrides without sequences")],
)
def test_what_cannot_fit_says_why(sequences: bool, knobs: Knobs, says: str) -> None:
    with refused(OverrideError, says):
        check_overrides(Overrides(**knobs), sequences=sequences, **FITTING)


@pytest.mark.parametrize(
    "knobs",
    [
        {"tp": 2, "dp": 2, "pp": 1},  # cp=2 is left to choose
        {"tp": 2, "cp": 2, "dp": 2},
        {"pp": 2, "virtual_stages": 2},
        {"dp": 8, "microbatch_size": 2, "num_microbatches": 1},
        {"dp_shard": 8, "hpz": {"a": 8}},
    ],
    ids=str,
)
def test_context_and_virtual_stages_count_where_they_may_be_had(knobs: Knobs) -> None:
    check_overrides(Overrides(**knobs), **FITTING)


# --- in the search -------------------------------------------------------------------------------


def test_the_search_takes_the_stages() -> None:
    wanted = [("embed", "layers.0"), ("layers.1", "layers.2", "head")]
    for candidate in search(stages=[["embed", "layers.0"], ["layers.1-2", "head"]]).candidates:
        assert [s.blocks for s in candidate.plan.stages] == wanted


@pytest.mark.parametrize(
    "knobs",
    [
        {"tp": 2, "zero": 0, "recompute": "full"},
        {"pp": 2, "schedule": "gpipe", "microbatch_size": 2},
        {"num_microbatches": 4, "forbid": ["tp", "zero"]},
        {"dp": 4, "forbid": ["pp"]},
    ],
    ids=str,
)
def test_every_candidate_keeps_the_overrides(knobs: Knobs) -> None:
    wanted = Overrides(**knobs)
    for candidate in search(**knobs).candidates:
        plan = candidate.plan
        assert wanted.everywhere("pp") in (None, len(plan.devices))
        assert wanted.num_microbatches in (None, plan.num_microbatches)
        assert wanted.schedule in (None, plan.schedule)
        for stage in plan.stages:
            for name in ("tp", "dp", "zero"):
                assert wanted.everywhere(name) in (None, getattr(stage, name))
            assert wanted.microbatch_size in (None, plan.microbatch_rows // stage.dp)
            assert wanted.recompute is None or set(stage.policies) == {wanted.recompute}


def test_shardings_reach_every_repeat() -> None:
    graph, _ = model()
    plans = search(2, tp=2, pp=1, shardings={"layers.*.up": "rowwise", "layers.1.up": "replicate"})
    (assignments,) = plans.best.assignments
    chosen = [
        assignments[block.name].strategies[op.name].name
        for block in graph.blocks
        for op in block.ops
        if op.key.endswith("up:linear")
    ]
    assert chosen == ["rowwise", "replicate", "rowwise"]


@pytest.mark.parametrize(
    ("shardings", "error", "says"),
    [
        ({"layer.*.up": "colwise"}, PlanError, r"sharding 'layer\.\*\.up'.*nearest"),
        ({"head": "colwize"}, OverrideError, r".*'colwize'.*mean 'colwise'"),
    ],
)
def test_a_sharding_that_can_not_hold_is_refused(shardings: Knobs, error: Any, says: str) -> None:
    with pytest.raises(error, match=f"override shardings: {says}"):
        search(shardings=shardings)


def test_a_degree_that_a_sharding_excludes_is_left_out() -> None:
    # a vocabulary of 24 divides by 2, 4 and 8, not by 16
    searched = search(16, pp=1, shardings={"head": "colwise"})
    assert {stage.tp for c in searched.candidates for stage in c.plan.stages} <= {1, 2, 4, 8}


# --- overrides without an effect -----------------------------------------------------------------

ALL = "embed, layers.0-2, head"
SPLIT = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
ALONE = "there is one data-parallel rank, so that nothing can be divided"
SUMMED = "there is one data-parallel rank, so that nothing can be summed"


def said(knobs: Knobs, **stage: Any) -> list[str]:
    graph, factors = model()
    plan = plan_for(graph, dp=stage.pop("dp", 2), tp=stage.pop("tp", 2))
    plan = with_stage(plan, **stage)
    assignments = check_plan(plan, graph, factors)
    restrictions = restrict(Overrides(**knobs), graph, allow=["quantized", "compressed"])
    return without_effect(restrictions, plan, assignments)


@pytest.mark.parametrize(
    ("knobs", "stage", "line"),
    [
        (
            {"tp": 2}, {},
            "override tp=2 splits nothing in stage 0: each of its 2 ranks computes all of it; drop "
            "the override, or give shardings",
        ),
        ({"zero": 1}, {"dp": 1}, f"override zero=1 has no effect on {ALL}: {ALONE}"),
        ({"quantized": "both"}, {"dp": 1},
         f"override quantized='both' has no effect on {ALL}: {ALONE}"),
        ({"compressed": "powersgd-4"}, {"dp": 1},
         f"override compressed='powersgd-4' has no effect on {ALL}: {SUMMED}"),
        ({"compressed": "powersgd-4"}, {"compressed": "powersgd-4"}, None),
        ({"dp_shard": 3}, {},
         f"override dp_shard=3 has no effect on {ALL}: the plan uses no ZeRO"),
        ({"dp_shard": 3}, {"zero": 1},
         f"override dp_shard=3 has no effect on {ALL}: the plan has 2"),
        ({"hpz": 2}, {"zero": 1},
         f"override hpz=2 has no effect on {ALL}: the plan uses no ZeRO-3"),
        ({"hpz": 4}, {"zero": 3, "hpz": 2, "dp": 8, "tp": 1},
         f"override hpz=4 has no effect on {ALL}: the plan has 2"),
        ({"recompute": {"layers.1": "full", "layers.2": "full"}}, {},
         "override recompute='full' has no effect on layers.1-2: the plan has 'none'"),
        ({"cp_kind": "ring"}, {},
         "override cp_kind='ring' has no effect: cp=1 on all stages"),
        ({}, {}, None),
        ({"tp": 2}, {"shardings": SPLIT}, None),
        ({"zero": 1, "dp": 2, "dp_shard": 2, "recompute": "none"}, {"zero": 1}, None),
        ({"cp_kind": "ring"}, {"cp": 2, "cp_kind": "ring", "dp": 1, "ranks": (0, 1, 2, 3)}, None),
        ({"hpz": 2}, {"zero": 3, "hpz": 2, "dp": 4, "tp": 1}, None),
        ({"hpz": 4}, {"zero": 3, "dp": 4, "tp": 1}, None),  # as many as ZeRO divides among
    ],
)  # fmt: skip
def test_values_that_the_plan_lacks_are_said(knobs: Knobs, stage: Knobs, line: str | None) -> None:
    assert said(knobs, **stage) == ([line] if line else [])


def test_overrides_are_dropped_one_by_one() -> None:
    overrides = Overrides(tp=2, recompute={"head": "full"}, forbid=["pp", "zero"])
    dropped = [(d.said, d.what, d.left.given()) for d in each_dropped(overrides)]
    recompute = {"recompute": {"head": "full"}}
    assert dropped == [
        ("tp=2", "leave tp free", {**recompute, "forbid": ["pp", "zero"]}),
        ("recompute={'head': 'full'}", "leave recompute free", {"tp": 2, "forbid": ["pp", "zero"]}),
        ("forbid='pp'", "allow pp", {"tp": 2, **recompute, "forbid": ("zero",)}),
        ("forbid='zero'", "allow zero", {"tp": 2, **recompute, "forbid": ("pp",)}),
    ]


# --- a whole plan as overrides -------------------------------------------------------------------

Said = dict[str, str]

few = settings(max_examples=40)
known: dict[Any, Any] = {}  # checked blocks of the tiny model
SHARDINGS = ({}, {"layers.*.up": "colwise"}, {"layers.**": "replicate", "head": "colwise"})


def placed(placement: str, sizes: list[int], inner: int, group: int) -> tuple[int, ...]:
    """Ranks of a device group: filled one after the other, or `inner` at a time in turns."""
    if placement == "tp,dp,pp":
        return tuple(range(sum(sizes[:group]), sum(sizes[: group + 1])))
    turns = [g for _ in range(sizes[0] // inner) for g in range(len(sizes)) for _ in range(inner)]
    return tuple(rank for rank, owner in enumerate(turns) if owner == group)


def groups_of(schedule: str, groups: int, per_device: int) -> dict[int, int]:
    """The device group of each stage."""
    placed = stages_of_devices(schedule, num_stages=groups * per_device, num_devices=groups)
    return {stage: group for group, stages in enumerate(placed) for stage in stages}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Legal plans of the tiny model, most of which the executor does not run."""
    graph, _ = model()
    names = [block.name for block in graph.blocks]
    schedule = draw(
        st.sampled_from([n for n, s in SCHEDULES.items() if s.copies == 1 and s.flushes])
    )
    per_device = SCHEDULES[schedule].stages_per_device or draw(st.integers(1, 2))
    groups = draw(st.integers(1, 5 // per_device))
    ends = sorted(draw(st.permutations(range(1, 5)))[: groups * per_device - 1])
    placement = draw(st.sampled_from(PLACEMENTS))
    tokens, kind = draw(st.sampled_from((1, 3))), draw(st.sampled_from(CONTEXT_KINDS))
    mesh = st.tuples(*[st.sampled_from((1, 2))] * 2, st.just(tokens))
    equal = draw(st.booleans()) or placement != PLACEMENTS[0]
    meshes = [draw(mesh)] * groups if equal else [draw(mesh) for _ in range(groups)]
    owner = groups_of(schedule, groups, per_device)
    plan = plan_for(
        graph, stages=groups * per_device, schedule=schedule,
        num_microbatches=draw(st.sampled_from((1, 2, 4, 8))),
    )  # fmt: skip
    for k, (start, stop) in enumerate(zip([0, *ends], [*ends, 5], strict=True)):
        tp, dp, cp = meshes[owner[k]]
        blocks, zero = tuple(names[start:stop]), draw(st.integers(0, 3))
        shards = draw(st.sampled_from([n for n in range(1, dp * cp + 1) if dp * cp % n == 0]))
        policies = [draw(st.sampled_from(RECOMPUTE)) for _ in blocks]
        shardings = draw(st.sampled_from(SHARDINGS)) if len(blocks) == 5 and tp == 2 else {}
        ranks = placed(placement, [t * d * c for t, d, c in meshes], tp * cp, owner[k])
        mesh_of = {"dp": dp, "tp": tp, "cp": cp, "cp_kind": kind if cp > 1 else ALL_GATHER}
        plan = with_stage(
            plan, k, blocks=blocks, ranks=ranks, zero=zero, dp_shard=shards if zero else None,
            recompute=recompute_of(blocks, policies), shardings=shardings, **mesh_of,
        )  # fmt: skip
    return plan


def rebuilt(limits: Restrictions) -> Plan:
    """The one plan that restrictions leave: fails where they leave a choice."""
    assert limits.cuts is not None and limits.pp is not None and limits.virtual_stages is not None
    assert limits.num_microbatches is not None and None not in limits.recompute
    (schedule,), (placement,) = limits.schedules, limits.placements
    owner = groups_of(schedule, limits.pp, limits.virtual_stages)
    meshes: dict[int, tuple[int, ...]] = {}
    stages: list[dict[str, Any]] = []
    for k, (start, stop) in enumerate(zip([0, *limits.cuts], limits.cuts, strict=False)):
        one = {}
        for name in ("tp", "dp", "cp", "ep", "zero", "dp_shard", "hpz"):
            (one[name],) = set(getattr(limits, name)[start:stop])
        among = one["dp_shard"] or one["dp"] * one["cp"]  # as many: no secondary shard
        one["hpz"] = None if one["hpz"] == among else one["hpz"]
        blocks = limits.blocks[start:stop]
        policies = [policy for policy in limits.recompute[start:stop] if policy]
        stages.append({**one, "blocks": blocks, "recompute": recompute_of(blocks, policies)})
        meshes.setdefault(owner[k], (one["tp"], one["dp"], one["cp"]))
    sizes = [meshes[g][0] * meshes[g][1] * meshes[g][2] for g in range(limits.pp)]
    plan = plan_for(
        model()[0], stages=len(stages), schedule=schedule, num_microbatches=limits.num_microbatches
    )
    for k, s in enumerate(stages):
        ranks = placed(placement, sizes, s["tp"] * s["cp"], owner[k])
        plan = with_stage(plan, k, **s, cp_kind=limits.cp_kind or ALL_GATHER, ranks=ranks)
    return plan


@few
@given(plans())
def test_a_pinned_plan_is_all_that_is_left(plan: Plan) -> None:
    graph, table = model()
    check_plan(plan, graph, table, known)
    pinned = plan_overrides(plan, graph)
    check_overrides(pinned, num_devices=plan.num_ranks, global_batch_size=16, num_blocks=5)
    limits = restrict(pinned, graph)
    stages = tuple(dataclasses.replace(stage, shardings={}) for stage in plan.stages)
    assert rebuilt(limits) == dataclasses.replace(plan, stages=stages)
    for k, stage in enumerate(plan.stages):
        assert limits.stage_mask("tp", stage.tp)[([0, *limits.cuts][k], limits.cuts[k])]  # type: ignore[misc]


def halves(graph: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = tuple(block.name for block in graph.blocks)
    return names[:3], names[3:]


def about(entries: dict[str, Entry], graph: Graph, stage: StagePlan) -> dict[str, Entry]:
    """What entries say about the blocks of a stage."""
    blocks = [block for block in graph.blocks if block.name in stage.blocks]
    names = {name for b in blocks for name in (*(op.name for op in b.ops), *b.parameters)}
    return {n: entry for n, entry in entries.items() if n in names and entry != Entry()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"layers.*.up": "colwise"}, {"layers.*.up": "colwise"}),
        ({"layers.*.up": "colwise"}, {"layers.*.up": "rowwise"}),
        ({}, {"layers.**": "replicate", "head": "colwise"}),
        ({"layers.*.up": "colwise", "layers.1.up": "follow", "embed": "vocab"}, {}),
    ],
)
def test_globs_of_a_stage_stay_with_its_blocks(first: Said, second: Said) -> None:
    graph, table = model()
    plan = plan_for(graph, stages=2)
    for k, (blocks, shardings) in enumerate(zip(halves(graph), (first, second), strict=True)):
        plan = with_stage(plan, k, blocks=blocks, shardings=shardings)
    check_plan(plan, graph, table)
    pinned = resolve_shardings(graph, graph.blocks, plan_overrides(plan, graph).shardings)
    for stage in plan.stages:
        blocks = [block for block in graph.blocks if block.name in stage.blocks]
        stated = resolve_shardings(graph, blocks, stage.shardings)
        assert about(pinned, graph, stage) == about(stated, graph, stage)


def test_the_state_of_what_leaves_a_stage_is_not_pinned() -> None:
    """Between stages of different tensor-parallel degrees it is whole: the glob of its repeats says
    otherwise, and may."""
    graph, table = model()
    plan = plan_for(graph, stages=2)
    given = {"layers.*:add": "-> S(2)"}
    for k, blocks in enumerate(halves(graph)):
        plan = with_stage(plan, k, blocks=blocks, shardings=given)
    check_plan(plan, graph, table)
    assert plan_overrides(plan, graph).shardings == given
    other = with_stage(plan, 1, dp=1, tp=4)
    check_plan(other, graph, table)
    wanted = {**given, "layers.1:add": "follow"}
    assert plan_overrides(other, graph).shardings == wanted


def test_values_that_differ_are_pinned_by_ranges_of_blocks() -> None:
    graph, _ = model()
    plan = plan_for(graph, stages=2, dp=2, tp=2, schedule="gpipe")
    plan = with_stage(plan, 0, zero=2, dp_shard=1, recompute={"full": ("layers.0", "layers.1")})
    assert plan_overrides(plan, graph).given() == {
        "tp": 2, "dp": 2, "cp": 1, "ep": 1, "pp": 2, "virtual_stages": 1,
        "zero": {"embed": 2, "layers.0-2": 2, "head": 0},
        "dp_shard": {"embed": 1, "layers.0-2": 1}, "quantized": "none", "compressed": "none",
        "segments": 1,
        "chunked_loss": 1, "slices": 1, "branches": 1,
        "recompute": {"embed": "none", "layers.2": "none", "head": "none", "layers.0-1": "full"},
        "num_microbatches": 2, "schedule": "gpipe", "placement": "tp,dp,pp",
        "stages": [["embed", "layers.0-2"], ["head"]],
    }  # fmt: skip
    overrides = plan_overrides(with_stage(plan, 1, zero=1), graph)  # divided among all data ranks
    assert overrides.dp_shard == {"embed": 1, "layers.0-2": 1, "head": 2}


@pytest.mark.parametrize(
    ("groups", "dp", "tp", "placement"),
    [
        # in turns inside a node of four devices, and on in the next
        (((0, 2), (1, 3), (4, 6), (5, 7)), 2, 1, "tp,pp,dp"),
        (((0, 2), (4, 6), (1, 3), (5, 7)), 2, 1, None),
        (((0, 2), (1, 3), (4, 6)), 2, 1, None),  # two groups to a node do not share out three
        (((4, 5, 6, 7), (0, 1, 2, 3)), 2, 2, None),
        (((2, 3, 6, 7), (0, 1, 4, 5)), 2, 2, None),
        # larger groups may come first: a part of a node would straddle two
        (((4, 5), (0, 1, 2, 3)), 2, 1, "tp,dp,pp"),
    ],
)
def test_ranks_of_a_placement(groups: Any, dp: int, tp: int, placement: str | None) -> None:
    graph, table = model()
    plan = plan_for(graph, stages=len(groups), dp=dp, tp=tp)
    for k, ranks in enumerate(groups):
        plan = with_stage(plan, k, ranks=ranks, tp=len(ranks) // dp)
    if len(groups) != 3:  # where ranks of a node are left over
        check_plan(plan, graph, table)
    if placement is not None:
        assert plan_overrides(plan, graph).placement == placement
        return
    shown = "; ".join(compress_ranks(ranks) for ranks in groups)
    says = rf"ranks {shown}, which no placement gives; legal: tp,dp,pp .*tp,pp,dp"
    with pytest.raises(PlanError, match=says):
        plan_overrides(plan, graph)


def test_most_of_what_stages_offload_is_pinned() -> None:
    graph, _ = model()
    plan = plan_for(graph, stages=2)
    assert plan_overrides(plan, graph).offload is None
    for k, part in enumerate((0.25, 0.5)):
        plan = with_stage(plan, k, offload={"optimizer": part, "weights": 0.1 * k})
    wanted = {"optimizer": 0.5, "weights": 0.1, "activations": 0.0, "nvme": 0.0}
    assert plan_overrides(plan, graph).offload == wanted


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"pp": 2, "virtual_stages": 2, "num_microbatches": 4},
        {"dp": 4, "zero": 3, "dp_shard": 2, "recompute": "full"},
        {"dp": 4, "zero": 3, "hpz": 2},
        pytest.param(
            {"pp": 2, "tp": {"embed": 1, "head": 2}, "recompute": {"layers.*": "selective"}},
            marks=second_tier("stages whose ZeRO differs stay"),
        ),
        {"pp": 2, "tp": 1, "zero": {"embed": 0, "head": 1}, "schedule": "gpipe"},
    ],
    ids=str,
)
def test_searching_under_a_pinned_plan_gives_it_back(wanted: Knobs) -> None:
    plan = search(**wanted).best.plan
    pinned: Knobs = plan_overrides(plan, model()[0]).given()
    assert search(**pinned).best.plan == plan


@pytest.mark.parametrize(
    "pinned",
    [
        {"layers.*:add": "-> S(1)"},
        pytest.param({"layers.1:add": "-> S(1)"}, marks=second_tier("those of all layers stay")),
    ],
    ids=["all", "one"],
)
def test_what_leaves_blocks_in_parts_may_be_pinned_where_meshes_may_differ(
    pinned: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between different meshes it is whole, so that such stages are not legal."""
    monkeypatch.setattr(tiny, "SEQUENCE", 8)
    monkeypatch.setattr(tiny, "VOCAB", 24)
    overrides = Overrides(pp=2, shardings=pinned)
    made = tiny.planned(tiny.net(), cluster=slow_host(8), precision="fp32", overrides=overrides)
    assert len(made.plan.devices) == 2
