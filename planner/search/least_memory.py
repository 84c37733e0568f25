"""What comes closest to fitting: the way to run the model that needs the least memory.

Of every mesh only the largest number of micro-batches is looked at, since smaller ones hold less.
A stage is taken for an equal share of the model, recomputes all it may, and holds

    static + h·activation + reserved  bytes, h the micro-batches that its first stage has in flight.

The way that needs least is then cut into stages exactly
(`planner.inter_op.partition.minimal_shortfall`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.blocks.peak import stage_bytes
from meshwright.costmodel.blocks.stage import of_one
from meshwright.costmodel.schedules.schedule import in_flight
from meshwright.planner.pricing.recompute_levels import recompute_levels
from meshwright.planner.search.equal_stages import EqualStages, Slot, Way
from meshwright.planner.search.space import Space
from meshwright.planner.search.unequal_stages import UnequalStages


@dataclass(frozen=True, slots=True, kw_only=True)
class Lean:
    """A way to run a slot's stages, and the bytes by which the first one exceeds a device; negative
    where they fit."""

    slot: Slot
    way: Way
    excess_bytes: float


def lean_slots(space: Space) -> list[Slot]:
    """Meshes with as many micro-batches as they may have, those that divide the weights most
    first; their bounds are left open."""
    found: dict[tuple[int, ...], Slot] = {}
    devices = space.cluster.num_devices
    for m in reversed(space.microbatch_counts()):
        for groups in space.stage_counts():
            for mesh in space.meshes(devices // groups, m):
                slot = Slot(mesh=mesh, num_microbatches=m, groups=groups, bound_s=0.0)
                if space.schedules(groups, m, 0):
                    found.setdefault((mesh.tp, groups, mesh.cp, mesh.ep), slot)
    return sorted(found.values(), key=lambda s: (-s.mesh.tp * s.groups, s.mesh, s.groups))


def leanest(
    equal: EqualStages,
    slots: Iterable[Slot],
    way: Callable[[Way], bool],
    schedule: Callable[[str], bool],
) -> Lean | None:
    """The way of these slots that needs least; None where there is none."""
    found = [lean for slot in slots for lean in leans(equal, slot, schedule) if way(lean.way)]
    return min(found, key=lambda lean: lean.excess_bytes, default=None)


def leans(
    equal: EqualStages, slot: Slot, schedule: Callable[[str], bool] = lambda name: True
) -> Iterator[Lean]:
    """Every way of a slot, under the schedule that holds least."""
    m, groups = slot.num_microbatches, slot.groups
    for way in equal.ways(slot.mesh, m):
        needs = []
        for name, each in equal.space.schedules(groups, m, way.zero):
            if schedule(name):
                stages, policies = groups * each, equal.space.policies(name)
                part = way.chain.typical().times(1 / stages)
                levels = recompute_levels(part, way.setting, policies, np.array(1.0))
                costs = of_one(levels.costs[-1])
                held = in_flight(
                    name, stage=0, num_stages=stages, num_microbatches=m, num_devices=groups
                )
                used = stage_bytes(costs.static_bytes, costs.activation_bytes, held)
                needs.append(each * used)
        if needs:
            yield Lean(slot=slot, way=way, excess_bytes=min(needs) - equal.room)


def shortfall_bytes(unequal: UnequalStages, lean: Lean) -> float:
    """Bytes that the fullest stage lacks in the best cut of a way; no less than an equal share
    does."""
    m = lean.slot.num_microbatches
    table, _ = unequal.table(m, [lean.way])
    exact = unequal.shortfall(table, m)
    return max(0.0, lean.excess_bytes, exact.excess_bytes if exact else 0.0)
