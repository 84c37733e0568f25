"""What parameters cost once a step by hand, their shards and replicas, and groups on meshes that
other stages lie between."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.compressed import compression
from meshwright.costmodel.kernels.collectives import group_for
from meshwright.costmodel.operators.cost import Cost
from meshwright.costmodel.operators.parameter_costs import GATHERED
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.quantized import wire_bytes
from meshwright.costmodel.sharding.strategies import Placement, R
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.profiles.cluster import Cluster
from tests.costmodel.operators.test_pricing import ENDLESS, costs, moving, net, talking
from tests.costmodel.operators.test_pricing import pricer as pricer_of
from tests.helpers.planning import changed, cluster, setting_on

# gradients of two bytes and no buffers; weights of four
PLAIN = dataclasses.replace(EAGER, gradient_bytes=2, bucket_copies=0)


def pricer(on: Cluster, **given: Any) -> Pricer:
    return pricer_of(net(), on, **{"target": PLAIN, **given})


def prices(found: Pricer) -> list[Cost]:
    return [found.parameter_cost(value, R) for value in found.graph.parameters]


def weights(found: Pricer, name: str) -> float:
    return sum(getattr(cost, name) for cost in prices(found))


@pytest.mark.parametrize(("dp", "cp", "shards"), [(8, 1, 2), (8, 1, 1), (4, 2, 2)])
def test_shards_are_scattered_near_and_reduced_far(dp: int, cp: int, shards: int) -> None:
    """Nodes of as many devices as shards: a byte inside takes 1 s, one that leaves a node 1000 s of
    its NIC, of which a node's ranks share one."""
    on = cluster(
        shards, nodes=8 // shards, flops=ENDLESS, memory_bandwidth=28.0, bandwidth=1.0,
        node_bandwidth=1e-3,
    )  # fmt: skip
    found = pricer(on, dp=dp, cp=cp, dp_shard=shards, optimizer="adamw_fused")
    numel, replicas = net().graph.num_parameters(), 8 // shards
    inside, outside = (shards - 1) / shards, 2 * (replicas - 1) / replicas
    assert weights(found, "scatter_s") == pytest.approx(2 * numel * inside)
    assert weights(found, "gather_s") == pytest.approx(4 * numel * inside)
    # each of a node's ranks reduces its part of the two bytes; together they send all of them
    assert weights(found, "replicate_s") == pytest.approx(2 * numel * outside * 1000)
    assert weights(found, "optimizer_s") == pytest.approx(numel)
    assert weights(found, "shard_s") == pytest.approx(numel / shards)


@pytest.mark.parametrize(("asked", "near"), [(0, 4), (2, 2), (4, 4)])
def test_a_secondary_shard_is_gathered_near(asked: int, near: int) -> None:
    """Two nodes of four: by itself a secondary shard lies in a node, of which no byte leaves it."""
    on = cluster(4, nodes=2, flops=ENDLESS, bandwidth=1.0, node_bandwidth=1e-3)
    found = pricer(on, dp=8, zero=3, hpz=asked)
    numel = net().graph.num_parameters()
    assert weights(found, "zero3_secondary_s") == pytest.approx(4 * numel * (near - 1) / near)
    assert weights(found, "zero3_gather_s") > 1000 * weights(found, "zero3_secondary_s")


def test_quantised_collectives_send_blocks_of_few_bits() -> None:
    """On links of one byte a second and a memory that takes none; of two nodes of four the summed
    gradients go near, and of what is left of them each rank sends its part far."""
    on = cluster(4, nodes=2, flops=ENDLESS, bandwidth=1.0, node_bandwidth=1e-3)
    free = dataclasses.replace(on, device=dataclasses.replace(on.device, memory_bandwidth=ENDLESS))
    numel = net().graph.num_parameters()
    exact = pricer(free, dp=8, zero=3)

    def priced(name: str, **given: Any) -> float:
        return weights(pricer(free, dp=8, zero=3, **given), name)

    gathered = priced("zero3_gather_s", quantized="weights")
    ratio = wire_bytes(1, 8) / 4
    assert gathered == pytest.approx(ratio * weights(exact, "zero3_gather_s"))
    assert priced("zero3_scatter_s", quantized="weights") == weights(exact, "zero3_scatter_s")
    near, far = wire_bytes(numel, 4) * 3 / 4, wire_bytes(numel / 4, 4) / 2
    # each of a node's four ranks sends as much through its NIC
    hops = priced("zero3_scatter_s", quantized="gradients", hpz=4)
    assert hops == pytest.approx(near + 4 * far * 1000, rel=1e-3)
    assert hops < priced("zero3_scatter_s", quantized="gradients") / 3
    secondary = [priced("zero3_secondary_s", hpz=4, quantized=name) for name in ("both", "none")]
    assert secondary[0] == secondary[1]


