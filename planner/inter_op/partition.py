"""Exact search for the cuts of a chain of blocks into pipeline stages, and their devices.

The problem is Alpa's (section 5 of the paper).  A partition covers blocks ``0..K-1`` by contiguous
stages ``[i, j)``, each on a variant ``v`` of ``n_v`` devices.  With ``m`` micro-batches, minimise

    Σ t_i + (m-1) · max t_i     subject to     Σ n_v = D,
                                               static + in_flight(s) · activation <= memory,

where ``s`` counts a stage's position from the end (the last stage is 1).

Schedules that fill the pipeline with less than whole stages have ``Σ g_i`` in place of ``Σ t_i``,
``g_i`` being the stage's fill.

The table is first reduced to what an optimal partition may need
(``planner.inter_op.stage_options``).  Write ``F(T)`` for the least ``Σ g_i`` over partitions with
``max t_i <= T``.  ``F`` falls with ``T``, so the objective is the least ``F(T) + (m-1)·T`` over a
staircase (``planner.inter_op.bounded_sum``), climbed from the smallest ``T`` at which the devices
suffice, where the program is cheapest and, with many micro-batches, the optimum is near.  ``F(T)``,
or a lower bound on it that already excludes ``T``, comes from ``least_sum``; the
bisection of memory in ``minimal_shortfall`` rests on ``planner.inter_op.table``.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from meshwright.costmodel.stages import fits, stage_bytes
from meshwright.planner.inter_op import table
from meshwright.planner.inter_op.bounded_sum import ROUNDING, Attempt, Staircase
from meshwright.planner.inter_op.table import (
    Cell,
    Constraints,
    Options,
    PartitionProblem,
    StageTable,
    any_partition,
    memory_lines,
    smallest_limit,
    stage_options,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """Blocks start..stop-1 as one stage on a variant of the table."""

    start: int
    stop: int
    variant: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InterOpSolution:
    """The best partition, first stage first; objective_s = sum_s + (m-1)·t_max_s."""

    stages: tuple[StageChoice, ...]
    objective_s: float
    t_max_s: float
    sum_s: float
    """Of the stages' fills, which are their times unless the table says otherwise."""
    bound_s: float
    """No partition has a lower objective, up to rounding; objective_s where it is the optimum."""
    candidates_tried: int
    """Values of t_max for which the dynamic program ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShortfall:
    """The partition whose worst stage exceeds the memory least; a negative excess is room left."""

    stages: tuple[StageChoice, ...]
    excess_bytes: float
    stage_excess_bytes: tuple[float, ...]


def solve_inter_op(
    table: StageTable,
    constraints: Constraints,
    *,
    num_microbatches: int,
    relative_gap: float = 0.0,
    cutoff_s: float = np.inf,
    deadline: float | None = None,
) -> InterOpSolution | None:
    """The cheapest partition that meets the constraints, or None.

    With ``relative_gap`` > 0 the objective is only within that fraction of the optimum.  Only
    objectives below ``cutoff_s`` count.  At ``deadline``, a time.monotonic(), the best so far is
    returned with its bound; None then says only that none was found in time.  The same input always
    gives the same answer: where several stages continue an equally cheap partition, the one of
    smallest (block, devices, variant).  Raises ValueError on malformed input.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} must be at least 1")
    if not 0 <= relative_gap < 1:
        raise ValueError(f"relative_gap={relative_gap} must lie in [0, 1); 0 asks for the optimum")
    problem = _problem(table, constraints)
    if problem is None:
        return None
    memory_bytes = constraints.memory_bytes
    later = num_microbatches - 1
    options = stage_options(problem, table, memory_bytes, later=later, cutoff_s=cutoff_s)
    lowest = None if options is None else smallest_limit(problem, options.quickest())
    if options is None or lowest is None:
        return None
    search = Staircase(
        program=LeastSum(problem=problem, options=options),
        later=later,
        gap=relative_gap,
        cutoff_s=cutoff_s,
        deadline=deadline,
    )
    search.attempt(lowest, lowest)
    free = search.best is None and cutoff_s == np.inf
    if free and any_partition(problem, options.furthest()) is None:
        return None
    search.run(np.unique(options.time_s[options.time_s > lowest]))
    if search.best is None or search.best.partition is None:
        return None
    best = search.best.partition
    return InterOpSolution(
        stages=tuple(
            _variant_of(problem, table, options, memory_bytes, option=n, position=len(best) - k)
            for k, n in enumerate(best)
        ),
        objective_s=search.objective_s,
        t_max_s=search.best.t_max_s,
        sum_s=search.best.sum_s,
        bound_s=search.bound_s,
        candidates_tried=search.tried,
    )


