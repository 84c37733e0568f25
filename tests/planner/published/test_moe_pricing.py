"""Mixtures of experts: rules, what expert parallelism divides and exchanges, plans, rows.

Oracles: loops over tokens, dense models of the same work, closed forms on ideal links,
enumeration.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.kernels.collectives import group_for
from meshwright.costmodel.kernels.moe_costs import exchange_seconds
from meshwright.costmodel.operators.cost import Setting
from meshwright.costmodel.operators.flops import model_flops
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.operators.problem import Problem
from meshwright.costmodel.rules.moe import COMBINE, DISPATCH, GROUPED
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.strategies import RP, Placement, R, Strategy, strategies
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.drafts.mesh import Mesh
from meshwright.planner.operators.moe import combine, dispatch, grouped_linear
from meshwright.planner.plan.check import check_plan, check_runs, fingerprint
from meshwright.planner.plan.plan import Plan, PlanError, StagePlan
from meshwright.planner.pricing.evaluate import evaluate
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.planner.published.predict import traced
from meshwright.planner.stages.programs import BlockPrograms
from meshwright.profiles.cluster import Cluster, Link
from meshwright.profiles.hardware.curve import Curve
from tests.planner.published.test_moe_models import DENSE, SPARSE


def ideal(nodes: int, per_node: int) -> Cluster:
    """Links without latency or size effects: 100 GB/s inside a node, 10 between for each device."""
    base = Cluster.from_catalog("dgx-h100", num_nodes=nodes, devices_per_node=per_node)
    device = dataclasses.replace(base.device, launch_overhead_s=0.0)

    def link(bandwidth: float) -> Link:
        return Link(
            name="ideal", latency_s=0.0, bandwidth=bandwidth, efficiency=Curve.constant(1.0)
        )

    return dataclasses.replace(
        base, device=device, intra_link=link(1e11), inter_link=link(1e10 * per_node)
    )


def pricer(
    graph: Graph,
    table: FactorTable,
    cluster: Cluster,
    *,
    dp: int,
    tp: int,
    ep: int,
    rows: float = 1,
) -> Pricer:
    setting = Setting(
        cluster=cluster,
        dp=dp,
        tp=tp,
        ep=ep,
        rows=rows,
        num_microbatches=1,
        precision="bf16",
        optimizer="adamw",
        target=Target(name="plain", bucket_copies=0),
    )
    return Pricer(graph=graph, table=table, setting=setting)


def ops_of(graph: Graph, short: str) -> list[Op]:
    return [op for op in graph.ops if op.short == short]


def split_tokens(graph: Graph, table: FactorTable, op: Op, tp: int) -> Strategy:
    return next(s for s in strategies(graph, table, op, tp) if s.name == "s")


# --- the operators and their rules ---------------------------------------------------------------


def test_every_copy_meets_its_own_expert() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 4, generator=generator), torch.randn(6, 4, 3, generator=generator)
    chosen = torch.randint(0, 6, (2, 5, 2), generator=generator)
    found = combine(grouped_linear(dispatch(x, chosen), weight, chosen))
    for b, s in itertools.product(range(2), range(5)):
        wanted = sum(x[b, s] @ weight[e] for e in chosen[b, s])
        torch.testing.assert_close(found[b, s], wanted)


def test_a_mixture_costs_the_work_of_a_dense_model_as_wide_as_a_tokens_experts() -> None:
    """And the router's: 2·b·s·h·e, thrice with the backward."""
    rows, tokens = 8, 8 * DENSE.seq_len
    dense = dataclasses.replace(DENSE, ffn=SPARSE.topk * SPARSE.expert_ffn)
    router = DENSE.layers * 3 * 2 * tokens * DENSE.hidden * SPARSE.experts
    found = model_flops(*traced(SPARSE, "bf16")).of(rows)
    assert found == model_flops(*traced(dense, "bf16")).of(rows) + router


def test_the_tensor_axis_splits_tokens_and_widths_but_never_experts() -> None:
    graph, table = traced(SPARSE, "bf16")
    op = ops_of(graph, GROUPED)[0]
    found = {s.name: s for s in strategies(graph, table, op, 2)}
    assert set(found) >= {"replicate", "s", "colwise", "rowwise"} and "e" not in found
    rows, weight = found["s"].operands[:2]
    assert (rows, weight) == (Placement("S", 1), RP)
    assert found["colwise"].operands[1] == Placement("S", 2)


# --- what a rank holds, computes and exchanges ----------------------------------------------------


