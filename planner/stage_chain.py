"""A chain of blocks to be cut into stages: its costs, what fits where, and whether anything does.

Notation: ``K`` blocks, ``D`` devices, variants ``v`` of ``n_v`` devices, positions ``s`` counted
from the end of the pipeline (the last stage is 1), a stage ``[i, j)`` of blocks ``i..j-1``.

A stage at position ``s`` uses ``static + in_flight(s) · activation`` bytes.  As ``in_flight`` does
not fall with ``s``, the positions where a stage fits are ``1..p``, so one integer per stage says
all about memory.  ``any_partition`` then answers feasibility for every stage count at once, with
the counts that reach (first block, devices) as a bit set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Shorts: TypeAlias = NDArray[np.int16]
Masks: TypeAlias = NDArray[np.bool_]
BitSets: TypeAlias = NDArray[np.uint64]
Stage: TypeAlias = tuple[int, int, int]
"""(first block, one past the last block, variant)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A partition problem in the form the programs want: variants sorted by device count."""

    num_blocks: int
    num_devices: int
    """In units of the greatest common divisor of all variants' device counts."""
    sizes: Ints
    """(Z,): the distinct device counts, ascending, in the same unit."""
    first_of_size: Ints
    """(Z,): where each size's variants begin."""
    size_of: Ints
    """(V,): device count of each variant."""
    names: Ints
    """(V,): each variant's index in the caller's table."""
    time_s: Floats
    static_bytes: Floats
    activation_bytes: Floats
    """(V, K+1, K+1) each; time_s is +inf where the stage is illegal."""
    in_flight: Ints
    """(S,): micro-batches held at positions 1..S, non-decreasing."""
    stage_counts: tuple[int, ...]
    """Allowed stage counts, ascending; S is the last."""

    @property
    def any_count(self) -> bool:
        """Whether fewer stages are always allowed too, so that they dominate."""
        return self.stage_counts == tuple(range(1, self.stage_counts[-1] + 1))


def positions_that_fit(chain: Chain, limit_bytes: float) -> Shorts:
    """Return (V, K+1, K+1): at how many leading positions 1, 2, ... each stage fits; 0 if never."""
    legal = np.isfinite(chain.time_s)
    static, activation = chain.static_bytes[legal], chain.activation_bytes[legal]
    levels, first = np.unique(chain.in_flight, return_index=True)
    positions_below = np.append(first, len(chain.in_flight)).astype(np.int16)
    low = np.zeros(len(static), dtype=np.int16)
    high = np.full(len(static), len(levels), dtype=np.int16)
    padded = np.append(levels, levels[-1]).astype(np.float64)
    for _ in range(len(levels).bit_length()):
        middle = (low + high) // 2
        fit = (static + padded[middle] * activation <= limit_bytes) & (low < high)
        high = np.where(fit, high, middle)
        low = np.where(fit, middle + 1, low)
    fits = np.zeros(chain.time_s.shape, dtype=np.int16)
    fits[legal] = positions_below[low]
    return fits


def next_usage_bytes(chain: Chain, fits: Shorts) -> float:
    """Return the least bytes that a stage uses at a position where it does not fit."""
    unfit = np.isfinite(chain.time_s) & (fits < len(chain.in_flight))
    held = chain.in_flight[fits[unfit]]
    return float((chain.static_bytes[unfit] + held * chain.activation_bytes[unfit]).min())


def usage_bytes(chain: Chain, stages: Sequence[Stage]) -> tuple[float, ...]:
    """Return the bytes each stage of a partition uses."""
    held = chain.in_flight[len(stages) - 1 :: -1]
    return tuple(
        float(chain.static_bytes[v, i, j] + f * chain.activation_bytes[v, i, j])
        for (i, j, v), f in zip(stages, held, strict=True)
    )


def sum_s(chain: Chain, stages: Sequence[Stage]) -> float:
    """Return the seconds of one micro-batch through all stages."""
    return float(sum(chain.time_s[v, i, j] for i, j, v in stages))


def t_max_s(chain: Chain, stages: Sequence[Stage]) -> float:
    """Return the seconds of one micro-batch in the slowest stage."""
    return float(max(chain.time_s[v, i, j] for i, j, v in stages))


def smallest_t_max(chain: Chain, fits: Shorts) -> float | None:
    """Return the least stage time below which the devices cannot cover the blocks, or None."""
    cost = by_size(chain, fits, 1, np.inf)
    times = np.unique(cost[np.isfinite(cost)])
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if device_bounds(chain, np.less_equal(cost, times[middle]))[1][0] <= chain.num_devices:
            high = middle
        else:
            low = middle + 1
    return float(times[low]) if low < len(times) else None


def by_size(chain: Chain, fits: Shorts, position: Shorts | int, t_max: float) -> Floats:
    """Return (Z, K+1, K+1): least time per size of the variants that fit at ``position[i, j]``."""
    time_s = np.where((fits >= position) & (chain.time_s <= t_max), chain.time_s, np.inf)
    return np.minimum.reduceat(time_s, chain.first_of_size, axis=0)


