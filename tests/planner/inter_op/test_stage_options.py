"""The reduced table against the whole one, entry by entry."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.inter_op.stage_options import memory_lines, stage_options
from meshwright.planner.inter_op.table import PartitionProblem, StageTable


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