@given(st.sampled_from([1, 2, 4, 8, 16]))
def test_experts_are_divided_and_everything_else_is_not(ep: int) -> None:
    graph, table = traced(SPARSE, "bf16")
    priced = pricer(graph, table, ideal(2, 8), dp=16, tp=1, ep=ep)
    for value, fqn in graph.parameters.items():
        whole = graph.values[value].numel
        sparse = ".experts." in fqn
        assert priced.numel(value) == (whole / ep if sparse else whole)
        cost = priced.parameter_cost(value, R)
        assert cost.shard_s == pytest.approx(cost.optimizer_s * (ep / 16 if sparse else 1 / 16))


def test_gradients_of_experts_are_reduced_over_the_ranks_that_hold_them() -> None:
    """dp=4, tp=2, ep=4: two ranks hold an expert, four ranks the rest of a tensor-parallel rank."""
    graph, table = traced(SPARSE, "bf16")
    cluster = ideal(8, 1)
    priced = pricer(graph, table, cluster, dp=4, tp=2, ep=4)
    weight = ops_of(graph, GROUPED)[0].operands[1]
    holders = priced.parameters.replicas
    assert holders(weight, R) == group_for(cluster, size=2, stride=4)
    assert holders(weight, Placement("S", 2)) == group_for(cluster, size=1, stride=8)
    router = next(v for v, fqn in graph.parameters.items() if fqn.endswith("router.weight"))
    assert holders(router, R) == group_for(cluster, size=4, stride=2)
    # an all-reduce among two sends each rank's bytes once: 4 a parameter
    sent = 4 * graph.values[weight].numel / 4
    assert priced.parameter_cost(weight, R).reduce_s == pytest.approx(sent / 1e10)
    # the tensor axis is among those ranks: no reduction of its own
    assert priced.reshard_parameter(weight, R, RP).reduce_s == 0
    assert priced.reshard_parameter(router, R, RP).reduce_s > 0


