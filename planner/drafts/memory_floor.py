"""Least memory of a plan on a mesh, known before its blocks are priced.

All blocks recomputed by the policy that keeps least, with one micro-batch in flight, all of it
split by the tensor axis. Saved bytes grow linearly with the rows of a micro-batch, and what a
backward holds besides is the maximum of linear functions, hence convex: extrapolated from 1 and 2
rows, both are no more than they will be. Meshes on which this doesn't fit are not priced.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from meshwright.costmodel.memo import Memo
from meshwright.costmodel.memory import model_states
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import DTYPE_BYTES
from meshwright.costmodel.stages import Floats, Sums, fits, stage_costs
from meshwright.planner.drafts.segments import may_segment
from meshwright.planner.drafts.space import Space
from meshwright.planner.stages import BlockPrograms

SLACK = 0.9  # of the extrapolated bytes: other states than the typical ones may need less
SMALL_ROWS = (1, 2)


@dataclass
class MemoryFloor:
    """Whether a mesh may hold a plan at all."""

    space: Space
    programs: BlockPrograms
    # by `_reference`: blocks of each kind, and the sums of one for each of SMALL_ROWS
    _small: Memo[Mesh, tuple[Floats, tuple[Sums, ...]]] = field(default_factory=Memo)

    @cached_property
    def _trained(self) -> int:
        return self.space.graph.num_trained()

    def allows(self, mesh: Mesh, m: int, groups: int) -> bool:
        """Whether m micro-batches of the model may fit on such a mesh for each device group."""
        if not self._states_fit(mesh, groups):
            return False
        counts, kinds = self._extrapolated(mesh, m)
        return not len(counts) or any(
            not overfull(float(held @ counts), passing, self._room, groups)
            for held, passing in self._needs(mesh, m, kinds, self.space.restrictions.policies[-1])
        )

    def allows_some(self, mesh: Mesh, m: int) -> bool:
        """Whether m micro-batches of some block may fit on a mesh."""
        counts, kinds = self._extrapolated(mesh, m)
        return not len(counts) or any(
            bool(fits(held + passing, self._room).any())
            for policy in self.space.restrictions.policies
            for held, passing in self._needs(mesh, m, kinds, policy)
        )

    @property
    def _room(self) -> float:
        return self.space.room_bytes / SLACK

    def _states_fit(self, mesh: Mesh, groups: int) -> bool:
        """Whether the model's states may fit, divided among all axes."""
        problem = self.space.problem
        part = self._trained / (mesh.tp * mesh.ep * groups)
        states = (
            model_states(
                part,
                precision=problem.precision,
                sharing=sharing,
                dp=sharing.among(mesh.holders),
                optimizer=problem.optimizer,
                target=problem.target,
                host=self.space.most_away.states,
                sent=self.space.most_away.states,
            ).nbytes
            for sharing in self.space.zeros(mesh)
        )
        there = self.space.most_away.weights * part * DTYPE_BYTES[problem.precision]
        return any(fits(float(needed) - there, self.space.room_bytes) for needed in states)

    def _needs(self, mesh: Mesh, m: int, kinds: Sums, policy: str) -> list[tuple[Floats, Floats]]:
        """Under each ZeRO stage the bytes that a block of each kind holds, and needs in passing."""
        rows = self.space.global_batch_size / m / mesh.dp
        setting = self.programs.coster.setting(mesh, Batch(rows=rows, microbatches=m))
        ranks = _reference(mesh).devices
        among, frozen = kinds.shard_parameters * ranks, kinds.frozen_shard_bytes * ranks  # on one
        host, needs = self.space.most_away, []
        for sharing in self.space.zeros(mesh):
            kinds.shard_parameters = among / sharing.among(mesh.holders)
            kinds.frozen_shard_bytes = frozen / sharing.among(mesh.holders)
            parts = replace(host, weights=host.weights * (not sharing.gathers))
            shared = replace(setting, sharing=sharing, host=parts)
            costs = stage_costs(kinds.without_maxima(), shared, policy)  # a stage has one buffer
            held = costs.kept_bytes + costs.activation_bytes
            needs.append((held, stage_costs(kinds, shared, policy).passing_bytes))
        return needs

    def _extrapolated(self, mesh: Mesh, m: int) -> tuple[Floats, Sums]:
        """Blocks of each kind, and the sums of one with the rows of m micro-batches; none where
        rows are few, segments may keep less, or shardings that the user decided may need a tensor
        axis."""
        rows = self.space.global_batch_size / m / mesh.dp
        free = any(relief.segmented for relief in self.space.reliefs)
        if (
            rows <= SMALL_ROWS[-1]
            or may_segment(self.space.restrictions, free=free)
            or self.programs.entries
        ):
            return np.zeros(0), Sums.zeros(0)
        reference = _reference(mesh)
        counts, (low, high) = self._small.of(reference, partial(self._few_rows, reference))
        steps = (rows - SMALL_ROWS[0]) / (SMALL_ROWS[1] - SMALL_ROWS[0])
        array = np.maximum(low.array + steps * (high.array - low.array), 0.0)
        return counts, Sums(array / mesh.tp)

    def _few_rows(self, mesh: Mesh) -> tuple[Floats, tuple[Sums, ...]]:
        """Blocks of each kind, and the sums of one for each of SMALL_ROWS."""
        coster, forced = self.programs.coster, self.space.restrictions.recompute
        settings = [coster.setting(mesh, Batch(rows=n, microbatches=2)) for n in SMALL_ROWS]
        chains = [self.programs.chain(setting, forced=forced) for setting in settings]
        kinds = [chain.kinds_typical() for chain in chains]
        none = Sums.zeros(0).array
        return np.array([float(kind.count) for kind in kinds[0]]), tuple(
            Sums(np.concatenate([none, *(kind.sums.array[None] for kind in few)])) for few in kinds
        )


def overfull(load: float, passing: Floats, room: float, groups: int) -> bool:
    """Whether so many device groups can't hold `load` bytes, wherever the blocks lie: beside all of
    a group's load, its last block needs what some kind is `passing`, that of the last group what
    the last kind is."""
    most = (groups - 1) * max(room - float(passing.min()), 0.0)
    return load > most + max(room - float(passing[-1]), 0.0)


def _reference(mesh: Mesh) -> Mesh:
    """The smallest mesh without a tensor axis that splits sequences and experts alike."""
    return replace(mesh.alone, tp=1, spread=1)