def minimal_shortfall(table: StageTable, constraints: Constraints) -> MemoryShortfall | None:
    """The partition with the least maximum over its stages of (bytes used - memory_bytes).

    None when no partition meets the other constraints, however much memory there were.  Bisects the
    memory limit: a partition within it lowers the upper end to what it really uses, and the
    least use beyond a limit that is too small raises the lower end, so the answer is exact.  Below
    the limit at which the devices suffice if every stage were the last, it need not look.
    """
    problem = _problem(table, constraints)
    lines = None if problem is None else memory_lines(problem, table)
    low = None if problem is None or lines is None else smallest_limit(problem, lines.least_bytes())
    if problem is None or lines is None or low is None:
        return None
    stages: list[StageChoice] = []
    used: list[float] = []
    high, limit = np.inf, low
    while low < high:
        furthest, beyond = lines.within(limit)
        cells = any_partition(problem, furthest)
        if cells is not None:
            stages, used = _least_use(problem, table, cells)
            high = max(used)
        elif beyond == np.inf:
            return None
        else:
            low = beyond
        middle = 2 * limit if high == np.inf else low + (high - low) / 2
        limit = middle if low <= middle < high else low
    excess = tuple(nbytes - constraints.memory_bytes for nbytes in used)
    return MemoryShortfall(
        stages=tuple(stages), excess_bytes=max(excess), stage_excess_bytes=excess
    )


def _least_use(
    problem: PartitionProblem, table: StageTable, cells: Sequence[Cell]
) -> tuple[list[StageChoice], list[float]]:
    """The variants of a partition that use least, and the bytes of each stage."""
    stages, used = [], []
    for (z, i, j), held in zip(cells, problem.in_flight[len(cells) - 1 :: -1], strict=True):
        at = problem.variants[z], i, j
        size = stage_bytes(table.static_bytes[at], table.activation_bytes[at], held)
        size = np.where(np.isfinite(table.time_s[at]), size, np.inf)
        stages.append(StageChoice(start=i, stop=j, variant=int(at[0][size.argmin()])))
        used.append(float(size.min()))
    return stages, used


def _variant_of(
    problem: PartitionProblem,
    table: StageTable,
    options: Options,
    memory_bytes: float,
    *,
    option: int,
    position: int,
) -> StageChoice:
    """The stage of an option, on the first variant that is as fast and fits there."""
    z, i, j = options.cell_of(option)
    at = problem.variants[z], i, j
    in_flight = float(problem.in_flight[position - 1])
    used = stage_bytes(table.static_bytes[at], table.activation_bytes[at], in_flight)
    same = (table.time_s[at] == options.time_s[option]) & fits(used, memory_bytes)
    if table.fill_s is not None:
        same &= table.fill_s[at] == options.fill_s[option]
    return StageChoice(start=i, stop=j, variant=int(at[0][same.argmax()]))


