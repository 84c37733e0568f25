"""The inter-operator program against enumeration of every partition, its reduced table against the
whole one, and cuts into equal meshes and into stages that share devices against every cut."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, combinations, pairwise, repeat
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.drafts.layouts import SharedDevices, evenly
from meshwright.planner.inter_op import InterOpSolution, MemoryShortfall, minimal_shortfall
from meshwright.planner.inter_op import bounded_sum as staircase
from meshwright.planner.inter_op.equal_meshes import cut_evenly
from meshwright.planner.inter_op.partition import StageChoice, solve_inter_op
from meshwright.planner.inter_op.table import (
    Constraints,
    PartitionProblem,
    StageTable,
    memory_lines,
    stage_options,
)

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
    blocks, variants = draw(st.integers(1, 6)), draw(st.integers(1, 5))
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


def pipeline_table(num_blocks: int, *, seed: int) -> StageTable:
    """A table whose stages get faster with devices and whose memory binds by position."""
    rng = np.random.default_rng(seed)
    ends = np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 1.5, num_blocks))])
    work = np.where(np.triu(np.ones((num_blocks + 1,) * 2), 1) > 0, ends - ends[:, None], np.inf)
    devices = np.array([2, 2, 4, 4, 8])
    slowdown = np.array([1.0, 1.3, 1.05, 1.35, 1.4])[:, None, None]
    saved = np.array([1.0, 0.2, 1.0, 0.2, 1.0])[:, None, None]
    share = work / devices[:, None, None]
    held = np.where(np.isfinite(share), share, 0.0)
    time_s, active = share * slowdown + 0.05, saved * held
    return StageTable(
        devices=devices, time_s=time_s, static_bytes=2.0 * held, activation_bytes=active
    )


def uniform_table(num_blocks: int, devices: tuple[int, ...]) -> StageTable:
    """Return a table of equal blocks: n blocks on d devices take n/d seconds and n/d bytes each."""
    length = np.maximum(np.arange(num_blocks + 1) - np.arange(num_blocks + 1)[:, None], 0)
    share = length / np.array(devices)[:, None, None]
    time_s = np.where(share > 0, share, np.inf)
    return StageTable(
        devices=np.array(devices), time_s=time_s, static_bytes=share, activation_bytes=share
    )


def on_devices(count: int) -> dict[str, Any]:
    """With 4 micro-batches and ample memory."""
    ample = {"memory_bytes": 1e9, "in_flight": one_f_one_b(4)}
    return {"num_devices": count, "num_microbatches": 4, **ample}


def solve_uniform(table: StageTable, **changes: Any) -> Partition | None:
    """Return the stages for 8 devices, 4 micro-batches and ample memory, with some changes."""
    solution = solve(table, **(on_devices(8) | changes))
    return None if solution is None else solution.stages


@settings(max_examples=250)
@given(problems())
def test_solution_equals_enumeration(problem: dict[str, Any]) -> None:
    table, m = problem["table"], problem["num_microbatches"]
    feasible = feasible_partitions(problem)
    solution = solve(**problem)
    if not feasible:
        assert solution is None
        return
    assert solution == solve(**problem)
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
    assert shortfall.stages in partitions
    used = stage_bytes(table, shortfall.stages, in_flight)
    assert shortfall.stage_excess_bytes == tuple(u - problem["memory_bytes"] for u in used)
    assert shortfall.excess_bytes == max(shortfall.stage_excess_bytes)
    least = min(max(stage_bytes(table, stages, in_flight)) for stages in partitions)
    assert shortfall.excess_bytes == least - problem["memory_bytes"]
    assert (shortfall.excess_bytes <= 0) == (solve(**problem) is not None)


def test_more_than_64_stages() -> None:
    """As many stages as blocks, one device each: the first holds one block and 70 micro-batches."""
    table = uniform_table(70, (1,))
    stages = solve_uniform(table, num_devices=70)
    assert stages == tuple(StageChoice(start=i, stop=i + 1, variant=0) for i in range(70))
    shortfall = shortfall_of(table, num_devices=70, memory_bytes=3.0, in_flight=lambda s: s)
    assert shortfall.stages == stages
    assert shortfall.excess_bytes == 71.0 - 3.0


def test_devices_must_be_met_exactly() -> None:
    table = uniform_table(3, (2, 4))
    assert solve_uniform(table, num_devices=7) is None
    assert solve_uniform(table, num_devices=1) is None
    assert solve_uniform(table, num_devices=14) is None  # 3 blocks: at most 12 devices
    assert shortfall_of(table, num_devices=7, memory_bytes=0, in_flight=gpipe(1)) is None
    assert solve_uniform(table, num_devices=12) is not None


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
    static_bytes, activation_bytes = np.zeros((2, *time_s.shape))
    activation_bytes[0, 0, 1] = 1.0
    table = StageTable(
        devices=np.array([1, 1, 2, 3]), time_s=time_s, static_bytes=static_bytes,
        activation_bytes=activation_bytes,
    )  # fmt: skip
    changes: dict[str, Any] = {"num_devices": 3, "num_microbatches": 1, "in_flight": lambda s: s}
    three = solve_uniform(table, **changes, memory_bytes=2.0)
    assert three == tuple(StageChoice(start=i, stop=i + 1, variant=1) for i in range(3))
    cheap = solve_uniform(table, **changes, memory_bytes=3.0)
    assert cheap is not None and cheap[0].variant == 0 and len(cheap) == 3


def test_ties_take_the_first_variant() -> None:
    table = uniform_table(4, (2, 2, 2))
    stages = solve_uniform(table, num_devices=4)
    assert stages is not None
    assert {choice.variant for choice in stages} == {0}


@settings(max_examples=150)
@given(problems(), st.floats(0.5, 1.5), st.just(0.0) | st.floats(0.0, 0.5))
def test_only_below_the_cutoff_counts(problem: dict[str, Any], factor: float, gap: float) -> None:
    optimum = least_objective_s(problem)
    cutoff = factor * optimum if optimum < np.inf else 10.0
    solution = solve(**problem, cutoff_s=cutoff, relative_gap=gap)
    assert (solution is not None) == (optimum < cutoff)
    if solution is not None:
        assert solution.stages in feasible_partitions(problem)
        assert solution.objective_s < cutoff
        assert solution.objective_s * (1 - gap) <= solution.bound_s * (1 + 1e-11)
        assert solution.bound_s <= optimum * (1 + 1e-11)


@settings(max_examples=100)
@given(problems(), st.integers(0, 3))
def test_a_deadline_leaves_the_best_and_its_bound(problem: dict[str, Any], ticks: int) -> None:
    optimum = least_objective_s(problem)
    clock = chain(range(ticks), repeat(ticks))
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
    problem = on_devices(16)
    exact = solve(table, **problem)
    late = solve(table, **problem, deadline=0.0)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A table, its partition problem, and a limit that some stage meets to the last bit."""

    table: StageTable
    problem: PartitionProblem
    memory_bytes: float

    @property
    def fill_s(self) -> np.ndarray:
        return self.table.time_s if self.table.fill_s is None else self.table.fill_s

    @property
    def used_bytes(self) -> np.ndarray:
        """(S, V, K+1, K+1)"""
        held = self.problem.in_flight[:, None, None, None]
        return self.table.static_bytes + held * self.table.activation_bytes

    def cells(self) -> list[tuple[int, int, int]]:
        rows = self.problem.num_blocks + 1
        each = range(len(self.problem.sizes)), range(rows), range(rows)
        return [(z, i, j) for z in each[0] for i in each[1] for j in each[2]]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks, variants = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    shape = (variants, blocks + 1, blocks + 1)
    time_s = rng.integers(1, draw(st.sampled_from([4, 100])), shape).astype(float)
    time_s[rng.random(shape) < draw(st.sampled_from([0.0, 0.3]))] = np.inf
    time_s[:, np.tril_indices(blocks + 1)[0], np.tril_indices(blocks + 1)[1]] = np.inf
    fill_s = rng.integers(0, 6, shape) / 3 if draw(st.booleans()) else None
    # Thirds make the sum that decides and the quotient that guesses round differently.
    static_bytes, activation_bytes = rng.integers(0, 9, (2, *shape)) / 3
    devices = rng.choice([1, 2], variants)
    sizes = np.unique(devices)
    in_flight = np.sort(rng.integers(0, 8, draw(st.integers(1, 5))))
    v, s = rng.integers(variants), rng.integers(len(in_flight))
    limit = static_bytes[v, 0, -1] + in_flight[s] * activation_bytes[v, 0, -1]
    return Drawn(
        table=StageTable(
            devices=devices,
            time_s=time_s,
            fill_s=fill_s,
            static_bytes=static_bytes,
            activation_bytes=activation_bytes,
        ),
        problem=PartitionProblem(
            num_blocks=blocks,
            num_devices=4,
            sizes=sizes,
            variants=tuple(np.flatnonzero(devices == size) for size in sizes),
            in_flight=in_flight,
            stage_counts=tuple(range(1, len(in_flight) + 1)),
        ),
        memory_bytes=float(limit),
    )


