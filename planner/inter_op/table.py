"""The stage table, the partition problem, and whether any partition fits at all.

Notation: ``K`` blocks, ``D`` devices, variants ``v`` of ``n_v`` devices, positions ``s`` counted
from the end of the pipeline (the last stage is 1), a stage ``[i, j)`` of blocks ``i..j-1``.

A stage at position ``s`` uses ``static + in_flight(s) · activation`` bytes.  As ``in_flight`` does
not fall with ``s``, the positions where a stage fits are ``1..p``, so one integer per (device
count, i, j) says all about memory.  ``any_partition`` answers feasibility for every stage count at
once: where any count is allowed the fewest stages of every (first block, devices) decide, since
whatever precedes them then stands nearest to the end; otherwise the counts are kept as a bit set.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Shorts: TypeAlias = NDArray[np.int16]
Masks: TypeAlias = NDArray[np.bool_]
BitSets: TypeAlias = NDArray[np.uint64]
Cell: TypeAlias = tuple[int, int, int]
"""A stage without its variant: (index of its device count, first block, one past the last)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """Costs of every contiguous run of blocks i..j-1 as one pipeline stage, for each variant.

    A variant is a submesh with its dp, tp, ZeRO and recomputation.  ``K`` blocks, ``V`` variants.
    """

    devices: NDArray[np.int64]
    """(V,): devices that variant v occupies."""
    time_s: NDArray[np.float64]
    """(V, K+1, K+1): one micro-batch, forward, backward and sends, with once-per-step work divided
    by the number of micro-batches; +inf where i >= j or where the stage is illegal."""
    static_bytes: NDArray[np.float64]
    """(V, K+1, K+1): weights, gradients, optimizer states, buffers, per device."""
    activation_bytes: NDArray[np.float64]
    """(V, K+1, K+1): saved activations of one in-flight micro-batch, per device."""
    fill_s: NDArray[np.float64] | None = None
    """(V, K+1, K+1): seconds that the stage adds to fill and drain the pipeline; None where these
    are time_s itself, as under GPipe and 1F1B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Devices, memory and stage counts that a partition of a stage table must meet."""

    num_devices: int
    """Devices of all stages together, exactly."""
    memory_bytes: float
    """Usable bytes per device."""
    in_flight: Callable[[int], int]
    """Position s from the end (the last stage is 1) -> micro-batches in flight on the stage; may
    not fall with s."""
    num_stages: int | Collection[int] | None = None
    """Number of stages, or the allowed ones; None for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProblem:
    """Table and constraints in the form that the programs work on."""

    num_blocks: int
    num_devices: int
    """In units of the greatest common divisor of all variants' device counts."""
    sizes: Ints
    """(Z,): the distinct device counts, ascending, in the same unit."""
    variants: tuple[Ints, ...]
    """For each size its variants' indices in the table, ascending."""
    in_flight: Ints
    """(S,): micro-batches held at positions 1..S, non-decreasing."""
    stage_counts: tuple[int, ...]
    """Allowed stage counts, ascending; S is the last."""

    @property
    def any_count(self) -> bool:
        """Whether fewer stages are always allowed too, so that they dominate."""
        return self.stage_counts == tuple(range(1, self.stage_counts[-1] + 1))


def smallest_limit(problem: PartitionProblem, cost: Floats) -> float | None:
    """The least limit on ``cost[z, i, j]`` under which the devices can cover the blocks."""
    values = np.unique(cost[np.isfinite(cost)])
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if device_bounds(problem, np.less_equal(cost, values[middle]))[1][0] <= problem.num_devices:
            high = middle
        else:
            low = middle + 1
    return float(values[low]) if low < len(values) else None


def cover(weight: Floats) -> Floats:
    """(K+1,): the least total weight of stages covering blocks i..K-1."""
    last = len(weight) - 1
    total = np.full(last + 1, np.inf)
    total[last] = 0.0
    for i in range(last - 1, -1, -1):
        total[i] = (weight[i, i + 1 :] + total[i + 1 :]).min()
    return total


def cover_prefix(weight: Floats) -> Floats:
    """(K+1,): the least total weight of stages covering blocks 0..i-1."""
    return cover(weight[::-1, ::-1].T)[::-1]


def device_bounds(problem: PartitionProblem, legal: Masks) -> tuple[Ints, Ints]:
    """(K+1,) twice: fewest devices for blocks 0..i-1, and for i..K-1; D+1 if impossible."""
    smallest = np.where(legal.any(axis=0), problem.sizes[legal.argmax(axis=0)], np.inf)
    bounds = cover_prefix(smallest), cover(smallest)
    before, after = (np.minimum(b, problem.num_devices + 1).astype(np.int64) for b in bounds)
    return before, after


def first_hit(hit: Masks) -> tuple[int, int]:
    """The smallest (block, device count) of a (Z, blocks) mask."""
    block = int(hit.any(axis=0).argmax())
    return block, int(hit[:, block].argmax())


def any_partition(problem: PartitionProblem, furthest: Shorts) -> tuple[Cell, ...] | None:
    """A partition into an allowed number of stages that fit, the fewest first, or None.

    ``furthest`` is (Z, K+1, K+1): at how many leading positions a stage fits.
    """
    program = _fewest_stages if problem.any_count else _counted_stages
    return program(problem, furthest)


