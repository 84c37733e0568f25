"""What a plan puts into host memory: whole blocks, from the last one on, and how a file says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.offload import (
    away_blocks,
    first_offloaded,
    in_files,
    offloaded_parameters,
    offloaded_weights,
    parts,
    trained_sizes,
)
from meshwright.planner.plan.plan import Plan, StagePlan
from meshwright.planner.plan.words import describe
from tests.helpers.tiny import cut, net, plan_for, with_stage

SIZES = st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=12).filter(any)


@given(SIZES, st.floats(0, 1))
def test_the_last_blocks_make_the_part_or_more_and_none_is_needless(
    sizes: list[float], part: float
) -> None:
    first = first_offloaded(sizes, part)
    total = sum(sizes)
    assert sum(sizes[first:]) >= part * total * (1 - 1e-8)
    assert first == len(sizes) or sum(sizes[first + 1 :]) < part * total


@given(SIZES)
def test_each_part_that_there_is_names_its_blocks(sizes: list[float]) -> None:
    found = parts(sizes)
    assert found[0] == 0
    assert found[-1] == pytest.approx(1)
    assert found == sorted(set(found))
    for part in found:
        assert sum(sizes[first_offloaded(sizes, part) :]) == pytest.approx(part * sum(sizes))


def test_parameters_that_an_earlier_block_reads_stay_with_it() -> None:
    graph, _ = cut(net(tied=True))
    stage = plan_for(graph).stages[0]
    sizes = trained_sizes(stage, graph)
    assert sizes[-1] == 0  # the head's weight is the embedding's
    assert sum(sizes) == graph.num_parameters()
    assert offloaded_parameters(stage, graph) == frozenset()
    everything = offloaded_parameters(replace(stage, offload={"optimizer": 1.0}), graph)
    assert everything == frozenset(graph.parameters)
    # weights that two blocks read stay on the devices
    weights = offloaded_weights(replace(stage, offload={"weights": 1.0}), graph)
    assert {graph.parameters[v] for v in everything - weights} == {"embed.weight"}
    some = offloaded_parameters(replace(stage, offload={"optimizer": 0.1}), graph)
    names = {graph.parameters[v] for v in some}
    assert names
    assert all(name.startswith("layers.2.") for name in names)


def test_a_file_says_what_is_offloaded_and_nothing_where_nothing_is() -> None:
    graph, table = cut(net())
    plain = plan_for(graph, dp=2, tp=1)
    assert '"offload"' not in plain.to_json()
    plan = with_stage(plain, offload={"optimizer": 0.25})
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert check_plan(again, graph, table)
    assert json.loads(plan.to_json())["stages"][0]["offload"] == {"optimizer": 0.25}


def test_states_in_files_are_those_of_the_last_blocks_and_a_file_says_so() -> None:
    graph, table = cut(net())
    plan = with_stage(plan_for(graph, dp=2, tp=1), offload={"optimizer": 1.0, "nvme": 0.1})
    assert check_plan(Plan.from_json(plan.to_json()), graph, table)
    assert Plan.from_json(plan.to_json()) == plan
    some = {graph.parameters[v] for v in in_files(plan.stages[0], graph)}
    beside = offloaded_parameters(replace(plan.stages[0], offload={"optimizer": 0.1}), graph)
    assert some == {graph.parameters[v] for v in beside}
    assert 0 < len(some) < len(graph.parameters)
    assert "all optimizer states in host memory, 10% of the states in files" in describe(plan)


@given(st.integers(1, 40), st.integers(0, 40))
def test_a_part_of_the_blocks_sends_from_the_first_one_on(blocks: int, count: int) -> None:
    names = tuple(f"layers.{k}" for k in range(blocks))
    stage = StagePlan(
        blocks=names, ranks=(0,), dp=1, tp=1, offload={"activations": min(1.0, count / blocks)}
    )
    assert away_blocks(stage) == min(count, blocks)


def test_activations_there_are_no_matter_of_how_weights_are_gathered() -> None:
    graph, table = cut(net())
    offload = {"activations": 1.0}
    plan = with_stage(plan_for(graph, dp=2, tp=1), zero=3, quantized="both", offload=offload)
    assert check_plan(plan, graph, table)
    assert offloaded_parameters(plan.stages[0], graph) == frozenset()
    assert "activations of all blocks in host memory" in describe(plan)
    half = with_stage(plan, offload={"activations": 0.5, "optimizer": 0.25})
    said = "25% of the optimizer states and activations of 50% of the blocks in host memory"
    assert said in describe(half)