@settings(max_examples=150)
@given(drawn(), st.sampled_from([0, 1, 5]), st.sampled_from([np.inf, 30.0]))
def test_options_lose_no_cheapest_stage(case: Drawn, later: int, cutoff_s: float) -> None:
    """At every position and under every bound the least fill is that of the whole table."""
    problem, table = case.problem, case.table
    alone_s = case.fill_s + later * np.where(np.isfinite(table.time_s), table.time_s, 1.0)
    legal = np.isfinite(table.time_s) & (alone_s < cutoff_s)
    fits = legal & (case.used_bytes <= case.memory_bytes)
    options = stage_options(problem, table, case.memory_bytes, later=later, cutoff_s=cutoff_s)
    if options is None:
        assert not fits.any()
        return
    for s in range(1, len(problem.in_flight) + 1):
        for t_max in (1.0, 3.0, 20.0, 1000.0):
            usable = fits[s - 1] & (table.time_s <= t_max)
            cheapest = options.cheapest(s, t_max)
            for z, i, j in case.cells():
                members = problem.variants[z]
                fills = case.fill_s[members, i, j][usable[members, i, j]]
                assert cheapest[z, i, j] == fills.min(initial=np.inf)


@settings(max_examples=150)
@given(drawn())
def test_options_are_ways_of_the_table(case: Drawn) -> None:
    """Each option has the costs of a variant that fits as far, and no other option beats it."""
    problem, table = case.problem, case.table
    options = stage_options(problem, table, case.memory_bytes, later=1, cutoff_s=np.inf)
    if options is None:
        return
    fits = (case.used_bytes <= case.memory_bytes).sum(axis=0)
    for n in range(len(options.fits)):
        z, i, j = options.cell_of(n)
        members = problem.variants[z]
        same = table.time_s[members, i, j] == options.time_s[n]
        same &= case.fill_s[members, i, j] == options.fill_s[n]
        assert (same & (fits[members, i, j] >= options.fits[n])).any()
    if table.fill_s is None:
        for _, first, last in zip(
            options.cell, options.first, [*options.first[1:], len(options.fits)], strict=True
        ):
            assert (np.diff(options.time_s[first:last]) > 0).all()
            assert (np.diff(options.fits[first:last]) > 0).all()


