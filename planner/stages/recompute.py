"""Recompute policies of a stage's blocks: the cheapest that fit in memory.

To run block b again under policy p takes s seconds of the device and h of the host per micro-batch,
and frees r bytes per micro-batch. With D and H the seconds of the stage's backward without
recompute, k the bytes that the stage keeps of a micro-batch and `room` those there are for one:

    minimise    max(D + Σ s[b, p(b)],  H + Σ h[b, p(b)])           (their sum where one follows
    subject to  k - Σ r[b, p(b)] <= room                            the other: on a CPU)

Equal blocks are interchangeable, so that the unknowns are counts per class.

The knapsack is solved class by class over the splits of the class's blocks among policies: all of
them where they are few, else those between two policies that are neighbours on the convex hull,
within a block of the best. A part of a solution is dropped where even the relaxation of the rest
(blocks may be divided) can't beat the best solution known; should more than `BEAM` be left, which
takes several classes of many blocks, those of the least bound stay, and the answer may be above the
optimum by a part of one block. The relaxation replaces the maximum by
λ (D + Σ s) + (1 - λ) (H + Σ h), which is no more than it for any 0 <= λ <= 1; then it is a
fractional knapsack: steps between policies on the convex hull of each block's (bytes, seconds), the
cheapest per byte first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.operators import Setting
from meshwright.costmodel.recompute import REGATHERING, segment_policy
from meshwright.costmodel.stages import (
    LATER,
    Floats,
    InFlight,
    Recompute,
    StageCosts,
    Sums,
    as_rows,
    fits,
    mixed,
    of_one,
    of_rows,
    stage_costs,
    used_bytes,
)

Ints: TypeAlias = NDArray[np.int64]

MIXES = (0.0, 0.25, 0.5, 0.75, 1.0)  # λ tried where either may bind; any of them gives a bound
FEW = 64  # partial solutions that are completed for a cutoff, and compared with all others
BEAM = 1024  # partial solutions kept
WAYS = 2048  # splits of a class's blocks among policies that are all tried


@dataclass(frozen=True, slots=True, kw_only=True)
class _Class:
    """Equal blocks: their indices, and per policy that is not worse in every way than another
    (seconds, host seconds, bytes freed)."""

    members: tuple[int, ...]
    policies: tuple[str, ...]
    options: Floats

    def mixed(self, mix: Floats) -> Floats:
        """(policies, 2): both kinds of seconds weighed into one cost, bytes freed."""
        return np.column_stack([self.options[:, :2] @ mix, self.options[:, 2]])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """A fractional knapsack: the least cost without freeing anything more, the bytes that this
    frees, and cumulated (bytes, cost) of steps from there, cheapest per byte first."""

    cost: float
    freed: float
    more_bytes: Floats
    more_cost: Floats

    def least(self, freed: Floats) -> Floats:
        """Least cost at which `freed` bytes are freed; inf where they can't be."""
        wanted = freed - self.freed
        cost = self.cost + np.interp(wanted, self.more_bytes, self.more_cost)
        return np.where(wanted <= self.more_bytes[-1], cost, np.inf)


def choose_policies(
    blocks: Sequence[Sums],
    legal: Sequence[str],
    *,
    room_bytes: float,
    device: str = "cuda",
    last: Collection[int] = (),
) -> tuple[str, ...] | None:
    """The policy of each block that adds the least seconds to a backward, None if none fits.

    `blocks` are the sums of each block, `legal` the policies to choose from; they may keep
    `room_bytes` of a micro-batch. On a `device` of kind "cuda" the host issues operators beside it.
    Blocks that are the `last` of their stage, by number, make again beside what all others keep.
    """
    if not blocks:
        return ()
    table = np.array([_options(sums, legal, device) for sums in blocks])
    for b in last:
        table[b, :, 2] = [freed_bytes(blocks[b], policy, last=True) for policy in legal]
    saved = sum(float(sums.saved_bytes + sums.input_bytes) for sums in blocks)
    device_s = sum(float(sums.backward_s) for sums in blocks)
    host_s = sum(float(sums.backward_host_s) for sums in blocks)
    base = np.array([device_s, host_s] if device == "cuda" else [device_s + host_s, -np.inf])
    return _Knapsack(_classes(table, legal), base, saved - room_bytes).solve()


