"""What plans put into their nodes' memory and flash, and whether it is known what these are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.planner.plan import Plan, PlanError
from meshwright.profiles.cluster import Cluster


def by_node(plan: Plan, held: Sequence[float], cluster: Cluster) -> tuple[int, ...]:
    """Bytes on each node of what each stage's ranks hold; none where nobody holds any."""
    nodes = [0.0] * cluster.num_nodes
    for stage, there in zip(plan.stages, held, strict=True):
        for rank in stage.ranks if there else ():
            nodes[rank // cluster.devices_per_node] += there
    return tuple(map(math.ceil, nodes)) if any(nodes) else ()


def check_host(plan: Plan, cluster: Cluster) -> None:
    """Raise `PlanError` where something is to lie in a host's memory of which nothing is known."""
    for k, stage in enumerate(plan.stages):
        if any(stage.offload.values()) and cluster.host is None:
            raise PlanError(
                f"cluster {cluster.name!r} says nothing of its hosts' memory",
                place=f"plan: stage {k}: offload",
                legal="a cluster with a host",
                way_out="give it one, in TOML as [host], or drop it from the plan",
            )
        if stage.offload.get("nvme") and not (cluster.host and cluster.host.has_flash):
            raise PlanError(
                f"cluster {cluster.name!r} says nothing of its hosts' flash",
                place=f"plan: stage {k}: offload",
                legal="a cluster with nvme_bytes, nvme_read_bandwidth and nvme_write_bandwidth",
                way_out="give it these, in TOML in [host], or drop nvme from the plan",
            )
