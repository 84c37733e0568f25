"""The inter-operator program against enumeration of every partition."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.inter_op import bounded_sum as staircase
from meshwright.planner.inter_op.partition import StageChoice
from meshwright.planner.inter_op.table import StageTable
from tests.planner.inter_op.partitions import (
    allowed_partitions,
    feasible_partitions,
    gpipe,
    least_objective_s,
    objective_s,
    one_f_one_b,
    pipeline_table,
    problems,
    shortfall_of,
    solve,
    solve_uniform,
    stage_bytes,
    uniform_table,
)


@settings(max_examples=250)
@given(problems())
def test_solution_equals_enumeration(problem: dict[str, Any]) -> None:
    table, m = problem["table"], problem["num_microbatches"]
    feasible = feasible_partitions(problem)
    solution = solve(**problem)
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
    assert solution.bound_s == pytest.approx(solution.objective_s, rel=1e-11)


@settings(max_examples=150)
@given(problems())
def test_shortfall_equals_enumeration(problem: dict[str, Any]) -> None:
    table, in_flight = problem["table"], problem["in_flight"]
    partitions = allowed_partitions(problem)
    shortfall = shortfall_of(**problem)
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
    assert (shortfall.excess_bytes <= 0) == (solve(**problem) is not None)


def alpa_optimum(table: StageTable, problem: dict[str, Any], counts: range) -> float:
    """Alpa's program as the paper states it: every t_max, then (stages, first block, devices)."""
    blocks, m = table.time_s.shape[1] - 1, problem["num_microbatches"]
    best = np.inf
    for t_max in np.unique(table.time_s[np.isfinite(table.time_s)]):
        layer = {(blocks, 0): 0.0}
        for s in range(1, counts[-1] + 1):
            held = problem["in_flight"](s) * table.activation_bytes + table.static_bytes
            usable = (table.time_s <= t_max) & (held <= problem["memory_bytes"])
            following: dict[tuple[int, int], float] = {}
            for (j, d), cost in layer.items():
                for v, i in np.argwhere(usable[:, :j, j]).tolist():
                    state = (i, d + int(table.devices[v]))
                    if state[1] <= problem["num_devices"]:
                        through = cost + float(table.time_s[v, i, j])
                        following[state] = min(following.get(state, np.inf), through)
            layer = following
            if s in counts:
                total = layer.get((0, problem["num_devices"]), np.inf)
                best = min(best, total + (m - 1) * float(t_max))
    return best


@pytest.mark.parametrize("counts", [range(1, 9), range(4, 5), range(3, 7)])
@pytest.mark.parametrize(
    ("memory_bytes", "m", "power"),
    [(2.5, 4, 2.0), (3.5, 1, 1.0), (3.5, 32, 1.0), (5.0, 4, 1.0), (20.0, 1, 2.0), (20.0, 4, 2.0)],
)
def test_solution_equals_the_program_of_the_paper(
    counts: range, memory_bytes: float, m: int, power: float
) -> None:
    table = pipeline_table(7, seed=m, power=power)
    problem: dict[str, Any] = {
        "num_devices": 16,
        "num_microbatches": m,
        "memory_bytes": memory_bytes,
        "in_flight": one_f_one_b(m),
    }
    expected = alpa_optimum(table, problem, counts)
    solution = solve(table, num_stages=counts, **problem)
    if np.isinf(expected):
        assert solution is None
    else:
        assert solution is not None
        assert solution.objective_s == pytest.approx(expected, rel=1e-11)
        assert len(solution.stages) in counts


def test_equal_blocks_are_split_evenly() -> None:
    """Each stage has 2 of 8 devices, so the even split is the only one of least t_max."""
    stages = solve_uniform(uniform_table(12, (2,)))
    assert stages == tuple(StageChoice(start=i, stop=i + 3, variant=0) for i in range(0, 12, 3))


def test_more_than_64_stages() -> None:
    """As many stages as blocks, one device each: the first holds one block and 70 micro-batches."""
    table = uniform_table(70, (1,))
    stages = solve_uniform(table, num_devices=70)
    assert stages == tuple(StageChoice(start=i, stop=i + 1, variant=0) for i in range(70))
    shortfall = shortfall_of(table, num_devices=70, memory_bytes=3.0, in_flight=lambda s: s)
    assert shortfall is not None
    assert shortfall.stages == stages
    assert shortfall.excess_bytes == 71.0 - 3.0


