"""Uneven routing: what the busiest of the ranks that share experts out computes, sends, keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.cli import main
from meshwright.costmodel.operators.cost import Setting
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.rules.moe import COMBINE, DISPATCH, GROUPED
from meshwright.costmodel.sharding.strategies import strategies
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.plan.check import check_plan
from meshwright.planner.pricing.evaluate import Evaluation, evaluate
from meshwright.planner.published.models import build
from meshwright.planner.published.predict import traced
from tests.planner.published.test_moe_pricing import SPARSE, ideal, ops_of, plan_of, problem_on

WIDE = dataclasses.replace(
    SPARSE, layers=2, hidden=512, heads=8, kv_heads=8, expert_ffn=1024, topk=2, seq_len=256
)


def uneven(ratio: float) -> Target:
    return dataclasses.replace(EAGER, expert_imbalance=ratio)


def pricer(ratio: float, ep: int) -> Pricer:
    graph, table = traced(SPARSE, "bf16")
    setting = Setting(
        cluster=ideal(1, 8),
        dp=8,
        tp=1,
        ep=ep,
        rows=512,
        num_microbatches=1,
        precision="bf16",
        optimizer="adamw",
        target=uneven(ratio),
    )
    return Pricer(graph=graph, table=table, setting=setting)


@settings(deadline=None)  # the first example traces
@given(st.floats(1, 8), st.sampled_from([1, 2, 8]))
def test_the_busiest_rank_has_so_many_times_the_copies(ratio: float, ep: int) -> None:
    graph, table = traced(SPARSE, "bf16")
    even, priced = pricer(1.0, ep), pricer(ratio, ep)
    dispatched = {op.results[0] for op in ops_of(graph, DISPATCH)}
    assert dispatched < table.copies
    for value in graph.values:
        more = ratio if ep > 1 and value in table.copies else 1
        assert priced.numel(value) == pytest.approx(even.numel(value) * more)


@pytest.mark.parametrize("short", [DISPATCH, COMBINE])
def test_exchanged_bytes_grow_with_it(short: str) -> None:
    graph, table = traced(SPARSE, "bf16")
    op = ops_of(graph, short)[0]
    whole = strategies(graph, table, op, 1)[0]
    one, two = (pricer(ratio, 8).op_cost(op, whole) for ratio in (1.0, 2.0))
    assert one.forward_exchange_s > 0
    assert two.forward_exchange_s == pytest.approx(2 * one.forward_exchange_s)
    assert two.backward_exchange_s == pytest.approx(2 * one.backward_exchange_s)


def test_products_take_longer_only_where_experts_are_shared_out() -> None:
    graph, table = traced(SPARSE, "bf16")
    op = ops_of(graph, GROUPED)[0]
    whole = strategies(graph, table, op, 1)[0]
    assert pricer(3.0, 1).op_cost(op, whole) == pricer(1.0, 1).op_cost(op, whole)
    one, three = (pricer(ratio, 8).op_cost(op, whole) for ratio in (1.0, 3.0))
    assert one.forward_s < three.forward_s <= 3 * one.forward_s
    assert one.backward_s < three.backward_s <= 3 * one.backward_s


def priced(ratio: float, ep: int) -> Evaluation:
    graph, table = traced(SPARSE, "bf16")
    plan = dataclasses.replace(plan_of(graph, ep=ep), global_batch_size=4096)  # device-bound
    return evaluate(
        plan,
        problem_on(Cluster.from_catalog("dgx-h100", devices_per_node=4), uneven(ratio)),
        check_plan(plan, graph, table),
    )


def test_a_plan_that_shares_experts_out_is_dearer_and_fuller() -> None:
    steps = [priced(ratio, 4).prediction for ratio in (1.0, 1.5, 4.0)]
    times = [step.step_time_s for step in steps]
    memory = [step.peak_memory_bytes[0] for step in steps]
    assert times == sorted(set(times)) and memory == sorted(set(memory))
    assert priced(1.0, 1).prediction == priced(4.0, 1).prediction


def chosen(ratio: float) -> tuple[set[int], str]:
    model, example = build(WIDE)
    made = auto_parallelize(
        model,
        Cluster.from_catalog("dgx-h100"),
        example_inputs=example,
        precision="bf16",
        global_batch_size=128,
        overrides=Overrides(tp=1, pp=1),
        profile=False,
        expert_imbalance=ratio,
    )
    return {stage.ep for stage in made.plan.stages}, str(made.report)


def test_the_choice_turns_where_routing_is_uneven_enough() -> None:
    ratios = (1.0, 2.0, 8.0)
    found = [chosen(ratio) for ratio in ratios]
    degrees = [max(ep) for ep, _ in found]
    assert degrees == sorted(degrees, reverse=True)
    assert degrees[0] > 1 and degrees[-1] == 1
    for ratio, (_, report) in zip(ratios, found, strict=True):
        assert f"gets {ratio:g} times the mean of tokens" in report


@pytest.mark.parametrize("ratio", [0.5, 0.0, -1.0, float("inf"), float("nan")])
def test_less_than_the_mean_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"expert_imbalance=.*legal: from 1"):
        uneven(ratio)


def test_the_command_line_takes_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (
        "from tests.helpers import tiny\n\n"
        "def made():\n    return tiny.net(), tiny.batch(4), tiny.loss\n"
    )
    (tmp_path / "imbalance_target.py").write_text(made)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["plan", "imbalance_target:made", "--batch", "8", "--expert-imbalance", "0.5"])
    assert "expert_imbalance=0.5" in capsys.readouterr().err