def freed_bytes(block: Sums, policy: str, *, last: bool) -> float:
    """Bytes that a block under a policy frees at the highest point of a backward."""
    repeated, none = block.recompute(policy), block.recompute("none")
    more = np.maximum(repeated.excess[LATER] - none.excess[LATER], 0.0) * last
    return max(0.0, float(repeated.freed_bytes - more))


def _options(block: Sums, legal: Sequence[str], device: str) -> Floats:
    """(policies, 3): seconds, host seconds and bytes freed; on a CPU all seconds are the first."""

    def option(policy: Recompute) -> list[float]:
        if device == "cuda":
            return [float(policy.seconds), float(policy.host_s), float(policy.freed_bytes)]
        return [float(policy.seconds + policy.host_s), 0.0, float(policy.freed_bytes)]

    return np.array([option(block.recompute(policy)) for policy in legal])


def _classes(table: Floats, legal: Sequence[str]) -> list[_Class]:
    """Classes of blocks whose policies cost and free the same, most blocks first."""
    alike: dict[bytes, list[int]] = {}
    for b, options in enumerate(table):
        alike.setdefault(options.tobytes(), []).append(b)
    classes = []
    for members in alike.values():
        options = table[members[0]]
        best = _undominated(options)
        policies = tuple(legal[k] for k in best)
        classes.append(_Class(members=tuple(members), policies=policies, options=options[best]))
    return sorted(classes, key=lambda blocks: -len(blocks.members))


def _undominated(options: Floats) -> list[int]:
    """Options that no other is at least as good as in all; of equal ones the first."""
    as_costs = options * (1.0, 1.0, -1.0)
    best: list[int] = []
    for k in sorted(range(len(options)), key=lambda k: (*as_costs[k], k)):
        if not any((as_costs[j] <= as_costs[k]).all() for j in best):
            best.append(k)
    return best


# --- the relaxation ------------------------------------------------------------------------------


def _relaxed(classes: Sequence[_Class], mix: Floats) -> _Steps:
    """The fractional knapsack of the blocks of these classes, their seconds weighed."""
    cost = freed = 0.0
    steps: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
    for blocks in classes:
        options, count = blocks.mixed(mix), len(blocks.members)
        hull = options[lower_hull(options)].tolist()
        cost, freed = cost + count * hull[0][0], freed + count * hull[0][1]
        for (c0, f0), (c1, f1) in pairwise(hull):
            steps.append(((c1 - c0) / (f1 - f0), count * (f1 - f0), count * (c1 - c0)))
    steps.sort()
    return _Steps(
        cost=cost,
        freed=freed,
        more_bytes=np.cumsum([step[1] for step in steps]),
        more_cost=np.cumsum([step[2] for step in steps]),
    )


# --- the knapsack --------------------------------------------------------------------------------