def cover(weight: Floats) -> Floats:
    """Return (K+1,): the least total weight of stages covering blocks i..K-1."""
    last = len(weight) - 1
    total = np.full(last + 1, np.inf)
    total[last] = 0.0
    for i in range(last - 1, -1, -1):
        total[i] = (weight[i, i + 1 :] + total[i + 1 :]).min()
    return total


def cover_prefix(weight: Floats) -> Floats:
    """Return (K+1,): the least total weight of stages covering blocks 0..i-1."""
    return cover(weight[::-1, ::-1].T)[::-1]


def device_bounds(chain: Chain, legal: Masks) -> tuple[Ints, Ints]:
    """Return (K+1,) twice: fewest devices for blocks 0..i-1, and for i..K-1; D+1 if impossible."""
    smallest = np.where(legal.any(axis=0), chain.sizes[legal.argmax(axis=0)], np.inf)
    bounds = cover_prefix(smallest), cover(smallest)
    before, after = (np.minimum(b, chain.num_devices + 1).astype(np.int64) for b in bounds)
    return before, after


def smallest(chain: Chain, hit: Masks) -> tuple[int, int]:
    """Return the smallest (block, variant) of a (V, blocks) mask, by the caller's variant order."""
    block = int(hit.any(axis=0).argmax())
    candidates = np.flatnonzero(hit[:, block])
    return block, int(candidates[chain.names[candidates].argmin()])


def any_partition(chain: Chain, fits: Shorts) -> tuple[Stage, ...] | None:
    """Return a partition into an allowed number of stages that fit, the fewest first, or None.

    ``counts[w, i, d]`` is the set of stage counts s for which blocks i..K-1 fit on d devices, bit
    ``s % 64`` of word ``s // 64``; a stage in front of it shifts the set and drops what is too far.
    """
    blocks, devices = chain.num_blocks, chain.num_devices
    furthest = np.maximum.reduceat(fits, chain.first_of_size, axis=0)
    before, after = device_bounds(chain, furthest > 0)
    words = chain.stage_counts[-1] // 64 + 1
    counts = np.zeros((words, blocks + 1, devices + 1), dtype=np.uint64)
    shifted = np.zeros_like(counts)
    counts[0, blocks, 0], shifted[0, blocks, 0] = 1, 2
    bits = np.arange(chain.stage_counts[-1] + 1)
    within = _pack(bits[None, :] <= bits[:, None], words)
    for i in range(blocks - 1, -1, -1):
        for z in np.flatnonzero(furthest[:, i].any(axis=1)):
            size, reach = int(chain.sizes[z]), np.flatnonzero(furthest[z, i])
            j0, j1 = int(reach[0]), int(reach[-1]) + 1
            low = max(int(after[i]), size + int(after[j0:j1].min()))
            high = devices - int(before[i]) + 1
            if low >= high:
                continue
            for w in range(words):
                later = shifted[w, j0:j1, low - size : high - size]
                keep = within[w, furthest[z, i, j0:j1], None]
                counts[w, i, low:high] |= np.bitwise_or.reduce(later & keep, axis=0)
        shifted[:, i] = counts[:, i] << np.uint64(1)
        shifted[1:, i] |= counts[:-1, i] >> np.uint64(63)
    for s in chain.stage_counts:
        if _has(counts[:, 0, devices], s):
            return _walk_counts(chain, fits, counts, s)
    return None


def _pack(member: Masks, words: int) -> BitSets:
    """Return (words, rows): each row of a (rows, bits) mask as a bit set without bit 0."""
    padded = np.zeros((len(member), 64 * words), dtype=np.uint64)
    padded[:, 1 : member.shape[1]] = member[:, 1:]
    weights = np.uint64(1) << np.arange(64, dtype=np.uint64)
    packed: BitSets = (padded.reshape(len(member), words, 64) * weights).sum(axis=2).T
    return packed


def _has(counts: BitSets, s: int) -> Masks:
    """Return where the bit sets along the first axis hold s."""
    held: Masks = (counts[s // 64] >> np.uint64(s % 64)) & np.uint64(1) > 0
    return held


def _walk_counts(chain: Chain, fits: Shorts, counts: BitSets, num_stages: int) -> tuple[Stage, ...]:
    """Read a partition of so many stages, its first stage first."""
    stages: list[Stage] = []
    i, d = 0, chain.num_devices
    for s in range(num_stages, 0, -1):
        left = d - chain.size_of
        later = counts[:, i + 1 :, np.maximum(left, 0)]
        hit = _has(later, s - 1).T & (left >= 0)[:, None] & (fits[:, i, i + 1 :] >= s)
        block, v = smallest(chain, hit)
        stages.append((i, i + 1 + block, v))
        i, d = i + 1 + block, int(left[v])
    return tuple(stages)
