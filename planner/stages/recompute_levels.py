"""Time against memory of stages: recompute more blocks, hold less.

With h micro-batches in flight a stage holds `static + h·activation` bytes. Level 0 recomputes
nothing; each further level recomputes all blocks by a policy that keeps less and takes longer, and
lies on the lower convex hull of seconds over bytes of all stages together.
Between two levels some blocks follow one policy and the rest the other, so that for n blocks the
fraction on the next level is a multiple of 1/n:

    λ = ⌈n · (bytes₀ - room) / (bytes₀ - bytes₁)⌉ / n,      time = (1-λ)·time₀ + λ·time₁

where both bytes count what one recomputed block holds during its backward. Which blocks, and
exactly how many, is decided for the chosen stages by `planner/stages/recompute.py`. On some levels
blocks send what they save to host memory, as well. Behind the levels of single blocks come those of
segments, in the order in which they are given, all of a stage's blocks on one or none: the bytes
that these hold while they run again don't grow with h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.operators import Setting
from meshwright.costmodel.recompute import REGATHERING, segment_policy
from meshwright.costmodel.stages import (
    Floats,
    InFlight,
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
