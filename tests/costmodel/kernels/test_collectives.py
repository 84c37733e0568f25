"""Collectives: bytes against simulated rings, groups against enumeration, seconds in closed form
and against published measurements; sends between stages."""

import dataclasses
import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.kernels.collectives import (
    COLLECTIVES,
    GLOO_ISSUES,
    Group,
    bytes_sent,
    collective_time,
    group_for,
    p2p_time,
    routes,
)
from meshwright.costmodel.kernels.transfers import crosses_node, packed, send_seconds
from meshwright.costmodel.targets import EAGER
from meshwright.profiles.cluster import Cluster, Link
from meshwright.profiles.hardware.curve import Curve
from tests.helpers.planning import cluster as cluster_of

KINDS = st.sampled_from(COLLECTIVES)


def _cluster(
    num_nodes: int = 4, devices_per_node: int = 8, backend: str = "gloo", *, launch_s: float = 0.0,
    inter: Any = None, **intra: Any,
) -> Cluster:  # fmt: skip
    """Links with round numbers: 10 s and 100 B/s inside a node, 1000 s and 160 B/s between."""
    base = Cluster.from_catalog("l4")
    return dataclasses.replace(
        base,
        device=dataclasses.replace(base.device, launch_overhead_s=launch_s),
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        intra_link=Link(name="intra", latency_s=10.0, bandwidth=100.0, **intra),
        inter_link=Link(name="inter", latency_s=1000.0, bandwidth=160.0, **(inter or {})),
        backend=backend,
    )


SWITCHED: Any = {"backend": "nccl", "switch_bandwidth": 90.0, "switch_latency_s": 4.0}


def _tree(group: Group) -> Any:
    _ring, tree = routes("all_reduce", group, _cluster(backend="nccl"))
    return tree


