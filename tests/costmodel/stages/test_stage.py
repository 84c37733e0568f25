"""From sums over blocks to a stage: what is hidden behind what, how often it is paid, what is held.

The sums are made up here, so that every expectation is arithmetic on them.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.intervals import slowest_of
from meshwright.costmodel.memory import model_states, optimizer_named
from meshwright.costmodel.operators import Cost, Setting
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.stages.stage import StageCosts, of_one, stage_costs
from meshwright.costmodel.stages.sums import COLUMNS, FIRST, GROWN, LATER, MAXIMA, SECOND, Sums
from meshwright.costmodel.target import Target
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import changed, cluster, setting_on, sums_of

SECONDS = st.floats(0, 100)
PARTS = st.floats(0, 1)
PLAIN = Target(name="plain")  # which hides nothing
HIDING = Target(name="hiding", overlap_gradients=True, overlap_parameters=True)


def stage(
    *,
    zero: int = 0,
    recompute: str = "none",
    target: Target = PLAIN,
    slowdown: float = 0.0,
    kind: str = "cuda",
    precision: str = "fp32",
    **sums: Any,
) -> StageCosts[float]:
    """A stage of these sums on four data-parallel ranks, others 0."""
    on = cluster(4)
    device = dataclasses.replace(on.device, overlap_slowdown=slowdown, kind=kind)
    own = four_ranks(precision=precision, zero=zero, target=target)
    setting = changed(own, cluster=dataclasses.replace(on, device=device))
    return of_one(stage_costs(sums_of(**sums), setting, recompute))


def four_ranks(nodes: int = 1, **given: Any) -> Setting:
    fields: dict[str, Any] = {"dp": 4, "microbatches": 3, "target": PLAIN, **given}
    return setting_on(cluster(4, nodes=nodes), **fields)


@given(SECONDS, SECONDS, PARTS, PARTS)
def test_reduction_beside_the_backward(
    compute: float, comm: float, edge: float, slowdown: float
) -> None:
    """The last block's gradients come when nothing is left to compute; while others pass, compute
    is slower. What is not overlapped comes after."""
    sums = {"backward_s": compute, "parameters": 1000, "largest_parameters": 1000 * edge}
    body = comm * (1 - edge)
    together = max(compute + slowdown * min(compute, body), body) + comm * edge
    found = stage(**sums, reduce_s=comm, target=HIDING, slowdown=slowdown)
    assert found.backward_s == pytest.approx(compute)
    assert found.reduce_s == pytest.approx(together - compute, rel=1e-9, abs=1e-9)
    assert stage(**sums, reduce_s=comm, slowdown=slowdown).reduce_s == pytest.approx(comm)
    assert stage(**sums, scatter_s=comm, zero=1).reduce_s == pytest.approx(comm)


def test_a_target_hides_a_part_of_zero_3s_and_of_exchanges() -> None:
    """6 of 8 s of a gather pass beside 10 of forward at 20 %; a backward's gather and scatter."""
    target = dataclasses.replace(HIDING, hidden_zero3=0.75)
    sums = {"forward_s": 10, "backward_s": 20, "zero3_gather_s": 8, "zero3_scatter_s": 4}
    sums |= {"zero3_again_s": 8}
    found = stage(**sums, zero=3, target=target, slowdown=0.2)
    assert found.forward_s == pytest.approx(10 + 0.2 * 6 + 2)
    assert found.backward_s == pytest.approx(20 + 0.2 * 9 + 3)
    target = dataclasses.replace(PLAIN, overlap_experts=0.5)
    sums = {"forward_s": 10, "forward_exchange_s": 4, "backward_s": 9, "backward_exchange_s": 7}
    found = stage(**sums, target=target)
    assert (found.forward_s, found.backward_s) == pytest.approx((10 - 2, 9 - 2))  # 2 s compute


def test_a_stage_is_as_slow_as_the_slowest_node_of_its_cluster() -> None:
    one, two = (
        of_one(stage_costs(sums_of(forward_s=3, backward_s=5), setting, "none"))
        for setting in (four_ranks(nodes=nodes) for nodes in (1, 2))
    )
    assert (one.forward_s, one.backward_s) == pytest.approx((3, 5))
    assert two.forward_s / one.forward_s == two.backward_s / one.backward_s == slowest_of(2) > 1


