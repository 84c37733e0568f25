"""The intra-operator program: exact against enumeration, and worth what its assignment costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.blocks.price import price_block
from meshwright.costmodel.graph import Block, Op
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, default_state
from meshwright.costmodel.sharding.strategies import RP, Placement, R, Strategy
from meshwright.planner.drafts.mesh import Mesh
from meshwright.planner.intra_op.program import BlockProgram
from meshwright.planner.intra_op.table import BlockTable
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import Traced, case, cut, odd_cluster, problem_of, programs_of
from tests.helpers.tiers import second_tier

# --- the table, the solver and the price agree ---------------------------------------------------

MODELS = ("gpt2_tied", "llama", "bert", "resnet", "mlp", "plain_gpt")


def tables(
    of: Traced, on: Cluster, *, tp: int, rows: float = 4, m: int = 8, mode: str = "fast"
) -> tuple[StageCoster, Pricer, dict[str, BlockTable]]:
    """Solved tables of all blocks, one per class, by the name of its first block."""
    programs = programs_of(of, on, "fp32")
    setting = programs.coster.setting(Mesh(dp=2, tp=tp), rows=rows, microbatches=m)
    chain = programs.chain(setting, mode)
    assert chain is not None
    distinct: dict[int, BlockTable] = {}
    names: dict[int, str] = {}
    for block, table in zip(of.graph.blocks, chain.tables, strict=True):
        distinct.setdefault(id(table), table)
        names.setdefault(id(table), block.name)
    return (
        programs.coster,
        programs.coster.pricer(setting),
        {names[k]: table for k, table in distinct.items()},
    )


def states(table: BlockTable) -> Iterator[tuple[tuple[int, ...], float]]:
    """Boundary states with an assignment, and what it costs."""
    return ((i, float(cost)) for i, cost in np.ndenumerate(table.costs) if i in table.choices)


def inputs_of(table: BlockTable, index: tuple[int, ...]) -> dict[str, Placement]:
    program = table.program
    at = table.choices[index]
    return {v: program.inputs[v][at[f"in:{v}"]] for v in program.block.inputs}


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *((name, k) for k, name in enumerate(MODELS)),
        *(
            pytest.param(name, (k + 4) % 6, marks=second_tier("other costs; each model stays"))
            for k, name in enumerate(MODELS)
        ),
    ],
)
def test_the_objective_is_the_price_of_the_assignment(name: str, seed: int) -> None:
    """Node and edge costs against seconds recomputed from the assignment alone, on clusters that
    make one and the other collective dear."""
    tp, rows, m, mode = [(2, 1, 1, "fast"), (4, 64, 8, "lean"), (4, 4, 1, "fast")][seed % 3]
    _, pricer, solved = tables(case(name), odd_cluster(seed), tp=tp, rows=rows, m=m, mode=mode)
    for table in solved.values():
        for index, objective in states(table):
            price = price_block(
                pricer,
                table.program.layouts,
                table.program.assignment(table, index),
                inputs_of(table, index),
            )
            assert price.cost.seconds(m) == pytest.approx(objective, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_the_table_is_the_optimum_of_the_whole_program(name: str) -> None:
    _, _, solved = tables(case(name), odd_cluster(7), tp=4)
    for table in solved.values():
        assert len(table.choices) == table.costs.size
        for index, objective in states(table):
            proof = table.certify(index)
            assert proof is not None
            assert proof.objective == pytest.approx(objective, rel=1e-7)
            assert {n: proof.choice[n] for n in table.keep} == dict(
                zip(table.keep, index, strict=True)
            )


@pytest.mark.parametrize("name", ["gpt2_tied", "llama", "mlp"])
@pytest.mark.parametrize("microbatches", [1, 64, math.inf])
def test_a_program_solved_for_another_data_axis_is_as_one_built_for_it(
    name: str, microbatches: float
) -> None:
    """Only how parameters are stored is priced again; a first table stays what it was. (Statistics
    of a batch are summed over the data axis: blocks with them have a program for each.)"""
    coster, _, solved = tables(case(name), odd_cluster(7), tp=2, rows=2, m=8)
    pricer = coster.pricer(coster.setting(Mesh(dp=4, tp=2), rows=2, microbatches=4))
    for table in solved.values():
        program, before = table.program, table.costs.copy()
        again = program.solve(pricer, microbatches=microbatches)
        fresh = BlockProgram(
            pricer, program.layouts, inputs=program.inputs, outputs=program.outputs
        ).solve(pricer, microbatches=microbatches)
        assert again is not None
        assert fresh is not None
        np.testing.assert_array_equal(again.costs, fresh.costs)
        assert dict(again.choices) == dict(fresh.choices)
        np.testing.assert_array_equal(table.costs, before)
        for index, objective in states(again):
            proof = again.certify(index)
            assert proof is not None
            assert proof.objective == pytest.approx(objective, rel=1e-7)


def sharded_only(program: BlockProgram) -> Callable[[str, Placement], bool]:
    """Parameters that can be sharded are."""
    return lambda value, state: state.sharded or len(program.stored_states(value)) == 1


@pytest.mark.parametrize("name", ["gpt2_tied", "llama"])
def test_what_is_forbidden_to_store_is_not_stored(name: str) -> None:
    """Forbidding states can't make a block cheaper; forbidding all leaves no assignment."""
    _, pricer, solved = tables(case(name), odd_cluster(3), tp=2)
    for table in solved.values():
        program = table.program
        split = [v for v in program.block.parameters if len(program.stored_states(v)) > 1]
        free = program.solve(pricer)
        found = program.solve(pricer, sharded_only(program))
        assert free is not None
        assert found is not None
        assert (found.costs >= free.costs).all()
        assert all(found.stored(i, v).sharded for i in found.choices for v in split)
        assert program.solve(pricer, lambda value, state: False) is None


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_moves_nothing(name: str) -> None:
    programs = programs_of(case(name), odd_cluster(1), "fp32")
    setting = programs.coster.setting(Mesh(dp=1, tp=1), rows=4, microbatches=4)
    chain = programs.chain(setting)
    assert chain is not None
    for j, table in enumerate(chain.tables):
        assert table.costs.shape == ()
        for name in ("forward_comm_s", "backward_comm_s", "reduce_s"):
            assert getattr(chain.parts(j, 0, 0), name) == 0


