"""Mixtures of experts: what expert parallelism divides and exchanges, plans, and uneven routing:
what the busiest of the ranks that share experts out computes, sends, keeps.

Oracles: dense models of the same work, closed forms on ideal links, enumeration.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.cli import main
from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.kernels.collectives import exchange_seconds, group_for
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.operators.cost import Cost
from meshwright.costmodel.operators.flops import model_flops
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.rules.moe import COMBINE, DISPATCH, GROUPED
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.strategies import RP, Placement, R, strategies
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.plan.check import check_runs
from meshwright.planner.plan.plan import Plan
from meshwright.planner.pricing.evaluate import Evaluation, Evaluator
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.planner.stages.programs import BlockPrograms
from scripts.published.models import build
from scripts.published.predict import traced
from tests.helpers.planning import cluster, setting_on
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import plan_for, with_stage
from tests.scripts.published.test_moe_models import DENSE, SPARSE

PLAIN = Target(name="plain", bucket_copies=0)


def graph() -> Graph:
    return traced(SPARSE, "bf16")[0]


def table() -> FactorTable:
    return traced(SPARSE, "bf16")[1]


def ideal(nodes: int, per_node: int) -> Cluster:
    """100 GB/s inside a node, 10 between for each device."""
    return cluster(
        per_node, nodes=nodes, flops=1e15, memory_bandwidth=3e12, bandwidth=1e11,
        node_bandwidth=1e10 * per_node,
    )  # fmt: skip


def pricer(on: Cluster, target: Target = PLAIN, **given: Any) -> Pricer:
    setting = setting_on(on, precision="bf16", target=target, **given)
    return Pricer(graph=graph(), table=table(), setting=setting)


def ops_of(short: str) -> list[Op]:
    return [op for op in graph().ops if op.short == short]


def whole(priced: Pricer, op: Op) -> Cost:
    """What it costs where the tensor axis splits nothing of it, or is not there."""
    return priced.op_cost(op, strategies(graph(), table(), op, 1)[0])


# --- rules ---------------------------------------------------------------------------------------


def test_a_mixture_costs_the_work_of_a_dense_model_as_wide_as_a_tokens_experts() -> None:
    """And the router's: 2·b·s·h·e, thrice with the backward."""
    rows, tokens = 8, 8 * DENSE.seq_len
    dense = dataclasses.replace(DENSE, ffn=SPARSE.topk * SPARSE.expert_ffn)
    router = DENSE.layers * 3 * 2 * tokens * DENSE.hidden * SPARSE.experts
    found = model_flops(graph(), table()).of(rows)
    assert found == model_flops(*traced(dense, "bf16")).of(rows) + router


def test_the_tensor_axis_splits_tokens_and_widths_but_never_experts() -> None:
    found = {s.name: s for s in strategies(graph(), table(), ops_of(GROUPED)[0], 2)}
    assert set(found) >= {"replicate", "s", "colwise", "rowwise"} and "e" not in found
    assert found["s"].operands[:2] == (Placement("S", 1), RP)
    assert found["colwise"].operands[1] == Placement("S", 2)


# --- what a rank holds, computes and exchanges ----------------------------------------------------


@pytest.mark.parametrize("ep", [1, 4, 16])
def test_experts_are_divided_and_everything_else_is_not(ep: int) -> None:
    priced = pricer(ideal(2, 8), dp=16, ep=ep)
    for value, fqn in graph().parameters.items():
        numel, sparse = graph().values[value].numel, ".experts." in fqn
        assert priced.numel(value) == (numel / ep if sparse else numel)
        cost = priced.parameter_cost(value, R)
        assert cost.shard_s == pytest.approx(cost.optimizer_s * (ep / 16 if sparse else 1 / 16))


def test_gradients_of_experts_are_reduced_over_the_ranks_that_hold_them() -> None:
    """dp=4, tp=2, ep=4: two ranks hold an expert, four ranks the rest of a tensor-parallel rank."""
    priced = pricer(ideal(8, 1), dp=4, tp=2, ep=4)
    weight = ops_of(GROUPED)[0].operands[1]
    holders = priced.parameters.holders
    assert (holders(weight, R), holders(weight, Placement("S", 2))) == (2, 1)
    router = next(v for v, fqn in graph().parameters.items() if fqn.endswith("router.weight"))
    assert holders(router, R) == 4
    # an all-reduce among two sends each rank's bytes once: 4 a parameter
    sent = 4 * graph().values[weight].numel / 4
    assert priced.parameter_cost(weight, R).reduce_s == pytest.approx(sent / 1e10)
    # the tensor axis is among those ranks: no reduction of its own
    assert priced.reshard(weight, R, RP, once=True).reduce_s == 0
    assert priced.reshard(router, R, RP, once=True).reduce_s > 0