def test_secondary_shards_and_segments_gather_once_more() -> None:
    """Beside the shards, 1/2 of the weights in the compute precision."""
    setting = four_ranks(zero=3, precision="bf16")
    sums = sums_of(
        zero3_gather_s=8, zero3_again_s=7, zero3_secondary_s=2, parameters=1000,
        shard_parameters=250,
    )  # fmt: skip
    plain, near = (of_one(stage_costs(sums, s, "none")) for s in (setting, changed(setting, hpz=2)))
    assert (plain.forward_comm_s, plain.backward_comm_s) == (8, 7)
    assert (near.forward_comm_s, near.backward_comm_s) == (8, 2)
    assert near.static_bytes - plain.static_bytes == pytest.approx(1000 * 2 / 2)
    sums = sums_of(
        forward_s=6, forward_comm_s=1, forward_host_s=2, backward_s=12, saved_bytes=80,
        input_bytes=16, blocks=4, zero3_gather_s=3,
    )  # fmt: skip
    found = sums.recompute("none/2")
    assert (found.seconds, found.comm_s, found.host_s) == (6, 1, 2)
    assert found.freed_bytes == 80 + 16 * (1 - 1 / 2)
    assert found.excess[LATER] == (80 + 16) * 2 / 4
    assert found.gather_s == 3 * (1 - 1 / 2)


def test_scaled_seconds_are_those_of_their_kind() -> None:
    """Compute twice, communication of passes three times, the data axis' five times."""
    sums = sums_of(
        forward_s=10, forward_comm_s=4, backward_s=20, backward_comm_s=6, forward_host_s=1,
        weight_s=7, optimizer_s=8, reduce_s=9, zero3_gather_s=2, saved_bytes=100,
        full=(5, 2, 3, 40),
    )  # fmt: skip
    found = sums.scaled(compute=2, communication=3, data_axis=5)
    got = {name: float(getattr(found, name)) for name in (
        "forward_s", "forward_comm_s", "backward_s", "forward_host_s", "weight_s", "optimizer_s",
        "reduce_s", "zero3_gather_s", "saved_bytes",
    )}  # fmt: skip
    assert [*got.values()] == [2 * 6 + 3 * 4, 12, 2 * 14 + 3 * 6, 2, 14, 16, 45, 10, 100]
    again = found.recompute("full")
    assert (again.seconds, again.comm_s, again.host_s, again.freed_bytes) == (12, 6, 6, 40)


def test_spans_are_sums_and_maxima_of_their_blocks() -> None:
    blocks = Sums(np.random.default_rng(1).random((5, COLUMNS)))
    starts, stops = np.array([0, 1, 2, 4]), np.array([5, 3, 3, 5])
    found = blocks.spans(starts, stops)
    for run, start, stop in zip(found.array, starts, stops, strict=True):
        own = blocks.array[start:stop]
        np.testing.assert_allclose(run[:-MAXIMA], own[:, :-MAXIMA].sum(axis=0))
        following = functools.reduce(Sums.then, map(Sums, own))
        np.testing.assert_allclose(following.array, run)
        np.testing.assert_allclose(blocks[start:stop].joined().array, run)
    times, less = blocks.times(3), blocks - blocks
    np.testing.assert_allclose(times.array[:, :-MAXIMA], 3 * blocks.array[:, :-MAXIMA])
    assert not less.array[:, :-MAXIMA].any()
    np.testing.assert_array_equal(less.excess, blocks.excess)
    assert (less.largest_numel == blocks.largest_numel).all() and not less.first_gradients.any()
    for k, one in enumerate(blocks.array):
        thrice = functools.reduce(Sums.then, [Sums(one)] * 3)
        np.testing.assert_allclose(times.array[k], thrice.array)
    part = Sums.shared_out([blocks[0]] * 2, np.array([1, 4]))
    np.testing.assert_allclose(part.array[1, :-MAXIMA], blocks.array[0, :-MAXIMA] / 4)


