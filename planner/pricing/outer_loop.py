"""Prices of replicas that train apart: one of them on its part of the cluster, and meetings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwright.costmodel.stages import STATE_BYTES, OuterExchange
from meshwright.planner.decisions import OUTER_LOOP, divisors
from meshwright.planner.plan import OuterLoop, Plan, PlanError
from meshwright.planner.pricing.priced_stage import PricedStage
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import MeshwrightError


def replica_counts(cluster: Cluster) -> list[int]:
    """Numbers of replicas that a cluster may have, from 2: of whole nodes, or of devices of one."""
    units = cluster.num_nodes if cluster.num_nodes > 1 else cluster.devices_per_node
    return [n for n in divisors(units) if n > 1]


def cluster_of_replica(
    cluster: Cluster, replicas: int, place: str, error: type[MeshwrightError] = PlanError
) -> Cluster:
    """The part of a cluster that each of so many replicas has. Raises where there are no equal
    ones."""
    if replicas not in (counts := replica_counts(cluster)):
        of = f"{cluster.num_nodes} nodes"
        if cluster.num_nodes == 1:
            of = f"{cluster.devices_per_node} devices"
        raise error(
            f"={replicas} does not divide the cluster's {of}",
            place=place,
            legal=counts or "none on one device",
            way_out="take one of these, or another cluster",
        )
    if cluster.num_nodes > 1:
        return cluster.on_nodes(cluster.num_nodes // replicas)
    return replace(cluster, devices_per_node=cluster.devices_per_node // replicas)


def outer_exchange(plan: Plan, loop: OuterLoop, stages: Sequence[PricedStage]) -> OuterExchange:
    """Exchange of a plan's replicas when they meet: all trained weights, each rank its share."""
    elements = 0.0
    for stage in stages:
        graph = stage.setting.problem.graph
        held = {v: state for block in stage.blocks for v, state in block.parameters}
        for value, state in held.items():
            meta = graph.values[value]
            if meta.requires_grad:
                copies = 1 if state.sharded else stage.stage.tp
                elements += copies * math.prod(meta.shape)
    ranks = plan.num_ranks // loop.replicas
    return OuterExchange(
        replicas=loop.replicas,
        ranks=ranks,
        share=elements / ranks,
        holders=max(1, plan.stages[0].holders // plan.stages[0].shards),
        bits=loop.outer_bits,
        fragments=loop.fragments,
    )


def state_bytes(exchange: OuterExchange) -> float:
    """Bytes of host memory that a rank's outer weights and momentum take."""
    return STATE_BYTES * exchange.share


PLACE = f"plan: outer_loop: {OUTER_LOOP[0]}"