# --- the table against every assignment ----------------------------------------------------------


def chunked(self: Any, x: torch.Tensor) -> torch.Tensor:
    left, right = self.a(x).chunk(2, -1)
    return left * right + right


# a forward, and the widths of its layers `a`, `b`, ... beside 8
SMALL: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], dict[str, int], bool]] = {
    "perceptron": (lambda self, x: self.b(F.gelu(self.a(x))), {"a": 32, "b": -32}, False),
    "the input is read twice": (lambda self, x: x + F.gelu(self.a(x)), {"a": 8}, True),
    "two of three readers want the same": (
        lambda self, x: self.a(x) * self.b(x) + x, {"a": 8, "b": 8}, False,
    ),
    "one weight, two operators": (lambda self, x: self.a(F.gelu(self.a(x))), {"a": 8}, False),
    # results beyond the first, each with several readers
    "two results": (chunked, {"a": 16}, False),
}  # fmt: skip


@cache
def small(name: str) -> Traced:
    """One of the small models as a single block, with its input among the activations."""
    forward, widths, bias = SMALL[name]
    model = type("Small", (nn.Module,), {"forward": forward})()
    for layer, width in widths.items():
        shape = (8, width) if width > 0 else (-width, 8)
        model.add_module(layer, nn.Linear(*shape, bias=bias))
    front = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    batch = (torch.empty(4, 8), torch.empty(4, 8))
    of = cut(nn.Sequential(front, model), batch, F.mse_loss, precision="fp32")
    assert len(of.graph.ops) <= 8
    return of


