"""The least sum of stage times under a bound on each of them, and the partition that attains it.

``least_sum`` computes ``F(T)``, the least ``Σ t`` over partitions whose stages all take at most
``T``, in the notation of ``planner.stage_chain`` and in two steps.

Relaxed.  ``h[j, d]`` is the least cost of blocks ``0..j-1`` on exactly ``d`` devices when every
stage is taken at the earliest position it could have, one more than the fewest stages that can
follow it:

    h[j, d] = min over i, v of  t(v, i, j) + μ + h[i, d - n_v].

``h[K, D] - μ·S`` bounds ``F(T)`` from below, and equals it when the partition found has ``S``
stages and fits where it stands.  ``μ`` prices a stage (a Lagrange multiplier): it is 0 where any
stage count is allowed, and otherwise bisected until the relaxed partition has about ``S`` stages.

Exact.  Otherwise ``f_s[i, d]``, the least cost of blocks ``i..K-1`` as ``s`` stages on ``d``
devices, is built layer by layer; the position, and with it the memory, is now known:

    f_s[i, d] = min over j, v of  t(v, i, j) + μ + f_{s-1}[j, d - n_v].

A state dies when ``f_s[i, d] + h[i, D-d] - μ·S`` is not below the cutoff, or (where any stage count
is allowed) when fewer stages reach it as cheaply, since memory only gets tighter further from the
end.  Both tables keep only those ``d`` for which the blocks on either side can be covered at all.
The layers are stored skewed, ``e = d - r·(K-i)``, which turns the diagonal band of living states
into a narrow rectangle that numpy sweeps with one call per (devices, length) pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from planner.stage_chain import (
    Chain,
    Floats,
    Ints,
    Masks,
    Shorts,
    Stage,
    by_size,
    cover,
    cover_prefix,
    device_bounds,
    smallest,
    sum_s,
)

ROUNDING = 1e-12
"""Improvements below this fraction of a cost are rounding, and are not pursued."""
_PRICES = 4
"""Stage prices tried before the exact program takes over; each costs one relaxed program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastSum:
    """What is known of F(t_max) after trying to get below a cutoff."""

    bound_s: float
    """A lower bound on F(t_max), or the cutoff if it is lower; F(t_max) itself with stages."""
    stages: tuple[Stage, ...] | None
    """The partition that attains F(t_max), if and only if that is below the cutoff."""
    price_s: float
    """μ, a good start for a similar t_max."""


def least_sum(
    chain: Chain, fits: Shorts, t_max: float, cutoff: float, price: float = 0.0
) -> LeastSum:
    """Compute F(t_max) as far as it is below the cutoff; ``price`` is where to start with μ."""
    blocks, devices, counts = chain.num_blocks, chain.num_devices, chain.stage_counts
    earliest = _earliest_positions(chain, fits, t_max)
    cost = by_size(chain, fits, earliest, t_max)
    before, after = device_bounds(chain, np.isfinite(cost))
    best: _Layers | None = None
    best_bound, low, high = -np.inf, -t_max, t_max
    if chain.any_count:
        price = 0.0
    for _ in range(_PRICES if after[0] <= devices else 0):
        prefix = _prefix_costs(chain, cost + price, before, after)
        rebate = max(price * counts[0], price * counts[-1])
        bound = float(prefix[blocks, devices]) - rebate
        if bound >= cutoff:
            return LeastSum(bound_s=bound, stages=None, price_s=price)
        allowed = (chain.time_s <= t_max) & (fits >= earliest)
        stages, in_place = _walk_prefix(chain, fits, allowed, prefix, price)
        total = sum_s(chain, stages)
        if in_place and len(stages) in counts and total <= bound + ROUNDING * abs(total):
            return LeastSum(bound_s=bound, stages=stages, price_s=price)
        if bound > best_bound:
            best_bound = bound
            best = _Layers.build(chain, fits, t_max, price, prefix, before, after)
        if counts[0] <= len(stages) <= counts[-1]:
            break
        low, high = (low, price) if len(stages) < counts[0] else (price, high)
        price = (low + high) / 2
    if best is None:
        return LeastSum(bound_s=np.inf, stages=None, price_s=price)
    found = best.run(cutoff)
    bound = cutoff if found is None else sum_s(chain, found)
    return LeastSum(bound_s=bound, stages=found, price_s=best.price)


