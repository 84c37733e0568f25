"""The stage table, the partition problem, and whether any partition fits at all.

Notation: ``K`` blocks, ``D`` devices, variants ``v`` of ``n_v`` devices, positions ``s`` counted
from the end of the pipeline (the last stage is 1), a stage ``[i, j)`` of blocks ``i..j-1``.

A stage at position ``s`` uses ``static + in_flight(s) · activation`` bytes.  As ``in_flight`` does
not fall with ``s``, the positions where a stage fits are ``1..p``, so one integer per (device
count, i, j) says all about memory.  ``any_partition`` answers feasibility for every stage count at
once: where any count is allowed the fewest stages of every (first block, devices) decide, since
whatever precedes them then stands nearest to the end; otherwise the counts are kept as a bit set.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.stages import fits, stage_bytes

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


# --- options of a stage ---------------------------------------------------------------------------

# Dominance: of a stage's hundreds of variants, the few that an optimal partition may need.
#
# A variant of a stage ``[i, j)`` matters to a partition only by its number of devices, its time
# ``t``, its fill ``g`` (what it adds to ``Σ g``) and how far from the end of the pipeline it fits.
# Among the variants of one device count and one run of blocks, one that is neither slower nor
# dearer to fill and fits wherever the other fits can replace it in any partition, so the other is
# dropped. What stays are the *options*, sorted by (device count, i, j).
#
# Fit is counted in levels, the distinct values of ``in_flight``: positions that hold equally many
# micro-batches are alike.  For every level the quickest variant that fits there is found by
# scattering each variant to the last level it fits and taking minima towards the first, which
# costs one pass over the table and one over (levels, runs).  A slower variant survives only where
# it fills for less than the quickest one at its own last level, which never happens where ``g =
# t``.
#
# Where only memory matters a variant is a line ``static + in_flight · activation``, and is dropped
# where another line starts lower and rises less.


AnyArray: TypeAlias = NDArray[Any]
_COMPARED = 8
"""Lines that a further line is compared with; more would drop few others and cost quadratically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """N entries in G cells (device count, i, j), by cell."""

    shape: tuple[int, int, int]
    """(Z, K+1, K+1), the shape of the dense tables that the programs work on."""
    cell: Ints
    """(G,): flat index into ``shape`` of each cell that has entries, ascending."""
    first: Ints
    """(G,): the first entry of each cell."""

    def _each(self, of_cells: AnyArray, entries: int) -> AnyArray:
        """(N,): ``of_cells`` (G,) repeated for each entry of a cell."""
        return np.repeat(of_cells, np.diff(np.append(self.first, entries)))

    def _dense(self, of_cells: AnyArray, empty: float) -> AnyArray:
        """(Z, K+1, K+1): ``of_cells`` (G,), ``empty`` elsewhere."""
        table = np.full(self.shape, empty, dtype=of_cells.dtype)
        table.ravel()[self.cell] = of_cells
        return table

    def _least(self, value: Floats) -> Floats:
        """(Z, K+1, K+1): the least of each cell's values; inf without any."""
        return self._dense(np.minimum.reduceat(value, self.first), np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(_Cells):
    """The variants of each stage that an optimal partition may need, as entries."""

    run: Ints
    """(N,): flat index into (K+1, K+1) of each option."""
    time_s: Floats
    fill_s: Floats
    """(N,) each"""
    fits: Shorts
    """(N,): at how many leading positions 1, 2, ... the option fits, at least 1."""

    def cheapest(self, position: Shorts | int, t_max: float) -> Floats:
        """(Z, K+1, K+1): least fill of what fits at ``position[i, j]`` within t_max."""
        at = position if isinstance(position, int) else position.ravel()[self.run]
        usable = (self.fits >= at) & (self.time_s <= t_max)
        return self._least(np.where(usable, self.fill_s, np.inf))

    def quickest(self) -> Floats:
        """(Z, K+1, K+1): the least time at position 1."""
        return self._least(self.time_s)

    def furthest(self) -> Shorts:
        """(Z, K+1, K+1): number of leading positions at which some option fits."""
        return self._most(self.fits)

    def furthest_at(self, cost: Floats, t_max: float) -> Shorts:
        """``furthest`` of options within t_max whose fill is ``cost`` there."""
        asked = self._each(cost.ravel()[self.cell], len(self.fits))
        usable = (self.fill_s == asked) & (self.time_s <= t_max)
        return self._most(np.where(usable, self.fits, 0).astype(np.int16))

    def find(self, z: int, i: int, j: int, *, fill_s: float, position: int, t_max: float) -> int:
        """The quickest option of a cell that has this fill and fits."""
        group = int(np.searchsorted(self.cell, np.ravel_multi_index((z, i, j), self.shape)))
        begin = int(self.first[group])
        end = int(self.first[group + 1]) if group + 1 < len(self.first) else len(self.fits)
        usable = (self.fits[begin:end] >= position) & (self.fill_s[begin:end] == fill_s)
        time_s = np.where(usable, self.time_s[begin:end], np.inf)
        best = int(time_s.argmin())
        assert time_s[best] <= t_max
        return begin + best

    def cell_of(self, option: int) -> Cell:
        """The cell of an option."""
        group = int(np.searchsorted(self.first, option, side="right")) - 1
        z, i, j = (int(x) for x in np.unravel_index(self.cell[group], self.shape))
        return z, i, j

    def _most(self, value: Shorts) -> Shorts:
        return self._dense(np.maximum.reduceat(value, self.first), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLines(_Cells):
    """Lines static + in_flight · activation of each stage, as entries."""

    static_bytes: Floats
    activation_bytes: Floats
    """(N,) each"""
    levels: Floats
    positions: Shorts
    """As returned by ``_levels``."""

    def least_bytes(self) -> Floats:
        """(Z, K+1, K+1): the least use at the last position; inf where illegal."""
        used = stage_bytes(self.static_bytes, self.activation_bytes, self.levels[0])
        return self._least(used)

    def within(self, limit_bytes: float) -> tuple[Shorts, float]:
        """(Z, K+1, K+1): number of leading positions at which a stage fits; and the least limit
        beyond this one at which some stage fits further, inf if all fit everywhere."""
        level = _levels_that_fit(self.static_bytes, self.activation_bytes, self.levels, limit_bytes)
        furthest = np.maximum.reduceat(level, self.first)
        here = self._each(furthest, len(level))
        over = here < len(self.levels)
        used = stage_bytes(
            self.static_bytes[over], self.activation_bytes[over], self.levels[here[over]]
        )
        return self._dense(self.positions[furthest], 0), float(used.min(initial=np.inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """The runs of blocks that one variant can take, and what it costs there."""

    at: Ints
    """Which of the runs i < j, as a position in their list."""
    time_s: Floats
    fill_s: Floats
    level: Ints
    """At how many levels it fits, at least 1."""


def stage_options(
    problem: PartitionProblem,
    table: StageTable,
    memory_bytes: float,
    *,
    later: int,
    cutoff_s: float,
) -> Options | None:
    """Options of a table, without those that alone reach the cutoff; None if none."""
    rows = problem.num_blocks + 1
    runs = _runs(rows)
    levels, positions = _levels(problem)
    columns: list[tuple[Ints, Floats, Floats, Ints]] = []
    for z, members in enumerate(problem.variants):
        variants: list[_Variant] = []
        # Of the last variant that fits everywhere; any other must be quicker or fill for less.
        everywhere_s, everywhere_fill_s = np.full(len(runs), np.inf), np.full(len(runs), np.inf)
        for v in members:
            time_s = table.time_s[v].ravel()[runs]
            fill_s = time_s if table.fill_s is None else table.fill_s[v].ravel()[runs]
            needed = (time_s < everywhere_s) | (fill_s < everywhere_fill_s)
            at = np.flatnonzero(needed & (time_s < np.inf))
            at = at[fill_s[at] + later * time_s[at] < cutoff_s]
            static = table.static_bytes[v].ravel()[runs[at]]
            activation = table.activation_bytes[v].ravel()[runs[at]]
            level = _levels_that_fit(static, activation, levels, memory_bytes)
            at, level = at[level > 0], level[level > 0]
            variants.append(_Variant(at=at, time_s=time_s[at], fill_s=fill_s[at], level=level))
            everywhere = at[level == len(levels)]
            everywhere_s[everywhere] = time_s[everywhere]
            everywhere_fill_s[everywhere] = fill_s[everywhere]
        two_costs = table.fill_s is not None
        for at, time_s, fill_s, level in _undominated(variants, len(runs), two_costs):
            columns.append((z * rows * rows + runs[at], time_s, fill_s, level))
    if not columns:
        return None
    cell, time_s, fill_s, level = (np.concatenate(c) for c in zip(*columns, strict=True))
    order = np.argsort(cell, kind="stable")
    cells, first = np.unique(cell[order], return_index=True)
    return Options(
        shape=(len(problem.sizes), rows, rows),
        cell=cells,
        first=first,
        run=cell[order] % (rows * rows),
        time_s=time_s[order],
        fill_s=fill_s[order],
        fits=positions[level[order]],
    )


def _undominated(
    variants: Sequence[_Variant], runs: int, two_costs: bool
) -> Iterator[tuple[Ints, Floats, Floats, Ints]]:
    """(runs, times, fills, levels) of the options of one device count."""
    occurring = np.flatnonzero(np.bincount(np.concatenate([variant.level for variant in variants])))
    if not len(occurring):
        return
    row = np.zeros(int(occurring[-1]) + 1, dtype=np.int64)
    row[occurring] = np.arange(len(occurring))
    # Row n is the quickest variant that fits occurring[n] levels or more, and its fill.
    quick = np.full((len(occurring) + 1, runs), np.inf)
    fill = np.full_like(quick, np.inf) if two_costs else quick
    for variant in variants:
        flat = row[variant.level] * runs + variant.at
        better = variant.time_s < quick.ravel()[flat]
        quick.ravel()[flat[better]] = variant.time_s[better]
        fill.ravel()[flat[better]] = variant.fill_s[better]
    for n in range(len(occurring) - 1, -1, -1):
        further = quick[n + 1] < quick[n]
        np.copyto(quick[n], quick[n + 1], where=further)
        np.copyto(fill[n], fill[n + 1], where=further)
    level, at = np.nonzero((quick[:-1] != quick[1:]) | (fill[:-1] != fill[1:]))
    yield at, quick[level, at], fill[level, at], occurring[level]
    if two_costs:
        for variant in variants:
            less = variant.fill_s < fill.ravel()[row[variant.level] * runs + variant.at]
            yield variant.at[less], variant.time_s[less], variant.fill_s[less], variant.level[less]


def _line(table: StageTable, v: int, runs: Ints, middle: float) -> tuple[float, Floats, Floats]:
    """Memory of one variant: its mean use at a middle level; static bytes and those of activations
    per run i < j, inf where illegal."""
    legal = table.time_s[v].ravel()[runs] < np.inf
    static = table.static_bytes[v].ravel()[runs]
    activation = table.activation_bytes[v].ravel()[runs]
    used = stage_bytes(static[legal], activation[legal], middle)
    mean = float(used.sum()) / max(len(used), 1)
    return mean, np.where(legal, static, np.inf), np.where(legal, activation, np.inf)


def memory_lines(problem: PartitionProblem, table: StageTable) -> MemoryLines | None:
    """Memory of a table's stages; None if no stage is legal."""
    rows = problem.num_blocks + 1
    runs = _runs(rows)
    levels, positions = _levels(problem)
    columns: list[tuple[Ints, Floats, Floats]] = []
    for z, members in enumerate(problem.variants):
        lines = [_line(table, v, runs, float(levels[len(levels) // 2])) for v in members]
        needed_lines: list[tuple[Floats, Floats]] = []
        # The leanest come first, as they drop most of the others.
        for _, static, activation in sorted(lines, key=lambda line: line[0]):
            needed = np.isfinite(static)
            for other_static, other_activation in needed_lines[:_COMPARED]:
                needed &= (static < other_static) | (activation < other_activation)
            at = np.flatnonzero(needed)
            if len(at):
                needed_lines.append((static, activation))
                columns.append((z * rows * rows + runs[at], static[at], activation[at]))
    if not columns:
        return None
    cell, static, activation = (np.concatenate(c) for c in zip(*columns, strict=True))
    order = np.argsort(cell, kind="stable")
    cells, first = np.unique(cell[order], return_index=True)
    return MemoryLines(
        shape=(len(problem.sizes), rows, rows),
        cell=cells,
        first=first,
        static_bytes=static[order],
        activation_bytes=activation[order],
        levels=levels,
        positions=positions,
    )


def _runs(rows: int) -> Ints:
    """Flat indices into (K+1, K+1) of all i < j."""
    i, j = np.triu_indices(rows, 1)
    return np.asarray(i * rows + j)


def _levels(problem: PartitionProblem) -> tuple[Floats, Shorts]:
    """The distinct in_flight, ascending; positions that the first 0, 1, ... of them span."""
    levels, first = np.unique(problem.in_flight, return_index=True)
    return levels.astype(np.float64), np.append(first, len(problem.in_flight)).astype(np.int16)


def _levels_that_fit(
    static_bytes: Floats, activation_bytes: Floats, levels: Floats, limit_bytes: float
) -> Ints:
    """(N,): number of levels at which static + level · activation is within the limit."""
    with np.errstate(divide="ignore", invalid="ignore"):
        room = (limit_bytes - static_bytes) / activation_bytes
    count = np.searchsorted(levels, room, side="right")
    # The quotient is rounded otherwise than the sum that decides, so step to where the sum turns.
    while True:
        here, further = np.maximum(count - 1, 0), np.minimum(count, len(levels) - 1)
        here_bytes = stage_bytes(static_bytes, activation_bytes, levels[here])
        further_bytes = stage_bytes(static_bytes, activation_bytes, levels[further])
        down = (count > 0) & ~fits(here_bytes, limit_bytes)
        up = (count < len(levels)) & fits(further_bytes, limit_bytes)
        if not (up.any() or down.any()):
            return count
        count = count + up - down
