"""Prices of a small net in closed form: sends, hosts, memory by what holds it, what is off devices.

The net's activations between layers are [rows, 6, 16] in fp32; nothing waits for a latency.
"""

import dataclasses
from functools import cache
from typing import Any

import pytest

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.intervals import Quantiles
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.stages.course import BlockBytes
from meshwright.costmodel.stages.offload import PINNED
from meshwright.costmodel.targets import EAGER
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.flow import crossings
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.pricing import Evaluation, Evaluator, Prediction
from meshwright.planner.pricing.away import entering_bytes, sending
from meshwright.planner.pricing.copies import exchanges, with_exchanges
from meshwright.planner.pricing.evaluate import (
    RehearsedMemory,
    by_node,
    check_host,
    evaluate,
    transfer,
)
from meshwright.planner.pricing.stage_costs import StageCoster, stage_blocks
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import cluster
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import SEQUENCE, WIDTH, cut, net, plan_for, with_stage
from tests.parity.parity_cells import graph_of

BANDWIDTH = 1e6
ON = cluster(8, bandwidth=BANDWIDTH)
ROW_BYTES = SEQUENCE * WIDTH * 4


@cache
def model(frozen: bool = False) -> tuple[Graph, FactorTable]:
    made = net()
    made.layers[0].requires_grad_(not frozen)
    return cut(made)


def problem(on: Cluster = ON, frozen: bool = False) -> Problem:
    graph, factors = model(frozen)
    return Problem(graph=graph, factors=factors, cluster=on, precision="fp32")


def priced(plan: Plan, on: Cluster = ON, frozen: bool = False) -> Evaluation:
    of = problem(on, frozen)
    return evaluate(plan, of, check_plan(plan, of.graph, of.factors))


@pytest.mark.parametrize(
    ("source", "target", "rows"),
    [
        # of 8 rows: (those of the rank with most to do, as sender and as receiver) / 2
        ((2, 1), (2, 1), 4),
        ((4, 1), (2, 1), (4 + 4) / 2),
        ((1, 2), (2, 1), (4 + 8) / 2),
        ((1, 1), (1, 4), (8 * 4 + 8) / 2),  # to each of four tensor ranks its copy
    ],
)
def test_a_send_takes_what_the_busiest_rank_moves(source: Any, target: Any, rows: float) -> None:
    graph = model()[0]
    plan, first = plan_for(graph, stages=2), source[0] * source[1]
    meshes = ((source, range(first)), (target, range(first, first + target[0] * target[1])))
    for k, ((dp, tp), ranks) in enumerate(meshes):
        plan = with_stage(plan, k, dp=dp, tp=tp, ranks=tuple(ranks))
    ((edge, values),) = crossings(plan, graph).items()
    found = transfer(plan, StageCoster(problem()), edge, values).seconds
    assert found == pytest.approx(rows * ROW_BYTES / BANDWIDTH)


def test_what_has_no_rows_goes_whole_to_every_rank() -> None:
    """T5's first encoder layer makes the position bias of the others."""
    of = graph_of("t5", 4)
    first = of.graph.blocks[1]
    bias = next(v for v in first.outputs if not of.table.has_batch(v))
    plan = plan_for(of.graph, stages=2)
    for k, (dp, ranks) in enumerate(((4, (0, 1, 2, 3)), (2, (4, 5)))):
        plan = with_stage(plan, k, dp=dp, tp=1, ranks=ranks)
    on = Problem(graph=of.graph, factors=of.table, cluster=ON, precision="fp32")
    found = transfer(plan, StageCoster(on), (0, 1), (bias,)).seconds
    nbytes = of.graph.values[bias].numel * 4
    assert found == pytest.approx(nbytes * (1 + 4 / 2) / 2 / BANDWIDTH)