class _Knapsack:
    """Counts of policies per class that free `needed` bytes of a micro-batch at the least of
    max(base[0] + seconds, base[1] + host seconds)."""

    def __init__(self, classes: Sequence[_Class], base: Floats, needed: float) -> None:
        self.classes, self.base, self.needed = classes, base, needed
        most = sum(len(c.members) * c.options[:, :2].max(axis=0) for c in classes)
        apart = base[0] - base[1]
        mixes = (1.0,) if apart >= most[1] else (0.0,) if apart <= -most[0] else MIXES
        self.mixes = [np.array([mix, 1.0 - mix]) for mix in mixes]
        self.rest = [
            [_relaxed(classes[k:], mix) for mix in self.mixes] for k in range(len(classes) + 1)
        ]

    def solve(self) -> tuple[str, ...] | None:
        """The policy of each block, where there are any."""
        states = np.zeros((1, 3))
        trail: list[tuple[Ints, Ints]] = []
        for k, blocks in enumerate(self.classes):
            splits = self._splits(blocks)
            merged = (states[:, None] + (splits @ blocks.options)[None]).reshape(-1, 3)
            bound = self._bound(merged, k + 1)
            known = self._rounded(merged[_least(bound, FEW)], k + 1)
            beam = np.flatnonzero(np.isfinite(bound) & (bound <= known))
            beam = beam[_front(merged[beam], bound[beam])]
            beam = beam[_least(bound[beam], BEAM)]
            states = merged[beam]
            trail.append((beam // len(splits), splits[beam % len(splits)]))
        if not len(states):
            return None
        order = np.lexsort((-states[:, 2], states[:, 1], states[:, 0], self._seconds(states)))
        return self._policies(trail, int(order[0]))

    def _splits(self, blocks: _Class) -> Ints:
        """(ways, policies): ways to share a class's blocks out to its policies."""
        count, kinds = len(blocks.members), len(blocks.policies)
        if math.comb(count + kinds - 1, kinds - 1) <= WAYS:
            return _all_splits(count, kinds)
        pairs = {pair for mix in self.mixes for pair in pairwise(lower_hull(blocks.mixed(mix)))}
        few = _all_splits(count, 2)
        splits = np.zeros((len(pairs), len(few), kinds), dtype=int)
        for split, pair in zip(splits, sorted(pairs), strict=True):
            split[:, list(pair)] = few
        return splits.reshape(-1, kinds)

    def _seconds(self, states: Floats) -> Floats:
        return np.asarray((states[:, :2] + self.base).max(axis=1))

    def _bound(self, states: Floats, k: int) -> Floats:
        """Least seconds at which the classes from k on complete each state."""
        missing = self.needed - states[:, 2]
        if k == len(self.classes):
            return np.where(missing <= 0, self._seconds(states), np.inf)
        base = np.where(np.isfinite(self.base), self.base, 0.0)
        bound = np.full(len(states), -np.inf)
        for mix, rest in zip(self.mixes, self.rest[k], strict=True):
            bound = np.maximum(bound, (states[:, :2] + base) @ mix + rest.least(missing))
        return bound * (1 - 1e-12)  # rounding drops nothing

    def _rounded(self, states: Floats, k: int) -> float:
        """Seconds of a good solution: the relaxation from class k on, with divided blocks whole."""
        best_s = np.inf
        for mix in self.mixes:
            done, steps = states, []
            for blocks in self.classes[k:]:
                costs, options, count = blocks.mixed(mix), blocks.options, len(blocks.members)
                hull = lower_hull(costs)
                done = done + count * options[hull[0]]
                for a, b in pairwise(hull):
                    slope = (costs[b, 0] - costs[a, 0]) / (costs[b, 1] - costs[a, 1])
                    steps.append((slope, count, options[b] - options[a]))
            for _, count, change in sorted(steps, key=lambda step: step[0]):
                more = np.ceil((self.needed - done[:, 2]) / change[2])
                done = done + np.clip(more, 0, count)[:, None] * change
            enough = done[done[:, 2] >= self.needed]
            best_s = min(best_s, float(self._seconds(enough).min(initial=np.inf)))
        return best_s

    def _policies(self, trail: Sequence[tuple[Ints, Ints]], at: int) -> tuple[str, ...]:
        """Policies by block, traced back from state `at`; of equal blocks the first free most."""
        policies: dict[int, str] = {}
        for blocks, (before, splits) in zip(reversed(self.classes), reversed(trail), strict=True):
            most = sorted(range(len(blocks.policies)), key=lambda k: -blocks.options[k, 2])
            names = [blocks.policies[k] for k in most for _ in range(int(splits[at][k]))]
            policies |= zip(blocks.members, names, strict=True)
            at = int(before[at])
        return tuple(policies[b] for b in sorted(policies))


@cache
def _all_splits(count: int, kinds: int) -> Ints:
    """(ways, kinds): all ways to share `count` blocks out to `kinds` policies."""
    slots = count + kinds - 1
    bars = np.array([*itertools.combinations(range(slots), kinds - 1)], dtype=int)
    ends = np.full((len(bars), 1), slots)
    return np.diff(np.hstack([-np.ones_like(ends), bars.reshape(len(bars), -1), ends])) - 1


def _least(values: Floats, count: int) -> Ints:
    """Indices of the least `count` of them."""
    return np.argpartition(values, count)[:count] if len(values) > count else np.arange(len(values))


def _front(states: Floats, bound: Floats) -> Ints:
    """Indices of the Pareto front of the states: distinct ones that none of the `FEW` of least
    bound is better than."""
    _, distinct = np.unique(states, axis=0, return_index=True)
    costs = states[distinct] * (1.0, 1.0, -1.0)
    dominated = np.zeros(len(distinct), dtype=bool)
    for i in _least(bound[distinct], FEW):
        dominated |= (costs[i] <= costs).all(axis=1) & (costs[i] < costs).any(axis=1)
    return distinct[~dominated]


# --- levels ---------------------------------------------------------------------------------------

# Time against memory of stages: recompute more blocks, hold less.
#
# With h micro-batches in flight a stage holds `static + h·activation` bytes. Level 0 recomputes
# nothing; each further level recomputes all blocks by a policy that keeps less and takes longer,
# and lies on the lower convex hull of seconds over bytes of all stages together. Between two
# levels some blocks follow one policy and the rest the other, so that for n blocks the fraction on
# the next level is a multiple of 1/n:
#
#     λ = ⌈n · (bytes₀ - room) / (bytes₀ - bytes₁)⌉ / n,      time = (1-λ)·time₀ + λ·time₁
#
# where both bytes count what one recomputed block holds during its backward. Which blocks, and
# exactly how many, is decided for the chosen stages by `planner/stages/recompute.py`. On some
# levels blocks send what they save to host memory, as well. Behind the levels of single blocks
# come those of segments, in the order in which they are given, all of a stage's blocks on one or
# none: the bytes that these hold while they run again don't grow with h.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLevel:
    """Per stage the `level` that its blocks are on, the `fraction` of them that is on the next one,
    and whether that `fits`: arrays of the stages' shape."""

    level: NDArray[np.int64]
    fraction: Floats
    fits: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RecomputeLevels:
    """Costs of stages with all blocks on a level, per level, the policy of each, and the part of
    its blocks that is `sent` to host memory beyond what the user decided; `blocks` is the number in
    each stage, an array of the stages' shape."""

    policies: tuple[str, ...]
    sent: tuple[float, ...]
    costs: tuple[StageCosts[Floats], ...]
    blocks: Floats | NDArray[np.int64]

    def choose(
        self, in_flight: InFlight, room_bytes: float, *, per_device: int | NDArray[np.int64] = 1
    ) -> ChosenLevel:
        """The least recompute with which each stage fits `room_bytes` with so many micro-batches in
        flight, beside the others of `per_device` on a device (numbers, or arrays of the stages'
        shape), which are like it. One of them is in a backward at a time, and which of the device's
        blocks recompute is decided for all of them together."""

        def used(costs: StageCosts[Floats], passing: StageCosts[Floats]) -> Floats:
            return used_bytes(costs, in_flight, per_device, passing)

        first = self.costs[0]
        done = np.asarray(fits(used(first, first), room_bytes))
        level, fraction = np.zeros(done.shape, dtype=np.int64), np.zeros(done.shape)
        for k in range(1, len(self.costs)):
            low, high = self.costs[k - 1], self.costs[k]
            above, below = used(high, high), used(low, high)
            here = ~done & np.asarray(fits(above, room_bytes))
            part = (below - room_bytes) / np.maximum(below - above, 1.0)
            blocks = self.blocks * per_device
            part = np.ceil(np.clip(part, 0.0, 1.0) * blocks - 1e-9) / blocks
            part = part if segment_policy(self.policies[k])[1] == 1 else np.ones_like(part)
            level, fraction = np.where(here, k - 1, level), np.where(here, part, fraction)
            done = done | here
        return ChosenLevel(level=level, fraction=fraction, fits=done)

    def everywhere(self, chosen: ChosenLevel) -> StageCosts[Floats]:
        """The costs of all stages on their chosen levels."""
        if not chosen.level.any() and not chosen.fraction.any():
            return self.costs[0]
        weights = [
            (chosen.level == k) * (1 - chosen.fraction) + (chosen.level == k - 1) * chosen.fraction
            for k in range(len(self.costs))
        ]
        return of_rows(np.einsum("k...,kc...->c...", np.stack(weights), self._rows))

    def at(self, stage: Any, chosen: ChosenLevel) -> StageCosts[float]:
        """The costs of one stage on its chosen level; `stage` indexes the arrays."""
        k, part = int(chosen.level[stage]), float(chosen.fraction[stage])
        low = of_one(self.costs[k], stage)
        return low if not part else mixed(low, of_one(self.costs[k + 1], stage), part)

    @cached_property
    def _rows(self) -> Floats:
        """(levels, costs, ...)."""
        return np.stack([as_rows(costs) for costs in self.costs])


def recompute_levels(
    sums: Sums,
    setting: Setting,
    policies: Sequence[str],
    blocks: Floats | NDArray[np.int64],
    sends: float = 0.0,
) -> RecomputeLevels:
    """Levels of the stages with these sums, from the policies on the convex hull; such a part of
    the blocks `sends` its activations on some of them."""
    if setting.mesh.tp == 1:  # nothing is gathered
        policies = [policy for policy in policies if policy not in REGATHERING] or policies
    single = [policy for policy in policies if segment_policy(policy)[1] == 1]
    levels, costs = list[tuple[str, float]](), list[StageCosts[Floats]]()
    if single:
        again, ways = sums.recompute_by(single), [setting]
        if sends:
            ways.append(replace(setting, host=replace(setting.host, activations=sends)))
        rows = np.concatenate([as_rows(stage_costs(sums, way, again)) for way in ways], axis=1)
        of_options = of_rows(rows)
        seconds = of_options.backward_s + of_options.forward_s * (sends > 0)
        saved = of_options.activation_bytes + of_options.later_bytes * (sends > 0)
        totals = (stages.reshape(len(rows[0]), -1).sum(axis=1) for stages in (seconds, -saved))
        hull = lower_hull(np.column_stack([*totals]))
        options = [(policy, part) for part in (0.0, sends)[: len(ways)] for policy in single]
        levels, costs = [options[k] for k in hull], [of_rows(rows[:, k]) for k in hull]
    grouped = [policy for policy in policies if policy not in single]
    if grouped:
        rows = as_rows(stage_costs(sums, setting, sums.recompute_by(grouped)))
        costs += [of_rows(rows[:, k]) for k in range(len(grouped))]
    levels += [(policy, 0.0) for policy in grouped]
    return RecomputeLevels(
        policies=tuple(policy for policy, _ in levels),
        sent=tuple(part for _, part in levels),
        costs=tuple(costs),
        blocks=np.maximum(blocks, 1),
    )


def lower_hull(options: Floats) -> list[int]:
    """Options, (cost, bytes freed), on the lower convex hull, from the cheapest on."""
    hull: list[int] = []
    for k in sorted(range(len(options)), key=lambda k: (options[k, 0], -options[k, 1], k)):
        cost, freed = options[k]
        if hull and freed <= options[hull[-1], 1] + 1e-9 * abs(freed):
            continue
        while len(hull) > 1:
            (c0, f0), (c1, f1) = options[hull[-2]], options[hull[-1]]
            if (c1 - c0) * (freed - f1) < (cost - c1) * (f1 - f0):
                break
            hull.pop()
        hull.append(k)
    return hull
