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
or a lower bound on it that already excludes ``T``, comes from ``planner.inter_op.stage_dp``; the
bisection of memory in ``minimal_shortfall`` rests on ``planner.inter_op.table``.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.stages import fits, stage_bytes
from meshwright.planner.inter_op.bounded_sum import Staircase
from meshwright.planner.inter_op.stage_dp import LeastSum
from meshwright.planner.inter_op.stage_options import Options, memory_lines, stage_options
from meshwright.planner.inter_op.table import (
    Cell,
    Constraints,
    PartitionProblem,
    StageTable,
    any_partition,
    smallest_limit,
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
