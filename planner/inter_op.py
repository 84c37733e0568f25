"""Cut a chain of blocks into pipeline stages and give every stage its devices: an exact search.

The problem is Alpa's (section 5 of the paper).  A partition covers blocks ``0..K-1`` by contiguous
stages ``[i, j)``, each on a variant ``v`` of ``n_v`` devices.  With ``m`` micro-batches, minimise

    Σ t_i + (m-1) · max t_i     subject to     Σ n_v = D,
                                               static + in_flight(s) · activation <= memory,

where ``s`` counts a stage's position from the end (the last stage is 1).

Write ``F(T)`` for the least ``Σ t_i`` over partitions with ``max t_i <= T``.  ``F`` falls with
``T``, so the objective is the least ``F(T) + (m-1)·T`` over a staircase, and for every ``T`` in
``[a, b]`` it is at least ``F(b) + (m-1)·a``.  The search branches on intervals of the distinct
stage times and drops those whose bound does not beat the incumbent.  A solution at ``b`` also
settles every ``T`` down to its own largest stage, and the incumbent caps the ``T`` worth trying at
``(incumbent - F(b)) / (m-1)``.  It starts from the smallest ``T`` at which the devices suffice,
where the program is cheapest and, with many micro-batches, the optimum is near.  ``F(T)``, or a
lower bound on it that already excludes ``T``, comes from ``planner.stage_dp``; the
bisection of memory in ``minimal_shortfall`` rests on ``planner.stage_chain``.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from planner.stage_chain import (
    Chain,
    Floats,
    Shorts,
    Stage,
    any_partition,
    next_usage_bytes,
    positions_that_fit,
    smallest_t_max,
    sum_s,
    t_max_s,
    usage_bytes,
)
from planner.stage_dp import ROUNDING, LeastSum, least_sum

_GALLOP = 1.1
"""First step between values of t_max while none has admitted a partition; steps grow."""


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
    *,
    num_devices: int,
    num_microbatches: int,
    memory_bytes: float,
    in_flight: Callable[[int], int],
    num_stages: int | Collection[int] | None = None,
    relative_gap: float = 0.0,
) -> InterOpSolution | None:
    """Return the cheapest partition that uses exactly num_devices and fits, or None.

    ``in_flight(s)`` is the number of micro-batches whose activations a stage holds when it is the
    s-th from the end; it may not fall with s.  ``num_stages`` is the stage count, or the allowed
    ones.  With ``relative_gap`` > 0 the objective is only within that fraction of the optimum.
    The same input always gives the same answer: where several stages continue an equally cheap
    partition, the one of smallest (block, variant).  Raises ValueError on malformed input.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} must be at least 1")
    if not 0 <= relative_gap < 1:
        raise ValueError(f"relative_gap={relative_gap} must lie in [0, 1); 0 asks for the optimum")
    chain = _chain(table, num_devices, in_flight, num_stages)
    if chain is None:
        return None
    fits = positions_that_fit(chain, memory_bytes)
    search = _Search(chain=chain, fits=fits, later=num_microbatches - 1, gap=relative_gap)
    search.run()
    if search.best is None:
        return None
    t_max, total = t_max_s(chain, search.best), sum_s(chain, search.best)
    return InterOpSolution(
        stages=_choices(chain, search.best),
        objective_s=total + search.later * t_max,
        t_max_s=t_max,
        sum_s=total,
        candidates_tried=search.tried,
    )


def minimal_shortfall(
    table: StageTable,
    *,
    num_devices: int,
    memory_bytes: float,
    in_flight: Callable[[int], int],
    num_stages: int | Collection[int] | None = None,
) -> MemoryShortfall | None:
    """Return the partition with the least maximum over its stages of (bytes used - memory_bytes).

    None when no legal partition uses exactly num_devices, however much memory there were.  Bisects
    the memory limit: a partition within it lowers the upper end to what it really uses, and the
    least use beyond a limit that is too small raises the lower end, so the answer is exact.
    """
    chain = _chain(table, num_devices, in_flight, num_stages)
    if chain is None:
        return None
    best = any_partition(chain, positions_that_fit(chain, np.inf))
    if best is None:
        return None
    low, high = 0.0, max(usage_bytes(chain, best))
    while low < high:
        middle = low + (high - low) / 2
        limit = middle if middle < high else low
        fits = positions_that_fit(chain, limit)
        stages = any_partition(chain, fits)
        if stages is None:
            low = next_usage_bytes(chain, fits)
        else:
            best, high = stages, max(usage_bytes(chain, stages))
    excess = tuple(used - memory_bytes for used in usage_bytes(chain, best))
    return MemoryShortfall(
        stages=_choices(chain, best),
        excess_bytes=max(excess),
        stage_excess_bytes=excess,
    )


