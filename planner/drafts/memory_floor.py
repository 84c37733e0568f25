"""What a plan on a mesh needs at least of a device, known before its blocks are priced.

An even share of the model, all of it split by the tensor axis and recomputed by the policy that
keeps least, with one micro-batch in flight. Saved bytes grow linearly with the rows of a micro-
batch, and what a backward holds besides is the maximum of linear functions, hence convex:
extrapolated from 1 and 2 rows, both are no more than they will be. Where even this doesn't fit, it
need not be found out what micro-batches of many rows would cost.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.costmodel.blocks import Sums, fits, stage_bytes, stage_costs
from meshwright.costmodel.memory import model_state_bytes
from meshwright.planner.drafts.space import Mesh, Space
from meshwright.planner.stages import BlockPrograms

SLACK = 0.9  # of the extrapolated bytes: other states than the typical ones may need less
SMALL_ROWS = (1, 2)


@dataclass(slots=True)
class MemoryFloor:
    """Which meshes may hold a plan at all."""

    space: Space
    programs: BlockPrograms
    _trained: int = field(init=False)
    # (cp, ep) and device groups: sums of the whole model for each of SMALL_ROWS
    _small: dict[tuple[int, ...], tuple[Sums, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.space.graph
        values = (graph.values[name] for name in graph.parameters)
        self._trained = sum(math.prod(v.shape) for v in values if v.requires_grad)

    def allows(self, mesh: Mesh, m: int, groups: int) -> bool:
        """Whether m micro-batches may fit on such a mesh for each of so many device groups."""
        rows = self.space.global_batch_size / m / mesh.dp
        if not self._states_fit(mesh, groups):
            return False
        return rows <= SMALL_ROWS[-1] or self._blocks_fit(mesh, m, groups, rows)

    def _states_fit(self, mesh: Mesh, groups: int) -> bool:
        """Whether the model's states may fit, divided among all axes."""
        problem = self.space.problem
        part = self._trained / (mesh.tp * mesh.ep * groups)
        states = (
            model_state_bytes(
                part,
                precision=problem.precision,
                zero=zero,
                dp=shard or mesh.dp * mesh.cp,
                optimizer=problem.optimizer,
                target=problem.target,
            )
            for zero, shard in self.space.zeros(mesh)
        )
        return any(fits(float(needed), self.space.room_bytes) for needed in states)

    def _blocks_fit(self, mesh: Mesh, m: int, groups: int, rows: float) -> bool:
        """Whether an even share of the blocks may fit, recomputed."""
        share = self._extrapolated(mesh, groups, rows).times(1 / groups)
        share.array /= mesh.tp
        setting = self.programs.coster.setting(mesh, rows=rows, microbatches=m)
        among = share.shard_parameters * _reference(mesh).devices  # on one rank
        for zero, shard in self.space.zeros(mesh):
            share.shard_parameters = among / (shard or mesh.dp * mesh.cp)
            own = replace(setting, zero=zero, dp_shard=shard)
            costs = stage_costs(share, own, self.space.restrictions.policies[-1])
            held = stage_bytes(costs.kept_bytes, costs.activation_bytes, 1.0)
            if fits(SLACK * float(held + costs.passing_bytes), self.space.room_bytes):
                return True
        return False

    def _extrapolated(self, mesh: Mesh, groups: int, rows: float) -> Sums:
        """Sums of the whole model with so many rows per rank, of the maxima those of blocks that
        every device group has."""
        key = mesh.cp, mesh.ep, groups
        if key not in self._small:
            chains = (
                self.programs.chain(
                    self.programs.coster.setting(_reference(mesh), rows=small, microbatches=2),
                    forced=self.space.restrictions.recompute,
                )
                for small in SMALL_ROWS
            )
            commonest = max(Counter(b.class_id for b in self.space.graph.blocks).values())
            self._small[key] = tuple(chain.typical(min(groups, commonest)) for chain in chains)
        low, high = self._small[key]
        steps = (rows - SMALL_ROWS[0]) / (SMALL_ROWS[1] - SMALL_ROWS[0])
        return Sums(np.maximum(low.array + steps * (high.array - low.array), 0.0))


def _reference(mesh: Mesh) -> Mesh:
    """The smallest mesh without a tensor axis that splits sequences and experts alike."""
    return replace(mesh, dp=mesh.ep // math.gcd(mesh.ep, mesh.cp), tp=1, spread=1)
