"""Whether ZeRO-3 keeps a secondary shard in the node, and sends quantised blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import cluster
from tests.planner.search.test_search import search


def test_secondary_shards_are_kept_where_nodes_are_far_and_memory_is_left() -> None:
    """ZeRO-3 alone fits; a backward that gathers within its node is faster while that fits, too."""
    near = cluster(2, nodes=2, flops=1e12, bandwidth=1e11, node_bandwidth=2e8)
    given = {"dp": 4, "zero": 3, "dp_shard": 4, "recompute": "none"}

    def stage(on: Cluster, **more: Any) -> tuple[int | None, float]:
        found = search(on, **given, **more).best
        peak = max(found.evaluation.prediction.peak_memory_bytes)
        return found.plan.stages[0].hpz, peak

    kept, peak = stage(near)
    assert kept == 2
    none, less = stage(near, forbid=["hpz"])
    assert none is None and less < peak
    small = dataclasses.replace(
        near, device=dataclasses.replace(near.device, memory_bytes=int(peak + less) // 2)
    )
    assert stage(small)[0] is None
    assert stage(cluster(4, flops=1e12, bandwidth=1e11))[0] is None


def test_blocks_are_quantised_where_that_is_allowed_and_links_are_slow() -> None:
    slow = cluster(2, nodes=2, flops=1e12, bandwidth=1e9, node_bandwidth=1e8)
    given = {"dp": 4, "zero": 3, "dp_shard": 4, "recompute": "none"}

    def chosen(on: Cluster, **more: Any) -> str:
        return search(on, **given, **more).best.plan.stages[0].quantized

    assert chosen(slow) == "none"
    assert chosen(slow, allow=("quantized",)) == "both"
    assert chosen(slow, allow=("quantized",), forbid=["quantized"]) == "none"
    fast = cluster(4, flops=1e9, memory_bandwidth=1e9, bandwidth=1e13)
    assert chosen(fast, allow=("quantized",)) == "none"