def _problem(table: StageTable, constraints: Constraints) -> PartitionProblem | None:
    """The checked input in the programs' form; None if no stage count is possible."""
    rows = _check_table(table)
    num_devices, num_stages = constraints.num_devices, constraints.num_stages
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices} must be at least 1")
    devices = np.asarray(table.devices, dtype=np.int64)
    usable = devices[devices <= num_devices]
    unit = int(np.gcd.reduce(usable))
    most = min(rows - 1, num_devices // int(devices.min()))
    if num_stages is None:
        counts: Collection[int] = range(1, most + 1)
    else:
        counts = (num_stages,) if isinstance(num_stages, int) else num_stages
    if num_stages is not None and (not counts or min(counts) < 1):
        raise ValueError(f"num_stages={num_stages} must name stage counts of at least 1")
    allowed = tuple(sorted({int(n) for n in counts if n <= most}))
    if not allowed or num_devices % unit:
        return None
    held = np.array([constraints.in_flight(s) for s in range(1, allowed[-1] + 1)], dtype=np.int64)
    if (held < 0).any() or (np.diff(held) < 0).any():
        raise ValueError(
            f"in_flight gives {held.tolist()} for positions 1..{allowed[-1]} from the end; it must "
            "be non-negative and may not fall, as a stage further from the end never holds fewer"
        )
    sizes = np.unique(usable)
    return PartitionProblem(
        num_blocks=rows - 1,
        num_devices=num_devices // unit,
        sizes=sizes // unit,
        variants=tuple(np.flatnonzero(devices == size) for size in sizes),
        in_flight=held,
        stage_counts=allowed,
    )


def _check_table(table: StageTable) -> int:
    """K+1; raises ValueError for a table whose shapes or values make no sense."""
    shape = np.shape(table.time_s)
    if len(shape) != 3 or shape[0] < 1 or shape[1] < 2 or shape[1] != shape[2]:
        raise ValueError(f"StageTable.time_s has shape {shape}; it must be (V, K+1, K+1), V, K > 0")
    if np.shape(table.devices) != shape[:1] or np.min(table.devices) < 1:
        raise ValueError(
            f"StageTable.devices is {np.asarray(table.devices).tolist()}; it must hold one "
            f"positive device count for each of the {shape[0]} variants"
        )
    names = ["time_s", "static_bytes", "activation_bytes"]
    names += [] if table.fill_s is None else ["fill_s"]
    for name in names:
        if np.shape(getattr(table, name)) != shape:
            raise ValueError(
                f"StageTable.{name} has shape {np.shape(getattr(table, name))}; expected {shape}"
            )
        _check_values(table, name)
    return int(shape[1])


def _check_values(table: StageTable, name: str) -> None:
    values = getattr(table, name)
    upper = np.triu(np.ones(values.shape[1:], dtype=bool), 1)
    # Nearly every table passes this test of whole variants, which makes no temporary arrays.
    sound = values.min(axis=(1, 2)) >= 0
    if name != "time_s":
        sound &= values.max(axis=(1, 2)) < np.inf
    for v in np.flatnonzero(~sound):
        legal = upper & (table.time_s[v] != np.inf)
        wrong = legal & ~(np.isfinite(values[v]) & (values[v] >= 0))
        if wrong.any():
            i, j = (int(x) for x in np.argwhere(wrong)[0])
            raise ValueError(
                f"StageTable.{name}[{v}, {i}, {j}] = {values[v, i, j]}; a legal stage has finite "
                "non-negative costs, and an illegal one has time_s = inf"
            )


# --- dynamic program of stages --------------------------------------------------------------------

# The least sum of stage times under a bound on each of them, and the partition that attains it.
#
# ``least_sum`` computes ``F(T)``, the least ``Σ g`` of the stages' fills over partitions whose
# stages all take at most ``T``, in the notation of ``planner.inter_op.table`` and in two steps.
#
# Relaxed.  ``h[j, d]`` is the least cost of blocks ``0..j-1`` on exactly ``d`` devices when every
# stage is taken at the earliest position it could have, one more than the fewest stages that can
# follow it:
#
#     h[j, d] = min over i, v of  g(v, i, j) + μ + h[i, d - n_v].
#
# ``h[K, D] - μ·S`` bounds ``F(T)`` from below, and equals it when the partition found has ``S``
# stages and fits where it stands.  ``μ`` prices a stage (a Lagrange multiplier): it is 0 where any
# stage count is allowed, and otherwise bisected until the relaxed partition has about ``S`` stages.
#
# Exact.  Otherwise ``f_s[i, d]``, the least cost of blocks ``i..K-1`` as ``s`` stages on ``d``
# devices, is built layer by layer; the position, and with it the memory, is now known:
#
#     f_s[i, d] = min over j, v of  g(v, i, j) + μ + f_{s-1}[j, d - n_v].
#
# A state dies when ``f_s[i, d] + h[i, D-d] - μ·S`` is not below the cutoff, or (where any stage
# count is allowed) when fewer stages reach it as cheaply, since memory only gets tighter further
# from the end.  Both tables keep only those ``d`` for which the blocks on either side can be
# covered at all. The layers are stored skewed, ``e = d - r·(K-i)``, which turns the diagonal band
# of living states into a narrow rectangle that numpy sweeps with one call per (devices, length)
# pair.


Stages: TypeAlias = tuple[int, ...]
"""A partition: the options of its stages, the first stage first."""
_PRICES = 4
"""Stage prices tried before the exact program takes over; each costs one relaxed program."""


@dataclass(slots=True, kw_only=True)
class LeastSum:
    """The program F(T); it starts from the stage price that its last call ended with."""

    problem: table.PartitionProblem
    options: Options
    price: float = 0.0
    """μ"""

    def __call__(self, t_max: float, cutoff: float) -> Attempt[Stages]:
        """F(t_max) as far as it is below the cutoff."""
        problem, options, counts = self.problem, self.options, self.problem.stage_counts
        earliest = _earliest_positions(problem, options, t_max)
        cost = options.cheapest(earliest, t_max)
        before, after = table.device_bounds(problem, np.isfinite(cost))
        reach = options.furthest_at(cost, t_max)
        best: _Layers | None = None
        best_bound, prices = -np.inf, _Prices(counts=counts, t_max=t_max)
        price = 0.0 if problem.any_count else self.price
        for _ in range(_PRICES if after[0] <= problem.num_devices else 0):
            self.price = price
            prefix = _prefix_costs(problem, cost + price, before, after)
            bound = float(prefix[-1, -1]) - max(price * counts[0], price * counts[-1])
            if bound >= cutoff:
                return Attempt(bound_s=bound, partition=None)
            cells, in_place = _walk_prefix(problem, cost + price, reach, prefix)
            total = float(sum(cost[cell] for cell in cells))
            if in_place and len(cells) in counts and total <= bound + ROUNDING * abs(total):
                return self._attempt(
                    options.find(*cell, fill_s=cost[cell], position=s, t_max=t_max)
                    for cell, s in zip(cells, range(len(cells), 0, -1), strict=True)
                )
            if bound > best_bound:
                best_bound = bound
                best = _Layers.build(problem, options, t_max, price, prefix, before, after)
            prices.cut(price, bound, len(cells))
            if prices.exact or prices.best_s < cutoff < np.inf:
                break
            price = prices.middle()
        if best is None:
            return Attempt(bound_s=np.inf, partition=None)
        self.price = best.price
        stages = best.run(cutoff)
        return Attempt(bound_s=cutoff, partition=None) if stages is None else self._attempt(stages)

    def _attempt(self, stages: Iterable[int]) -> Attempt[Stages]:
        """The attempt of a partition that attains F(T)."""
        partition = tuple(stages)
        total = float(sum(self.options.fill_s[n] for n in partition))
        slowest = float(max(self.options.time_s[n] for n in partition))
        return Attempt(bound_s=total, partition=partition, t_max_s=slowest, sum_s=total)


@dataclass(slots=True, kw_only=True)
class _Prices:
    """Tangents of the bound h(μ) - μ·S, which is concave in μ.

    A partition of n stages makes it rise with slope n - S at its price: a tangent from above.
    """

    counts: tuple[int, ...]
    t_max: float
    rising: tuple[float, float, float] | None = None
    falling: tuple[float, float, float] | None = None
    """(price, bound, slope) of the nearest tangents below and above the best price."""
    exact: bool = False
    """Whether a price gave an allowed count, so that no price bounds better."""

    @property
    def best_s(self) -> float:
        """The most that any price can bound; -inf where the best is known."""
        if self.exact:
            return -np.inf
        if self.rising is None or self.falling is None:
            return np.inf
        price, bound, slope = self.rising
        return bound + slope * (self.middle() - price)

    def cut(self, price: float, bound: float, stages: int) -> None:
        """Add the tangent of a relaxed partition."""
        least, most = self.counts[0], self.counts[-1]
        if stages > most:
            self.rising = (price, bound, stages - (least if price < 0 else most))
        elif stages < least:
            self.falling = (price, bound, stages - (most if price > 0 else least))
        else:
            self.exact = True

    def middle(self) -> float:
        """The price where the tangents meet, or halfway to the largest one on the open side."""
        if self.rising is None or self.falling is None:
            known = self.rising or self.falling
            assert known is not None
            return (known[0] + (self.t_max if self.rising else -self.t_max)) / 2
        (p, b, slope), (q, c, descent) = self.rising, self.falling
        return (c - b + slope * p - descent * q) / (slope - descent)


def _earliest_positions(
    problem: table.PartitionProblem, options: Options, t_max: float
) -> table.Shorts:
    """(K+1, K+1): the position that stage [i, j) has at least."""
    legal = np.isfinite(options.cheapest(1, t_max)).any(axis=0)
    most = len(problem.in_flight) + 1
    following = np.minimum(table.cover(np.where(legal, 1.0, np.inf)), most)
    # At most i stages come before block i, so the rest of the smallest count comes after it.
    preceding = problem.stage_counts[0] - np.arange(problem.num_blocks + 1)
    return np.asarray(np.maximum(following[None, :] + 1, preceding[:, None]).astype(np.int16))


def _prefix_costs(
    problem: table.PartitionProblem, cost: table.Floats, before: table.Ints, after: table.Ints
) -> table.Floats:
    """h, (K+1, D+1): least relaxed cost of blocks 0..j-1 on exactly d devices."""
    blocks, devices = problem.num_blocks, problem.num_devices
    prefix = np.full((blocks + 1, devices + 1), np.inf)
    prefix[0, 0] = 0.0
    scratch = np.empty((blocks, devices + 1))
    legal = np.isfinite(cost)
    used: table.Masks = np.any(legal, axis=1)
    start: table.Ints = np.argmax(legal, axis=1)
    stop: table.Ints = blocks + 1 - legal[:, ::-1].argmax(axis=1)
    for j in range(1, blocks + 1):
        for z in np.flatnonzero(used[:, j]):
            size, i0, i1 = int(problem.sizes[z]), int(start[z, j]), int(stop[z, j])
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
    problem: table.PartitionProblem, cost: table.Floats, reach: table.Shorts, prefix: table.Floats
) -> tuple[tuple[table.Cell, ...], bool]:
    """A partition that attains h[K, D], and whether it fits in place."""
    stages: list[table.Cell] = []
    in_place = True
    j, d = problem.num_blocks, problem.num_devices
    while j > 0:
        free = d - problem.sizes
        through = cost[:, :j, j] + prefix[:j, np.maximum(free, 0)].T
        hit = (through == prefix[j, d]) & (free >= 0)[:, None]
        fitting = hit & (reach[:, :j, j] > len(stages))
        in_place &= bool(fitting.any())
        i, z = table.first_hit(fitting if fitting.any() else hit)
        stages.append((z, i, j))
        j, d = i, int(free[z])
    return tuple(reversed(stages)), in_place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """The exact program f_s[i, d], its planes skewed to e = d - r·(K-i) - e0."""

    problem: table.PartitionProblem
    options: Options
    t_max: float
    price: float
    """μ"""
    skew: int
    """r"""
    origin: int
    """e0"""
    remaining: table.Floats
    """(K+1, E): h[i, D-d], what blocks 0..i-1 still cost at least."""
    fewest_before: table.Floats
    """(K+1,): the fewest stages that cover blocks 0..i-1."""

    @classmethod
    def build(
        cls,
        problem: table.PartitionProblem,
        options: Options,
        t_max: float,
        price: float,
        prefix: table.Floats,
        before: table.Ints,
        after: table.Ints,
    ) -> "_Layers":
        """Layers with the skew that makes the band of states with both ends covered narrow."""
        blocks, devices = problem.num_blocks, problem.num_devices
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
        legal = np.isfinite(options.cheapest(1, t_max)).any(axis=0)
        return cls(
            problem=problem,
            options=options,
            t_max=t_max,
            price=price,
            skew=skew,
            origin=origin,
            remaining=remaining,
            fewest_before=table.cover_prefix(np.where(legal, 1.0, np.inf)),
        )

    def column(self, i: int, d: int) -> int:
        return d - self.skew * (self.problem.num_blocks - i) - self.origin

    def run(self, cutoff: float) -> list[int] | None:
        """The partition of least sum below the cutoff, if there is one."""
        problem, counts = self.problem, self.problem.stage_counts
        layer = np.full(self.remaining.shape, np.inf)
        layer[problem.num_blocks, self.column(problem.num_blocks, 0)] = 0.0
        layers, best, stages = [layer], np.full_like(layer, np.inf), 0
        final = self.column(0, problem.num_devices)
        rebate = max(self.price * counts[0], self.price * counts[-1])
        for s in range(1, counts[-1] + 1):
            cost = self.options.cheapest(s, self.t_max) + self.price
            layer = self._next(layer, cost, cutoff + rebate)
            layer[~self._rows_that_can_end(s)] = np.inf
            layer[layer + self.remaining >= cutoff + rebate] = np.inf
            if problem.any_count:
                layer[layer >= best] = np.inf
                np.minimum(best, layer, out=best)
            layers.append(layer)
            total = float(layer[0, final]) - self.price * s
            if s in counts and total < cutoff:
                cutoff, stages = total - ROUNDING * abs(total), s
            if not np.isfinite(layer[1:]).any():
                break
        return self._walk(layers[: stages + 1]) if stages else None

    def _rows_that_can_end(self, s: int) -> table.Masks:
        """(K+1,): rows whose blocks before can make up an allowed number of stages."""
        more = np.array(self.problem.stage_counts)[:, None] - s
        block = np.arange(self.problem.num_blocks + 1)
        return np.asarray(np.any((more >= self.fewest_before) & (more <= block), axis=0))

    def _next(self, layer: table.Floats, cost: table.Floats, cutoff: float) -> table.Floats:
        """``layer`` with one more stage in front of every state."""
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
            shift = int(self.problem.sizes[z]) - self.skew * int(n)
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

    def _walk(self, layers: Sequence[table.Floats]) -> list[int]:
        """The partition of the layers, from its first stage on."""
        problem = self.problem
        stages: list[int] = []
        i, d = 0, problem.num_devices
        for s in range(len(layers) - 1, 0, -1):
            cost = self.options.cheapest(s, self.t_max)
            j = np.arange(i + 1, problem.num_blocks + 1)
            free = d - problem.sizes
            e = free[:, None] - self.skew * (problem.num_blocks - j) - self.origin
            inside = (e >= 0) & (e < self.remaining.shape[1])
            later = np.where(inside, layers[s - 1][j, np.where(inside, e, 0)], np.inf)
            through = (cost[:, i, i + 1 :] + self.price) + later
            block, z = table.first_hit(through == layers[s][i, self.column(i, d)])
            cell = (z, i, int(j[block]))
            stages.append(self.options.find(*cell, fill_s=cost[cell], position=s, t_max=self.t_max))
            i, d = cell[2], int(free[z])
        return stages