def test_who_sends_waits_where_nothing_overlaps() -> None:
    """The first stage with its activations, the second one with their gradients."""
    graph = model()[0]
    plan = with_stage(plan_for(graph, stages=2, dp=1, tp=1, schedule="gpipe"), 1, ranks=(1,))
    target = dataclasses.replace(EAGER, overlap_sends=False)
    of = dataclasses.replace(problem(), target=target)
    found = evaluate(plan, of, check_plan(plan, graph, of.factors))
    sent_s = 8 * ROW_BYTES / BANDWIDTH
    for costs, busy_s in zip(found.stages, found.timeline.busy_s, strict=True):
        assert busy_s == pytest.approx(2 * (costs.forward_s + costs.backward_s + sent_s))


def test_utilisation_is_of_all_devices_at_their_peak() -> None:
    plan = plan_for(model()[0], dp=2, tp=2)
    found = priced(plan).prediction
    flops = StageCoster(problem()).model_flops.of(plan.global_batch_size)
    assert found.mfu == pytest.approx(flops / (found.step_time_s * 4 * 1e12))
    on = Cluster.from_catalog("dgx-h100")
    found = priced(dataclasses.replace(plan, precision="fp8"), on).prediction
    assert on.device.flops("fp8") > on.device.flops("bf16")
    part = StageCoster(problem()).model_flops.narrow
    assert 0 < part < 1
    seconds = part / on.device.flops("fp8") + (1 - part) / on.device.flops("bf16")
    assert found.mfu == pytest.approx(flops * seconds / (found.step_time_s * 4))


@second_tier("prices of stages after others stay (test_order)")
def test_no_price_depends_on_what_was_asked_before() -> None:
    """An evaluator asked both ways round says what a fresh one does, of plans that differ in what
    prices are known by: ZeRO, its shards, micro-batches of the same rows, degrees."""
    of = graph_of("llama", 4)
    base = plan_for(of.graph, dp=8, tp=1)
    stages: list[dict[str, Any]] = [{"zero": zero} for zero in range(4)]
    stages += [{"zero": 2, "dp_shard": 2}, {"zero": 3, "hpz": 2}, {"zero": 3, "hpz": 4}]
    stages += [{"zero": 3, "quantized": "both"}, {"zero": 3, "quantized": "both", "hpz": 2}]
    stages += [{"compressed": "powersgd-4"}, {"compressed": "topk-1"}]
    stages += [{"dp": 4, "cp": 2}, {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}, {"recompute": "full"}]
    plans = [with_stage(base, **given) for given in stages]
    alone = with_stage(base, dp=1, ranks=(0,))
    half = alone.global_batch_size // 2
    once = dataclasses.replace(alone, global_batch_size=half, num_microbatches=1)
    plans += [alone, once, dataclasses.replace(once, global_batch_size=4 * half)]
    on = Problem(graph=of.graph, factors=of.table, cluster=ON, precision="fp32")
    fresh = {plan.to_json(): Evaluator(on).price(plan).prediction for plan in plans}
    for order in (plans, plans[::-1]):
        evaluator = Evaluator(on)
        for plan in order:
            assert evaluator.price(plan).prediction == fresh[plan.to_json()], plan


def test_copies_of_the_model_add_their_gradients_up_parameter_by_parameter() -> None:
    """Every stage's gradients meet its mate's in fp32: one message carries them, and each further
    parameter's takes what a byte does."""
    graph = model()[0]
    plan = plan_for(graph, stages=2, dp=1, tp=1, schedule="dualpipe")
    names = [block.name for block in graph.blocks]
    plan = dataclasses.replace(plan, stages=tuple(
        dataclasses.replace(plan.stages[0], blocks=tuple(own), ranks=(rank,))
        for own, rank in ((names[:3], 0), (names[3:], 1), (names[:3], 1), (names[3:], 0))
    ))  # fmt: skip
    coster = StageCoster(problem())
    assignments = check_plan(plan, graph, model()[1])
    plain = evaluate(dataclasses.replace(plan, stages=plan.stages[:2], schedule="1f1b"),
                     problem(), assignments[:2]).stages  # fmt: skip
    summed = exchanges(plan, coster, (*plain, *plain))
    found = with_exchanges((*plain, *plain), summed)
    counts = [sum(len(b.parameters) for b in graph.blocks if b.name in own)
              for own in (names[:3], names[3:])]  # fmt: skip
    for own, costs, count in zip((*plain, *plain), found, counts * 2, strict=True):
        seconds = (own.parameters * 4 + count - 1) / BANDWIDTH
        assert costs.reduce_s - own.reduce_s == pytest.approx(seconds)
    assert plan.passes == 1 and plan_for(graph).passes == 2