def test_a_backward_lets_go_of_what_was_kept_but_for_what_it_leaves() -> None:
    """100 and 20 bytes behind a block whose highest point is 1000 above its own: 5 parameters leave
    gradients in fp32 where those stay, a first half the 30 that it puts off."""
    behind = sums_of(saved_bytes=100, input_bytes=20, parameters=5, put_off_bytes=30, blocks=1)
    before = sums_of(blocks=1)
    before.excess = np.full_like(before.excess, 1000.0)
    found = before.then(behind).excess[:, 0]
    kinds = (LATER, GROWN, FIRST, SECOND)
    assert [found[kind] for kind in kinds] == [1000 - 120, 1000 - 100, 1000 - 90, 1000]


def test_blocks_with_policies_are_each_with_its_own() -> None:
    blocks = Sums(np.random.default_rng(2).random((4, COLUMNS)))
    policies = ["full", "none", "full", "pointwise+regather"]
    found = blocks.with_policies(policies)
    for own, block, policy in zip(found.array, blocks.array, policies, strict=True):
        np.testing.assert_array_equal(own, Sums(block).with_policy(policy).array)
    together = blocks.recompute("full").together()
    each = [Sums(block).recompute("full") for block in blocks.array]
    added = functools.reduce(lambda one, other: one + other, each)
    for name in (field.name for field in dataclasses.fields(added)):
        np.testing.assert_allclose(getattr(together, name), getattr(added, name))


ONCE = {
    "forward_s": 10.0, "backward_s": 20.0, "reduce_s": 4.0, "scatter_s": 2.5, "gather_s": 1.5,
    "zero3_scatter_s": 2.5, "zero3_gather_s": 1.5, "zero3_again_s": 1.5, "optimizer_s": 8.0,
    "shard_s": 2.0, "parameters": 1000.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("zero", "forward_s", "backward_s", "reduce_s", "optimizer_s"),
    [
        (0, 10, 20, 4, 8),
        (1, 10, 20, 4, 2),  # scattered once, gathered once
        (2, 10, 22.5, 1.5, 2),  # scattered after every micro-batch, gathered once
        (3, 11.5, 24, 0, 2),  # gathered for every forward and every backward, then scattered
    ],
)
def test_what_is_paid_per_micro_batch_and_what_once(
    zero: int, forward_s: float, backward_s: float, reduce_s: float, optimizer_s: float
) -> None:
    found = stage(**ONCE, zero=zero)
    slow = {**ONCE, "zero3_scatter_s": 25.0, "zero3_gather_s": 15.0}  # units of ZeRO-3 alone
    assert (stage(**slow, zero=zero) == found) == (zero < 3)
    got = (found.forward_s, found.backward_s, found.reduce_s, found.optimizer_s)
    assert got == pytest.approx((forward_s, backward_s, reduce_s, optimizer_s))
    assert found.forward_comm_s == pytest.approx(forward_s - 10)
    assert found.backward_comm_s == pytest.approx(backward_s - 20)
    once = (reduce_s + optimizer_s) / 3
    assert found.amortised_s(3) == pytest.approx(forward_s + backward_s + once)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_hidden_behind_enough_compute_only_the_edge_is_left(zero: int) -> None:
    """Of ZeRO-3 it is the largest block's part of all weights, frozen ones, too."""
    sums = {**ONCE, "largest_parameters": 100, "largest_gathered": 400, "frozen_parameters": 3000}
    found = stage(**sums, zero=zero, target=HIDING)
    bare = {
        0: (10, 20, 0.4), 1: (10, 20, 0.4), 2: (10, 20.25, 0.15), 3: (10.15, 20.4, 0),
    }[zero]  # fmt: skip
    assert (found.forward_s, found.backward_s, found.reduce_s) == pytest.approx(bare)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_replicas_of_shards_are_reduced_once_per_step(zero: int) -> None:
    """Not once per micro-batch, and behind the last backward like what is scattered in it, unless
    the target does not hide them."""
    late = dataclasses.replace(HIDING, overlap_replicas=(3,))
    sums = {**ONCE, "largest_parameters": 100, "largest_gathered": 100}
    for target, bare in ((PLAIN, 7), (HIDING, 0.7), (late, 0.7 if zero == 3 else 7)):
        alone = stage(**sums, zero=zero, target=target)
        replicas = {"zero3_replicate_s" if zero == 3 else "replicate_s": 7}
        both = stage(**sums, **replicas, zero=zero, target=target)
        assert (both.forward_s, both.backward_s) == (alone.forward_s, alone.backward_s)
        assert both.reduce_s - alone.reduce_s == pytest.approx(bare)
    assert stage(**ONCE, replicate_s=7).reduce_s == stage(**ONCE).reduce_s