@pytest.mark.parametrize("name", ["powersgd-1", "powersgd-4", "topk-1", "topk-10"])
def test_compressed_sums_send_what_stands_for_matrices(name: str) -> None:
    """On links of one byte a second, 8 ranks in a ring: of a matrix n by m two all-reduces of r n
    and r m numbers, or the k largest elements of each rank and their places to all others, with a
    number that says whether there is a gradient; vectors, and what would not shrink, as they are:
    of gradients of two bytes no 10 % of 8 ranks, and no rank 4 of these. On a memory of one byte a
    second, what is read and written for it; and the bytes that are remembered."""
    how, ring = compression(name), 2 * 7 / 8
    assert how is not None
    sent = moved = remembered = 0.0
    for value in net().graph.parameters:
        n, *more = net().graph.values[value].shape
        m, numel = math.prod(more), n * math.prod(more)
        k = max(1, int(how.part * numel))
        fewer = 4 * (how.rank * (n + m) if how.rank else 8 * k) < 2 * numel
        if not more or not fewer:
            sent += ring * 2 * numel
        elif how.rank:
            sent += ring * 4 * (how.rank * (n + m) + 1)
            moved += 3 * 4 * (numel + how.rank * (n + m)) + 24 * numel
            remembered += 4 * (numel + how.rank * m)
        else:
            sent += 7 * (8 * k + 4)
            moved += 40 * numel + 8 * 80 * k
            remembered += 4 * numel
    assert bool(moved) == (name in ("powersgd-1", "topk-1"))
    most = 2**31  # elements of a matrix, the first places that int32 has no number for
    assert how.rank or (how.shrinks(1, most - 1, 2, 4), how.shrinks(1, most, 2, 4)) == (True, False)
    free = {"flops": ENDLESS, "bandwidth": ENDLESS, "memory_bandwidth": ENDLESS}
    linked, plain = cluster(8, **{**free, "bandwidth": 1.0}), {"dp": 8, "compressed": name}
    assert weights(pricer(linked, **plain), "reduce_s") == pytest.approx(sent)
    slow = cluster(8, **{**free, "memory_bandwidth": 1.0})
    assert weights(pricer(slow, **plain), "compress_s") == pytest.approx(moved)
    assert weights(pricer(slow, dp=8), "compress_s") == 0
    assert weights(pricer(slow, dp=1, compressed=name), "compress_s") == 0
    held = [
        sum(pricer(slow, **of).parameters.moment_bytes(v, R)[0] for v in net().graph.parameters)
        for of in (plain, {"dp": 8})
    ]
    assert held[0] - held[1] == pytest.approx(remembered)


def test_a_rank_compresses_its_own_part_of_a_matrix() -> None:
    """Split along rows or columns over two ranks; with a number beside both sums."""
    found = pricer(cluster(8, flops=ENDLESS, bandwidth=1.0), dp=4, tp=2, compressed="powersgd-1")
    for value in net().graph.parameters:
        if len(shape := net().graph.values[value].shape) < 2:
            continue
        for dim in (0, 1):
            rows, columns = (size / (1 + (d == dim)) for d, size in enumerate(shape))
            _, cost = found.parameters.priced(value, Placement("S", dim))
            assert cost.reduce_s == pytest.approx(2 * 3 / 4 * 4 * (rows + columns + 1))