def test_what_prices_rest_on_are_parts_of_the_operators_seconds() -> None:
    found = priced(plan_for(model()[0], stages=2))
    stages = [
        dataclasses.replace(s, forward_s=3.0, backward_s=6.0, forward_comm_s=1.0,
                            backward_comm_s=3.0, measured_s=m, interpolated_s=i)
        for s, m, i in zip(found.stages, (1.0, 2.0), (0.5, 0.0), strict=True)
    ]  # fmt: skip
    parts = dataclasses.replace(found, stages=tuple(stages)).rests_on()
    assert parts == {"measured": 0.3, "interpolated": 0.05, "modelled": pytest.approx(0.65)}


def prediction(**given: Any) -> Prediction:
    error = Quantiles(low=0.8, middle=1.0, high=1.25, rows=1, models=1, of="")
    base: dict[str, Any] = {
        "step_time_s": 2.0, "peak_memory_bytes": [40, 80], "bubble_fraction": 0.0,
        "model_flops": 1.0, "mfu": 0.5, "step_error": error, "memory_error": error,
    }  # fmt: skip
    return Prediction(**base | given)


def rehearsed(nbytes: int) -> RehearsedMemory:
    return RehearsedMemory(tensor_bytes=[nbytes - 5, 0], beside_bytes=[5, 5])


def roomy(memory: int, host: int = 1, flash: int = 0) -> Cluster:
    found = Cluster.from_catalog("dgx-h100", num_nodes=1).host
    assert found is not None
    own = dataclasses.replace(found, memory_bytes=host, nvme_bytes=flash)
    return dataclasses.replace(cluster(2, nodes=2, memory_bytes=memory), host=own)


@pytest.mark.parametrize(
    ("given", "on", "verdict"),
    [
        ({}, roomy(63), "does not fit"),
        ({}, roomy(65), "tight"),
        ({}, roomy(99), "tight"),
        ({}, roomy(101), "fits"),
        ({"host_memory_bytes": (60, 50)}, roomy(101, host=67), "fits"),
        ({"host_memory_bytes": (60, 61)}, roomy(101, host=67), "does not fit"),
        ({"flash_bytes": (60, 61)}, roomy(101, flash=68), "fits"),
        ({"flash_bytes": (60, 61)}, roomy(101, flash=67), "does not fit"),
        ({"rehearsed": rehearsed(80)}, roomy(100), "fits"),
        ({"rehearsed": rehearsed(82)}, roomy(100), "tight"),
        ({"rehearsed": rehearsed(123)}, roomy(100), "tight"),
        ({"rehearsed": rehearsed(125)}, roomy(100), "does not fit"),
    ],
)
def test_verdicts_on_memory(given: dict[str, Any], on: Cluster, verdict: str) -> None:
    """The interval's ends are those of nine and of one in ten; what hosts hold is certain."""
    found = prediction(**given)
    assert found.memory_verdict(on) == verdict
    assert found.step_interval_s == (1.6, 2.5)
    assert found.memory_interval_bytes == (64.0, 100.0)
    assert found.shortfall_bytes(roomy(79)) == [0, 1]


def test_what_lies_on_hosts_is_counted_by_node() -> None:
    plan = with_stage(plan_for(model()[0], stages=2, dp=3, tp=1), 1, ranks=(5, 4, 3))
    on = cluster(2, nodes=3)
    assert by_node(plan, [10.0, 1.5], on) == (20, 12, 3)
    assert by_node(plan, [0.0, 0.0], on) == ()