@pytest.mark.parametrize(
    ("zero", "precision", "forward", "backward", "once"),
    [(0, "bf16", 0, 0, 0), (1, "bf16", 0, 0, 1), (1, "fp32", 0, 0, 0), (3, "fp32", 1, 1, 0)],
)
def test_gathered_weights_are_copied_where_the_target_does_so(
    zero: int, precision: str, forward: int, backward: int, once: int
) -> None:
    """Read and written: for every use of ZeRO-3's, else once per step, if they are 16-bit."""
    sums: dict[str, Any] = {"parameters": 1e9, "zero": zero, "precision": precision}
    copying = dataclasses.replace(PLAIN, copies_weights=True)
    found, bare = stage(**sums, target=copying), stage(**sums)
    device = cluster(4).device
    nbytes = 2 * (4 if precision == "fp32" else 2) * 1e9
    copy_s = nbytes / (device.memory_bandwidth * device.memory_efficiency(nbytes))
    wanted = {"forward_s": forward, "backward_s": backward, "reduce_s": once}
    for name, count in wanted.items():
        assert getattr(found, name) - getattr(bare, name) == pytest.approx(count * copy_s)


@pytest.mark.parametrize(
    ("mesh", "count"),
    [
        ({"dp": 8}, 2),  # the world and the data axis
        ({"dp": 4, "tp": 2}, 3),
        ({"dp": 8, "zero": 3, "dp_shard": 4}, 4),  # with its shards and their replicas
        ({"dp": 8, "ep": 4}, 4),  # with the exchange, and who holds the same experts
        ({"dp": 2, "tp": 2}, 4),  # half of the cluster: a pipeline of two
        ({"dp": 2}, 4),  # and of four, with a neighbour on either side
    ],
    ids=str,
)
def test_communicators_of_a_rank_take_memory(mesh: dict[str, int], count: int) -> None:
    on = cluster(8)
    device = dataclasses.replace(on.device, communicator_bytes=1000)
    setting = setting_on(dataclasses.replace(on, device=device), **mesh)
    assert setting.communicators == count
    costs = of_one(stage_costs(sums_of(), setting, "none"))
    assert costs.passing_bytes == costs.static_bytes == 1000 * (count - 2)