def _earliest_positions(chain: Chain, fits: Shorts, t_max: float) -> Shorts:
    """Return (K+1, K+1): the position that stage [i, j) has at least."""
    legal = ((chain.time_s <= t_max) & (fits > 0)).any(axis=0)
    most = len(chain.in_flight) + 1
    following = np.minimum(cover(np.where(legal, 1.0, np.inf)), most)
    # At most i stages come before block i, so the rest of the smallest count comes after it.
    preceding = chain.stage_counts[0] - np.arange(chain.num_blocks + 1)
    earliest: Shorts = np.maximum(following[None, :] + 1, preceding[:, None]).astype(np.int16)
    return earliest


def _prefix_costs(chain: Chain, cost: Floats, before: Ints, after: Ints) -> Floats:
    """Return h, (K+1, D+1): least relaxed cost of blocks 0..j-1 on exactly d devices."""
    blocks, devices = chain.num_blocks, chain.num_devices
    prefix = np.full((blocks + 1, devices + 1), np.inf)
    prefix[0, 0] = 0.0
    scratch = np.empty((blocks, devices + 1))
    legal = np.isfinite(cost)
    used: Masks = np.any(legal, axis=1)
    start: Ints = np.argmax(legal, axis=1)
    stop: Ints = blocks + 1 - legal[:, ::-1].argmax(axis=1)
    for j in range(1, blocks + 1):
        for z in np.flatnonzero(used[:, j]):
            size, i0, i1 = int(chain.sizes[z]), int(start[z, j]), int(stop[z, j])
            low = max(int(before[j]), size + int(before[i0:i1].min()))
            high = devices - int(after[j]) + 1
            if low >= high:
                continue
            through = scratch[: i1 - i0, : high - low]
            earlier = prefix[i0:i1, low - size : high - size]
            np.add(cost[z, i0:i1, j, None], earlier, out=through)
            row = prefix[j, low:high]
            np.minimum(row, through.min(axis=0), out=row)
    return prefix


