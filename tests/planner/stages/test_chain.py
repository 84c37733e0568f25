"""Block programs, and stages composed from them, against every path through the boundary states."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from meshwright.costmodel.blocks.price import price_block, price_pass
from meshwright.costmodel.graph import Op
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, Entry, translate
from meshwright.costmodel.sharding.strategies import Placement, R, can_hold
from meshwright.costmodel.stages.stage import stage_costs
from meshwright.costmodel.stages.sums import MAXIMA, Sums
from meshwright.planner.stages.chain import Chain
from meshwright.planner.stages.programs import BlockPrograms
from tests.helpers.planning import Traced, case, large_gpt2, linears, odd_cluster, programs_of
from tests.helpers.tiers import second_tier, tiered

MODELS = ("gpt2_tied", "llama", "bert", "resnet", "mlp", "plain_gpt")
MICROBATCHES, ROWS = 4, 4


def chain_of(programs: BlockPrograms, *, dp: int = 2, tp: int = 2, mode: str = "fast") -> Chain:
    setting = programs.coster.setting(
        Mesh(dp=dp, tp=tp), Batch(rows=ROWS / dp, microbatches=MICROBATCHES)
    )
    return programs.chain(setting, mode)


def stages_of(chain: Chain) -> Iterator[tuple[int, int]]:
    return itertools.combinations(range(len(chain.tables) + 1), 2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [2, 3])
def test_values_cross_cuts_in_every_state_that_ranks_can_hold(name: str, tp: int) -> None:
    programs = programs_of(case(name), odd_cluster(0), "fp32")
    graph, table = programs.graph, programs.coster.problem.factors
    crossing = [value for block in graph.blocks for value in block.outputs]
    uneven = 0
    for value in crossing:
        found = programs.value_states(value, tp)
        for dim, atoms in enumerate(table.dims[value]):
            if len(atoms) == 1 and atoms[0] != table.batch:
                state = Placement("S", dim, 1)
                assert (state in found) == can_hold(graph, table, value, state, tp)
                uneven += state in found and graph.values[value].shape[dim] % tp != 0
    assert not uneven or tp == 3
    assert uneven or tp == 2 or name not in ("gpt2_tied", "llama")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, 2])
def test_stages_are_pieces_of_the_models_cheapest_path(name: str, seed: int) -> None:
    programs = programs_of(case(name), odd_cluster(seed), "fp32")
    chain = chain_of(programs)
    assert np.isinf(chain.seconds[np.tril_indices(len(chain.seconds))]).all()
    count = len(chain.tables)
    inner = [range(len(chain.cuts[k])) for k in range(1, count)]
    best = min(
        sum(chain.costs[k][a, b] for k, (a, b) in enumerate(itertools.pairwise([0, *path, 0])))
        for path in itertools.product(*inner)
    )
    assert sum(chain.block_s) == pytest.approx(best, rel=1e-9)
    for i, j in stages_of(chain):
        again = repeats(programs, chain, i, j)
        assert chain.seconds[i, j] == pytest.approx(sum(chain.block_s[i:j]) - again, rel=1e-9)


def repeats(programs: BlockPrograms, chain: Chain, i: int, j: int) -> float:
    """Seconds of parameters that a stage's blocks read again: gradients and optimizer."""
    pricer, seen, seconds = programs.coster.pricer(chain.setting), set(), 0.0
    for k, table in enumerate(chain.tables[i:j], i):
        for value in programs.graph.blocks[k].parameters:
            if value in seen:
                state = table.stored(next(iter(table.choices)), value)
                seconds += pricer.parameter_cost(value, state).seconds(MICROBATCHES)
            seen.add(value)
    return seconds


@second_tier("other models; a tied one stays")
@pytest.mark.parametrize("name", MODELS)
def test_the_assignments_of_a_stage_cost_what_the_stage_costs(name: str) -> None:
    """The way back: from every stage's assignments alone to its seconds and parameters."""
    programs = programs_of(case(name), odd_cluster(4), "fp32")
    chain = chain_of(programs, mode="lean")
    pricer = programs.coster.pricer(chain.setting)
    for i, j in stages_of(chain):
        found = chain.assignments(i, j)
        assert list(found) == [b.name for b in programs.graph.blocks[i:j]]
        arriving, leaving = (chain.cuts[k][chain.states[k]] for k in (i, j))
        at = dict.fromkeys(programs.coster.activations_at_cuts[i], arriving)
        seconds, parameters = -repeats(programs, chain, i, j), {}
        for block in programs.graph.blocks[i:j]:
            assignment = found[block.name]
            layouts = BlockLayouts(programs.graph, programs.coster.problem.factors, block, 2)
            seconds += price_block(pricer, layouts, assignment, at).cost.seconds(MICROBATCHES)
            states = assignment.states
            parameters |= {v: pricer.numel(v, states[v]) for v in block.parameters}
            at |= {v: states[v] for v in block.outputs}
        assert all(at[v] == leaving for v in programs.coster.activations_at_cuts[j])
        assert seconds == pytest.approx(chain.seconds[i, j], rel=1e-9)
        local = stage_costs(chain.sums[i, j], chain.setting, "none").parameters
        assert local == pytest.approx(sum(parameters.values()))


