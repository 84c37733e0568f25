"""Pools of nodes: what a link between them adds to collectives and messages, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.costmodel.kernels import collective_time, group_for, p2p_time, send_seconds
from meshwright.costmodel.targets import target_named
from meshwright.profiles.cluster import Cluster, Link
from meshwright.profiles.inputs import ClusterError

SLOW = Link(name="between sites", latency_s=0.02, bandwidth=1.25e8)
ONE = Cluster.from_catalog("h100-sxm", num_nodes=4)
TWO = replace(ONE, num_pools=2, pool_link=SLOW)
GB = 1e9


def test_a_ring_over_pools_waits_for_the_link_between_them() -> None:
    """All 32 ranks, one ring: 2 M (n-1)/n over the slow link, whose latency stands at two
    of the four borders between nodes."""
    group = group_for(TWO, size=32, stride=1)
    assert group.over_pools == 1
    gathering = collective_time("all_gather", GB, group, TWO)
    alone = collective_time("all_gather", GB, group_for(ONE, size=32, stride=1), ONE)
    inside = ONE.inter_link.latency_s
    latency_s = 27 * ONE.intra_link.latency_s + 4 * inside + 2 * (SLOW.latency_s - inside)
    expected = GB * 31 / 32 / SLOW.bandwidth + latency_s + ONE.device.launch_overhead_s
    assert gathering == pytest.approx(expected, rel=1e-12)
    assert gathering > 50 * alone


def test_groups_side_by_side_share_the_link() -> None:
    """Ranks r and r + 16: sixteen pairs, one over each other's bytes."""
    group = group_for(TWO, size=2, stride=16)
    assert (group.over_pools, group.concurrent) == (16, 8)
    seconds = collective_time("all_gather", GB, group, TWO)
    expected = 0.5 * GB * 16 / SLOW.bandwidth + SLOW.latency_s + ONE.device.launch_overhead_s
    assert seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("size", "stride"), [(8, 1), (16, 1), (2, 8), (4, 4)])
def test_groups_within_a_pool_are_priced_as_without_pools(size: int, stride: int) -> None:
    group = group_for(TWO, size=size, stride=stride)
    assert group == group_for(ONE, size=size, stride=stride)
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        assert collective_time(kind, GB, group, TWO) == collective_time(kind, GB, group, ONE)


def test_a_message_between_pools() -> None:
    target = target_named("eager")
    near, far = [*range(8, 16)], [*range(16, 24)]
    seconds = send_seconds(1e6, near, far, tp=1, cluster=TWO, target=target)
    launch_s = ONE.device.launch_overhead_s
    assert seconds == pytest.approx(8e6 / SLOW.bandwidth + SLOW.latency_s + launch_s, rel=1e-12)
    first = [*range(8)]
    assert send_seconds(1e6, first, near, tp=1, cluster=TWO, target=target) == send_seconds(
        1e6, first, near, tp=1, cluster=ONE, target=target
    )
    assert p2p_time(1e6, TWO, crosses_node=True) == p2p_time(1e6, ONE, crosses_node=True)


def test_pools_stay_legal_on_other_numbers_of_nodes() -> None:
    assert TWO.on_nodes(2) == replace(ONE, num_nodes=2)
    assert TWO.on_nodes(6) == replace(TWO, num_nodes=6, num_pools=3)
    assert TWO.on_nodes(3) == replace(ONE, num_nodes=3)
    assert ONE.on_nodes(8) == replace(ONE, num_nodes=8)


def test_clusters_without_pools_are_written_as_before() -> None:
    assert not {"num_pools", "pool_link"} & ONE.to_dict().keys()
    assert TWO.to_dict()["num_pools"] == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_pools": 3, "pool_link": SLOW}, "num_pools is 3, of 4 nodes"),
        ({"num_pools": 2}, "pool_link is missing"),
        ({"pool_link": SLOW}, "pool_link is given"),
    ],
)
def test_pools_that_are_none_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        replace(ONE, **changes)  # type: ignore[arg-type]
