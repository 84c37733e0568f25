"""Layouts: the blocks of stages that share devices, with as little recompute as their devices need.

Several stages of a device are cut together by the sum of their seconds and their bytes at the
device's peak (`SharedDevices`). Moves of blocks from there are judged by
simulation, of a few rounds of micro-batches and what each further round adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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
from meshwright.planner.inter_op import cut_evenly
from meshwright.planner.inter_op.table import Ints, Masks
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
        pipeline, costs = self.combination.pipeline, self.costs(cuts)
        m, each = pipeline.num_microbatches, pipeline.round
        if m <= ALL_ROUNDS * each:  # which a draft has been simulated with
            return self._simulated_s(costs, sends, m)
        few = ROUNDS * each + m % each
        first, more = (self._simulated_s(costs, sends, n) for n in (few, few + each))
        return np.asarray(first + (more - first) * (m - few) / each)

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


# --- shared devices -------------------------------------------------------------------------------

# Layouts of stages that share devices: how busy and how full each device is, and moves of blocks.
#
# Cuts c_0 < .. < c_P give stage k the run r_k of blocks c_k..c_{k+1}-1. Device d takes turns
# between its stages; with all of their blocks on recompute level l it is busy for so many seconds
# per micro-batch, and holds so many bytes, of kinds h,
#
#     t_d(l) = Σ_{k on d} time[l, r_k]
#     b_d(l) = max over moments q of Σ_{k on d} Σ_h w[d, q, k, h] · held[l, r_k, h]
#
# and on the least level at which it fits the part λ of its blocks, of the others on the one below
#
#     λ = (b_d(l-1) - room) / (b_d(l-1) - b_d(l))        t_d = (1 - λ) t_d(l-1) + λ t_d(l)
#
# A layout is the better the fewer bytes its devices lack on the last level, then the less busy its
# busiest device is, then the next one, and so on; then the less time they took if all waited for
# the slowest in each of their stages in turn. From a start, blocks move one by one from a stage of
# the worst device, the one that lacks most or else the busiest, or where stages are few of any
# device, to any other stage, all cuts between the two by one place, until no move makes the layout
# better: a local optimum.


MOST_MOVES = 64
FEW_STAGES = 24  # of which all moves are tried
ROUNDED = 4  # digits of loads that are compared, over the most


class Judged(NamedTuple):
    """N layouts on D devices, (N, D) each: seconds per micro-batch, inf where a stage is not legal;
    bytes that lack on the last level; the level below, and the part of the blocks that is on the
    next one; (N,): seconds if all waited for the slowest in each of their stages in turn."""

    load_s: Floats
    lacks: Floats
    level: Ints
    part: Floats
    in_turn_s: Floats


@dataclass(frozen=True, kw_only=True)
class SharedDevices:
    """R runs of blocks on L levels; P stages, of which each of D devices has v, one of them twice
    where there are two copies of the model; H kinds of bytes at Q moments."""

    time_s: Floats
    """(L, R); of run 0, which is no stage, it does not matter."""
    held: Floats
    """(L, R, H) bytes"""
    index: Ints
    """(C, C): the run between two positions, 0 where no stage is legal."""
    weights: Floats
    """(D, Q, v, H): how often a device holds each kind of bytes of each of its stages."""
    stages: Ints
    """(D, v): the stages of each device."""
    undivided: Masks
    """(L,): levels that all blocks of a device are on, or none."""
    room_bytes: float

    def judged(self, cuts: Ints) -> Judged:
        """The devices of layouts with these cuts, (N, P+1)."""
        devices, v = self.stages.shape
        runs = self.index[cuts[:, :-1], cuts[:, 1:]][:, self.stages]
        in_turn = self.time_s[0][runs].max(axis=1).sum(axis=1)
        # layouts have most of their devices in common: told apart by sums that hardly ever agree
        random = np.random.default_rng(0).integers(2**62, size=v + 1)
        codes = (runs @ random[:v] + np.arange(devices) * random[v]).ravel()
        _, first, back = np.unique(codes, return_index=True, return_inverse=True)
        device, runs = first % devices, runs.reshape(-1, v)[first]
        seconds = self.time_s[:, runs].sum(axis=2)
        used = self.used_bytes(device, self.held[:, runs])
        level, part = self._least(used)
        at = np.arange(len(device))
        after = np.minimum(level + 1, len(used) - 1)
        load = (1 - part) * seconds[level, at] + part * seconds[after, at]
        load = np.where((runs > 0).all(axis=1), load, np.inf)
        lacks = np.maximum(used.min(axis=0) - self.room_bytes, 0.0)
        back = back.reshape(len(cuts), devices)
        return Judged(load[back], lacks[back], level[back], part[back], in_turn)

    def used_bytes(self, device: Ints, held: Floats) -> Floats:
        """(..., U): bytes at the peak of each `device`, (U,), whose stages have (..., U, v, H)."""
        flat = held.reshape(*held.shape[:-2], held.shape[-2] * held.shape[-1])
        used: Floats = np.empty(flat.shape[:-1])
        for d, weights in enumerate(self.weights):
            here, moments = device == d, weights.reshape(len(weights), -1)
            used[..., here] = (flat[..., here, :] @ moments.T).max(axis=-1)
        return used

    def _least(self, used: Floats) -> tuple[Ints, Floats]:
        """The level below the least one at which devices fit, (L, U) bytes, and the part on it."""
        fits = used <= self.room_bytes
        last = len(used) - 1
        level = np.where(fits.any(axis=0), np.maximum(fits.argmax(axis=0) - 1, 0), last)
        at, after = np.arange(used.shape[1]), np.minimum(level + 1, last)
        freed = np.maximum(used[level, at] - used[after, at], 1.0)
        part = np.clip((used[level, at] - self.room_bytes) / freed, 0.0, 1.0)
        return level, np.where(
            level == last, 0.0, np.where(self.undivided[after], np.ceil(part), part)
        )

    def evened(self, cuts: Ints) -> Ints:
        """The cuts, (P+1,), after all moves that make the layout better; those that fill devices to
        more than their room only as far as so many moves may still mend that."""
        lacks = np.inf
        for moves_left in range(MOST_MOVES, 0, -1):
            devices = self.judged(cuts[None])
            gained, lacks = lacks - devices.lacks.sum(), float(devices.lacks.sum())
            if lacks > gained * moves_left:
                break
            better = self._better(cuts, self.moves(cuts))
            if better is None:
                break
            cuts = better
        return cuts

    def _better(self, cuts: Ints, moves: Ints) -> Ints | None:
        """The best layout of these moves, if it is better."""
        tried = np.concatenate([cuts[None], moves])
        best = int(np.lexsort(_order(self.judged(tried)).T[::-1])[0])
        return tried[best] if best else None

    def moves(self, cuts: Ints) -> Ints:
        """(N, P+1): the cuts, (P+1,), after each move of a block from the worst device's stages."""
        count = len(cuts) - 1
        sources = np.arange(count)
        if count > FEW_STAGES:
            devices = self.judged(cuts[None])
            sources = self.stages[
                (devices.lacks if devices.lacks.any() else devices.load_s).argmax()
            ]
        source, target = np.meshgrid(sources, np.arange(count))
        source, target = source.reshape(-1, 1), target.reshape(-1, 1)
        at = np.arange(count + 1)
        later = (at > source) & (at <= target)
        earlier = (at > target) & (at <= source)
        layouts = cuts - later + earlier
        return np.asarray(layouts[(np.diff(layouts) > 0).all(axis=1) & (source != target)[:, 0]])


def _order(judged: Judged) -> Floats:
    """(N, 2 + D): keys by which layouts are compared, the first place first."""
    loads = -np.sort(-judged.load_s, axis=1)
    most = float(loads[np.isfinite(loads)].max(initial=1e-30))
    seconds = np.column_stack([loads, judged.in_turn_s]) / most
    return np.column_stack([judged.lacks.sum(axis=1), np.round(seconds, ROUNDED)])


def evenly(weights: Floats, stages: int) -> Ints:
    """(stages + 1,): cuts of pieces with these weights, each stage near its even share."""
    ends = np.concatenate([[0.0], np.cumsum(weights)])
    wanted = ends[-1] * np.arange(stages + 1) / stages
    after = np.clip(np.searchsorted(ends, wanted), 1, len(weights))
    cuts = after - (wanted - ends[after - 1] < ends[after] - wanted)
    cuts[0], cuts[-1] = 0, len(weights)
    at = np.arange(stages + 1)
    cuts = np.maximum.accumulate(cuts - at) + at
    return np.asarray(np.minimum(cuts, len(weights) - stages + at))
