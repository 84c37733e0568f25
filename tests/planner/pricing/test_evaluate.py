"""A plan's price from its stages' components: what crosses devices, what adds up on one device."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.costmodel.mesh import CONTEXT_KINDS, Batch, Mesh
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding.strategies import replicated
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.flow import crossings
from meshwright.planner.plan.plan import Plan, StagePlan, recompute_of
from meshwright.planner.pricing.evaluate import Evaluation, evaluate, price_stages, transfer
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.profiles.cluster import Cluster
from tests.costmodel.operators import test_pricing as operators
from tests.helpers.planning import cluster, problem_of
from tests.helpers.tiny import plan_for
from tests.planner.plan.test_check import model

NODE = cluster(4, bandwidth=1e6)
NODES = cluster(2, nodes=2, bandwidth=1e9, node_bandwidth=1e4)


def problem(on: Cluster, precision: str = "fp32", target: Target = EAGER) -> Problem:
    graph, factors = model()
    return Problem(graph=graph, factors=factors, cluster=on, precision=precision, target=target)


def virtual(schedule: str, owners: tuple[int, ...]) -> Plan:
    """Four stages on two groups of two ranks; `owners` are the groups of the stages."""
    base = plan_for(model()[0], dp=2, tp=1)
    ranks = [((0, 1), (2, 3))[owner] for owner in owners]
    return cut_up(base, ranks, schedule=schedule)


def cut_up(plan: Plan, ranks: Sequence[tuple[int, ...]], **whole: Any) -> Plan:
    """Stages like the plan's first one: the first two blocks, one each, the rest."""
    names, count = plan.stages[0].blocks, len(ranks)
    bounds = [0, *range(2, count + 1), len(names)] if count == 4 else [0, 3, len(names)]
    stages = tuple(
        replace(plan.stages[0], blocks=names[i:j], ranks=own)
        for (i, j), own in zip(itertools.pairwise(bounds), ranks, strict=True)
    )
    return replace(plan, stages=stages, **whole)


def priced(plan: Plan, on: Cluster = NODE) -> Evaluation:
    return evaluate(plan, problem(on), check_plan(plan, *model()))


def test_stages_of_one_device_send_nothing() -> None:
    """The V turns on the last device: between its two stages there is no link."""
    seconds = sends(virtual("zb_v", (0, 1, 1, 0)), NODE)
    assert seconds.pop((1, 2)) == 0
    assert seconds.keys() >= {(0, 1), (2, 3)} and all(seconds.values())


def sends(plan: Plan, on: Cluster) -> dict[tuple[int, int], float]:
    coster = StageCoster(problem(on, plan.precision))
    return {
        edge: transfer(plan, coster, edge, values).seconds
        for edge, values in crossings(plan, model()[0]).items()
    }


def test_pairs_overlap_only_where_software_and_experts_make_them() -> None:
    """Half of each pass is communication: `train_step` hides none of it, torch's schedules what
    goes with an exchange of tokens."""
    graph, table = model()
    plan = replace(virtual("dualpipe_v", (0, 1, 1, 0)), num_microbatches=4)
    assignments = check_plan(plan, graph, table)
    costs = [
        replace(own, forward_comm_s=own.forward_s / 2, backward_comm_s=own.backward_s / 2)
        for own in evaluate(plan, problem(NODE), assignments).stages
    ]

    def busy_s(overlap_passes: bool, ep: int) -> float:
        target = replace(EAGER, overlap_passes=overlap_passes)
        shared = tuple(replace(stage, ep=ep) for stage in plan.stages)
        coster = StageCoster(problem(NODE, plan.precision, target))
        made = price_stages(replace(plan, stages=shared), coster, costs)
        return sum(made.timeline.busy_s)

    apart = plan.num_microbatches * sum(own.forward_s + own.backward_s for own in costs)
    assert busy_s(False, 1) == busy_s(False, 2) == busy_s(True, 1) == pytest.approx(apart)
    assert busy_s(True, 2) < apart * 0.95


