"""Layouts of stages that share devices: how busy and how full each device is, and moves of blocks.

Cuts c_0 < .. < c_P give stage k the run r_k of blocks c_k..c_{k+1}-1. Device d takes turns between
its stages; with all of their blocks on recompute level l it is busy for so many seconds per
micro-batch, and holds so many bytes, of kinds h,

    t_d(l) = Σ_{k on d} time[l, r_k]
    b_d(l) = max over moments q of Σ_{k on d} Σ_h w[d, q, k, h] · held[l, r_k, h]

and on the least level at which it fits the part λ of its blocks, of the others on the one below

    λ = (b_d(l-1) - room) / (b_d(l-1) - b_d(l))        t_d = (1 - λ) t_d(l-1) + λ t_d(l)

A layout is the better the fewer bytes its devices lack on the last level, then the less busy its
busiest device is, then the next one, and so on; then the less time they took if all waited for the
slowest in each of their stages in turn. From a start, blocks move one by one from a stage of the
worst device, the one that lacks most or else the busiest, or where stages are few of any device, to
any other stage, all cuts between the two by one place, until no move makes the layout better: a
local optimum.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.planner.inter_op.table import Floats, Ints, Masks

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