def _windows(
    problem: PartitionProblem, furthest: Shorts, i: int, before: Ints, after: Ints
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(z, size, j0, j1, low, high) of stages from block i on: those of this size end before block
    j0 <= j < j1, and leave blocks i..K-1 on low <= d < high devices in all."""
    for z in np.flatnonzero(furthest[:, i].any(axis=1)):
        size, reach = int(problem.sizes[z]), np.flatnonzero(furthest[z, i])
        j0, j1 = int(reach[0]), int(reach[-1]) + 1
        low = max(int(after[i]), size + int(after[j0:j1].min()))
        high = problem.num_devices - int(before[i]) + 1
        if low < high:
            yield int(z), size, j0, j1, low, high


def _fewest_stages(problem: PartitionProblem, furthest: Shorts) -> tuple[Cell, ...] | None:
    """Dynamic program where any count is allowed: ``fewest[i, d]`` is the least number of stages
    for blocks i..K-1 on exactly d devices."""
    blocks, devices = problem.num_blocks, problem.num_devices
    before, after = device_bounds(problem, furthest > 0)
    never = np.int16(np.iinfo(np.int16).max)
    fewest = np.full((blocks + 1, devices + 1), never)
    fewest[blocks, 0] = 0
    for i in range(blocks - 1, -1, -1):
        for z, size, j0, j1, low, high in _windows(problem, furthest, i, before, after):
            later = fewest[j0:j1, low - size : high - size]
            fits = later < furthest[z, i, j0:j1, None]
            least = np.where(fits, later + np.int16(1), never).min(axis=0)
            np.minimum(fewest[i, low:high], least, out=fewest[i, low:high])
    if fewest[0, devices] == never:
        return None
    stages: list[Cell] = []
    i, d = 0, devices
    while i < blocks:
        s, free = fewest[i, d], d - problem.sizes
        later = fewest[i + 1 :, np.maximum(free, 0)].T
        hit = (later == s - 1) & (free >= 0)[:, None] & (furthest[:, i, i + 1 :] >= s)
        block, size_index = first_hit(hit)
        stages.append((size_index, i, i + 1 + block))
        i, d = i + 1 + block, int(free[size_index])
    return tuple(stages)


def _counted_stages(problem: PartitionProblem, furthest: Shorts) -> tuple[Cell, ...] | None:
    """``counts[w, i, d]`` is the set of stage counts s for which blocks i..K-1 fit on d devices,
    bit ``s % 64`` of word ``s // 64``; a stage in front of it shifts the set and drops what is too
    far."""
    blocks, devices = problem.num_blocks, problem.num_devices
    before, after = device_bounds(problem, furthest > 0)
    words = problem.stage_counts[-1] // 64 + 1
    counts = np.zeros((words, blocks + 1, devices + 1), dtype=np.uint64)
    shifted = np.zeros_like(counts)
    counts[0, blocks, 0], shifted[0, blocks, 0] = 1, 2
    bits = np.arange(problem.stage_counts[-1] + 1)
    within = _pack(bits[None, :] <= bits[:, None], words)
    for i in range(blocks - 1, -1, -1):
        for z, size, j0, j1, low, high in _windows(problem, furthest, i, before, after):
            for w in range(words):
                later = shifted[w, j0:j1, low - size : high - size]
                keep = within[w, furthest[z, i, j0:j1], None]
                counts[w, i, low:high] |= np.bitwise_or.reduce(later & keep, axis=0)
        shifted[:, i] = counts[:, i] << np.uint64(1)
        shifted[1:, i] |= counts[:-1, i] >> np.uint64(63)
    for s in problem.stage_counts:
        if _has(counts[:, 0, devices], s):
            return _walk_counts(problem, furthest, counts, s)
    return None


def _pack(member: Masks, words: int) -> BitSets:
    """(words, rows): each row of a (rows, bits) mask as a bit set without bit 0."""
    padded = np.zeros((len(member), 64 * words), dtype=np.uint64)
    padded[:, 1 : member.shape[1]] = member[:, 1:]
    weights = np.uint64(1) << np.arange(64, dtype=np.uint64)
    return np.asarray((padded.reshape(len(member), words, 64) * weights).sum(axis=2).T)


def _has(counts: BitSets, s: int) -> Masks:
    """Whether the bit sets along the first axis hold s."""
    return np.asarray((counts[s // 64] >> np.uint64(s % 64)) & np.uint64(1) > 0)


def _walk_counts(
    problem: PartitionProblem, furthest: Shorts, counts: BitSets, num_stages: int
) -> tuple[Cell, ...]:
    """A partition of so many stages, its first stage first."""
    stages: list[Cell] = []
    i, d = 0, problem.num_devices
    for s in range(num_stages, 0, -1):
        free = d - problem.sizes
        later = counts[:, i + 1 :, np.maximum(free, 0)]
        hit = _has(later, s - 1).T & (free >= 0)[:, None] & (furthest[:, i, i + 1 :] >= s)
        block, z = first_hit(hit)
        stages.append((z, i, i + 1 + block))
        i, d = i + 1 + block, int(free[z])
    return tuple(stages)
