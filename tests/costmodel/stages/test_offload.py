"""The price of optimizer states and activations in host memory, against sums by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.costmodel.memory import model_states, optimizer_named
from meshwright.costmodel.operators import Setting
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.stages.offload import (
    PINNED,
    host_bandwidth,
    host_costs,
    sent_by_block,
    sent_evenly,
)
from meshwright.costmodel.stages.stage import stage_costs
from meshwright.costmodel.stages.sums import Sums
from meshwright.costmodel.targets import EAGER
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import changed, setting_on, sums_of

NUMEL = 1e9
PER_NODE = 8
ON = Cluster.from_catalog("dgx-a100")
HOST: Any = ON.host


def setting(zero: int, part: float, microbatches: int = 1) -> Setting:
    given = {"microbatches": microbatches, "precision": "bf16", "zero": zero}
    given |= {"optimizer": "adamw_fused"}
    return setting_on(ON, dp=8, states=part, **given)


def sums(**changes: float) -> Sums:
    return sums_of(**{"parameters": NUMEL, "shard_parameters": NUMEL / 8, **changes})


@pytest.mark.parametrize(("zero", "numel"), [(0, NUMEL), (1, NUMEL / 8), (3, NUMEL / 8)])
def test_bytes_and_seconds_are_those_of_the_ranks_own_part(zero: int, numel: float) -> None:
    found = host_costs(sums(), setting(zero, 0.5))
    assert found.nbytes == pytest.approx(0.5 * numel * (PINNED * (4 + 4) + 8))
    assert found.fetched_s == pytest.approx(0.5 * numel * 4 / HOST.link_bandwidth)
    bandwidth = HOST.memory_bandwidth / PER_NODE
    assert found.added_s == pytest.approx(0.5 * numel * 3 * 4 / bandwidth)
    step = 0.5 * numel * optimizer_named("adamw_fused").moved
    assert step == 0.5 * numel * 28
    assert found.step_s == pytest.approx(step / bandwidth)


def test_ranks_share_their_hosts_memory_and_the_link_with_the_network() -> None:
    """Eight ranks at 55.6 GB/s would take more than the 253 that the node's cores reach; between
    nodes the card takes half of a link."""
    for nodes, link in ((1, 55.6e9), (2, 27.8e9)):
        on = Cluster.from_catalog("dgx-h100", num_nodes=nodes)
        own = setting_on(on, dp=8, states=1.0, microbatches=1, precision="bf16", zero=1)
        assert host_bandwidth(own, "to_host") == pytest.approx(min(link, 253e9 / 8))
        assert host_bandwidth(own, "optimizer_step") == pytest.approx(253e9)


@pytest.mark.parametrize(("zero", "numel"), [(0, NUMEL), (1, NUMEL / 8)])
def test_files_are_read_and_written_once(zero: int, numel: float) -> None:
    beside, own = setting(zero, 1.0), changed(setting(zero, 1.0), files=0.25)
    found, without = host_costs(sums(), own), host_costs(sums(), beside)
    assert found.flash_bytes == pytest.approx(0.25 * numel * (4 + 8))
    pinned = PINNED - 1  # of weights beyond what is asked for
    assert found.nbytes == pytest.approx(without.nbytes - found.flash_bytes - pinned * numel)
    read, written = 0.25 * numel * (4 + 4 + 8), 0.25 * numel * (4 + 8)  # a forward reads weights
    wanted = read / HOST.nvme_read_bandwidth + written / HOST.nvme_write_bandwidth
    assert found.step_s - without.step_s == pytest.approx(wanted * PER_NODE)
    assert found.fetched_s == without.fetched_s
    assert stage_costs(sums(), own, "none").flash_bytes == found.flash_bytes
    assert without.flash_bytes == 0


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_devices_let_go_of_what_lies_in_host_memory(zero: int, microbatches: int) -> None:
    """Masters and moments; gradients of one micro-batch, of several where ZeRO-2 scatters them."""
    none, some, all_ = (
        float(stage_costs(sums(), setting(zero, part, microbatches), "none").static_bytes)
        for part in (0.0, 0.25, 1.0)
    )
    assert stage_costs(sums(), setting(zero, 0.0), "none").host_bytes == 0
    sent = microbatches == 1 or zero >= 2
    gradients = 4 * sent  # of a rank's shards
    freed = NUMEL / (8 if zero else 1) * (4 + 8 + gradients)
    # those of two buckets on their way are there all the time
    assert (none - all_, none - some) == pytest.approx((freed, freed / 4), rel=0.02)
    optimizer = optimizer_named("adamw")
    states: Any = {"weight_bytes": 2, "dp": 8, "optimizer": optimizer, "away": (1.0, 1.0)}
    assert all_ >= model_states(NUMEL, sharing=Sharing(zero=zero), **states).nbytes


def test_gradients_pass_beside_backwards_once_or_in_each_microbatch() -> None:
    def costs(zero: int, part: float, m: int) -> tuple[float, float]:
        own = stage_costs(sums(forward_s=9.0, backward_s=9.0), setting(zero, part, m), "none")
        return float(own.forward_s + own.backward_s), float(own.reduce_s + own.optimizer_s)

    for zero in range(4):
        at = host_costs(sums(), setting(zero, 1.0))
        pairs = zip(costs(zero, 1.0, 4), costs(zero, 0.0, 4), strict=True)
        passes, once = (more - less for more, less in pairs)
        if zero < 2:  # summed in the last backward, 9 s long: the link is hidden behind it
            assert passes == 0
            assert at.step_s < once < at.step_s + at.returned_s + at.fetched_s
        elif zero == 2:
            assert at.added_s < passes < at.added_s + at.returned_s
            assert once < at.step_s + at.fetched_s
        else:
            assert passes >= at.returned_s + at.added_s
            assert once == pytest.approx(at.step_s)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_on_a_cpu_all_that_passes_is_waited_for(zero: int, microbatches: int) -> None:
    """By way: in each forward, each backward, once a step."""
    own = changed(setting(zero, 1.0, microbatches), weights=0.5 * (zero < 3))
    cpu = replace(own.cluster, device=replace(own.cluster.device, kind="cpu"))
    own = changed(own, cluster=cpu, target=replace(EAGER, copies_weights=False))
    h, costs = host_costs(sums(), own), stage_costs(sums(), own, "none")
    several = microbatches > 1
    forward, backward, once = {
        0: (h.weights_s, h.weights_s, h.fetched_s + h.kept_s + h.returned_s),
        1: (h.weights_s, h.weights_s, h.fetched_s + h.kept_s + h.returned_s),
        2: (h.weights_s, h.weights_s + h.returned_s + several * h.added_s, h.fetched_s + h.kept_s),
        3: (h.fetched_s, h.fetched_s + h.returned_s + several * h.added_s, 0),
    }[zero]
    assert float(costs.forward_s) == pytest.approx(float(forward))
    assert float(costs.backward_s) == pytest.approx(float(backward))
    assert float(costs.reduce_s) == pytest.approx(float(once))


def test_steps_that_are_validated_copy_what_they_write() -> None:
    """28 bytes a parameter are read and written, and 12 copied; which are held."""
    plain, checked = (
        stage_costs(sums(optimizer_s=2.0), changed(setting(0, 0.0), stepping=stepping), "none")
        for stepping in ("at_end", "validated")
    )
    assert float(checked.optimizer_s) == pytest.approx(2 * (1 + 2 * 12 / 28))
    assert float(checked.static_bytes - plain.static_bytes) == pytest.approx(12 * NUMEL)


def test_measured_copies_take_the_place_of_the_catalogs() -> None:
    class Measured:
        def host_bandwidth(self, kind: str, ranks: int = 1) -> float | None:
            assert ranks == (PER_NODE if "flash" in kind else 1)
            return {"to_device": 1e9, "to_host": 2e9, "from_flash": 3e9, "to_flash": 4e9}.get(kind)

    known: Any = Measured()
    own = changed(setting(0, 1.0), profile=known)
    found = host_costs(sums(), own)
    assert found.fetched_s == pytest.approx(NUMEL * 4 / 1e9)
    assert found.returned_s == pytest.approx(NUMEL * 4 / 2e9)
    filed = host_costs(sums(), changed(own, files=1.0))
    nodes = own.cluster.devices_per_node  # ranks that share the flash
    of_files = nodes * NUMEL * (16 / 3e9 + 12 / 4e9)
    assert filed.step_s - found.step_s == pytest.approx(of_files)


@pytest.mark.parametrize("zero", [0, 2])
def test_weights_in_files_are_pinned_on_their_way(zero: int) -> None:
    own = changed(setting(zero, 1.0), files=0.25)
    found, without = (
        host_costs(sums(largest_parameters=largest), own) for largest in (NUMEL / 100, 0.0)
    )
    part = PINNED / (8 if zero else 1)
    assert found.nbytes - without.nbytes == pytest.approx(part * 8 * NUMEL / 100)
    most = host_costs(sums(largest_parameters=NUMEL), own)
    assert most.nbytes - without.nbytes == pytest.approx(part * NUMEL)


@pytest.mark.parametrize(("precision", "copied"), [("fp32", 4 * 0.25), ("bf16", 2 * 0.5)])
def test_weights_in_files_are_read_once_a_step_and_kept(precision: str, copied: float) -> None:
    own = changed(setting(0, 1.0, 4), precision=precision, weights=0.5, files=0.25)
    found = host_costs(sums(), own)
    assert found.flash_bytes == pytest.approx(0.25 * 12 * NUMEL)
    assert found.nbytes == pytest.approx(
        (8 + PINNED * 8 - 0.25 * (8 + 4 * PINNED) + PINNED * copied) * NUMEL
    )
    assert found.kept_s == pytest.approx(copied * NUMEL / HOST.link_bandwidth)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_pass_in_the_compute_precision(precision: str) -> None:
    own = changed(setting(0, 1.0, 4), precision=precision, weights=0.5)
    found, alone = host_costs(sums(), own), host_costs(sums(), changed(own, weights=0.0))
    nbytes = {"fp32": 4, "bf16": 2}[precision] * 0.5 * NUMEL
    copied = nbytes * (precision != "fp32")  # else it is what the optimizer steps
    assert found.weights_s == pytest.approx(nbytes / HOST.link_bandwidth)
    assert found.kept_s == pytest.approx(copied / HOST.link_bandwidth)
    assert found.nbytes - alone.nbytes == pytest.approx(PINNED * copied)
    held = [
        float(stage_costs(sums(largest_parameters=NUMEL / 50), each, "none").static_bytes)
        for each in (changed(own, weights=0.0), own)
    ]
    assert held[0] - held[1] == pytest.approx(nbytes * (1 - 2 / 50 / 0.5))


def moving(part: float, *, slowdown: float = 0.0, kind: str = "cuda") -> Setting:
    """A link of 1 byte a second."""
    device = replace(ON.device, overlap_slowdown=slowdown, kind=kind)
    on = replace(ON, device=device, host=replace(HOST, link_bandwidth=1.0))
    return setting_on(on, precision="bf16", activations=part)


def four(**changes: float) -> Sums:
    return sums_of(**{"saved_bytes": 12.0, "input_bytes": 4.0, "blocks": 4.0, **changes})


def test_each_blocks_copies_lie_beside_the_next_one_and_slow_it() -> None:
    moved, forward = np.array([5.0, 1.0, 3.0]), np.array([9.0, 2.0, 4.0])
    found = sent_by_block(moved, forward, 2 * forward, moving(1.0))
    assert found.nbytes == 9.0
    assert found.passing_bytes == 6.0  # of the first and the second
    assert found.forward_s == (5 - 2) + 0 + 3  # nothing lies beside the last one's
    assert found.backward_s == (5 - 4) + 0 + 3
    moved, passes = np.array([2.0, 0.0]), np.array([8.0, 8.0])
    slowed = sent_by_block(moved, passes, passes, moving(1.0, slowdown=0.25))
    assert slowed.forward_s == slowed.backward_s == 0.25 * 2
    found = sent_by_block(moved, passes, passes, moving(1.0, kind="cpu"))
    assert found.forward_s == found.backward_s == 2


@pytest.mark.parametrize(("part", "beside"), [(0.5, 0.5), (1.0, 0.75)])
def test_equal_blocks_are_those_of_a_search(part: float, beside: float) -> None:
    moved = np.array([4.0] * int(4 * part) + [0.0] * int(4 - 4 * part))
    one = np.full(4, 3.0)
    by_block = sent_by_block(moved, one, one, moving(part))
    sizes = (np.float64(x) for x in (16.0, 4.0, 12.0, 12.0))
    evenly = sent_evenly(*sizes, moving(part))
    assert (evenly.nbytes, evenly.passing_bytes) == (by_block.nbytes, by_block.passing_bytes)
    assert evenly.forward_s == max(0.0, 16 * part - 12 * beside)
    assert evenly.forward_s <= by_block.forward_s


def test_a_stage_holds_less_and_its_host_what_it_sent() -> None:
    without, some, all_ = (stage_costs(four(), moving(part), "none") for part in (0, 0.5, 1))
    assert (without.activation_bytes, without.away_bytes) == (16, 0)
    assert (without.forward_comm_s, without.backward_comm_s) == (0, 0)
    assert (some.activation_bytes, some.away_bytes) == (8, 8 * PINNED)
    assert (all_.activation_bytes, all_.away_bytes) == (0, 16 * PINNED)
    # of half of them what comes back takes the place of what later blocks kept
    assert some.passing_bytes - without.passing_bytes == 0
    assert all_.passing_bytes - without.passing_bytes == 8
    assert all_.forward_s > some.forward_s > without.forward_s
    assert all_.forward_comm_s == all_.forward_s - without.forward_s