CLUSTERS = (
    _cluster(backend="nccl"),
    _cluster(backend="gloo"),
    *(Cluster.from_catalog(name) for name in ("p5.48xlarge", "dgx-1-v100", "gcp-a3-megagpu")),
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    per_node = draw(st.integers(1, 8))
    nodes = draw(st.integers(1, 16))
    concurrent = draw(st.integers(1, 8)) if nodes > 1 else 1
    return Group(size=per_node * nodes, per_node=per_node, concurrent=concurrent)


class TestBytes:
    @pytest.mark.parametrize("size", [2, 3, 8])
    def test_by_counting_shards(self, size: int) -> None:
        """Of `size` shards of 840 bytes a ring passes on all but one; an all-reduce goes round
        twice; of an all-to-all's blocks each rank sends others what is not its own."""
        shard, blocks = 840.0, [(a, b) for a in range(size) for b in range(size)]
        sent = Counter(source for source, target in blocks if source != target)
        passed_on = (size - 1) * shard
        for kind, nbytes, expected in (
            ("all_gather", size * shard, passed_on),
            ("reduce_scatter", size * shard, passed_on),
            ("all_reduce", size * shard, 2 * passed_on),
            ("all_to_all", 5.0 * len(blocks), 5.0 * sent[0]),
            ("broadcast", 100.0, 100.0),
        ):
            assert bytes_sent(kind, nbytes, size) == pytest.approx(expected, rel=1e-12), kind

    def test_one_rank_sends_nothing_and_an_unknown_kind_is_refused(self) -> None:
        for kind in COLLECTIVES:
            assert bytes_sent(kind, 1e9, 1) == 0.0
            assert collective_time(kind, 1e9, Group(size=1, per_node=1), _cluster()) == 0.0
        with pytest.raises(ValueError, match="collective 'gather' is unknown; legal: all_gather"):
            collective_time("gather", 1.0, Group(size=2, per_node=2), _cluster())


class TestGroups:
    @given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
    def test_against_enumeration(
        self, num_nodes: int, devices_per_node: int, size: int, stride: int
    ) -> None:
        cluster = _cluster(num_nodes, devices_per_node)
        if size * stride > cluster.num_devices:
            with pytest.raises(ValueError, match=f"needs {size * stride} ranks"):
                group_for(cluster, size=size, stride=stride)
            return
        fewest, users = size, Counter[int]()
        for tile in range(0, cluster.num_devices - size * stride + 1, size * stride):
            for first in range(tile, tile + stride):
                on_node = Counter((first + k * stride) // devices_per_node for k in range(size))
                if len(on_node) > 1:
                    fewest = min(fewest, max(on_node.values()))
                    users.update(on_node.keys())
        group = group_for(cluster, size=size, stride=stride)
        assert group == Group(size=size, per_node=fewest, concurrent=max(users.values(), default=1))

    def test_impossible_groups_are_refused(self) -> None:
        with pytest.raises(ValueError, match="per_node=3; legal: 1 to 2"):
            Group(size=2, per_node=3)
        with pytest.raises(ValueError, match="concurrent=0; legal: 1 or more"):
            Group(size=2, per_node=1, concurrent=0)


def _slowest_chunk_s(per_node: int, nodes: int) -> float:
    """Walk every chunk of a ring over `nodes` nodes from its first rank to its last."""
    size = per_node * nodes
    walks = []
    for first in range(size):
        ranks = [(first + step) % size for step in range(size)]
        borders = sum(one // per_node != other // per_node for one, other in pairwise(ranks))
        walks.append(1000.0 * borders + 10.0 * (size - 1 - borders))
    return max(walks)


class TestSeconds:
    @pytest.mark.parametrize(
        ("kind", "time_s"),
        [
            ("all_reduce", 2 * 800 * 3 / 4 / 100 + 6 * 10),
            ("all_gather", 800 * 3 / 4 / 100 + 3 * 10),
            ("reduce_scatter", 2 * 800 * 3 / 4 / 100 + 6 * 10),  # an all-reduce's part
            ("all_to_all", 800 * 3 / 16 / 100 + 3 * 10),
            ("broadcast", 800 / 100 + 3 * 10),
        ],
    )
    def test_inside_a_node(self, kind: str, time_s: float) -> None:
        group = Group(size=4, per_node=4)
        assert collective_time(kind, 800.0, group, _cluster()) == pytest.approx(time_s)

    @pytest.mark.parametrize(("backend", "issues"), [("nccl", 1), ("gloo", GLOO_ISSUES)])
    def test_a_collective_is_a_kernel_and_messages_go_point_to_point(
        self, backend: str, issues: float
    ) -> None:
        group = Group(size=4, per_node=4)
        before_s = collective_time("reduce_scatter", 800.0, group, _cluster(backend=backend))
        late = _cluster(backend=backend, launch_s=7.0)
        late_s = collective_time("reduce_scatter", 800.0, group, late)
        assert late_s == pytest.approx(before_s + 7 * issues)
        assert (backend == "nccl") == (before_s == pytest.approx(800 * 3 / 4 / 100 + 3 * 10))
        cluster = _cluster()
        assert p2p_time(800.0, cluster, crosses_node=False) == pytest.approx(8 + 10)
        assert p2p_time(800.0, cluster, crosses_node=True) == pytest.approx(5 + 1000)
        shared = p2p_time(800.0, cluster, crosses_node=True, concurrent=8)
        assert shared == pytest.approx(800 / 20 + 1000)

    @pytest.mark.parametrize(("per_node", "nodes"), [(1, 4), (2, 2), (2, 4), (3, 2), (8, 1)])
    def test_ring_latency_is_that_of_the_slowest_chunk(self, per_node: int, nodes: int) -> None:
        group = Group(size=per_node * nodes, per_node=per_node)
        time_s = collective_time("all_gather", 0.0, group, _cluster())
        assert time_s == pytest.approx(_slowest_chunk_s(per_node, nodes))

    def test_ring_and_all_to_all_over_nodes(self) -> None:
        """8 ranks on 4 nodes: half a node's NICs are theirs."""
        group = Group(size=8, per_node=2, concurrent=2)
        time_s = collective_time("all_gather", 800.0, group, _cluster())
        assert time_s == pytest.approx(800 * 7 / 8 / 80 + _slowest_chunk_s(2, 4))
        # 6 ranks on 3 nodes: of 36 blocks each node sends 2 x 4 through its NICs
        group = Group(size=6, per_node=2)
        time_s = collective_time("all_to_all", 36 * 500.0, group, _cluster())
        assert time_s == pytest.approx(2 * 4 * 500 / 160 + 1000 + 5 * 10)

    @pytest.mark.parametrize(
        ("group", "own_nic", "bandwidth"),
        [
            (Group(size=8, per_node=8), None, 100.0),
            (Group(size=16, per_node=8), None, 100.0),  # of 160, the link inside caps
            (Group(size=8, per_node=2, concurrent=4), None, 40.0),
            (Group(size=4, per_node=1), 20.0, 20.0),
            (Group(size=12, per_node=3), 20.0, 60.0),
            (Group(size=8, per_node=1, concurrent=16), 20.0, 10.0),
        ],
    )
    def test_narrowest_place(self, group: Group, own_nic: float | None, bandwidth: float) -> None:
        cluster = _cluster(inter={"per_rank_bandwidth": own_nic})
        more_s = collective_time("all_gather", 2e9, group, cluster)
        less_s = collective_time("all_gather", 1e9, group, cluster)
        share = (group.size - 1) / group.size
        assert 1e9 * share / (more_s - less_s) == pytest.approx(bandwidth)

    def test_nccl_takes_the_tree_while_latency_rules(self) -> None:
        cluster, group = _cluster(backend="nccl"), Group(size=32, per_node=8)
        latency_s, busy_s = 2 * (7 * 10 + 2 * 1000), 2 * 8.0 / 100
        tree_s = latency_s + busy_s + math.sqrt(latency_s * busy_s)
        assert collective_time("all_reduce", 8.0, group, cluster) == pytest.approx(tree_s)
        ring_s = 2 * 1e9 * 31 / 32 / 100 + 2 * _slowest_chunk_s(8, 4)
        assert collective_time("all_reduce", 1e9, group, cluster) == pytest.approx(ring_s)

    def test_switches_add_up_where_there_are_any(self) -> None:
        """Of 4 ranks each sends the switch its tensor, and a quarter of the sum to all."""
        plain = _cluster(backend="nccl")
        cluster = _cluster(**SWITCHED)
        group, pair = Group(size=4, per_node=4), Group(size=2, per_node=2)
        busy_s = 1e6 * 1.25 / 90
        switch_s = busy_s + 2 * 4 + math.sqrt(busy_s * 2 * 4)
        assert collective_time("all_reduce", 1e6, group, cluster) == pytest.approx(switch_s)
        assert collective_time("all_reduce", 1e6, group, plain) > switch_s
        for kind, other in (("all_gather", group), ("all_reduce", pair)):
            with_it, without = (collective_time(kind, 1e6, other, on) for on in (cluster, plain))
            assert with_it == without

    def test_switches_over_nodes_stand_in_for_the_chain(self) -> None:
        """A node of 4 of 4: 1.25 of the tensor through its switch, 2 through its NICs; 2 steps
        of the tree over nodes."""
        cluster = _cluster(**SWITCHED)
        latency_s = 2 * (4 + 2 * 1000)
        for concurrent in (1, 2):
            group = Group(size=16, per_node=4, concurrent=concurrent)
            _, _, switch = found = routes("all_reduce", group, cluster)
            busy_s = max(1e6 * 1.25 / 90, 2 * 1e6 / (160 / concurrent))
            whole_s = busy_s + latency_s + math.sqrt(busy_s * latency_s)
            assert switch.seconds(1e6) == pytest.approx(whole_s)
        alone = "all_reduce", Group(size=4, per_node=1)  # has nothing to add up in a node
        assert routes(*alone, cluster) == routes(*alone, _cluster(backend="nccl"))
        late = _cluster(launch_s=7.0, **SWITCHED)
        for route, later in zip(found, routes("all_reduce", group, late), strict=True):
            assert later.seconds(1e6) - route.seconds(1e6) == pytest.approx(7)

    def test_a_tree_in_nodes_and_over_them(self) -> None:
        """3 ranks on each of 5 nodes: chains of 2 steps, a tree of 3; 2 tensors each way inside,
        2 of the node through its NICs, a half of which are the group's."""
        tree = _tree(Group(size=15, per_node=3, concurrent=2))
        latency_s = 2 * (2 * 10 + 3 * 1000)
        busy_s = max(2 * 1e6 / 100, 2 * 1e6 / (160 / 2))
        expected_s = busy_s + latency_s + math.sqrt(busy_s * latency_s)
        assert tree.seconds(1e6) == pytest.approx(expected_s)
        # over a heap and its mirror image, each of which carries half of the tensor up and down: a
        # parent of two has three neighbours in one and one in the other
        for nodes, tensors in ((2, 1), (8, 2), (64, 2)):
            assert _tree(Group(size=nodes, per_node=1)).legs[-1].share == tensors

    def test_posts_to_many_at_once_reach_less_between_nodes(self) -> None:
        """Of 16 blocks 2 x 2 leave a node of 2, and 1 of each rank stays; one post crosses."""
        cluster = _cluster(inter={"direct_efficiency": 0.5}, direct_efficiency=0.25)
        group = Group(size=4, per_node=2)
        busy_s = max(500 / 25, 2 * 2 * 500 / 80)
        found_s = collective_time("all_to_all", 16 * 500.0, group, cluster)
        assert found_s == pytest.approx(busy_s + 3 * 10 + 1000)

    def test_a_mesh_has_fewer_wires_between_fewer_ranks(self) -> None:
        cluster = _cluster(group_efficiency=Curve(points=((2, 0.25), (8, 1.0))))
        pair_s = collective_time("all_gather", 800.0, Group(size=2, per_node=2), cluster)
        assert pair_s == pytest.approx(800 / 2 / 25 + 10)
        assert p2p_time(800.0, cluster, crosses_node=False) == pytest.approx(800 / 25 + 10)
        octet_s = [
            collective_time("all_gather", 800.0, Group(size=8, per_node=8), on)
            for on in (cluster, _cluster())
        ]
        assert octet_s[0] == octet_s[1]

    def test_short_messages_reach_less_of_the_bandwidth(self) -> None:
        """The curve is over what one rank sends: 600 of 800 bytes inside a node of 4."""
        curve = Curve(points=((600, 0.5), (60_000, 1.0)))
        cluster = _cluster(efficiency=curve, direct_efficiency=0.8)
        group = Group(size=4, per_node=4)
        short_s = collective_time("all_gather", 800.0, group, cluster)
        assert short_s == pytest.approx(600 / 50 + 30)
        long_s = collective_time("all_gather", 80_000.0, group, cluster)
        assert long_s == pytest.approx(60_000 / 100 + 30)
        direct_s = collective_time("all_to_all", 16 * 200.0, group, cluster)
        assert direct_s == pytest.approx(600 / (100 * 0.5 * 0.8) + 30)


@pytest.mark.parametrize(
    ("hardware", "nodes", "size", "kind", "nbytes", "measured_us"),
    [
        # Rows of nccl-tests tables (scripts/fits/fit_links.py scores all): vTrain (A100, V100),
        # ml-engineering (H200), a public EFA benchmark, NVIDIA/nccl-tests#256.
        ("dgx-a100", 1, 8, "all_reduce", 2**30, 8196.4),
        ("dgx-a100", 1, 2, "all_reduce", 2**30, 5453.4),
        ("dgx-1-v100", 1, 8, "all_reduce", 2**30, 13983.0),
        ("dgx-h200", 1, 8, "all_gather", 2**34, 41594.8),
        ("dgx-h200", 2, 16, "all_reduce", 2**30, 4389.6),
        ("p5.48xlarge", 16, 128, "all_reduce", 2**33, 47844.7),
        ("p5.48xlarge", 32, 256, "all_gather", 2**25, 2699.79),
        ("p5.48xlarge", 32, 256, "all_to_all", 2**31 * 256, 52454.5),
    ],
)
def test_published_measurements(
    hardware: str, nodes: int, size: int, kind: str, nbytes: int, measured_us: float
) -> None:
    cluster = Cluster.from_catalog(hardware, num_nodes=nodes)
    group = group_for(cluster, size=size, stride=1)
    predicted_us = collective_time(kind, float(nbytes), group, cluster) * 1e6
    assert predicted_us == pytest.approx(measured_us, rel=0.15)


SIZES = st.integers(1, 40)
NODES = st.integers(1, 9)
# one byte takes a second inside a node, 100 between nodes
SLOW = cluster_of(4, nodes=4, bandwidth=1.0, node_bandwidth=1e-2)


def sent(source: range, destination: range, *, tp: int = 1, scatter: bool = False) -> float:
    target = dataclasses.replace(EAGER, scatter_sends=scatter)
    return send_seconds(8.0, source, destination, tp=tp, cluster=SLOW, target=target)


@given(SIZES, SIZES, SIZES, NODES)
def test_contiguous_stages_cross_nodes(first: int, one: int, two: int, node: int) -> None:
    source, destination = range(first, first + one), range(first + one, first + one + two)
    touched = [{rank // node for rank in side} for side in (source, destination)]
    assert crosses_node(source, destination, node) == (touched[0] != touched[1])
    assert crosses_node(source, destination, node) == crosses_node(destination, source, node)
    assert packed(source, node) == min(one, node)


def test_sends_between_stages() -> None:
    """Four stages of four ranks, one on each node: the pipeline runs inside the nodes."""
    first, second, third = (range(k, 16, 4) for k in range(3))
    assert sent(first, second) == sent(second, third) == pytest.approx(8)
    assert packed(first, 4) == 1
    # ranks 0, 1, 4, 5 send to 8, 9, 12, 13: two of each node
    nodes = [0, 1, 4, 5], [8, 9, 12, 13]
    seconds = send_seconds(8.0, *nodes, tp=2, cluster=SLOW, target=EAGER)
    assert seconds == pytest.approx(8 * 100 * 2)
    assert sent(range(4), range(4, 8)) == pytest.approx(8 * 100 * 4)
    whole = sent(range(2), range(2, 4), tp=2)
    assert whole == pytest.approx(8)
    assert sent(range(2), range(2, 4), tp=2, scatter=True) == pytest.approx(4 + 4)
    assert sent(range(4), range(4)) == 0