def block_of(of: Traced) -> Block:
    """The operators between the first tanh and the loss, as one block."""
    ops = of.graph.ops[2:-1]
    made = {r for op in ops for r in op.results}
    used = dict.fromkeys(n for op in ops for n in op.operands)
    return Block(
        name="small",
        ops=ops,
        class_id="small",
        derived=(),
        buffers=(),
        inputs=tuple(n for n in used if n not in made and n not in of.graph.parameters),
        outputs=of.graph.ops[-1].operands[:1],
        parameters=tuple(n for n in used if n in of.graph.parameters),
    )


def every_assignment(
    program: BlockProgram, inputs: Mapping[str, Placement], leaving: Placement
) -> Iterator[Assignment]:
    """All strategies, states of parameters, and states in which values wait."""
    block, layouts = program.block, program.layouts
    options = [layouts.options(op) for op in block.ops]
    for chosen in itertools.product(*options):
        strategies = {op.name: s for op, s in zip(block.ops, chosen, strict=True)}
        free: dict[str, list[Placement]] = {v: program.stored_states(v) for v in block.parameters}
        for op in block.ops:
            for value, made in zip(op.results, strategies[op.name].results, strict=True):
                free[value] = _waiting(layouts, block, op, value, made, strategies, leaving)
        for found in itertools.product(*free.values()):
            yield Assignment(strategies=strategies, states=dict(zip(free, found, strict=True)))


def _waiting(
    layouts: BlockLayouts,
    block: Block,
    op: Op,
    value: str,
    made: Placement,
    strategies: Mapping[str, Strategy],
    leaving: Placement,
) -> list[Placement]:
    """States worth trying: a plan can say any, but only of an operator's first result."""
    targets = layouts.targets(value, strategies)
    if value in block.outputs:
        return [leaving]
    if value != op.results[0]:
        return [default_state(made, targets, False)]
    readers = [s.operands[i] for o, i in layouts.readers[value] for s in layouts.options(o)]
    return sorted({made, R, RP, *targets, *(readers if len(targets) > 1 else [])})


@pytest.mark.parametrize(
    ("name", "seed", "every"),
    [
        ("perceptron", 3, 7),
        ("the input is read twice", 5, 1),
        ("one weight, two operators", 0, 1),
        *(
            pytest.param(*of, marks=second_tier("more blocks and costs; three blocks stay"))
            for of in (
                ("perceptron", 0, 3),
                ("the input is read twice", 1, 1),
                ("two of three readers want the same", 22, 29),
                ("one weight, two operators", 2, 1),
                ("two results", 4, 17),
            )
        ),
    ],
)
def test_no_assignment_is_cheaper_than_the_table(name: str, seed: int, every: int) -> None:
    """Enter and leave both ways; what the table promises is the least price of all, and is paid. Of
    the larger blocks one assignment of so many is tried."""
    of, m, boundary = small(name), 2, [R, Placement("S", 1)]
    block = block_of(of)
    coster = StageCoster(problem_of(of, odd_cluster(seed), "fp32"))
    pricer = coster.pricer(coster.setting(Mesh(dp=2, tp=2), rows=4, microbatches=m))
    layouts = BlockLayouts(of.graph, of.table, block, 2)
    program = BlockProgram(
        pricer,
        layouts,
        inputs=dict.fromkeys(block.inputs, boundary),
        outputs=dict.fromkeys(block.outputs, boundary),
    )
    table = program.solve(pricer)
    assert table is not None
    for index in ((0, 0), (1, 1)):
        inputs, best = inputs_of(table, index), np.inf
        tried = every_assignment(program, inputs, boundary[index[1]])
        for assignment in itertools.islice(tried, 0, None, every):
            try:
                price = price_block(pricer, layouts, assignment, inputs).cost.seconds(m)
            except ValueError:
                continue  # a re-shard that does not exist
            best = min(best, price)
        assert table.costs[index] <= best * (1 + 1e-9)
        assert every > 1 or table.costs[index] == pytest.approx(best, rel=1e-9)
