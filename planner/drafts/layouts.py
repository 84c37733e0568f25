"""Layouts: the blocks of stages that share devices, with as little recompute as their devices need.

Several stages of a device are cut together by the sum of their seconds and their bytes at the
device's peak (`planner.inter_op.shared_devices`). Moves of blocks from there are judged by
simulation, of a few rounds of micro-batches and what each further round adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.costmodel.recompute import segment_policy
from meshwright.costmodel.schedules import build_schedule, step_times
from meshwright.costmodel.stages import (
    COSTS,
    HELD,
    Floats,
    StageCosts,
    as_rows,
    communicator_bytes,
    held_weights,
    of_rows,
)
from meshwright.planner.drafts.combinations import Combination
from meshwright.planner.drafts.fills import filling_s
from meshwright.planner.inter_op import Judged, SharedDevices, cut_evenly, evenly
from meshwright.planner.stages import ChosenLevel, RecomputeLevels

ROUNDS = 3  # of micro-batches that are simulated, one more for what each further one adds
ALL_ROUNDS = 8  # of so many no fewer are simulated
MOST_ROUNDS = 4  # of moves that are simulated
MOST_SIMULATED = 96  # layouts in one of them, the least busy
EVEN = 1.02  # of what devices compute on average: no start is sought that is more even
WORTH = 1e-3  # of a step, what a move has to gain
GAIN = 0.05  # of a step, what all moves may gain: drawn nets 1 % on average

_ACTIVE = HELD.index("activation_bytes")


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """All layouts of a combination, on the levels of its runs. Cuts are positions where stages may
    start and end; those of one copy of the model, where there are two."""

    combination: Combination
    levels: RecomputeLevels
    rows: Floats
    """(levels, `COSTS`, runs)"""
    shared: SharedDevices
    sent_s: Floats
    """(C, C): seconds that a stage between two positions sends per micro-batch and direction."""
    groups: Sequence[int]
    """The device group of each stage, of both copies."""

    @classmethod
    def of(
        cls,
        combination: Combination,
        levels: RecomputeLevels,
        legal: np.ndarray,
        sent_s: Floats,
        room_bytes: float,
    ) -> Layouts:
        """Layouts of `legal` stages between positions and the seconds that they send, (C, C) each,
        with so much room on each device."""
        setup, runs = combination.setup, combination.setup.chain.runs
        pipeline, groups = combination.pipeline, combination.pipeline.device_of
        stages = np.argsort(groups, kind="stable").reshape(pipeline.num_devices, -1)
        rows = np.stack([as_rows(costs) for costs in levels.costs])
        held = rows[:, [COSTS.index(name) for name in HELD]]
        shared = SharedDevices(
            time_s=of_rows(np.moveaxis(rows, 1, 0)).amortised_s(pipeline.num_microbatches),
            held=np.moveaxis(held, 1, 2),
            index=np.where(legal & np.isfinite(runs.seconds)[runs.index], runs.index, 0),
            weights=held_weights(pipeline),
            stages=stages % (pipeline.num_stages // pipeline.record.copies),
            undivided=np.array([segment_policy(policy)[1] > 1 for policy in levels.policies]),
            room_bytes=room_bytes - communicator_bytes(setup.setting),
        )
        return cls(
            combination=combination,
            levels=levels,
            rows=rows,
            shared=shared,
            sent_s=sent_s,
            groups=groups,
        )

    @property
    def copies(self) -> int:
        return self.combination.pipeline.record.copies

    @property
    def turns(self) -> float:
        """Micro-batches of each copy."""
        return self.combination.pipeline.num_microbatches / self.copies

    # --- by device ---

    @cached_property
    def starts(self) -> np.ndarray:
        """(N, P+1): cuts where equal shares would have them, and after moves by device, the layout
        first whose busiest device is least busy; none where none fits."""
        starts = list[np.ndarray]()
        for start in self._even():
            evened = self.shared.evened(start)
            starts += [evened, start]
            judged = self.shared.judged(evened[None])
            if not judged.lacks.any() and judged.load_s.max() <= EVEN * judged.load_s.mean():
                break
        if not starts:
            return np.zeros((0, 1), dtype=np.int64)
        cuts = np.unique(starts, axis=0)
        judged = self.shared.judged(cuts)
        busiest = np.where(judged.lacks.any(axis=1), np.inf, judged.load_s.max(axis=1))
        order = np.argsort(busiest, kind="stable")[: np.isfinite(busiest).sum()]
        return np.asarray(cuts[order])

    def _even(self) -> list[np.ndarray]:
        """Legal cuts of equal numbers of layers, of equal work, and best stage by stage."""
        chain, shared = self.combination.setup.chain, self.shared
        runs, kinds = chain.runs, chain.kinds
        stages = self.combination.pipeline.num_stages // self.copies
        usual, _ = Counter(kinds).most_common(1)[0]
        layers = np.concatenate([[0], np.cumsum([kind == usual for kind in kinds])])
        pieces = np.arange(len(runs.index) - 1)
        seconds = runs.seconds[runs.index[pieces, pieces + 1]]
        tried = [
            evenly(np.diff(layers[list(chain.at)]).astype(float), stages),
            evenly(np.where(np.isfinite(seconds), seconds, 0.0), stages),
        ]
        times = np.where(shared.index > 0, shared.time_s[0][shared.index], np.inf)
        cut = cut_evenly(times[None], None, [0] * stages, later=self.turns)
        tried += [] if cut is None else [np.array(cut.cuts)]
        return [cuts for cuts in tried if np.isfinite(shared.judged(cuts[None]).load_s).all()]

    def objective_s(self, cuts: np.ndarray) -> float:
        """Seconds that the busiest device computes in a step, and that others add to fill it."""
        pipeline, validated = self.combination.pipeline, self.combination.setup.validated
        sent_s = float(self.sent_s[cuts[:-1], cuts[1:]].mean())
        fill_s = float(filling_s(pipeline, self.costs(cuts[None]), validated=validated).mean())
        turns = 0.0 if pipeline.record.hides_sends else self.turns * pipeline.each
        filled_s = (pipeline.num_devices - 1) * (fill_s + sent_s) + turns * sent_s
        return self.busiest_s(cuts) + filled_s

    def busiest_s(self, cuts: np.ndarray) -> float:
        """Seconds that the busiest device computes in a step."""
        return self.turns * float(self.shared.judged(cuts[None]).load_s.max())

    def chosen(self, cuts: np.ndarray) -> list[ChosenLevel]:
        """Level of each stage, of both copies, and the part of its blocks on the next one: as few
        blocks of a device as it takes, first of its stages with most micro-batches in flight."""
        judged, stages = self.shared.judged(cuts[None]), len(cuts) - 1
        runs = self.shared.index[cuts[:-1], cuts[1:]]
        shape = self.combination.setup.chain.runs.seconds.shape
        parts = {
            (device, k): part
            for device, shard in enumerate(self.shared.stages.tolist())
            for k, part in zip(shard, self._parts(device, runs[shard], judged), strict=True)
        }
        return [
            ChosenLevel(
                level=np.broadcast_to(judged.level[0, g], shape),
                fraction=np.broadcast_to(parts[g, k % stages], shape),
                fits=np.broadcast_to(np.True_, shape),
            )
            for k, g in enumerate(self.groups)
        ]

    def _parts(self, device: int, runs: np.ndarray, judged: Judged) -> Floats:
        """(v,): the part of the stages of a device, with these runs, that is on the next level."""
        level, part = int(judged.level[0, device]), float(judged.part[0, device])
        if not part or self.shared.undivided[level + 1]:
            return np.full(len(runs), part)
        blocks = self.levels.blocks[runs]
        often = self.shared.weights[device, :, :, _ACTIVE].max(axis=0)
        order = np.argsort(-often, kind="stable")
        before = np.empty(len(runs))
        before[order] = np.cumsum(blocks[order]) - blocks[order]
        tried = np.arange(int(blocks.sum()) + 1)[:, None]
        parts: Floats = np.clip(tried - before, 0, blocks) / blocks
        low, high = self.shared.held[level, runs], self.shared.held[level + 1, runs]
        held = low + parts[..., None] * (high - low)
        used = self.shared.used_bytes(np.full(len(tried), device), held)
        fits = used <= self.shared.room_bytes
        return np.asarray(parts[int(fits.argmax()) if fits.any() else -1])

    # --- by simulation ---

    def improved(
        self, current: np.ndarray, sends: Mapping[tuple[int, int], float]
    ) -> tuple[np.ndarray, float]:
        """The best layout by simulated moves, and its part of the step with the `current` cuts."""
        tried = np.concatenate([current[None], self.starts, self._promising(current, np.inf)])
        cuts, current_s, best_s = current, 0.0, np.inf
        for _ in range(MOST_ROUNDS):
            steps = self._steps_s(tried, sends)
            current_s = current_s or float(steps[0])
            first = int(steps.argmin())
            if steps[first] > best_s * (1 - WORTH):
                break
            cuts, best_s = tried[first], float(steps[first])
            tried = self._promising(cuts, best_s)
            if not len(tried):
                break
        return cuts, best_s / current_s

    def _promising(self, cuts: np.ndarray, limit_s: float) -> np.ndarray:
        """(N, P+1): moves whose step may be below a limit, the least busy first."""
        tried = self.shared.moves(cuts)
        judged = self.shared.judged(tried)
        busiest_s = self.turns * judged.load_s.max(axis=1)
        worth = (busiest_s < limit_s) & ~judged.lacks.any(axis=1)
        promise = (busiest_s + self.turns * judged.in_turn_s)[worth]
        return np.asarray(tried[worth][np.argsort(promise, kind="stable")[:MOST_SIMULATED]])

    def _steps_s(self, cuts: np.ndarray, sends: Mapping[tuple[int, int], float]) -> Floats:
        """(N,): approximate seconds of steps of layouts, (N, P+1)."""
        (m, groups, _), costs = self.combination.pipeline.shape, self.costs(cuts)
        if m <= ALL_ROUNDS * groups:  # which a draft has been simulated with
            return self._simulated_s(costs, sends, m)
        few = ROUNDS * groups + m % groups
        first, more = (self._simulated_s(costs, sends, n) for n in (few, few + groups))
        return np.asarray(first + (more - first) * (m - few) / groups)

    def costs(self, cuts: np.ndarray) -> StageCosts[Floats]:
        """(N, stages): costs of the stages of layouts, of both copies."""
        judged = self.shared.judged(cuts)
        runs = self.shared.index[cuts[:, :-1], cuts[:, 1:]]
        runs = np.concatenate([runs] * self.copies, axis=1)
        level, part = judged.level[:, self.groups], judged.part[:, self.groups, None]
        after = np.minimum(level + 1, len(self.rows) - 1)
        low, high = self.rows[level, :, runs], self.rows[after, :, runs]
        return of_rows(np.moveaxis(low + part * (high - low), 2, 0))

    def _simulated_s(
        self, costs: StageCosts[Floats], sends: Mapping[tuple[int, int], float], m: int
    ) -> Floats:
        """(N,): seconds of a step of so many micro-batches."""
        pipeline = self.combination.pipeline._replace(num_microbatches=m)
        return step_times(
            build_schedule(pipeline, frozenset(sends)),
            forward_s=costs.forward_s,
            backward_s=costs.backward_s,
            weight_s=costs.weight_s,
            reduce_s=costs.reduce_s,
            optimizer_s=costs.optimizer_s,
            transfer_s=sends,
        )