def test_virtual_stages_of_one_device_cost_what_one_stage_does() -> None:
    """One micro-batch: all forwards, then all backwards; cut or whole, the device does the same."""
    whole = plan_for(model()[0], dp=1, tp=1, num_microbatches=1)
    pieces = cut_up(whole, [(0,)] * 4, schedule="interleaved_1f1b")
    on = cluster(1)
    one, four = (priced(plan, on).prediction for plan in (whole, pieces))
    assert four.peak_memory_bytes == pytest.approx(one.peak_memory_bytes, abs=1)
    assert four.step_time_s == pytest.approx(one.step_time_s)


def only(plan: Plan, on: Cluster = NODE, **changes: Any) -> Evaluation:
    (stage,) = plan.stages
    return priced(replace(plan, stages=(replace(stage, **changes),)), on)


def test_each_block_runs_again_by_its_own_policy() -> None:
    """Seconds and bytes of recompute add up over blocks, whichever others do it as well."""
    plan = plan_for(model()[0], dp=1, tp=1)
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
    plan = plan_for(model()[0], dp=4, tp=1)
    inside, whole = (only(plan, NODES, zero=1, dp_shard=shards) for shards in (2, 4))
    assert inside.stages[0].static_bytes > whole.stages[0].static_bytes
    assert inside.stages[0].reduce_s < whole.stages[0].reduce_s
    assert only(plan, NODES, zero=1).stages == whole.stages


@pytest.mark.parametrize(
    ("ranks", "dp", "cp", "tp", "spread"),
    [
        (range(8), 4, 1, 2, 1),
        (range(1, 16, 4), 4, 1, 1, 4),
        ((0, 1, 8, 9, 16, 17, 24, 25), 4, 1, 2, 4),
        ((0, 1, 8, 9, 16, 17, 24, 25), 2, 2, 2, 4),
        ((0, 1, 4, 5, 16, 17, 20, 21), 4, 1, 2, 1),  # no one distance
        ((0, 2, 4, 6), 2, 1, 2, 1),  # a tensor axis of its own kind
    ],
)
def test_spread_of_the_data_axis(ranks: Any, dp: int, cp: int, tp: int, spread: int) -> None:
    stage = StagePlan(blocks=("x",), ranks=tuple(ranks), dp=dp, cp=cp, tp=tp)
    assert stage.spread == spread


def test_a_pipeline_inside_the_nodes_sends_there_and_reduces_between() -> None:
    on = cluster(2, nodes=2, bandwidth=1e9, node_bandwidth=1e5)
    base = plan_for(model()[0], dp=2, tp=1)
    between, inside = (cut_up(base, groups) for groups in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    reduced = [priced(plan, on).stages[0].reduce_s for plan in (between, inside)]
    assert reduced[1] > 100 * reduced[0]
    assert sum(sends(between, on).values()) > 100 * sum(sends(inside, on).values())


def test_the_cheapest_kind_of_context_parallelism_is_taken() -> None:
    """Free sends: a ring's are hidden; a network alone: all-to-all moves least of many heads."""
    of, on = operators.net(), operators.talking()
    (attention,) = (o for o in of.graph.ops if o.short == "scaled_dot_product_attention")
    costs = {
        kind: operators.pricer(of, on, cp=2, cp_kind=kind).op_cost(attention, replicated(attention))
        for kind in CONTEXT_KINDS
    }
    seconds = {kind: cost.forward_s + cost.backward_s for kind, cost in costs.items()}
    coster = StageCoster(problem_of(of, on, "fp32"))
    found = coster.setting(Mesh(dp=1, tp=1, cp=2), Batch(rows=operators.ROWS)).mesh.kind
    assert seconds[found] == min(seconds.values())


DECIDING = ("pulp", *(f"meshwright.planner.{room}" for room in ("intra_op", "search", "tracing")))
WRITTEN = """
import sys
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.planner.pricing.stage_costs import StageCoster
print(*sys.modules)
"""


def test_prices_are_made_without_what_decides() -> None:
    command = [sys.executable, "-c", WRITTEN]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "meshwright.planner.pricing.evaluate" in loaded
    assert not [name for name in loaded if name.startswith(DECIDING)]
