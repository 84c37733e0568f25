"""The intra-operator program: exact against enumeration, worth what its assignment costs, and
splitting models as the field does."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.blocks.price import price_block
from meshwright.costmodel.graph import Block
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, default_state
from meshwright.costmodel.sharding.strategies import RP, Placement, R, Strategy
from meshwright.planner.intra_op.program import BlockProgram, BlockTable
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.profiles.cluster import Cluster
from tests.helpers import planning
from tests.helpers.planning import Traced, case, large_bert, large_gpt2, odd_cluster, programs_of
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.traced import with_forward

# --- the table, the solver and the price agree ---------------------------------------------------

MODELS = ("gpt2_tied", "llama", "bert", "resnet", "mlp", "plain_gpt")


def tables(
    of: Traced, on: Cluster, *, tp: int, rows: float = 4, m: int = 8, mode: str = "fast"
) -> tuple[StageCoster, Pricer, list[BlockTable]]:
    """Solved tables of all blocks, one per class."""
    programs = programs_of(of, on, "fp32")
    setting = programs.coster.setting(Mesh(dp=2, tp=tp), Batch(rows=rows, microbatches=m))
    distinct = {id(table): table for table in programs.chain(setting, mode).tables}
    return programs.coster, programs.coster.pricer(setting), list(distinct.values())


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
    for table in solved:
        for index, objective in states(table):
            assignment, at = table.program.assignment(table, index), inputs_of(table, index)
            price = price_block(pricer, table.program.layouts, assignment, at)
            assert price.cost.seconds(m) == pytest.approx(objective, rel=1e-9)


def test_a_buffer_is_not_read_as_a_partial_sum() -> None:
    batch = torch.empty(4, 6, 8), torch.empty(4, 6, 8)
    parts = {"linear": nn.Linear(8, 8, bias=False), "shift": nn.Buffer(torch.ones(8))}
    model = with_forward(lambda self, x: self.linear(x) + self.shift, **parts)
    of = planning.cut(model, batch, F.mse_loss, precision="fp32")
    programs = [table.program for table in tables(of, odd_cluster(0), tp=2)[2]]
    ((program, op),) = [(p, op) for p in programs for op in p.block.ops if op.short == "add"]
    options = program.layouts.options(op)
    assert any(s.operands[1].kind == "P" for s in options)
    for strategy, seconds in zip(options, program.problem.unary[op.name], strict=True):
        assert np.isfinite(seconds) == (strategy.operands[1].kind != "P")


@pytest.mark.parametrize(
    "name", tiered(MODELS, ("gpt2_tied", "mlp").__contains__, "a tied model and an MLP stay")
)
def test_the_table_is_the_optimum_of_the_whole_program(name: str) -> None:
    _, _, solved = tables(case(name), odd_cluster(7), tp=4)
    for table in solved:
        assert len(table.choices) == table.costs.size
        for index, objective in states(table):
            proof = table.certify(index)
            assert proof.objective == pytest.approx(objective, rel=1e-7)
            assert tuple(proof.choice[name] for name in table.keep) == index


@pytest.mark.parametrize(
    "name", tiered(["gpt2_tied", "llama", "mlp"], "mlp".__eq__, "an MLP stays")
)
@pytest.mark.parametrize("microbatches", [1, math.inf])
def test_another_data_axis_is_as_a_fresh_program(name: str, microbatches: float) -> None:
    """Only how parameters are stored is priced again; a first table stays what it was. (Statistics
    of a batch are summed over the data axis: blocks with them have a program for each.)"""
    coster, _, solved = tables(case(name), odd_cluster(7), tp=2, rows=2, m=8)
    pricer = coster.pricer(coster.setting(Mesh(dp=4, tp=2), Batch(rows=2, microbatches=4)))
    for table in solved:
        program, before = table.program, table.costs.copy()
        again = program.solve(pricer, microbatches=microbatches)
        fresh = BlockProgram(
            pricer, program.layouts, inputs=program.inputs, outputs=program.outputs
        ).solve(pricer, microbatches=microbatches)
        np.testing.assert_array_equal(again.costs, fresh.costs)
        assert dict(again.choices) == dict(fresh.choices)
        np.testing.assert_array_equal(table.costs, before)
        for index, objective in states(again):
            proof = again.certify(index)
            assert proof.objective == pytest.approx(objective, rel=1e-7)


def sharded_only(program: BlockProgram) -> Callable[[str, Placement], bool]:
    """Parameters that can be sharded are."""
    return lambda value, state: state.sharded or len(program.storable[value]) == 1


@pytest.mark.parametrize("name", ["gpt2_tied", "llama"])
def test_what_is_forbidden_to_store_is_not_stored(name: str) -> None:
    """Forbidding states can't make a block cheaper; forbidding all leaves no assignment."""
    _, pricer, solved = tables(case(name), odd_cluster(3), tp=2)
    for table in solved:
        program = table.program
        split = [v for v in program.block.parameters if len(program.storable[v]) > 1]
        free, found = program.solve(pricer), program.solve(pricer, sharded_only(program))
        assert (found.costs >= free.costs).all()
        assert all(found.stored(i, v).sharded for i in found.choices for v in split)
        assert program.solve(pricer, lambda value, state: False) is None


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_moves_nothing(name: str) -> None:
    programs = programs_of(case(name), odd_cluster(1), "fp32")
    setting = programs.coster.setting(Mesh(dp=1, tp=1), Batch(rows=4, microbatches=4))
    chain = programs.chain(setting)
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
    shapes = {layer: (8, w) if w > 0 else (-w, 8) for layer, w in widths.items()}
    layers = {layer: nn.Linear(*shape, bias=bias) for layer, shape in shapes.items()}
    model = with_forward(forward, **layers)
    front = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    batch = (torch.empty(4, 8), torch.empty(4, 8))
    of = planning.cut(nn.Sequential(front, model), batch, F.mse_loss, precision="fp32")
    assert len(of.graph.ops) <= 8
    return of