@settings(max_examples=150)
@given(drawn())
def test_lines_lose_no_leanest_stage(case: Drawn) -> None:
    problem, table = case.problem, case.table
    used = np.where(np.isfinite(table.time_s), case.used_bytes, np.inf)
    lines = memory_lines(problem, table)
    if lines is None:
        assert not np.isfinite(table.time_s).any()
        return
    furthest, beyond = lines.within(case.memory_bytes)
    larger = [np.inf]
    for z, i, j in case.cells():
        least = used[:, problem.variants[z], i, j].min(axis=1)
        assert lines.least_bytes()[z, i, j] == least[0]
        assert furthest[z, i, j] == (least <= case.memory_bytes).sum()
        larger += least[least > case.memory_bytes].tolist()
    assert beyond == min(larger)


@st.composite
def cuts_to_make(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the arguments of cut_evenly; half of the tables repeat few values."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks, levels, stages = (draw(st.integers(1, most)) for most in (7, 3, 5))
    shape = (levels, blocks + 1, blocks + 1)
    if draw(st.booleans()):
        time_s = rng.integers(1, 5, shape).astype(float)
    else:
        time_s = np.arange(blocks + 1) - np.arange(blocks + 1)[:, None] + rng.uniform(0, 1, shape)
    time_s[rng.random(shape) < draw(st.sampled_from([0.0, 0.2, 0.5]))] = np.inf
    time_s[:, np.tril_indices(blocks + 1)[0], np.tril_indices(blocks + 1)[1]] = np.inf
    fill_s = rng.integers(0, 4, shape).astype(float) if draw(st.booleans()) else None
    return {
        "time_s": time_s,
        "fill_s": fill_s,
        "level_of_stage": tuple(rng.integers(0, levels, stages).tolist()),
        "later": draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 15.0])),
    }


