"""The price of activations in host memory, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.costmodel.operators import Setting
from meshwright.costmodel.stages.away import sent_by_block, sent_evenly
from meshwright.costmodel.stages.stage import stage_costs
from meshwright.costmodel.stages.sums import Sums
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import setting_on


def setting(part: float, *, slowdown: float = 0.0, kind: str = "cuda") -> Setting:
    """A link of 1 byte a second."""
    cluster = Cluster.from_catalog("dgx-a100")
    assert cluster.host is not None
    device = replace(cluster.device, overlap_slowdown=slowdown, kind=kind)
    host = replace(cluster.host, link_bandwidth=1.0)
    on = replace(cluster, device=device, host=host)
    return setting_on(on, precision="bf16", host_activations=part)


def four(**changes: float) -> Sums:
    found = Sums.zeros()
    given = {"saved_bytes": 12.0, "input_bytes": 4.0, "blocks": 4.0}
    for name, value in {**given, **changes}.items():
        setattr(found, name, np.float64(value))
    return found


def test_each_blocks_copies_lie_beside_the_next_one() -> None:
    moved, forward = np.array([5.0, 1.0, 3.0]), np.array([9.0, 2.0, 4.0])
    found = sent_by_block(moved, forward, 2 * forward, setting(1.0))
    assert found.nbytes == 9.0
    assert found.passing_bytes == 6.0  # of the first and the second
    assert found.forward_s == (5 - 2) + 0 + 3  # nothing lies beside the last one's
    assert found.backward_s == (5 - 4) + 0 + 3


def test_copies_slow_what_they_lie_beside_and_on_a_cpu_hide_behind_nothing() -> None:
    moved, passes = np.array([2.0, 0.0]), np.array([8.0, 8.0])
    slowed = sent_by_block(moved, passes, passes, setting(1.0, slowdown=0.25))
    assert slowed.forward_s == slowed.backward_s == 0.25 * 2
    found = sent_by_block(moved, passes, passes, setting(1.0, kind="cpu"))
    assert found.forward_s == found.backward_s == 2


@pytest.mark.parametrize(("part", "beside"), [(0.5, 0.5), (1.0, 0.75)])
def test_equal_blocks_are_those_of_a_search(part: float, beside: float) -> None:
    moved = np.array([4.0] * int(4 * part) + [0.0] * int(4 - 4 * part))
    one = np.full(4, 3.0)
    by_block = sent_by_block(moved, one, one, setting(part))
    evenly = sent_evenly(
        np.float64(16.0), np.float64(4.0), np.float64(12.0), np.float64(12.0), setting(part)
    )
    assert (evenly.nbytes, evenly.passing_bytes) == (by_block.nbytes, by_block.passing_bytes)
    assert evenly.forward_s == max(0.0, 16 * part - 12 * beside)
    assert evenly.forward_s <= by_block.forward_s


def test_a_stage_holds_less_and_its_host_what_it_sent() -> None:
    without, some, all_ = (stage_costs(four(), setting(part), "none") for part in (0, 0.5, 1))
    assert (without.activation_bytes, without.away_bytes) == (16, 0)
    assert (some.activation_bytes, some.away_bytes) == (8, 8)
    assert (all_.activation_bytes, all_.away_bytes) == (0, 16)
    # of half of them what comes back takes the place of what later blocks kept
    assert some.passing_bytes - without.passing_bytes == 0
    assert all_.passing_bytes - without.passing_bytes == 8
    assert all_.forward_s > some.forward_s > without.forward_s
    assert all_.forward_comm_s == all_.forward_s - without.forward_s


def test_nothing_in_host_memory_costs_nothing() -> None:
    own = stage_costs(four(), setting(0.0), "none")
    assert (own.away_bytes, own.forward_comm_s, own.backward_comm_s) == (0, 0, 0)