def test_shards_of_one_node_and_among_all_ranks() -> None:
    found = pricer(cluster(8), dp=8, zero=3)
    assert weights(found, "zero3_secondary_s") == weights(found, "zero3_gather_s") > 0
    on = cluster(4, nodes=2)
    assert prices(pricer(on, dp=8, dp_shard=8)) == prices(pricer(on, dp=8))
    assert weights(pricer(on, dp=8), "replicate_s") == 0
    whole, parts = (weights(pricer(on, dp=8, dp_shard=s), "reduce_s") for s in (0, 4))
    assert whole == parts > 0
    slow = cluster(8, flops=ENDLESS, memory_bandwidth=28.0, bandwidth=ENDLESS)
    for name, quantized in (("zero3_gather_s", "weights"), ("zero3_scatter_s", "gradients")):
        sent = weights(pricer(slow, dp=8, zero=3, quantized=quantized), name)
        assert sent > weights(pricer(slow, dp=8, zero=3), name)


def test_prices_known_for_one_data_axis_are_not_another_s() -> None:
    on = cluster(4, nodes=4, bandwidth=1.0)
    first = pricer(on, dp=8)
    assert costs(first, "linear")
    for change in (
        {"dp_shard": 4}, {"hpz": 2}, {"quantized": "both"}, {"dp": 4, "microbatches": 3},
        {"compressed": "powersgd-1"}, {"compressed": "topk-1"},
        {"microbatches": 3}, {"dp": 2, "dp_shard": 1},
    ):  # fmt: skip
        again = first.once(changed(first.step, **change))
        fresh = pricer(on, **{"dp": 8, **change})
        assert prices(again) == prices(fresh) != prices(first)
        assert costs(again, "linear") == costs(fresh, "linear")


@pytest.mark.parametrize(("dp", "cp"), [(4, 1), (2, 2), (1, 4)])
def test_gradients_are_reduced_over_all_who_hold_the_weight(dp: int, cp: int) -> None:
    """Rings: an all-reduce sends 2(n-1)/n of the bytes, scatter and gather half of that."""
    found, numel = pricer(talking(), dp=dp, cp=cp), net().graph.num_parameters()
    assert weights(found, "reduce_s") == pytest.approx(2 * numel * 2 * 3 / 4)
    assert weights(found, "scatter_s") == pytest.approx(2 * numel * 3 / 4)
    assert weights(found, "gather_s") == pytest.approx(4 * numel * 3 / 4)


def test_a_collective_starts_once_per_unit() -> None:
    """Three steps of a ring of four for each unit: a bucket, which may grow with the ranks, each of
    the parameters, or all of a block's."""
    graph = net().graph
    nbytes = graph.num_parameters() * 4
    for unit, per_rank, count in (
        ("bucket", 0, nbytes / 1000),
        ("bucket", 500, nbytes / 2000),
        ("parameter", 0, len(graph.parameters)),
        ("block", 0, sum(bool(block.parameters) for block in graph.blocks)),
    ):
        given_ = {"bucket_bytes": 1000, "bucket_bytes_per_rank": per_rank, "bucket_copies": 0}
        target = Target(name="odd", unit=unit, **given_)
        quiet, slow = (
            weights(pricer(talking(latency_s), dp=4, target=target), "gather_s")
            for latency_s in (0.0, 1.0)
        )
        assert slow - quiet == pytest.approx(3 * count)