def every_cut(problem: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Return the objective of every legal cut."""
    time_s, levels = problem["time_s"], problem["level_of_stage"]
    fill_s = time_s if problem["fill_s"] is None else problem["fill_s"]
    blocks, found = time_s.shape[1] - 1, {}
    for inner in combinations(range(1, blocks), len(levels) - 1):
        cuts = (0, *inner, blocks)
        where = list(zip(levels, cuts, cuts[1:], strict=False))
        times = [float(time_s[w]) for w in where]
        if max(times) < np.inf:
            total = sum(float(fill_s[w]) for w in where)
            found[cuts] = total + problem["later"] * max(times)
    return found


@settings(max_examples=250)
@given(cuts_to_make())
def test_cut_equals_enumeration(problem: dict[str, Any]) -> None:
    legal = every_cut(problem)
    cut = cut_evenly(**problem)
    if not legal:
        assert cut is None
        return
    assert cut == cut_evenly(**problem)
    assert cut.cuts in legal
    assert cut.objective_s == pytest.approx(legal[cut.cuts], rel=1e-12)
    assert cut.objective_s == pytest.approx(min(legal.values()), rel=1e-11)
    assert cut.objective_s == cut.sum_s + problem["later"] * cut.t_max_s


@settings(max_examples=150)
@given(cuts_to_make(), st.floats(0.5, 1.5))
def test_only_cuts_below_the_cutoff_count(problem: dict[str, Any], factor: float) -> None:
    optimum = min(every_cut(problem).values(), default=np.inf)
    cutoff = factor * optimum if optimum < np.inf else 10.0
    cut = cut_evenly(**problem, cutoff=cutoff)
    assert (cut is not None) == (optimum < cutoff)
    if cut is not None:
        assert cut.objective_s == pytest.approx(optimum, rel=1e-11)


def equal_blocks(num_blocks: int) -> Any:
    length = np.arange(num_blocks + 1.0) - np.arange(num_blocks + 1.0)[:, None]
    return np.where(length > 0, length, np.inf)[None]


def test_ties_take_the_smallest_cuts() -> None:
    """Three stages of at most 4 blocks: any place of the short one costs the same."""
    cut = cut_evenly(equal_blocks(10), None, [0] * 3, 7.0)
    assert cut is not None and cut.cuts == (0, 2, 6, 10)


@pytest.mark.parametrize(
    ("time_s", "fill_s", "levels", "says"),
    [
        (equal_blocks(3)[0], None, [0], r"time_s has shape \(4, 4\)"),
        (equal_blocks(3), equal_blocks(3)[0], [0], "fill_s has shape"),
        (equal_blocks(3), None, [0, 1], r"level_of_stage=\[0, 1\]"),
        (equal_blocks(3), None, [], "level_of_stage"),
        (np.zeros((1, 4, 4)), None, [0], "i >= j"),
    ],
)
def test_malformed_cuts_are_named(time_s: Any, fill_s: Any, levels: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cut_evenly(time_s, fill_s, levels, 1.0)


# --- stages that share devices -------------------------------------------------------------------

WEIGHTS = np.ones((2, 1, 2, 1))  # of two devices with two stages each: their bytes, added up
STAGES = np.array([[0, 2], [1, 3]])


def shared(
    costs: Sequence[float], sizes: Sequence[float], room_bytes: float = np.inf, **given: Any
) -> SharedDevices:
    """Any run of blocks that take so many seconds and bytes; on the second level half the bytes in
    twice the seconds."""
    count = len(costs) + 1
    starts, stops = np.triu_indices(count, 1)
    index = np.zeros((count, count), dtype=np.int64)
    index[starts, stops] = np.arange(1, len(starts) + 1)
    seconds, held = (np.concatenate([[0.0], np.cumsum(own)]) for own in (costs, sizes))
    seconds, held = (
        np.concatenate([[0.0], ends[stops] - ends[starts]]) for ends in (seconds, held)
    )
    own: dict[str, Any] = {
        "time_s": np.stack([seconds, 2 * seconds]),
        "held": np.stack([held, held / 2])[..., None],
        "index": index,
        "weights": WEIGHTS,
        "stages": STAGES,
        "undivided": np.array([False, False]),
        "room_bytes": room_bytes,
    }
    return SharedDevices(**own | given)


def of_devices(values: Sequence[float], cuts: Sequence[int]) -> np.ndarray:
    """(2,): sums over the blocks of each device."""
    own = [float(sum(values[i:j])) for i, j in pairwise(cuts)]
    return np.array([own[0] + own[2], own[1] + own[3]])


blocks = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=4, max_size=8)


@given(blocks, st.floats(0.2, 1.1))
def test_devices_are_judged_by_the_sums_of_their_stages(
    own: list[tuple[int, int]], room: float
) -> None:
    costs, sizes = zip(*own, strict=True)
    every = np.array([(0, *inner, len(own)) for inner in combinations(range(1, len(own)), 3)])
    room_bytes = room * sum(sizes) / 2
    judged = shared(costs, sizes, room_bytes).judged(every)
    for k, cuts in enumerate(every.tolist()):
        seconds, held = of_devices(costs, cuts), of_devices(sizes, cuts)
        part = np.clip((held - room_bytes) / (held / 2), 0.0, 1.0)
        lacks = np.maximum(held / 2 - room_bytes, 0.0)
        np.testing.assert_allclose(judged.lacks[k], lacks)
        np.testing.assert_allclose(judged.load_s[k], seconds * (1 + part))
        np.testing.assert_allclose((judged.level + judged.part)[k], part)
        in_turn = [max(sum(costs[i:j]) for i, j in pair) for pair in _pairs(cuts)]
        assert judged.in_turn_s[k] == sum(in_turn)


def _pairs(cuts: Sequence[int]) -> list[list[tuple[int, int]]]:
    own = [*pairwise(cuts)]
    return [own[:2], own[2:]]


def test_a_level_in_segments_is_for_all_blocks_or_none() -> None:
    devices = shared([1.0] * 8, [1.0] * 8, 3.9, undivided=np.array([False, True]))
    judged = devices.judged(np.array([[0, 2, 4, 6, 8]]))
    assert judged.part.tolist() == [[1.0, 1.0]] and judged.load_s.tolist() == [[8.0, 8.0]]


@given(blocks, st.data())
def test_moves_make_no_layout_worse(own: list[tuple[int, int]], data: st.DataObject) -> None:
    costs, sizes = zip(*own, strict=True)
    every = [(0, *inner, len(own)) for inner in combinations(range(1, len(own)), 3)]
    start = np.array(data.draw(st.sampled_from(every)))
    devices = shared(costs, sizes, data.draw(st.floats(0.2, 1.1)) * sum(sizes) / 2)
    found = devices.evened(start)
    assert (np.diff(found) > 0).all() and (found[0], found[-1]) == (0, len(own))
    before, after = (devices.judged(cuts[None]) for cuts in (start, found))
    assert after.lacks.sum() <= before.lacks.sum()
    if after.lacks.sum() == before.lacks.sum():
        assert after.load_s.max() <= before.load_s.max() * (1 + 1e-3)


def test_a_long_stage_is_made_up_for_by_a_short_one() -> None:
    """The last block takes three: its device gives one away, of the stage that is longest."""
    costs = [1.0] * 7 + [3.0]
    devices = shared(costs, [1.0] * 8)
    start = np.array([0, 2, 4, 6, 8])
    assert of_devices(costs, start.tolist()).max() == 6.0
    found = devices.evened(start).tolist()
    assert of_devices(costs, found).max() == 5.0 and found[-2:] == [7, 8]


def test_what_lacks_moves_first() -> None:
    """All blocks with many bytes are on one device: one of them moves, though it gets busier."""
    costs, sizes = [1.0, 1.0, 1.0, 2.0, 1.0, 1.0], [6.0, 1.0, 1.0, 6.0, 1.0, 1.0]
    devices = shared(costs, sizes, 5.5)
    start = np.array([0, 1, 3, 4, 6])
    assert devices.judged(start[None]).lacks.tolist() == [[0.5, 0.0]]
    assert not devices.judged(devices.evened(start)[None]).lacks.any()


def test_stages_that_are_not_legal_take_forever() -> None:
    devices = shared([1.0] * 6, [1.0] * 6)
    index = devices.index.copy()
    index[0, 1] = 0
    judged = replace(devices, index=index).judged(np.array([[0, 1, 2, 3, 6], [0, 2, 3, 4, 6]]))
    assert np.isinf(judged.load_s).tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize(
    ("weights", "stages", "cuts"),
    [
        ([0, 1, 1, 1, 1, 0], 2, [0, 3, 6]),  # an embedding and a head beside as many layers
        ([0, 1, 1, 1, 0], 2, [0, 3, 5]),
        ([1, 1, 1, 1, 1, 1, 1], 3, [0, 2, 5, 7]),
        ([9, 1, 1, 1], 3, [0, 1, 2, 4]),  # at least one each
        ([1, 1, 1, 9], 3, [0, 2, 3, 4]),
    ],
)
def test_even_shares(weights: list[float], stages: int, cuts: list[int]) -> None:
    assert evenly(np.array(weights, dtype=float), stages).tolist() == cuts
