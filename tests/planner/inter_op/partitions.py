"""Stage tables for the tests of the inter-operator program, and enumeration of their partitions."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st

from meshwright.planner.inter_op.partition import (
    InterOpSolution,
    MemoryShortfall,
    StageChoice,
    minimal_shortfall,
    solve_inter_op,
)
from meshwright.planner.inter_op.table import Constraints, StageTable

LIMITS = [each.name for each in fields(Constraints)]
Partition: TypeAlias = tuple[StageChoice, ...]
InFlight: TypeAlias = Callable[[int], int]


def one_f_one_b(num_microbatches: int) -> InFlight:
    return lambda s: min(s, num_microbatches)


def gpipe(num_microbatches: int) -> InFlight:
    return lambda s: num_microbatches


def every_partition(table: StageTable, num_devices: int, start: int = 0) -> Iterator[Partition]:
    """Yield every legal way to cover blocks start.. with exactly num_devices."""
    blocks = table.time_s.shape[1] - 1
    if start == blocks:
        if num_devices == 0:
            yield ()
        return
    for stop in range(start + 1, blocks + 1):
        for v, devices in enumerate(table.devices.tolist()):
            if devices <= num_devices and table.time_s[v, start, stop] < np.inf:
                here = StageChoice(start=start, stop=stop, variant=v)
                for rest in every_partition(table, num_devices - devices, stop):
                    yield (here, *rest)


def stage_bytes(table: StageTable, stages: Partition, in_flight: InFlight) -> list[float]:
    where = [(c.variant, c.start, c.stop) for c in stages]
    return [
        float(table.static_bytes[w] + in_flight(len(where) - n) * table.activation_bytes[w])
        for n, w in enumerate(where)
    ]


def objective_s(table: StageTable, stages: Partition, num_microbatches: int) -> float:
    fill_s = table.time_s if table.fill_s is None else table.fill_s
    times = [float(table.time_s[c.variant, c.start, c.stop]) for c in stages]
    fills = [float(fill_s[c.variant, c.start, c.stop]) for c in stages]
    return sum(fills) + (num_microbatches - 1) * max(times)


def least_objective_s(problem: dict[str, Any]) -> float:
    """Return the optimum by enumeration, inf where nothing fits."""
    table, m = problem["table"], problem["num_microbatches"]
    return min(
        (objective_s(table, stages, m) for stages in feasible_partitions(problem)), default=np.inf
    )


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a small table and the arguments of solve_inter_op; half of them repeat few values."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks, variants = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    shape = (variants, blocks + 1, blocks + 1)
    length = np.maximum(np.arange(blocks + 1)[None, :] - np.arange(blocks + 1)[:, None], 0)
    devices = rng.choice(draw(st.sampled_from([(1, 2, 3), (1, 2, 4), (2, 4), (1,)])), variants)
    if draw(st.booleans()):
        time_s = rng.integers(1, 5, shape).astype(float)
    else:
        time_s = length * rng.uniform(0.5, 1.5, shape) / devices[:, None, None] ** 0.8
    time_s[rng.random(shape) < draw(st.sampled_from([0.0, 0.2, 0.5]))] = np.inf
    time_s[:, np.tril_indices(blocks + 1)[0], np.tril_indices(blocks + 1)[1]] = np.inf
    fill_s = draw(st.sampled_from([None, 1.0, 0.25]))
    if fill_s is not None:
        fill_s = time_s * np.maximum(fill_s, rng.integers(0, 5, shape) / 4)
    m = draw(st.integers(1, 6))
    most = draw(st.sampled_from([None, None, 1, 2, 3, (1, 3), (2, 4), (4, 5)]))
    return {
        "table": StageTable(
            devices=devices,
            time_s=time_s,
            static_bytes=rng.integers(0, 10, shape) * (1.0 + length),
            activation_bytes=rng.integers(0, 6, shape) * (1.0 + length),
            fill_s=fill_s,
        ),
        "num_devices": draw(st.integers(1, 6)),
        "num_microbatches": m,
        "memory_bytes": float(draw(st.integers(0, 80))),
        "in_flight": draw(st.sampled_from([one_f_one_b(m), gpipe(m)])),
        "num_stages": most,
    }


def allowed_partitions(problem: dict[str, Any]) -> list[Partition]:
    counts = problem["num_stages"]
    counts = range(1, 100) if counts is None else (counts,) if isinstance(counts, int) else counts
    every = every_partition(problem["table"], problem["num_devices"])
    return [stages for stages in every if len(stages) in counts]


def feasible_partitions(problem: dict[str, Any]) -> list[Partition]:
    table, in_flight = problem["table"], problem["in_flight"]
    return [
        stages
        for stages in allowed_partitions(problem)
        if max(stage_bytes(table, stages, in_flight)) <= problem["memory_bytes"]
    ]


def solve(table: StageTable, **arguments: Any) -> InterOpSolution | None:
    """solve_inter_op with the fields of the constraints among its arguments."""
    given = {name: arguments.pop(name) for name in LIMITS if name in arguments}
    return solve_inter_op(table, Constraints(**given), **arguments)


def shortfall_of(table: StageTable, **arguments: Any) -> MemoryShortfall | None:
    given = {name: arguments[name] for name in LIMITS if name in arguments}
    return minimal_shortfall(table, Constraints(**given))


def pipeline_table(num_blocks: int, *, seed: int, power: float = 1.0) -> StageTable:
    """Return a table whose stages get faster with devices and whose memory binds by position.

    With a power above 1 long stages are disproportionately slow, so that more stages cost less.
    """
    rng = np.random.default_rng(seed)
    ends = np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 1.5, num_blocks))])
    work = np.where(np.triu(np.ones((num_blocks + 1,) * 2), 1) > 0, ends - ends[:, None], np.inf)
    devices = np.array([2, 2, 4, 4, 8])
    slowdown = np.array([1.0, 1.3, 1.05, 1.35, 1.4])[:, None, None]
    saved = np.array([1.0, 0.2, 1.0, 0.2, 1.0])[:, None, None]
    share = work / devices[:, None, None]
    share_bytes = np.where(np.isfinite(share), share, 0.0)
    return StageTable(
        devices=devices,
        time_s=share**power * slowdown + 0.05,
        static_bytes=2.0 * share_bytes,
        activation_bytes=saved * share_bytes,
    )


def uniform_table(num_blocks: int, devices: tuple[int, ...]) -> StageTable:
    """Return a table of equal blocks: n blocks on d devices take n/d seconds and n/d bytes each."""
    length = np.maximum(np.arange(num_blocks + 1) - np.arange(num_blocks + 1)[:, None], 0)
    share = length / np.array(devices)[:, None, None]
    return StageTable(
        devices=np.array(devices),
        time_s=np.where(share > 0, share, np.inf),
        static_bytes=share,
        activation_bytes=share,
    )


def solve_uniform(table: StageTable, **changes: Any) -> Partition | None:
    """Return the stages for 8 devices, 4 micro-batches and ample memory, with some changes."""
    arguments: dict[str, Any] = {
        "num_devices": 8,
        "num_microbatches": 4,
        "memory_bytes": 1e9,
        "in_flight": one_f_one_b(4),
    }
    solution = solve(table, **(arguments | changes))
    return None if solution is None else solution.stages