def block_of(of: Traced) -> Block:
    """The operators between the first tanh and the loss, as one block."""
    ops = of.graph.ops[2:-1]
    made = {r for op in ops for r in op.results}
    used = dict.fromkeys(n for op in ops for n in op.operands)
    inputs = tuple(n for n in used if n not in made and n not in of.graph.parameters)
    parameters = tuple(n for n in used if n in of.graph.parameters)
    return Block(
        name="small", class_id="small", ops=ops, derived=(), buffers=(), inputs=inputs,
        outputs=of.graph.ops[-1].operands[:1], parameters=parameters,
    )  # fmt: skip


def every_assignment(
    program: BlockProgram, inputs: Mapping[str, Placement], leaving: Placement
) -> Iterator[Assignment]:
    """All strategies, states of parameters, and states in which values wait."""
    block, layouts = program.block, program.layouts
    options = [layouts.options(op) for op in block.ops]
    for chosen in itertools.product(*options):
        strategies = {op.name: s for op, s in zip(block.ops, chosen, strict=True)}
        free: dict[str, list[Placement]] = {v: program.storable[v] for v in block.parameters}
        for op in block.ops:
            for value, made in zip(op.results, strategies[op.name].results, strict=True):
                targets = layouts.targets(value, strategies)
                if value in block.outputs:
                    free[value] = [leaving]
                elif value != op.results[0]:
                    free[value] = [default_state(made, targets, False)]
                else:
                    free[value] = _waiting(layouts, value, made, targets)
        for found in itertools.product(*free.values()):
            yield Assignment(strategies=strategies, states=dict(zip(free, found, strict=True)))


def _waiting(
    layouts: BlockLayouts, value: str, made: Placement, targets: Sequence[Placement]
) -> list[Placement]:
    """States worth trying: a plan can say any, but only of an operator's first result."""
    readers = [s.operands[i] for o, i in layouts.readers[value] for s in layouts.options(o)]
    return sorted({made, R, RP, *targets, *(readers if len(targets) > 1 else [])})