def test_the_optimizer_and_sums_of_gradients_by_traffic() -> None:
    """A fused AdamW reads weight, gradient and two moments and writes all but the gradient: 7 × 4
    bytes; what others than ours do."""
    own = dataclasses.replace(EAGER, optimizer_passes=2.0)
    others, numel = dataclasses.replace(own, fused_optimizer=True), net().graph.num_parameters()
    for target, optimizer, moved in (
        (own, "adamw", 80), (own, "adamw_fused", 28), (others, "adamw", 28), (own, "sgd", 12),
    ):  # fmt: skip
        found = pricer(moving(), dp=2, cp=2, target=target, optimizer=optimizer)
        assert weights(found, "optimizer_s") == pytest.approx(2 * moved * numel)
        assert weights(found, "shard_s") == pytest.approx(2 * moved * numel / 4)
    # a CPU steps one parameter after the other, each rank all of them
    slow = dataclasses.replace(moving().device, kind="cpu", launch_overhead_s=1.0)
    device = dataclasses.replace(moving(), device=slow)
    for optimizer, operators in (("adamw", 9), ("adamw_fused", 0), ("sgd", 1)):
        found, quiet = (
            pricer(on, dp=2, target=own, optimizer=optimizer) for on in (device, moving())
        )
        for name in ("optimizer_s", "shard_s"):
            more = weights(found, name) - weights(quiet, name)
            assert more == pytest.approx(3 * operators * len(net().graph.parameters))
    # read the sum and the new gradient, write the sum; one micro-batch needs none of it
    target, numel = dataclasses.replace(EAGER, gradient_bytes=4), net().graph.num_parameters()
    for count, traffic in ((1, 0), (2, 12 * numel), (5, 12 * numel)):
        found = pricer(moving(), microbatches=count, target=target)
        assert weights(found, "backward_s") == pytest.approx(traffic)


def test_frozen_weights_are_gathered_by_zero_3_alone() -> None:
    """As trained ones are, and nothing else; a block's gradients travel without them."""
    own, trained = (pricer_of(net(frozen=frozen), talking(), dp=4) for frozen in (True, False))
    value = next(v for v, fqn in own.graph.parameters.items() if fqn == "down.weight")
    numel, gathered = own.graph.values[value].numel, trained.parameter_cost(value, R).zero3_gather_s
    wanted = Cost(**dict.fromkeys(GATHERED, gathered))
    assert own.parameter_cost(value, R) == wanted != Cost()
    assert own.parameters.frozen_bytes(value, R) == (4 * numel, 4 * numel / 4)
    by_block = dataclasses.replace(PLAIN, unit="block", gathered_unit="block")
    values, blocks = own.graph.values, own.graph.blocks
    for name, least in (("zero3_gather_s", 0), ("zero3_scatter_s", 1), ("scatter_s", 1)):
        quiet, slow = (
            weights(pricer_of(net(frozen=True), talking(late), dp=4, target=by_block), name)
            for late in (0.0, 1.0)
        )
        units = sum(any(values[v].requires_grad >= least for v in b.parameters) for b in blocks)
        assert slow - quiet == pytest.approx(3 * units), name


POWERS, STRIDES = st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4])


@given(STRIDES, POWERS, st.sampled_from([1, 2, 4, 8]), st.sampled_from([4, 8, 6]))
def test_the_data_axis_lies_where_its_ranks_do(tp: int, dp: int, spread: int, node: int) -> None:
    on = cluster(node, nodes=-(-tp * dp * spread // node) + 1)
    found = setting_on(on, dp=dp, tp=tp, spread=spread)
    assert found.group(size=dp, stride=tp) == group_for(on, size=dp, stride=tp * spread)
    assert found.group(size=tp, stride=1) == group_for(on, size=tp, stride=1)


@given(POWERS, POWERS, STRIDES, st.data())
def test_groups_across_both_axes(tp: int, dp: int, spread: int, data: st.DataObject) -> None:
    """Powers of two, so that all groups of a mesh lie alike."""
    stride = data.draw(st.sampled_from([s for s in (1, 2, 4, 8) if s < tp]))
    size = tp * dp // stride
    on = cluster(8, nodes=max(1, tp * dp * spread // 8))
    ranks = (np.arange(dp)[:, None] * tp * spread + np.arange(tp)).ravel()[::stride]
    nodes, counts = np.unique(ranks // 8, return_counts=True)
    found = setting_on(on, dp=dp, tp=tp, spread=spread).group(size=size, stride=stride)
    assert (found.size, found.nodes, found.per_node) == (size, len(nodes), counts.max())


def test_a_stage_between_others_reduces_over_the_network() -> None:
    """dp=2 on neighbours, or on the same place of two nodes."""
    on = cluster(4, nodes=2, flops=ENDLESS, bandwidth=1.0, node_bandwidth=1e-2)
    near, far = (weights(pricer(on, dp=2, spread=s), "reduce_s") for s in (1, 4))
    # four such groups share the node's NIC
    assert far == pytest.approx(near * 100 * 4)