def test_a_stage_takes_the_longer_of_device_and_host_and_hides_behind_either() -> None:
    sums = {"forward_s": 2.0, "backward_s": 9.0, "forward_host_s": 3.0, "backward_host_s": 4.0}
    found = stage(**sums)
    assert found.forward_s == pytest.approx((2**8 + 3**8) ** 0.125)
    assert found.backward_s == pytest.approx((9**8 + 4**8) ** 0.125)
    again = stage(**sums, recompute="full", full=(2, 0, 8, 0))
    assert again.forward_s == found.forward_s
    assert again.backward_s == pytest.approx((11**8 + 12**8) ** 0.125)
    # A backward that waits for its host leaves as much room beside it
    found = stage(backward_s=1, backward_host_s=10, reduce_s=6, target=HIDING)
    assert (found.backward_s, found.reduce_s) == (pytest.approx(10, rel=1e-4), 0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_cpu_is_its_own_host_and_hides_nothing(zero: int) -> None:
    found = stage(forward_s=2, backward_s=9, forward_host_s=3, backward_host_s=4, kind="cpu")
    assert (found.forward_s, found.backward_s) == (5, 13)
    plain, hiding = (stage(**ONCE, zero=zero, kind="cpu", target=t) for t in (PLAIN, HIDING))
    assert plain == hiding


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recompute_repeats_and_frees_what_its_policy_says(policy: str) -> None:
    sums: dict[str, Any] = {
        "forward_s": 5.0, "backward_s": 10.0, "saved_bytes": 100.0, "input_bytes": 7.0,
        "passing": 11.0, policy: (2.0, 0.0, 0.0, 60.0),
    }  # fmt: skip
    keep, again = stage(**sums), stage(**sums, recompute=policy)
    assert (keep.backward_s, keep.activation_bytes) == (10, 107)
    assert (again.forward_s, again.backward_s, again.activation_bytes) == (5, 12, 47)
    # a block holds what it freed, in its turn
    assert (keep.passing_bytes, again.passing_bytes) == (11, 71)


def test_blocks_may_each_have_their_policy() -> None:
    first = sums_of(full=(3, 1, 5, 50), selective=(1, 0, 2, 20))
    second = sums_of(full=(4, 2, 6, 60), selective=(2, 0, 4, 30))
    mixed = first.recompute("full") + second.recompute("selective")
    wanted = {"seconds": 5, "comm_s": 1, "host_s": 9, "freed_bytes": 80}
    assert {name: float(getattr(mixed, name)) for name in wanted} == wanted
    sums = first.then(second)
    for policy in ("none", "selective", "full"):
        added, whole = first.recompute(policy) + second.recompute(policy), sums.recompute(policy)
        assert all(getattr(added, name) == getattr(whole, name) for name in wanted)
    # the second block is at its highest with all kept, the first one with its own alone
    kept = sums_of(saved_bytes=30, passing=100).then(sums_of(saved_bytes=70, passing=20))
    assert kept.recompute("none").excess[LATER] == max(20, 100 - 70)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_shared_by_those_who_hold_them(zero: int) -> None:
    """`shard_parameters` is the sum of parameters over their holders: experts, held by fewer ranks,
    are divided among fewer. Frozen ones are whole but under ZeRO-3."""
    target = dataclasses.replace(PLAIN, bucket_copies=0)
    sums = {"parameters": 1000, "shard_parameters": 1000 / 2}
    frozen = {"frozen_bytes": 64 if zero < 3 else 1e9, "frozen_shard_bytes": 1e9}
    frozen |= {"frozen_shard_bytes": 64} if zero == 3 else {}
    found = stage(zero=zero, target=target, precision="bf16", **sums, **frozen)
    optimizer = optimizer_named("adamw")
    given: Any = {"weight_bytes": 2, "dp": 2, "optimizer": optimizer, "target": target}
    states = model_states(1000, sharing=Sharing(zero=zero), **given)
    assert found.static_bytes == pytest.approx(states.nbytes + 64)


def test_seconds_are_named_as_in_the_cost_and_arrays_priced_one_by_one() -> None:
    numbers = {name: float(k) for k, name in enumerate(Cost._fields, 1)}
    found = Sums.zeros().costing(Cost(**numbers), {})
    assert {name: float(getattr(found, name)) for name in Cost._fields} == numbers
    rng = np.random.default_rng(0)
    sums = Sums(rng.random((3, 4, COLUMNS)))
    setting = four_ranks(precision="bf16", zero=2, target=HIDING)
    whole = stage_costs(sums, setting, "full")
    for i, j in np.ndindex(3, 4):
        one = stage_costs(sums[i, j], setting, "full")
        for name, value in dataclasses.asdict(one).items():
            assert np.asarray(getattr(whole, name))[i, j] == pytest.approx(value), name


@pytest.mark.parametrize(("kept", "beside"), [(0.0, 4.0), (1.0, 4.0), (9.0, 0.0)])
def test_an_optimizers_step_holds_what_it_makes(kept: float, beside: float) -> None:
    """Beside the states, when no micro-batch is in flight; a fused kernel makes nothing."""
    on = Cluster.from_catalog("h100-sxm")
    found, fused = (
        of_one(stage_costs(sums_of(parameters=1e9, saved_bytes=kept * 1e9), own, "none"))
        for own in (setting_on(on, optimizer=name) for name in ("adamw", "adamw_fused"))
    )
    assert found.static_bytes - fused.static_bytes == beside * 1e9