BOUNDARY = [R, Placement("S", 1)]


def small_program(name: str, seed: int, m: int) -> tuple[BlockProgram, Pricer]:
    """Of the block of a small model that is entered and left both ways."""
    of = small(name)
    coster = StageCoster(planning.problem_of(of, odd_cluster(seed), "fp32"))
    pricer = coster.pricer(coster.setting(Mesh(dp=2, tp=2), Batch(rows=4, microbatches=m)))
    layouts = BlockLayouts(of.graph, of.table, block_of(of), 2)
    inputs, outputs = (
        dict.fromkeys(v, BOUNDARY) for v in (layouts.block.inputs, layouts.block.outputs)
    )
    return BlockProgram(pricer, layouts, inputs=inputs, outputs=outputs), pricer


def test_a_value_that_no_plan_names_waits_in_a_state_of_where_it_comes_from() -> None:
    program, _ = small_program("the input is read twice", 3, 2)
    ((edge, seconds),) = [
        (edge, seconds) for edge, seconds in program.problem.pairs.items() if edge[0][:3] == "in:"
    ]
    for row, source in zip(seconds, BOUNDARY, strict=True):
        waits = zip(program.problem.states[edge[1]], row, strict=True)
        assert all(np.isfinite(cost) == (wait.source == source) for wait, cost in waits)


