"""Every rank of a plan by its node and its place on each axis, from the report's device groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.planner.plan import expand_ranks

AXES = ("group", "dp", "cp", "ep", "tp")
COLUMNS = ("rank", "node", "slot", *AXES)


def rank_rows(groups: Sequence[Mapping[str, Any]], devices_per_node: int) -> list[tuple[int, ...]]:
    """`COLUMNS` of each rank, by rank."""
    rows = []
    for number, group in enumerate(groups):
        cp, ep, tp = group["cp"], group["ep"], group["tp"]
        for place, rank in enumerate(expand_ranks(group["ranks"])):
            node, slot = divmod(rank, devices_per_node)
            axes = (place // (cp * tp), place // tp % cp, place // group["ep_stride"] % ep)
            rows.append((rank, node, slot, number, *axes, place % tp))
    return sorted(rows)


def axes_in_use(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Axes on which ranks differ; the device group, where they differ on none."""
    used = [axis for axis in AXES[1:] if any(group[axis] > 1 for group in groups)]
    return ["group", *used] if len(groups) > 1 or not used else used