def test_passes_of_all_data_axes_are_what_each_takes_alone() -> None:
    """Also of blocks whose batch meets there, whose prices follow from those of two ranks."""
    programs, took = programs_of(case("resnet"), odd_cluster(4), "fp32"), []
    graph, table = programs.graph, programs.coster.problem.factors
    for dp in (1, 2, 4):
        chain, at = chain_of(programs, dp=dp), dict[str, Placement]()
        found = chain.assignments(0, len(graph.blocks))
        for block in graph.blocks:
            assignment, inputs = found[block.name], {v: at.get(v, R) for v in block.inputs}
            pricer = programs.coster.pricer(chain.setting)
            passes, _ = programs.coster.block(pricer, block, assignment, inputs)
            alone = Pricer(graph=graph, table=table, setting=chain.setting)
            layouts = BlockLayouts(graph, table, block, 2)
            assert passes == price_pass(alone, layouts, assignment, inputs)
            took.append((block.name, passes.cost.forward_comm_s))
            at |= {v: assignment.states[v] for v in block.outputs}
    assert len({s for name, s in took if name == graph.blocks[0].name}) == 3  # its statistics


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("name", ["gpt2_tied", "bert"])
def test_tied_parameters_are_stored_alike(name: str, mode: str) -> None:
    """In every stage, whatever the boundary states."""
    for seed in (0, 1, 3, 17):
        programs = programs_of(case(name), odd_cluster(seed), "fp32")
        shared = programs._shared
        assert shared
        chain = chain_of(programs, tp=4, mode=mode)
        stored = {
            (value, table.stored(index, value))
            for block, table in zip(programs.graph.blocks, chain.tables, strict=True)
            for value in shared.intersection(block.parameters)
            for index in table.choices
        }
        assert len(stored) == len(shared)


@pytest.mark.parametrize(
    "name", tiered(["llama", "resnet"], "resnet".__eq__, "a model with statistics stays")
)
def test_prices_do_not_depend_on_what_was_priced_before(name: str) -> None:
    """Equal rows on equal tensor axes share programs and caches, whatever the data axis and the
    number of micro-batches."""
    of, on = case(name), odd_cluster(3)
    shared = programs_of(of, on, "fp32")
    for dp, microbatches in ((1, 4), (4, 1), (2, 2), (2, 8)):
        one, other = (
            programs.chain(
                programs.coster.setting(Mesh(dp=dp, tp=2), Batch(rows=1, microbatches=microbatches))
            )
            for programs in (shared, programs_of(of, on, "fp32"))
        )
        np.testing.assert_array_equal(one.seconds, other.seconds)
        np.testing.assert_array_equal(one.sums.array, other.sums.array)
        for found, expected in zip(one.tables, other.tables, strict=True):
            np.testing.assert_array_equal(found.costs, expected.costs)


def test_only_one_value_may_cross_in_pieces() -> None:
    programs = programs_of(case("llama"), odd_cluster(0), "fp32")
    assert programs.cut_states(2, 1) == [R]
    assert programs.cut_states(0, 2) == programs.cut_states(5, 2) == [R]
    assert set(programs.cut_states(2, 2)) == {R, Placement("S", 1), Placement("S", 2)}
    assert set(programs.cut_states(2, 3)) == {R, Placement("S", 2)}  # 32 as 11, 11 and 10


def test_an_assignment_moves_to_a_repeat_by_position() -> None:
    of = large_gpt2()
    first, second = of.graph.blocks[1:3]
    assert first.class_id == second.class_id
    programs = programs_of(of, odd_cluster(0))
    setting = programs.coster.setting(Mesh(dp=1, tp=8), Batch(rows=2, microbatches=MICROBATCHES))
    chain = programs.chain(setting)
    assert chain.tables[1] is chain.tables[2]
    here = chain.tables[1].program.assignment(chain.tables[1], (0, 0))
    there = translate(here, first, second)
    assert translate(here, first, first) is here
    assert translate(there, second, first) == here
    assert set(there.strategies) == {op.name for op in second.ops}
    results = {r for op in second.ops for r in op.results}
    assert set(there.states) == results | set(second.parameters)
    pricer = programs.coster.pricer(setting)

    def price(block: int, assignment: Assignment) -> float:
        layouts = BlockLayouts(of.graph, of.table, of.graph.blocks[block], 8)
        return price_block(pricer, layouts, assignment, {}).cost.seconds(MICROBATCHES)

    assert price(2, there) == pytest.approx(price(1, here), rel=1e-12)


def up_projection() -> Op:
    ops = case("llama").graph.ops
    return next(o for o in ops if o.key == "model.layers.1.mlp.up_proj:linear")