@pytest.mark.parametrize(
    ("offload", "on", "says"),
    [
        (
            {"optimizer": 1.0}, dataclasses.replace(ON, host=None),
            "memory; legal: a cluster with a host; give it one, in TOML as [host], or drop it from "
            "the plan",
        ),
        (
            {"optimizer": 1.0, "nvme": 0.5}, roomy(100),
            "flash; legal: a cluster with nvme_bytes, nvme_read_bandwidth and "
            "nvme_write_bandwidth; give it these, in TOML in [host], or drop nvme from the plan",
        ),
    ],
)  # fmt: skip
def test_an_unknown_host_holds_nothing(offload: Any, on: Cluster, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_host(with_stage(plan_for(model()[0]), offload=offload), on)
    says = f"plan: stage 0: cluster 'h100-sxm' says nothing of its hosts' {says}"
    assert str(caught.value) == says


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_by_what_holds_it(zero: int) -> None:
    """AdamW in fp32 on two data ranks, the first layer frozen: its weights are held, too, in parts
    by ZeRO-3. ZeRO-1 and 2 keep shards of weights beside the moments; gradients are whole where
    none are scattered before the last backward."""
    plan = with_stage(plan_for(model(True)[0], dp=2, tp=1), zero=zero)
    of = problem(frozen=True)
    assignments = check_plan(plan, of.graph, of.factors)
    found = evaluate(plan, of, assignments)
    (parts,) = (peak.by_part for peak in found.prediction.peaks)
    numel = {v: of.graph.values[v].numel for v in of.graph.parameters}
    trained = sum(n for v, n in numel.items() if of.graph.values[v].requires_grad)
    frozen = sum(numel.values()) - trained
    assert parts["weights"] == 4 * (trained + frozen) / (2 if zero == 3 else 1)
    assert parts["optimizer"] == {0: 8, 3: 8 / 2}.get(zero, (8 + 4) / 2) * trained
    if zero < 2:
        assert parts["gradients"] == 4 * trained
    else:
        assert parts["gradients"] > 4 * trained / 2


def test_activations_off_devices_are_those_that_are_not_on_them() -> None:
    """Of a layer: the norm's input and statistics, both products' inputs, and gelu's."""
    layer = 8 * (4 * SEQUENCE * (WIDTH + 2 + WIDTH + 2 * WIDTH + 2 * WIDTH))
    plain = with_stage(plan_for(model()[0], dp=1, tp=1, schedule="gpipe"), ranks=(0,))
    host = Cluster.from_catalog("dgx-h100", num_nodes=1).host
    on = dataclasses.replace(ON, host=host)
    keep, some, none = (
        priced(with_stage(plain, offload={"activations": part} if part else {}), on)
        for part in (0.0, 0.6, 1.0)
    )
    held = keep.stages[0].activation_bytes
    for found, away in ((keep, 0), (some, 2 * layer), (none, held)):
        (costs,) = found.stages
        assert (costs.away_bytes, costs.activation_bytes) == (PINNED * away, held - away)
        there = (pytest.approx(2 * PINNED * away, abs=1),) if away else ()
        assert found.prediction.host_memory_bytes == there
    # a layer's are there for its backward while the next one's come
    assert 2 * layer <= none.stages[0].passing_bytes - keep.stages[0].passing_bytes < 3 * layer


def test_what_blocks_send_is_there_for_two_backwards() -> None:
    """The first two blocks send all they keep."""
    graph, table = model()
    plan = with_stage(plan_for(graph, dp=1, tp=1), 0, ranks=(0,), offload={"activations": 0.4})
    own = stage_blocks(plan, 0, StageCoster(problem()), check_plan(plan, graph, table)[0])
    assert entering_bytes(own) == [0, *[8 * ROW_BYTES] * 4]
    held = [BlockBytes(kept=1e6 + k, passing=10.0, releases=False, course=()) for k in range(5)]
    moved = [1e6, 1e6 + 1, 0, 0, 0]
    found = sending(own, held)
    assert [own.kept for own in found] == [0, 0, 1e6 + 2, 1e6 + 3, 1e6 + 4]
    both = [own + before for own, before in zip(moved, [0, *moved], strict=False)]
    assert [own.passing - 10 for own in found] == both
