"""A plan's price from its stages' components: what crosses devices, what adds up on one device."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from planning import cluster
from tiny import cut, net, plan_for

from costmodel.factors import FactorTable
from costmodel.graph import Graph
from costmodel.target import EAGER
from planner.check import check_plan
from planner.evaluate import Evaluation, crossings, evaluate, transfer_seconds
from planner.plan import Plan
from planner.stage_costs import StageCoster
from profiles.cluster import Cluster

NODE = cluster(4, bandwidth=1e6)


@cache
def model() -> tuple[Graph, FactorTable]:
    return cut(net())


def virtual(schedule: str, owners: tuple[int, ...]) -> Plan:
    """Four stages on two groups of two ranks; `owners` are the groups of the stages."""
    graph, _ = model()
    names = [block.name for block in graph.blocks]
    groups = ((0, 1), (2, 3))
    base = plan_for(graph, dp=2, tp=1)
    parts = (names[:2], names[2:3], names[3:4], names[4:])
    stages = tuple(
        dataclasses.replace(base.stages[0], blocks=tuple(blocks), ranks=groups[owner])
        for blocks, owner in zip(parts, owners, strict=True)
    )
    return dataclasses.replace(base, schedule=schedule, stages=stages)


def priced(plan: Plan, on: Cluster = NODE, *, overlap_sends: bool = True) -> Evaluation:
    graph, table = model()
    target = dataclasses.replace(EAGER, overlap_sends=overlap_sends)
    assignments = check_plan(plan, graph, table)
    return evaluate(plan, graph, table, on, assignments, optimizer="adamw", target=target)


def test_stages_of_one_device_send_nothing() -> None:
    """The V turns on the last device: between its two stages there is no link."""
    graph, table = model()
    plan = virtual("zb_v", (0, 1, 1, 0))
    coster = StageCoster(graph, table, NODE, plan.precision, "adamw")
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


def test_virtual_stages_of_one_device_cost_what_one_stage_does() -> None:
    """One micro-batch: all forwards, then all backwards; cut or whole, the device does the same."""
    graph, _ = model()
    whole = dataclasses.replace(plan_for(graph, dp=1, tp=1), num_microbatches=1)
    (stage,) = whole.stages
    parts = (stage.blocks[:2], stage.blocks[2:3], stage.blocks[3:4], stage.blocks[4:])
    cut_up = dataclasses.replace(
        whole,
        schedule="interleaved_1f1b",
        stages=tuple(dataclasses.replace(stage, blocks=blocks) for blocks in parts),
    )
    on = cluster(1)
    one, four = (priced(plan, on).prediction for plan in (whole, cut_up))
    assert four.peak_memory_bytes == pytest.approx(one.peak_memory_bytes, abs=1)
    assert four.step_time_s == pytest.approx(one.step_time_s)
