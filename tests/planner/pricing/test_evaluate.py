"""A plan's price from its stages' components: what crosses devices, what adds up on one device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.operators.problem import Problem
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.flow import crossings, spread_of
from meshwright.planner.plan.plan import Plan, StagePlan, recompute_of
from meshwright.planner.pricing.evaluate import Evaluation, evaluate, price_stages, transfer_seconds
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import cluster
from tests.helpers.tiny import cut, net, plan_for

NODE = cluster(4, bandwidth=1e6)


@cache
def model() -> tuple[Graph, FactorTable]:
    return cut(net())


def problem(on: Cluster, precision: str = "fp32", target: Target = EAGER) -> Problem:
    graph, factors = model()
    return Problem(graph=graph, factors=factors, cluster=on, precision=precision, target=target)


def virtual(schedule: str, owners: tuple[int, ...]) -> Plan:
    """Four stages on two groups of two ranks; `owners` are the groups of the stages."""
    graph, _ = model()
    names = [block.name for block in graph.blocks]
    base, groups = plan_for(graph, dp=2, tp=1), ((0, 1), (2, 3))
    return cut_up(base, names, [groups[owner] for owner in owners], schedule=schedule)


def cut_up(
    plan: Plan, names: Sequence[str], ranks: Sequence[tuple[int, ...]], **whole: Any
) -> Plan:
    """Stages like the plan's first one: the first two blocks, one each, the rest."""
    count = len(ranks)
    bounds = [0, *range(2, count + 1), len(names)] if count == 4 else [0, 3, len(names)]
    stages = tuple(
        dataclasses.replace(plan.stages[0], blocks=tuple(names[i:j]), ranks=own)
        for (i, j), own in zip(itertools.pairwise(bounds), ranks, strict=True)
    )
    return dataclasses.replace(plan, stages=stages, **whole)


def priced(plan: Plan, on: Cluster = NODE, *, overlap_sends: bool = True) -> Evaluation:
    graph, table = model()
    target = dataclasses.replace(EAGER, overlap_sends=overlap_sends)
    assignments = check_plan(plan, graph, table)
    return evaluate(plan, problem(on, target=target), assignments)


def test_stages_of_one_device_send_nothing() -> None:
    """The V turns on the last device: between its two stages there is no link."""
    graph = model()[0]
    plan = virtual("zb_v", (0, 1, 1, 0))
    coster = StageCoster(problem(NODE, plan.precision))
    seconds = {
        edge: transfer_seconds(plan, coster, edge, values)
        for edge, values in crossings(plan, graph).items()
    }
    assert seconds.pop((1, 2)) == 0
    assert seconds.keys() >= {(0, 1), (2, 3)} and all(seconds.values())


def test_a_stage_that_waits_for_its_sends_is_slower() -> None:
    plan = virtual("zb_v", (0, 1, 1, 0))
    beside, waiting = (priced(plan, overlap_sends=each) for each in (True, False))
    assert waiting.prediction.step_time_s > beside.prediction.step_time_s


def test_pairs_overlap_only_where_software_and_experts_make_them() -> None:
    """Half of each pass is communication: `train_step` hides none of it, torch's schedules what
    goes with an exchange of tokens."""
    graph, table = model()
    plan = dataclasses.replace(virtual("dualpipe_v", (0, 1, 1, 0)), num_microbatches=4)
    assignments = check_plan(plan, graph, table)
    costs = [
        dataclasses.replace(
            own, forward_comm_s=own.forward_s / 2, backward_comm_s=own.backward_s / 2
        )
        for own in evaluate(plan, problem(NODE), assignments).stages
    ]

    def busy_s(overlap_passes: bool, ep: int) -> float:
        target = dataclasses.replace(EAGER, overlap_passes=overlap_passes)
        shared = tuple(dataclasses.replace(stage, ep=ep) for stage in plan.stages)
        coster = StageCoster(problem(NODE, plan.precision, target))
        made = price_stages(dataclasses.replace(plan, stages=shared), coster, costs)
        return sum(made.timeline.busy_s)

    apart = plan.num_microbatches * sum(own.forward_s + own.backward_s for own in costs)
    assert busy_s(False, 1) == busy_s(False, 2) == busy_s(True, 1) == pytest.approx(apart)
    assert busy_s(True, 2) < apart * 0.95


def test_virtual_stages_of_one_device_cost_what_one_stage_does() -> None:
    """One micro-batch: all forwards, then all backwards; cut or whole, the device does the same."""
    graph, _ = model()
    whole = dataclasses.replace(plan_for(graph, dp=1, tp=1), num_microbatches=1)
    pieces = cut_up(whole, whole.stages[0].blocks, [(0,)] * 4, schedule="interleaved_1f1b")
    on = cluster(1)
    one, four = (priced(plan, on).prediction for plan in (whole, pieces))
    assert four.peak_memory_bytes == pytest.approx(one.peak_memory_bytes, abs=1)
    assert four.step_time_s == pytest.approx(one.step_time_s)


