"""The plan that needs the least memory: what comes closest to fitting where nothing fits.

Of every mesh only the largest number of micro-batches is looked at, since smaller ones hold less.
A stage is taken for an equal share of the model and recomputes all it may; a device needs what
such stages hold at its peak, one of them in a backward (`costmodel.blocks.peak`).

The setup that needs least is then cut into stages exactly
(`planner.inter_op.partition.minimal_shortfall`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.stages import device_peaks, of_one
from meshwright.planner.drafts import EqualStages, MeshChoice, Space, StageSetup, UnequalStages
from meshwright.planner.stages import recompute_levels


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The bytes by which a setup on a mesh exceeds its fullest device; negative where it fits."""

    choice: MeshChoice
    setup: StageSetup
    excess_bytes: float


def least_memory_choices(space: Space) -> list[MeshChoice]:
    """Meshes with as many micro-batches as they may have, those that divide the weights most
    first; their bounds are left open."""
    found: dict[tuple[int, ...], MeshChoice] = {}
    devices = space.cluster.num_devices
    for m in reversed(space.microbatch_counts()):
        for groups in space.stage_counts():
            for mesh in space.meshes(devices // groups, m):
                choice = MeshChoice(mesh=mesh, num_microbatches=m, groups=groups, bound_s=0.0)
                if space.schedules(groups, m, 0):
                    found.setdefault((mesh.tp, groups, mesh.cp, mesh.ep), choice)
    return sorted(found.values(), key=lambda s: (-s.mesh.tp * s.groups, s.mesh, s.groups))


def least_memory(
    equal: EqualStages,
    choices: Iterable[MeshChoice],
    setup: Callable[[StageSetup], bool] = lambda own: True,
    schedule: Callable[[str], bool] = lambda name: True,
) -> MemoryNeed | None:
    """The least need of these meshes, of the setups and schedules that the predicates let through;
    None where there is none."""
    needs = [
        need
        for choice in choices
        for need in memory_needs(equal, choice, schedule)
        if setup(need.setup)
    ]
    return min(needs, key=lambda need: need.excess_bytes, default=None)


def memory_needs(
    equal: EqualStages, choice: MeshChoice, schedule: Callable[[str], bool] = lambda name: True
) -> Iterator[MemoryNeed]:
    """Every setup on a mesh, under the schedule that needs least."""
    m, groups = choice.num_microbatches, choice.groups
    for setup in equal.setups(choice.mesh, m):
        needs = []
        for name, per_group in equal.space.schedules(groups, m, setup.zero):
            if schedule(name):
                stages, policies = groups * per_group, equal.policies(setup, name)
                part = setup.chain.typical().times(1 / stages)
                levels = recompute_levels(part, setup.setting, policies, np.array(1.0))
                costs = of_one(levels.costs[-1])
                peaks = device_peaks(
                    [costs] * stages,
                    schedule=name,
                    num_microbatches=m,
                    num_devices=groups,
                    reserved=equal.space.cluster.device.reserved_bytes,
                )
                needs.append(max(peak.nbytes for peak in peaks))
        if needs:
            yield MemoryNeed(
                choice=choice, setup=setup, excess_bytes=min(needs) - equal.space.memory_bytes
            )


def shortfall_bytes(unequal: UnequalStages, need: MemoryNeed) -> float:
    """Bytes that the fullest stage lacks in the best cut of a setup; no less than an equal share
    does."""
    m = need.choice.num_microbatches
    table, _ = unequal.table(m, [need.setup])
    exact = unequal.shortfall(table, m)
    return max(0.0, need.excess_bytes, exact.excess_bytes if exact else 0.0)