def _walk_prefix(
    chain: Chain, fits: Shorts, allowed: Masks, prefix: Floats, price: float
) -> tuple[tuple[Stage, ...], bool]:
    """Read a partition that attains h[K, D], last stage first, and whether it fits in place."""
    stages: list[Stage] = []
    in_place = True
    j, d = chain.num_blocks, chain.num_devices
    while j > 0:
        left = d - chain.size_of
        earlier = prefix[:j, np.maximum(left, 0)].T
        through = (chain.time_s[:, :j, j] + price) + earlier
        hit = allowed[:, :j, j] & (through == prefix[j, d]) & (left >= 0)[:, None]
        fitting = hit & (fits[:, :j, j] > len(stages))
        in_place &= bool(fitting.any())
        i, v = smallest(chain, fitting if fitting.any() else hit)
        stages.append((i, j, v))
        j, d = i, int(left[v])
    return tuple(reversed(stages)), in_place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """The exact program f_s[i, d], its planes skewed to e = d - r·(K-i) - e0."""

    chain: Chain
    fits: Shorts
    t_max: float
    price: float
    """μ"""
    skew: int
    """r"""
    origin: int
    """e0"""
    remaining: Floats
    """(K+1, E): h[i, D-d], what blocks 0..i-1 still cost at least."""
    fewest_before: Floats
    """(K+1,): the fewest stages that cover blocks 0..i-1."""

    @classmethod
    def build(
        cls,
        chain: Chain,
        fits: Shorts,
        t_max: float,
        price: float,
        prefix: Floats,
        before: Ints,
        after: Ints,
    ) -> "_Layers":
        """Choose the skew that makes the band of states from which both ends are covered narrow."""
        blocks, devices = chain.num_blocks, chain.num_devices
        low, high = after, devices - before
        rows = np.flatnonzero(low <= high)
        length = blocks - np.arange(blocks + 1)
        skews = np.arange(2 * devices // blocks + 2)[:, None]
        origins = (low[rows] - skews * length[rows]).min(axis=1)
        widths = (high[rows] - skews * length[rows]).max(axis=1) - origins + 1
        skew = int(widths.argmin())
        origin, width = int(origins[skew]), int(widths[skew])
        d = np.arange(width)[None, :] + origin + skew * length[:, None]
        valid = (d >= low[:, None]) & (d <= high[:, None])
        free = np.where(valid, devices - d, 0)
        remaining = np.where(valid, np.take_along_axis(prefix, free, axis=1), np.inf)
        legal = ((chain.time_s <= t_max) & (fits > 0)).any(axis=0)
        return cls(
            chain=chain,
            fits=fits,
            t_max=t_max,
            price=price,
            skew=skew,
            origin=origin,
            remaining=remaining,
            fewest_before=cover_prefix(np.where(legal, 1.0, np.inf)),
        )

    def column(self, i: int, d: int) -> int:
        return d - self.skew * (self.chain.num_blocks - i) - self.origin

    def run(self, cutoff: float) -> tuple[Stage, ...] | None:
        """Return the partition of least sum below the cutoff, if there is one."""
        chain, counts = self.chain, self.chain.stage_counts
        layer = np.full(self.remaining.shape, np.inf)
        layer[chain.num_blocks, self.column(chain.num_blocks, 0)] = 0.0
        layers, best, found = [layer], np.full_like(layer, np.inf), 0
        final = self.column(0, chain.num_devices)
        rebate = max(self.price * counts[0], self.price * counts[-1])
        for s in range(1, counts[-1] + 1):
            cost = by_size(chain, self.fits, s, self.t_max) + self.price
            layer = self._next(layer, cost, cutoff + rebate)
            layer[~self._rows_that_can_end(s)] = np.inf
            layer[layer + self.remaining >= cutoff + rebate] = np.inf
            if chain.any_count:
                layer[layer >= best] = np.inf
                np.minimum(best, layer, out=best)
            layers.append(layer)
            total = float(layer[0, final]) - self.price * s
            if s in counts and total < cutoff:
                cutoff, found = total - ROUNDING * abs(total), s
            if not np.isfinite(layer[1:]).any():
                break
        return self._walk(layers[: found + 1]) if found else None

    def _rows_that_can_end(self, s: int) -> Masks:
        """Return (K+1,): rows whose blocks before can make up an allowed number of stages."""
        more = np.array(self.chain.stage_counts)[:, None] - s
        block = np.arange(self.chain.num_blocks + 1)
        rows: Masks = np.any((more >= self.fewest_before) & (more <= block), axis=0)
        return rows

    def _next(self, layer: Floats, cost: Floats, cutoff: float) -> Floats:
        """Put one more stage in front of every state of ``layer``."""
        rows, width = layer.shape
        ahead = layer.min(axis=1)[None, :] + self.remaining.min(axis=1)[:, None]
        padded = np.full((len(cost), rows, 2 * rows), np.inf)
        padded[:, :, :rows] = np.where(cost + ahead < cutoff, cost, np.inf)
        # diagonal[z, n, i] is padded[z, i, i + n]: all stages of n blocks, by their first block.
        by_size, by_row, by_column = padded.strides
        diagonal = as_strided(padded, cost.shape, (by_size, by_column, by_row + by_column))
        legal = np.isfinite(diagonal)
        start = legal.argmax(axis=2)
        stop = rows - legal[:, :, ::-1].argmax(axis=2)
        columns = np.flatnonzero(np.isfinite(layer).any(axis=0))
        result = np.full_like(layer, np.inf)
        scratch = np.empty_like(layer)
        for z, n in np.argwhere(legal.any(axis=2)):
            i0, i1 = int(start[z, n]), int(stop[z, n])
            shift = int(self.chain.sizes[z]) - self.skew * int(n)
            e0 = max(int(columns[0]) + shift, 0)
            e1 = min(int(columns[-1]) + 1 + shift, width)
            if e0 >= e1:
                continue
            through = scratch[: i1 - i0, : e1 - e0]
            later = layer[i0 + n : i1 + n, e0 - shift : e1 - shift]
            np.add(diagonal[z, n, i0:i1, None], later, out=through)
            target = result[i0:i1, e0:e1]
            np.minimum(target, through, out=target)
        return result

    def _walk(self, layers: Sequence[Floats]) -> tuple[Stage, ...]:
        """Read the partition from its first stage on."""
        chain = self.chain
        stages: list[Stage] = []
        i, d = 0, chain.num_devices
        for s in range(len(layers) - 1, 0, -1):
            value = layers[s][i, self.column(i, d)]
            j = np.arange(i + 1, chain.num_blocks + 1)
            left = d - chain.size_of
            e = left[:, None] - self.skew * (chain.num_blocks - j) - self.origin
            inside = (e >= 0) & (e < self.remaining.shape[1])
            later = np.where(inside, layers[s - 1][j, np.where(inside, e, 0)], np.inf)
            time_s = chain.time_s[:, i, i + 1 :]
            usable = (self.fits[:, i, i + 1 :] >= s) & (time_s <= self.t_max)
            block, v = smallest(chain, usable & ((time_s + self.price) + later == value))
            stages.append((i, int(j[block]), v))
            i, d = int(j[block]), int(left[v])
        return tuple(stages)