@pytest.mark.parametrize(("tp", "ep"), [(1, 8), (2, 2), (8, 8)])
def test_each_rank_exchanges_its_tokens_copies(tp: int, ep: int) -> None:
    """b·s·k·h elements, b·s of them a rank's own; (ep-1)/ep leave it, out and back in both
    passes; twice as many where the busiest rank has twice the mean."""
    copies = 4 * SPARSE.seq_len / tp * SPARSE.topk * SPARSE.hidden
    for ratio in (1.0, 2.0):
        target = dataclasses.replace(PLAIN, expert_imbalance=ratio)
        priced = pricer(ideal(1, 8), target, dp=8 // tp, tp=tp, ep=ep, rows=4)
        wanted = pytest.approx(ratio * 2 * copies * (ep - 1) / ep / 1e11)
        for op in (*ops_of(DISPATCH), *ops_of(COMBINE)):
            ways = strategies(graph(), table(), op, tp)
            way = ways[0] if tp == 1 else next(s for s in ways if s.name == "s")
            cost = priced.op_cost(op, way)
            assert (cost.forward_exchange_s, cost.backward_exchange_s) == (wanted, wanted)


@given(st.integers(2, 5), st.integers(1, 4))
def test_a_token_crosses_once_to_each_node_that_wants_it(nodes: int, copies: int) -> None:
    """Against all ways to choose a node for each copy, the inside of nodes being free."""
    on = cluster(2, nodes=nodes, bandwidth=1e11, node_bandwidth=1.0)
    ways = [len(set(way) - {0}) for way in itertools.product(range(nodes), repeat=copies)]
    nbytes, crossing = 1000.0, sum(ways) / len(ways)
    group = group_for(on, size=2 * nodes, stride=1)
    found = exchange_seconds(nbytes, copies, group, on, once_per_node=True)
    assert found == pytest.approx(2 * crossing * nbytes / copies, rel=1e-6)
    every = exchange_seconds(nbytes, copies, group, on, once_per_node=False)
    assert found <= every * (1 + 1e-9)


def test_products_grow_with_the_tokens_of_all_expert_ranks() -> None:
    """A rank's product does the FLOPs of its tokens for any ep, in fewer and taller matrices."""
    op = ops_of(GROUPED)[0]
    costs = [whole(pricer(ideal(1, 8), dp=8, ep=ep, rows=64), op).forward_s for ep in (1, 2, 8)]
    assert costs == sorted(costs, reverse=True) and costs[-1] > 0


def test_products_take_longer_only_where_experts_are_shared_out_unevenly() -> None:
    (one, three), (alone, uneven) = (
        [
            whole(pricer(ideal(1, 8), target, dp=8, ep=ep, rows=512), ops_of(GROUPED)[0])
            for target in (PLAIN, dataclasses.replace(PLAIN, expert_imbalance=3.0))
        ]
        for ep in (8, 1)
    )
    assert alone == uneven
    assert one.forward_s < three.forward_s <= 3 * one.forward_s
    assert one.backward_s < three.backward_s <= 3 * one.backward_s


# --- plans ---------------------------------------------------------------------------------------


def problem_on(on: Cluster, target: Target = EAGER) -> Problem:
    return Problem(graph=graph(), factors=table(), cluster=on, precision="bf16", target=target)


def plan_of(ep: int) -> Plan:
    return with_stage(plan_for(graph(), dp=4, tp=1, precision="bf16"), ep=ep)


@pytest.mark.parametrize("tp", [1, 2])
def test_programs_are_shared_by_all_degrees_and_solved_for_each(tp: int) -> None:
    """Stages with ep=8, found after those with ep=2, cost what they do where nothing was before."""

    def costs(programs: BlockPrograms, ep: int) -> np.ndarray:
        setting = programs.coster.setting(Mesh(dp=8, tp=tp, ep=ep), Batch(rows=2.0, microbatches=4))
        return programs.chain(setting).seconds

    used, fresh = (BlockPrograms(StageCoster(problem_on(ideal(2, 8)))) for _ in range(2))
    before = costs(used, 2)
    after = costs(used, 8)
    np.testing.assert_allclose(after, costs(fresh, 8), rtol=1e-12)
    assert not np.allclose(after, before)


def test_sharing_experts_out_saves_their_memory_and_can_be_run() -> None:
    on = Cluster.from_catalog("dgx-h100", devices_per_node=4)
    # what the exchange's communicators take is more than there is to save of so small a model
    on = dataclasses.replace(on, device=dataclasses.replace(on.device, communicator_bytes=0))
    plans = [plan_of(ep) for ep in (1, 4)]
    alone, shared = map(Evaluator(problem_on(on)).price, plans)
    saved = alone.stages[0].parameters - shared.stages[0].parameters
    experts = 3 * SPARSE.layers * SPARSE.experts * SPARSE.hidden * SPARSE.expert_ffn
    assert saved == experts * 3 / 4
    assert shared.prediction.peak_memory_bytes[0] < alone.prediction.peak_memory_bytes[0]
    for plan in plans:
        check_runs(plan)
    assert ['"ep": 4' in plan.to_json() for plan in plans] == [False, True]


@pytest.mark.parametrize("ep", [2, 4])
def test_weights_of_experts_that_zero_3_divides_among_nobody_are_there(ep: int) -> None:
    """Of ep=2 two ranks share an expert, of ep=4 none: sums say what each of the blocks does."""
    plan = with_stage(plan_of(ep), zero=3)
    on = Cluster.from_catalog("dgx-h100", devices_per_node=4)
    priced = Evaluator(problem_on(on)).price(plan)
    (walked,), (summed,) = priced.stages, priced.priced
    assert summed.costs.fixed_bytes == pytest.approx(walked.fixed_bytes, rel=0.01)


def test_the_exchange_hides_behind_compute_as_far_as_there_is_some() -> None:
    plan, on = plan_of(ep=4), Cluster.from_catalog("p5.48xlarge", devices_per_node=4)

    def seconds(overlap: float) -> float:
        target = Target(name="test", overlap_experts=overlap, host_scale=0.0)  # device-bound
        return Evaluator(problem_on(on, target)).price(plan).stages[0].forward_s

    times = [seconds(overlap) for overlap in (0.0, 0.5, 1.0)]
    assert times[0] > times[1] >= times[2]


# --- uneven routing ------------------------------------------------------------------------------


def uneven(ratio: float) -> Target:
    return dataclasses.replace(EAGER, expert_imbalance=ratio)


def test_a_plan_that_shares_experts_out_is_dearer_and_fuller() -> None:
    on = Cluster.from_catalog("dgx-h100", devices_per_node=4)

    def priced(ratio: float, ep: int) -> Evaluation:
        plan = dataclasses.replace(plan_of(ep), global_batch_size=4096)  # device-bound
        return Evaluator(problem_on(on, uneven(ratio))).price(plan)

    steps = [priced(ratio, 4).prediction for ratio in (1.0, 1.5, 4.0)]
    times = [step.step_time_s for step in steps]
    memory = [step.peak_memory_bytes[0] for step in steps]
    assert times == sorted(set(times)) and memory == sorted(set(memory))
    assert priced(1.0, 1).prediction == priced(4.0, 1).prediction


@second_tier("that uneven routing makes shared experts dearer and fuller stays")
def test_the_choice_turns_where_routing_is_uneven_enough() -> None:
    wide = dataclasses.replace(
        SPARSE, layers=2, hidden=512, heads=8, kv_heads=8, expert_ffn=1024, topk=2, seq_len=256
    )
    model, example = build(wide)
    degrees = []
    for ratio in (1.0, 2.0, 8.0):
        made = auto_parallelize(
            model, Cluster.from_catalog("dgx-h100"), example_inputs=example, precision="bf16",
            global_batch_size=128, overrides=Overrides(tp=1, pp=1), profile=False,
            expert_imbalance=ratio,
        )  # fmt: skip
        degrees.append(made.plan.stages[0].ep)
        assert f"gets {ratio:g} times the mean of tokens" in str(made.report)
    assert degrees == sorted(degrees, reverse=True)
    assert degrees[0] > 1 and degrees[-1] == 1


def test_less_than_the_mean_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command line, too."""
    for ratio in (0.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"expert_imbalance=.*legal: from 1"):
            uneven(ratio)
    (tmp_path / "imbalance_target.py").write_text(
        "from tests.helpers import tiny\n\n"
        "def made():\n    return tiny.net(), tiny.batch(4), tiny.loss\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["plan", "imbalance_target:made", "--batch", "8", "--expert-imbalance", "0.5"])
    assert "expert_imbalance=0.5" in capsys.readouterr().err