@pytest.mark.parametrize(
    ("name", "seed", "every"),
    [
        ("the input is read twice", 5, 1),
        *(
            pytest.param(
                *of, marks=second_tier("more blocks and costs; one of which all is tried stays")
            )
            for of in (
                ("perceptron", 3, 7),
                ("one weight, two operators", 0, 1),
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
    m = 2
    program, pricer = small_program(name, seed, m)
    table = program.solve(pricer)
    assert table is not None
    for index in ((0, 0), (1, 1)):
        inputs, best = inputs_of(table, index), np.inf
        tried = every_assignment(program, inputs, BOUNDARY[index[1]])
        for assignment in itertools.islice(tried, 0, None, every):
            try:
                price = price_block(pricer, program.layouts, assignment, inputs).cost.seconds(m)
            except ValueError:
                continue  # a re-shard that does not exist
            best = min(best, price)
        assert table.costs[index] <= best * (1 + 1e-9)
        assert every > 1 or table.costs[index] == pytest.approx(best, rel=1e-9)


# --- what the field knows, found without being told ----------------------------------------------

H100 = Cluster.from_catalog("h100-sxm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The cheapest assignment of all blocks as one stage, by operator key, and what it moves."""

    of: Traced
    strategies: Mapping[str, Strategy]
    moves: Mapping[str, planning.Recorder]


def solve(
    of: Traced, on: Cluster = H100, *, tp: int = 8, rows: float = 2, m: int = 8, mode: str = "lean"
) -> Solved:
    programs = programs_of(of, on)
    setting = programs.coster.setting(Mesh(dp=1, tp=tp), Batch(rows=rows, microbatches=m))
    chain = programs.chain(setting, mode)
    chosen: dict[str, Strategy] = {}
    moves: dict[str, planning.Recorder] = {}
    at: dict[str, Placement] = {}
    found = chain.assignments(0, len(of.graph.blocks))
    for block in of.graph.blocks:
        assignment = found[block.name]
        chosen |= {op.key: assignment.strategies[op.name] for op in block.ops}
        layouts = BlockLayouts(of.graph, of.table, block, tp)
        moves[block.name] = planning.communication(
            programs.coster.pricer(setting), layouts, assignment, at
        )
        at |= {v: assignment.states[v] for v in block.outputs}
    return Solved(of=of, strategies=chosen, moves=moves)


@cache
def split(model: Callable[[], Traced]) -> Solved:
    return solve(model())


def named(found: Solved, pattern: str) -> list[str]:
    """Names of the strategies of operators whose key matches, in order."""
    return [s.name for key, s in found.strategies.items() if re.fullmatch(pattern, key)]


def test_fused_attention_is_split_by_heads() -> None:
    """`colwise.1` of c_attn divides the heads inside each of the parts q, k and v."""
    found = split(large_gpt2)
    for k in range(2):
        layer = rf"transformer\.h\.{k}\.attn"
        assert named(found, rf"{layer}\.c_attn:addmm") == ["colwise.1"]
        assert named(found, rf"{layer}.*:scaled_dot_product_attention") == ["heads"]
        assert named(found, rf"{layer}\.c_proj:addmm")[0].startswith("rowwise")
        fused = found.strategies[f"transformer.h.{k}.attn.c_attn:addmm"]
        assert fused.results == (Placement("S", 1, 3),)


@pytest.mark.parametrize(
    ("model", "prefix", "columns", "first", "second"),
    [
        (
            planning.large_llama, r"model\.layers\.\d", 10,
            r"(self_attn\.[qkv]|mlp\.(gate|up))_proj", r"(self_attn\.o|mlp\.down)_proj",
        ),
        pytest.param(
            large_bert, r"bert\.encoder\.layer\.\d", 8,
            r"(attention\.self\.(query|key|value)|intermediate\.dense)",
            r"(attention\.)?output\.dense",
            marks=second_tier("projections of a decoder stay"),
        ),
    ],
)  # fmt: skip
def test_columns_then_rows(model: Any, prefix: str, columns: int, first: str, second: str) -> None:
    """Of attention, by heads between, and of the MLP."""
    found = split(model)
    for pattern, way, count in ((first, "colwise", columns), (second, "rowwise", 4)):
        names = named(found, rf"{prefix}\.{pattern}:linear")
        assert [name.split(".")[0] for name in names] == [way] * count
    assert named(found, rf"{prefix}.*:scaled_dot_product_attention") == ["heads"] * 2


@pytest.mark.parametrize("model", [large_gpt2, planning.large_llama, large_bert])
def test_a_layer_costs_four_all_reduces(model: Callable[[], Traced]) -> None:
    """Two forward and two backward, whether as all-reduces or over the sequence as reduce-scatters
    with all-gathers."""
    found = split(model)
    layers = [r for name, r in found.moves.items() if name[-1].isdigit()]
    assert [r.all_reduces() for r in layers] == [(2.0, 2.0)] * 2


def test_logits_of_a_tied_head_are_never_gathered() -> None:
    found = split(large_gpt2)
    assert named(found, r"transformer\.wte:embedding") == ["vocab"]
    assert named(found, "lm_head:linear") == ["colwise"]
    loss = next(s for key, s in found.strategies.items() if "cross_entropy_loss" in key)
    assert loss.implementation == "cross_entropy"
    assert loss.operands[0].sharded
    vocabulary = {v for v, meta in found.of.graph.values.items() if 50304 in meta.shape[1:]}
    moved = {value for recorder in found.moves.values() for value, _, _ in recorder.moved}
    assert vocabulary
    assert not vocabulary & moved


@pytest.mark.parametrize("layers", tiered([3, 6], (3).__eq__, "fewer layers stay"))
def test_wide_layers_on_few_rows_take_one_all_reduce_each_but_the_first(layers: int) -> None:
    """Alpa's figure: columns and rows in turn, an all-reduce after each pair in each direction. By
    what is computed and sent, that is: without tiles to fill and switches that reduce."""
    plain = planning.cluster(4, flops=1e15, memory_bandwidth=3e12, bandwidth=4e11, latency_s=1e-6)
    found = solve(planning.linears(8192, layers, 64), plain, tp=4, rows=64, m=1, mode="fast")
    assert sum(sum(r.all_reduces()) for r in found.moves.values()) == layers - 1


def test_over_slow_wires_nothing_is_split() -> None:
    slow = planning.cluster(4, flops=1e15, memory_bandwidth=1e15, bandwidth=1e6)
    found = solve(planning.linears(8192, 2, 64), slow, tp=4, rows=64, mode="fast")
    assert named(found, ".*:linear") == ["replicate", "replicate"]
    assert sum(sum(r.all_reduces()) for r in found.moves.values()) == 0