def test_devices_must_be_met_exactly() -> None:
    table = uniform_table(3, (2, 4))
    assert solve_uniform(table, num_devices=7) is None
    assert solve_uniform(table, num_devices=1) is None
    assert solve_uniform(table, num_devices=14) is None  # 3 blocks: at most 12 devices
    assert shortfall_of(table, num_devices=7, memory_bytes=0, in_flight=gpipe(1)) is None
    assert solve_uniform(table, num_devices=12) is not None


def test_position_decides_whether_a_stage_fits() -> None:
    """Two stages of one block use 1 + 1 bytes at the end and 1 + 2 before it under 1F1B."""
    table = uniform_table(2, (1,))
    two: dict[str, Any] = {"num_devices": 2, "in_flight": one_f_one_b(4)}
    assert solve_uniform(table, **two, memory_bytes=3.0) is not None
    assert solve_uniform(table, **two, memory_bytes=2.9) is None
    assert solve_uniform(table, num_devices=2, in_flight=gpipe(4), memory_bytes=3.0) is None
    shortfall = shortfall_of(table, **two, memory_bytes=2.5)
    assert shortfall is not None
    assert shortfall.stage_excess_bytes == (0.5, -0.5)


def test_more_stages_win_where_only_the_exact_program_can_tell() -> None:
    """The cheap first block fits second from the end only; third from the end it costs 3, not 1.

    So 3 stages look like 1 + 4 + 9 but cost 16, and still beat the 2 stages of 9 + 9.  Blocks 1
    and 2 also make one stage, on too many devices, which hides where the first block must stand.
    """
    time_s = np.full((4, 4, 4), np.inf)
    time_s[0, 0, 1] = 1.0
    time_s[1, [0, 1, 2], [1, 2, 3]] = 3.0, 4.0, 9.0
    time_s[2, 0, 2] = 9.0
    time_s[3, 1, 3] = 1.0
    activation_bytes = np.zeros_like(time_s)
    activation_bytes[0, 0, 1] = 1.0
    table = StageTable(
        devices=np.array([1, 1, 2, 3]),
        time_s=time_s,
        static_bytes=np.zeros_like(time_s),
        activation_bytes=activation_bytes,
    )
    changes: dict[str, Any] = {"num_devices": 3, "num_microbatches": 1, "in_flight": lambda s: s}
    three = solve_uniform(table, **changes, memory_bytes=2.0)
    assert three == tuple(StageChoice(start=i, stop=i + 1, variant=1) for i in range(3))
    cheap = solve_uniform(table, **changes, memory_bytes=3.0)
    assert cheap is not None and cheap[0].variant == 0 and len(cheap) == 3


def test_number_of_stages_is_restricted() -> None:
    table = uniform_table(8, (1, 2, 4, 8))
    for count in range(1, 9):
        stages = solve_uniform(table, num_stages=count)
        assert stages is not None and len(stages) == count
    assert solve_uniform(table, num_stages=9) is None
    stages = solve_uniform(table, num_stages={3, 9})
    assert stages is not None and len(stages) == 3


@settings(max_examples=50)
@given(problems(), st.randoms())
def test_order_of_variants_does_not_change_the_cost(problem: dict[str, Any], random: Any) -> None:
    table: StageTable = problem["table"]
    order = list(range(len(table.devices)))
    random.shuffle(order)
    shuffled = StageTable(
        devices=table.devices[order],
        time_s=table.time_s[order],
        static_bytes=table.static_bytes[order],
        activation_bytes=table.activation_bytes[order],
        fill_s=None if table.fill_s is None else table.fill_s[order],
    )
    first, again = solve(**problem), solve(**problem)
    other = solve(**(problem | {"table": shuffled}))
    assert first == again
    assert (first is None) == (other is None)
    if first is not None and other is not None:
        assert first.objective_s == pytest.approx(other.objective_s, rel=1e-11)