@pytest.mark.parametrize(("tp", "ep"), [(1, 8), (2, 8), (2, 2), (8, 8)])
def test_each_rank_exchanges_its_tokens_copies(tp: int, ep: int) -> None:
    """b·s·k·h elements, b·s of them a rank's own; (ep-1)/ep leave it, out and back in both
    passes."""
    graph, table = traced(SPARSE, "bf16")
    priced = pricer(graph, table, ideal(1, 8), dp=8 // tp, tp=tp, ep=ep, rows=4)
    copies = 4 * SPARSE.seq_len / tp * SPARSE.topk * SPARSE.hidden
    wanted = 2 * copies * (ep - 1) / ep / 1e11
    for op in (*ops_of(graph, DISPATCH), *ops_of(graph, COMBINE)):
        strategy = (
            strategies(graph, table, op, tp)[0] if tp == 1 else split_tokens(graph, table, op, tp)
        )
        cost = priced.op_cost(op, strategy)
        assert cost.forward_exchange_s == pytest.approx(wanted)
        assert cost.backward_exchange_s == pytest.approx(wanted)


@given(st.integers(2, 5), st.integers(1, 4))
def test_a_token_crosses_once_to_each_node_that_wants_it(nodes: int, copies: int) -> None:
    """Against all ways to choose a node for each copy, the inside of nodes being free."""
    cluster = dataclasses.replace(
        ideal(nodes, 1), inter_link=dataclasses.replace(ideal(nodes, 1).inter_link, bandwidth=1.0)
    )
    two = dataclasses.replace(ideal(nodes, 2), inter_link=cluster.inter_link)
    ways = [len(set(way) - {0}) for way in itertools.product(range(nodes), repeat=copies)]
    crossing = sum(ways) / len(ways)
    nbytes = 1000.0
    group = group_for(two, size=2 * nodes, stride=1)
    found = exchange_seconds(nbytes, copies, group, two, once_per_node=True)
    assert found == pytest.approx(2 * crossing * nbytes / copies, rel=1e-6)
    every = exchange_seconds(nbytes, copies, group, two, once_per_node=False)
    assert found <= every * (1 + 1e-9)


def test_products_grow_with_the_tokens_of_all_expert_ranks() -> None:
    """A rank's product does the FLOPs of its tokens for any ep, in fewer and taller matrices."""
    graph, table = traced(SPARSE, "bf16")
    op = ops_of(graph, GROUPED)[0]
    costs = [
        pricer(graph, table, ideal(1, 8), dp=8, tp=1, ep=ep, rows=64)
        .op_cost(op, strategies(graph, table, op, 1)[0])
        .forward_s
        for ep in (1, 2, 8)
    ]
    assert costs == sorted(costs, reverse=True) and costs[-1] > 0


# --- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_programs_are_shared_by_all_degrees_and_solved_for_each(tp: int) -> None:
    """Stages with ep=8, found after those with ep=2, cost what they do where nothing was before."""

    def costs(programs: BlockPrograms, ep: int) -> np.ndarray:
        setting = programs.coster.setting(Mesh(dp=8, tp=tp, ep=ep), rows=2.0, microbatches=4)
        return programs.chain(setting).seconds

    problem = problem_on(ideal(2, 8))
    used, fresh = (BlockPrograms(StageCoster(problem)) for _ in range(2))
    before = costs(used, 2)
    after = costs(used, 8)
    np.testing.assert_allclose(after, costs(fresh, 8), rtol=1e-12)
    assert not np.allclose(after, before)


def problem_on(cluster: Cluster, target: Target = EAGER) -> Problem:
    graph, table = traced(SPARSE, "bf16")
    return Problem(graph=graph, factors=table, cluster=cluster, precision="bf16", target=target)


def plan_of(graph: Graph, **stage: int) -> Plan:
    sizes = {"dp": 4, "tp": 1, "ep": 1} | stage
    return Plan(
        model=fingerprint(graph),
        global_batch_size=16,
        num_microbatches=2,
        schedule="1f1b",
        precision="bf16",
        stages=(
            StagePlan(
                blocks=tuple(block.name for block in graph.blocks),
                ranks=tuple(range(sizes["dp"] * sizes["tp"])),
                **sizes,
            ),
        ),
    )


def test_the_expert_axis_is_written_and_read() -> None:
    graph, _ = traced(SPARSE, "bf16")
    plan = plan_of(graph, ep=4)
    assert '"mesh": {"dp": 4, "tp": 1, "ep": 4}' in plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan
    assert '"ep"' not in plan_of(graph).to_json()


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"ep": 0}, "stage 0: ep=0; legal: an integer from 1"),
        ({"ep": 3}, "stage 0: ep=3 does not divide the 4 ranks"),
        ({"dp": 3, "ep": 3}, "ep=3 does not divide the 16 experts of layers.0.mlp.experts.gate"),
        ({"dp": 2, "tp": 2, "ep": 4}, r"ep=4 does not divide the 2 ranks .* split the sequence"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(stage: dict[str, int], message: str) -> None:
    graph, table = traced(SPARSE, "bf16")
    plan = dataclasses.replace(plan_of(graph, **stage), global_batch_size=48)
    with pytest.raises(PlanError, match=message):
        check_plan(plan, graph, table)


def test_sharing_experts_out_saves_their_memory_and_can_be_run() -> None:
    graph, table = traced(SPARSE, "bf16")
    cluster = Cluster.from_catalog("dgx-h100", devices_per_node=4)
    # what the exchange's communicators take is more than there is to save of so small a model
    device = dataclasses.replace(cluster.device, communicator_bytes=0)
    cluster = dataclasses.replace(cluster, device=device)
    plans = [plan_of(graph, ep=ep) for ep in (1, 4)]
    alone, shared = (
        evaluate(plan, problem_on(cluster), check_plan(plan, graph, table)) for plan in plans
    )
    saved = alone.stages[0].parameters - shared.stages[0].parameters
    experts = 3 * SPARSE.layers * SPARSE.experts * SPARSE.hidden * SPARSE.expert_ffn
    assert saved == experts * 3 / 4
    assert shared.prediction.peak_memory_bytes[0] < alone.prediction.peak_memory_bytes[0]
    for plan in plans:
        check_runs(plan)


def test_the_exchange_hides_behind_compute_as_far_as_there_is_some() -> None:
    graph, table = traced(SPARSE, "bf16")
    plan, cluster = plan_of(graph, ep=4), Cluster.from_catalog("p5.48xlarge", devices_per_node=4)
    assignments = check_plan(plan, graph, table)

    def seconds(overlap: float) -> float:
        target = Target(name="test", overlap_experts=overlap, host_scale=0.0)  # device-bound
        return evaluate(plan, problem_on(cluster, target), assignments).stages[0].forward_s

    times = [seconds(overlap) for overlap in (0.0, 0.5, 1.0)]
    assert times[0] > times[1] >= times[2]
    with pytest.raises(ValueError, match=r"overlap_experts=1\.5; legal: 0 to 1"):
        seconds(1.5)