def test_decisions_of_the_user_hold_in_every_stage() -> None:
    of, up = case("llama"), up_projection()
    forced = Entry(strategy="rowwise", state=R)
    programs = programs_of(of, odd_cluster(0), "fp32", **{up.name: forced})
    chain = chain_of(programs)
    for i, j in stages_of(chain):
        found = chain.assignments(i, j).get("model.layers.1")
        if found is not None:
            assert found.strategies[up.name].name == "rowwise"
            assert found.states[up.results[0]] == R
    free = chain_of(programs_of(of, odd_cluster(0), "fp32"))
    legal = np.isfinite(free.seconds)
    assert (chain.seconds[legal] >= free.seconds[legal] * (1 - 1e-12)).all()
    assert chain.seconds[2, 3] > free.seconds[2, 3]
    assert chain.seconds[1, 2] == free.seconds[1, 2]


def test_a_decision_that_cannot_hold_names_the_legal_ones() -> None:
    of, up = case("llama"), up_projection()
    programs = programs_of(of, odd_cluster(0), "fp32", **{up.name: Entry(strategy="heads")})
    chain = chain_of(programs)
    says = "sharding 'heads' of model.layers.1.mlp.up_proj:linear: not possible"
    assert says in programs.refused[2]
    assert np.isinf(chain.seconds[:3, 3:]).all()  # layer 1 is block 2
    assert np.isfinite(chain.seconds[0, 2])
    assert np.isfinite(chain.seconds[3, 5])


SHAPES = {
    "linears": lambda: linears(64, 6, 4, 16), "gpt2": large_gpt2, "llama": lambda: case("llama"),
    "resnet": lambda: case("resnet"),
}  # fmt: skip


def repeated(of: Traced, forced: tuple[str | None, ...] = ()) -> Chain:
    programs = programs_of(of, odd_cluster(5))
    setting = programs.coster.setting(Mesh(dp=2, tp=2), Batch(rows=2, microbatches=2))
    return programs.chain(setting, "fast", forced)


def kinds(chain: Chain, start: int, stop: int) -> tuple[tuple[int, str | None], ...]:
    """What the blocks of a stage are: their solved tables, and the policies forced on them."""
    tables = [id(table) for table in chain.tables[start:stop]]
    return tuple(zip(tables, chain.forced[start:stop], strict=True))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("mixed", [False, True])
def test_stages_share_a_run_if_and_only_if_their_blocks_are_alike(name: str, mixed: bool) -> None:
    of = SHAPES[name]()
    count = len(of.graph.blocks)
    chain = repeated(of, tuple("full" if k % 3 == 1 else None for k in range(count)) * mixed)
    of_row: dict[int, Any] = {}
    for i, j in itertools.combinations(range(count + 1), 2):
        row = int(chain.runs.index[i, j])
        alike = kinds(chain, i, j), chain.states[i : j + 1]
        assert of_row.setdefault(row, alike) == alike
        assert chain.runs.blocks[row] == j - i
    assert len(set(map(str, of_row.values()))) == len(of_row) == len(chain.runs.seconds) - 1
    assert (chain.runs.index[np.tril_indices(count + 1)] == 0).all()
    assert np.isinf(chain.runs.seconds[0])


@pytest.mark.parametrize("name", SHAPES)
def test_a_stage_is_the_sum_of_its_blocks_on_its_path(name: str) -> None:
    """But for parameters that several of them read, which are held once."""
    chain = repeated(SHAPES[name]())
    for i, j in itertools.combinations(range(len(chain.blocks) + 1), 2):
        parts = Sums(np.array([part.array for part in chain.block_sums(i, j)]))
        sums = chain.sums[i, j]
        following = functools.reduce(Sums.then, map(Sums, parts.array))
        if not chain.shared:
            np.testing.assert_allclose(sums.array[-MAXIMA:], following.array[-MAXIMA:], rtol=1e-9)
            added = parts.array[:, :-MAXIMA].sum(axis=0)
            np.testing.assert_allclose(sums.array[:-MAXIMA], added, rtol=1e-9)
        else:
            assert sums.parameters <= parts.parameters.sum() * (1 + 1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_typical_runs_add_up_typical_blocks(name: str) -> None:
    """What the whole model's typical sums are made of, stage by stage."""
    chain = repeated(SHAPES[name]())
    count = len(chain.blocks)
    ends = sorted({0, 1, count // 2, count - 1, count})
    runs = chain.typical_runs(ends)
    assert runs.index[0, -1] > 0 and np.isinf(runs.seconds[0])
    assert (runs.index[np.tril_indices(len(ends))] == 0).all()
    whole = runs.sums[runs.index[0, -1]].array
    typical = chain.typical().array
    np.testing.assert_allclose(whole[:-MAXIMA], typical[:-MAXIMA], rtol=1e-9, atol=1e-12)
    for i, j in itertools.combinations(range(len(ends)), 2):
        assert runs.blocks[runs.index[i, j]] == ends[j] - ends[i]
        parts = [runs.sums[runs.index[k, k + 1]].array for k in range(i, j)]
        together = runs.sums[runs.index[i, j]].array
        assert (together[:-MAXIMA] <= sum(parts)[:-MAXIMA] * (1 + 1e-9) + 1e-12).all()
