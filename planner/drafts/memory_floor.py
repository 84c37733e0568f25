"""What a plan on a mesh needs at least of a device, known before its blocks are priced.

All blocks recomputed by the policy that keeps least, with one micro-batch in flight, all of it
split by the tensor axis. Saved bytes grow linearly with the rows of a micro-batch, and what a
backward holds besides is the maximum of linear functions, hence convex: extrapolated from 1 and 2
rows, both are no more than they will be. Where even this doesn't fit, it need not be found out what
micro-batches of many rows would cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.costmodel.memory import model_states
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import DTYPE_BYTES
from meshwright.costmodel.stages import Floats, Sums, fits, stage_costs
from meshwright.planner.drafts.segments import may_segment
from meshwright.planner.drafts.space import Space
from meshwright.planner.stages import BlockPrograms

SLACK = 0.9  # of the extrapolated bytes: other states than the typical ones may need less
SMALL_ROWS = (1, 2)


@dataclass(slots=True)
class MemoryFloor:
    """Which meshes may hold a plan at all."""

    space: Space
    programs: BlockPrograms
    _trained: int = field(init=False)
    # (cp, ep): blocks of each kind, and the sums of one for each of SMALL_ROWS
    _small: dict[Mesh, tuple[Floats, tuple[Sums, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trained = self.space.graph.num_trained()

    def allows(self, mesh: Mesh, m: int, groups: int) -> bool:
        """Whether m micro-batches of the model may fit on such a mesh for each of so many device
        groups."""
        rows = self.space.global_batch_size / m / mesh.dp
        if not self._states_fit(mesh, groups):
            return False
        if rows <= SMALL_ROWS[-1] or self._segments:
            return True
        counts, kinds = self._extrapolated(mesh, rows)
        if not len(counts):
            return True
        return any(
            not overfull(float(held @ counts), passing, self._room, groups)
            for held, passing in self._needs(mesh, m, kinds, self.space.restrictions.policies[-1])
        )

    def allows_some(self, mesh: Mesh, m: int) -> bool:
        """Whether m micro-batches of some block may fit on a mesh."""
        rows = self.space.global_batch_size / m / mesh.dp
        if rows <= SMALL_ROWS[-1] or self._segments:
            return True
        counts, kinds = self._extrapolated(mesh, rows)
        return not len(counts) or any(
            bool(fits(held + passing, self._room).any())
            for policy in self.space.restrictions.policies
            for held, passing in self._needs(mesh, m, kinds, policy)
        )

    @property
    def _segments(self) -> bool:
        return may_segment(
            self.space.restrictions, free=any(own.segmented for own in self.space.reliefs)
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
        found = []
        for sharing in self.space.zeros(mesh):
            kinds.shard_parameters = among / sharing.among(mesh.holders)
            kinds.frozen_shard_bytes = frozen / sharing.among(mesh.holders)
            host = self.space.most_away
            own = replace(
                setting,
                sharing=sharing,
                host=replace(host, weights=host.weights * (not sharing.gathers)),
            )
            costs = stage_costs(kinds.without_maxima(), own, policy)  # of buffers a stage has one
            held = costs.kept_bytes + costs.activation_bytes
            found.append((held, stage_costs(kinds, own, policy).passing_bytes))
        return found

    def _extrapolated(self, mesh: Mesh, rows: float) -> tuple[Floats, Sums]:
        """Blocks of each kind, and the sums of one with so many rows per rank; none where nothing
        is known: shardings that the user decided may need a tensor axis."""
        if self.programs.entries:
            return np.zeros(0), Sums.zeros(0)
        key = _reference(mesh)
        if key not in self._small:
            coster, forced = self.programs.coster, self.space.restrictions.recompute
            kinds = [
                self.programs.chain(
                    coster.setting(_reference(mesh), Batch(rows=small, microbatches=2)),
                    forced=forced,
                ).kinds_typical()
                for small in SMALL_ROWS
            ]
            counts = np.array([float(kind.count) for kind in kinds[0]])
            none = [Sums.zeros(0).array]
            sums = (
                Sums(np.concatenate([*none, *(kind.sums.array[None] for kind in own)]))
                for own in kinds
            )
            self._small[key] = counts, tuple(sums)
        counts, (low, high) = self._small[key]
        steps = (rows - SMALL_ROWS[0]) / (SMALL_ROWS[1] - SMALL_ROWS[0])
        array = np.maximum(low.array + steps * (high.array - low.array), 0.0)
        return counts, Sums(array / mesh.tp)


def overfull(load: float, passing: Floats, room: float, groups: int) -> bool:
    """Whether so many device groups can't hold `load` bytes, wherever the blocks lie: each group's
    last block needs what some kind is `passing`, that of the last group what the last kind is, with
    all of the group's load beside it."""
    most = (groups - 1) * max(room - float(passing.min()), 0.0)
    return load > most + max(room - float(passing[-1]), 0.0)


def _reference(mesh: Mesh) -> Mesh:
    """The smallest mesh without a tensor axis that splits sequences and experts alike."""
    return replace(mesh.alone, tp=1, spread=1)