# --- decisions of a stage ------------------------------------------------------------------------


def only(plan: Plan, on: Cluster = NODE, **changes: Any) -> Evaluation:
    (stage,) = plan.stages
    return priced(dataclasses.replace(plan, stages=(dataclasses.replace(stage, **changes),)), on)


def test_each_block_runs_again_by_its_own_policy() -> None:
    """Seconds and bytes of recompute add up over blocks, whichever others do it as well."""
    graph, _ = model()
    plan = plan_for(graph, dp=1, tp=1)
    names = plan.stages[0].blocks

    def backward_and_kept(*full: str) -> np.ndarray:
        policies = ["full" if name in full else "none" for name in names]
        (stage,) = only(plan, cluster(1), recompute=recompute_of(names, policies)).stages
        return np.array([stage.backward_s, stage.activation_bytes])

    keep = backward_and_kept()
    alone = [backward_and_kept(name) - keep for name in names]
    assert backward_and_kept(*names) - keep == pytest.approx(sum(alone))
    assert backward_and_kept(names[1], names[3]) - keep == pytest.approx(alone[1] + alone[3])
    assert alone[1][0] > 0 > alone[1][1]
    (whole,) = only(plan, cluster(1), recompute="full").stages
    assert backward_and_kept(*names) == pytest.approx([whole.backward_s, whole.activation_bytes])


def test_shards_within_a_node_take_more_memory_and_less_network() -> None:
    graph, _ = model()
    plan = plan_for(graph, dp=4, tp=1)
    on = cluster(2, nodes=2, bandwidth=1e9, node_bandwidth=1e4)
    inside, whole = (only(plan, on, zero=1, dp_shard=shards) for shards in (2, 4))
    assert inside.stages[0].static_bytes > whole.stages[0].static_bytes
    assert inside.stages[0].reduce_s < whole.stages[0].reduce_s
    assert only(plan, on, zero=1).stages == whole.stages


def test_secondary_shards_take_memory_and_spare_the_backward_the_network() -> None:
    graph, _ = model()
    plan = plan_for(graph, dp=4, tp=1)
    on = cluster(2, nodes=2, bandwidth=1e9, node_bandwidth=1e4)
    kept, whole = (only(plan, on, zero=3, hpz=hpz) for hpz in (2, None))
    assert kept.stages[0].backward_s < whole.stages[0].backward_s
    assert kept.stages[0].forward_s == whole.stages[0].forward_s
    more = kept.stages[0].static_bytes - whole.stages[0].static_bytes
    assert more == pytest.approx(4 * whole.stages[0].parameters / 2)


@pytest.mark.parametrize(
    ("ranks", "dp", "cp", "tp", "spread"),
    [
        (range(8), 4, 1, 2, 1),
        (range(3, 4), 1, 1, 1, 1),
        (range(4, 8), 1, 1, 4, 1),
        (range(1, 16, 4), 4, 1, 1, 4),
        ((0, 1, 8, 9, 16, 17, 24, 25), 4, 1, 2, 4),
        ((0, 1, 8, 9, 16, 17, 24, 25), 2, 2, 2, 4),
        ((0, 1, 4, 5, 16, 17, 20, 21), 4, 1, 2, 1),  # no one distance
        ((0, 2, 4, 6), 2, 1, 2, 1),  # a tensor axis of its own kind
        ((3, 2, 1, 0), 4, 1, 1, 1),
    ],
)
def test_how_far_apart_the_data_axis_lies(
    ranks: Sequence[int], dp: int, cp: int, tp: int, spread: int
) -> None:
    stage = StagePlan(blocks=("x",), ranks=tuple(ranks), dp=dp, cp=cp, tp=tp)
    assert spread_of(stage) == spread


def test_a_pipeline_inside_the_nodes_sends_there_and_reduces_between() -> None:
    graph, _ = model()
    names = [block.name for block in graph.blocks]
    base = plan_for(graph, dp=2, tp=1)
    on = cluster(2, nodes=2, bandwidth=1e9, node_bandwidth=1e5)

    def laid(first: tuple[int, ...], second: tuple[int, ...]) -> Evaluation:
        return priced(cut_up(base, names, [first, second]), on)

    between, inside = laid((0, 1), (2, 3)), laid((0, 2), (1, 3))
    assert inside.stages[0].reduce_s > 100 * between.stages[0].reduce_s

    def sends(of: Evaluation) -> float:
        graph = model()[0]
        coster = StageCoster(problem(on, of.plan.precision))
        found = crossings(of.plan, graph).items()
        return sum(transfer_seconds(of.plan, coster, edge, values) for edge, values in found)

    assert sends(between) > 100 * sends(inside)
