"""The inter-operator program against enumeration of every partition."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.inter_op import (
    MemoryShortfall,
    StageChoice,
    StageTable,
    minimal_shortfall,
    solve_inter_op,
)

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
    times = [float(table.time_s[c.variant, c.start, c.stop]) for c in stages]
    return sum(times) + (num_microbatches - 1) * max(times)


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
    m = draw(st.integers(1, 6))
    most = draw(st.sampled_from([None, None, 1, 2, 3, (1, 3), (2, 4), (4, 5)]))
    return {
        "table": StageTable(
            devices=devices,
            time_s=time_s,
            static_bytes=rng.integers(0, 10, shape) * (1.0 + length),
            activation_bytes=rng.integers(0, 6, shape) * (1.0 + length),
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


def shortfall_of(problem: dict[str, Any]) -> MemoryShortfall | None:
    return minimal_shortfall(**{k: v for k, v in problem.items() if k != "num_microbatches"})


@settings(max_examples=500, deadline=None)
@given(problems())
def test_solution_equals_enumeration(problem: dict[str, Any]) -> None:
    table, m = problem["table"], problem["num_microbatches"]
    feasible = [
        stages
        for stages in allowed_partitions(problem)
        if max(stage_bytes(table, stages, problem["in_flight"])) <= problem["memory_bytes"]
    ]
    solution = solve_inter_op(**problem)
    if not feasible:
        assert solution is None
        return
    assert solution is not None
    assert solution.stages in feasible
    assert solution.objective_s == pytest.approx(objective_s(table, solution.stages, m), rel=1e-12)
    assert solution.objective_s == pytest.approx(
        min(objective_s(table, stages, m) for stages in feasible), rel=1e-11
    )
    assert solution.objective_s == solution.sum_s + (m - 1) * solution.t_max_s


@settings(max_examples=300, deadline=None)
@given(problems())
def test_shortfall_equals_enumeration(problem: dict[str, Any]) -> None:
    table, in_flight = problem["table"], problem["in_flight"]
    partitions = allowed_partitions(problem)
    shortfall = shortfall_of(problem)
    if not partitions:
        assert shortfall is None
        return
    assert shortfall is not None
    assert shortfall.stages in partitions
    used = stage_bytes(table, shortfall.stages, in_flight)
    assert shortfall.stage_excess_bytes == tuple(u - problem["memory_bytes"] for u in used)
    assert shortfall.excess_bytes == max(shortfall.stage_excess_bytes)
    least = min(max(stage_bytes(table, stages, in_flight)) for stages in partitions)
    assert shortfall.excess_bytes == least - problem["memory_bytes"]
    assert (shortfall.excess_bytes <= 0) == (solve_inter_op(**problem) is not None)