@dataclass(slots=True, kw_only=True)
class _Search:
    """Branch and bound on t_max; intervals are index ranges of the sorted distinct stage times."""

    chain: Chain
    fits: Shorts
    later: int
    """m - 1"""
    gap: float
    best: tuple[Stage, ...] | None = None
    objective: float = np.inf
    tried: int = 0
    price: float = 0.0
    """The price of a stage at the last candidate."""
    heap: list[tuple[float, int, int, float]] = field(default_factory=list)
    """(bound on the objective, first candidate, last candidate, bound on F there)"""

    def run(self) -> None:
        lowest = smallest_t_max(self.chain, self.fits)
        if lowest is None:
            return
        usable = (self.fits > 0) & (self.chain.time_s >= lowest)
        times = np.unique(self.chain.time_s[usable])
        self._try(float(times[0]), np.inf)
        if self.best is None and any_partition(self.chain, self.fits) is None:
            return
        self._push(times, 1, len(times) - 1, 0.0)
        while self.heap:
            bound, first, last, total = heappop(self.heap)
            if bound >= self._target():
                return
            last = max(first, min(last, self._last_worth_trying(times, total)))
            middle = self._split(times, first, last, total)
            cutoff = self._target() - self.later * float(times[first])
            found = self._try(float(times[middle]), cutoff)
            self._push(times, middle + 1, last, total)
            if found.stages is not None:
                middle = int(np.searchsorted(times, t_max_s(self.chain, found.stages)))
            self._push(times, first, middle - 1, max(found.bound_s, total))

    def _try(self, t_max: float, cutoff: float) -> LeastSum:
        """Run the program at t_max and keep its partition if it beats the incumbent."""
        self.tried += 1
        found = least_sum(self.chain, self.fits, t_max, cutoff, self.price)
        self.price = found.price_s
        if found.stages is not None:
            slowest = t_max_s(self.chain, found.stages)
            objective = sum_s(self.chain, found.stages) + self.later * slowest
            if objective < self.objective:
                self.best, self.objective = found.stages, objective
        return found

    def _target(self) -> float:
        """Return what an objective must be below to be worth finding."""
        return self.objective * (1 - max(self.gap, ROUNDING))

    def _push(self, times: Floats, first: int, last: int, total: float) -> None:
        """Keep candidates first..last, where F is at least total, if they can still win."""
        if first <= last:
            bound = total + self.later * float(times[first])
            if bound < self._target():
                heappush(self.heap, (bound, first, last, total))

    def _last_worth_trying(self, times: Floats, total: float) -> int:
        """Return the last candidate T with total + (m-1)·T below the target."""
        if self.later == 0 or self.best is None:
            return len(times) - 1
        return int(np.searchsorted(times, (self._target() - total) / self.later)) - 1

    def _split(self, times: Floats, first: int, last: int, total: float) -> int:
        """Choose the candidate to try: low while nothing is found, high once, then the middle."""
        if self.best is None:
            value = times[first] * _GALLOP**self.tried
        elif total == 0.0:
            return last
        else:
            value = (times[first] + times[last]) / 2
        return min(last, max(first, int(np.searchsorted(times, value, side="right")) - 1))


def _chain(
    table: StageTable,
    num_devices: int,
    in_flight: Callable[[int], int],
    num_stages: int | Collection[int] | None,
) -> Chain | None:
    """Check the input and bring it into the programs' form; None if no stage count is possible."""
    rows = _check_table(table)
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices} must be at least 1")
    devices = np.asarray(table.devices, dtype=np.int64)
    order = np.argsort(devices, kind="stable")
    order = order[devices[order] <= num_devices]
    unit = int(np.gcd.reduce(devices[order]))
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
    held = np.array([in_flight(s) for s in range(1, allowed[-1] + 1)], dtype=np.int64)
    if (held < 0).any() or (np.diff(held) < 0).any():
        raise ValueError(
            f"in_flight gives {held.tolist()} for positions 1..{allowed[-1]} from the end; it must "
            "be non-negative and may not fall, as a stage further from the end never holds fewer"
        )
    # Illegal stages get finite bytes, so that no inf or nan enters the arithmetic.
    time_s = np.where(np.triu(np.ones((rows, rows), dtype=bool), 1), table.time_s[order], np.inf)
    legal = np.isfinite(time_s)
    sizes, first = np.unique(devices[order] // unit, return_index=True)
    return Chain(
        num_blocks=rows - 1,
        num_devices=num_devices // unit,
        sizes=sizes,
        first_of_size=first,
        size_of=devices[order] // unit,
        names=order,
        time_s=time_s,
        static_bytes=np.where(legal, table.static_bytes[order], 0.0),
        activation_bytes=np.where(legal, table.activation_bytes[order], 0.0),
        in_flight=held,
        stage_counts=allowed,
    )


def _check_table(table: StageTable) -> int:
    """Return K+1, or raise ValueError for a table whose shapes or values make no sense."""
    shape = np.shape(table.time_s)
    if len(shape) != 3 or shape[0] < 1 or shape[1] < 2 or shape[1] != shape[2]:
        raise ValueError(f"StageTable.time_s has shape {shape}; it must be (V, K+1, K+1), V, K > 0")
    if np.shape(table.devices) != shape[:1] or np.min(table.devices) < 1:
        raise ValueError(
            f"StageTable.devices is {np.asarray(table.devices).tolist()}; it must hold one "
            f"positive device count for each of the {shape[0]} variants"
        )
    upper = np.triu(np.ones(shape[1:], dtype=bool), 1)
    legal = upper & ~(table.time_s == np.inf)
    for name in ("time_s", "static_bytes", "activation_bytes"):
        values = getattr(table, name)
        if np.shape(values) != shape:
            raise ValueError(f"StageTable.{name} has shape {np.shape(values)}; expected {shape}")
        wrong = legal & ~(np.isfinite(values) & (values >= 0))
        if wrong.any():
            v, i, j = (int(x) for x in np.argwhere(wrong)[0])
            raise ValueError(
                f"StageTable.{name}[{v}, {i}, {j}] = {values[v, i, j]}; a legal stage has finite "
                "non-negative costs, and an illegal one has time_s = inf"
            )
    return int(shape[1])


def _choices(chain: Chain, stages: tuple[Stage, ...]) -> tuple[StageChoice, ...]:
    return tuple(StageChoice(start=i, stop=j, variant=int(chain.names[v])) for i, j, v in stages)