def test_ties_take_the_first_variant() -> None:
    table = uniform_table(4, (2, 2, 2))
    stages = solve_uniform(table, num_devices=4)
    assert stages is not None
    assert {choice.variant for choice in stages} == {0}


@settings(max_examples=100)
@given(problems(), st.floats(0.0, 0.5))
def test_relative_gap_is_kept(problem: dict[str, Any], gap: float) -> None:
    exact = solve(**problem)
    loose = solve(**problem, relative_gap=gap)
    assert (exact is None) == (loose is None)
    if exact is not None and loose is not None:
        assert loose.objective_s * (1 - gap) <= exact.objective_s * (1 + 1e-11)
        assert loose.objective_s * (1 - gap) <= loose.bound_s * (1 + 1e-11)
        assert loose.bound_s <= exact.objective_s * (1 + 1e-11)


@settings(max_examples=150)
@given(problems(), st.floats(0.5, 1.5), st.sampled_from([0.0, 0.3]))
def test_only_objectives_below_the_cutoff_count(
    problem: dict[str, Any], factor: float, gap: float
) -> None:
    optimum = least_objective_s(problem)
    cutoff = factor * optimum if optimum < np.inf else 10.0
    solution = solve(**problem, cutoff_s=cutoff, relative_gap=gap)
    assert (solution is not None) == (optimum < cutoff)
    if solution is not None:
        assert solution.stages in feasible_partitions(problem)
        assert solution.objective_s < cutoff
        assert solution.objective_s * (1 - gap) <= optimum * (1 + 1e-11)
        assert solution.bound_s <= optimum * (1 + 1e-11)


@settings(max_examples=100)
@given(problems(), st.integers(0, 3))
def test_a_deadline_leaves_the_best_so_far_and_its_bound(
    problem: dict[str, Any], ticks: int
) -> None:
    optimum = least_objective_s(problem)
    clock = itertools.chain(range(ticks), itertools.repeat(ticks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staircase.time, "monotonic", lambda: float(next(clock)))
        solution = solve(**problem, deadline=float(ticks))
    if solution is not None:
        assert solution.stages in feasible_partitions(problem)
        assert solution.bound_s <= optimum * (1 + 1e-11)
        assert solution.objective_s >= optimum * (1 - 1e-11)


def test_past_the_deadline_only_the_first_try_counts() -> None:
    """Six unequal blocks need several values of t_max, of which only the smallest is tried."""
    table = pipeline_table(7, seed=4)
    problem: dict[str, Any] = {
        "num_devices": 16,
        "num_microbatches": 4,
        "memory_bytes": 1e9,
        "in_flight": one_f_one_b(4),
    }
    exact = solve(table, **problem)
    late = solve(table, **problem, deadline=0.0)
    assert exact is not None and late is not None
    assert late.candidates_tried == 1 < exact.candidates_tried
    assert late.bound_s < exact.objective_s < late.objective_s


def with_time(table: StageTable, value: float) -> StageTable:
    broken = table.time_s.copy()
    broken[1, 0, 2] = value
    return replace(table, time_s=broken)


PAIR = uniform_table(2, (1, 2))


@pytest.mark.parametrize(
    ("table", "changes", "says"),
    [
        (PAIR, {"num_microbatches": 0}, "num_microbatches=0"),
        (PAIR, {"num_devices": 0}, "num_devices=0"),
        (PAIR, {"num_stages": 0}, "num_stages=0"),
        (PAIR, {"relative_gap": 1}, "relative_gap=1"),
        (PAIR, {"in_flight": lambda s: 5 - s}, "may not fall"),
        (replace(PAIR, devices=np.array([1, 0])), {}, "positive device count"),
        (replace(PAIR, static_bytes=np.zeros(3)), {}, "static_bytes has shape"),
        (
            replace(PAIR, fill_s=np.full(PAIR.time_s.shape, -1.0)), {},
            r"fill_s\[0, 0, 1\] = -1.0",
        ),
        (with_time(PAIR, np.nan), {}, r"time_s\[1, 0, 2\] = nan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_malformed_input_is_named(table: StageTable, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        solve_uniform(table, **changes)
