"""Few decisions stand for all: compressing and completing are inverse, names and states parse. The
steps of a block are consistent under any assignment: operands come in the states that their readers
take, every state is made once, and only from one in which the value is."""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Block, Op
from meshwright.costmodel.sharding.layouts import (
    Assignment,
    BlockLayouts,
    Entry,
    default_state,
    stored_state,
)
from meshwright.costmodel.sharding.moves import (
    Enter,
    Leave,
    Move,
    Run,
    Step,
    moves,
    replicated_steps,
)
from meshwright.costmodel.sharding.strategies import (
    RP,
    P,
    Placement,
    R,
    Strategy,
    indivisible,
    transition,
)
from tests.costmodel.traces import graph_of
from tests.helpers.planning import Traced, cut, large_gpt2
from tests.helpers.traced import with_forward

MODELS = ("gpt2_tied", "llama", "bert", "resnet", "mlp", "plain_gpt")
ROWS, COLUMNS, FUSED = Placement("S", 0), Placement("S", 1), Placement("S", 1, 3)


def layouts_of(of: Traced, degree: int) -> list[BlockLayouts]:
    return [BlockLayouts(of.graph, of.table, block, degree) for block in of.graph.blocks]


def written(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    return {name: Entry.parse(str(entry)) for name, entry in entries.items()}


def legal(options: list[Strategy], op: Op, at: Mapping[str, Placement]) -> list[Strategy]:
    """Strategies whose operands can be had from the states they are in."""
    return [
        s for s in options
        if all(
            transition(at[v], t) is not None
            for v, t in zip(op.operands, s.operands, strict=True)
            if v in at
        )
    ]  # fmt: skip


def random_assignment(
    layouts: BlockLayouts, inputs: Mapping[str, Placement], rng: random.Random
) -> Assignment:
    """Any legal strategies, and for what a plan can name (first results, parameters) any states."""
    chosen: dict[str, Strategy] = {}
    at = {name: inputs.get(name, R) for name in layouts.block.inputs}
    made: dict[str, Placement] = {}
    for op in layouts.block.ops:
        chosen[op.name] = rng.choice(legal(layouts.options(op), op, at))
        made |= dict(zip(op.results, chosen[op.name].results, strict=True))
        at |= {v: made[v] for v in op.results}
    states: dict[str, Placement] = {}
    for op in layouts.block.ops:
        for value in op.results:
            targets = layouts.targets(value, chosen)
            default = default_state(made[value], targets, value in layouts.block.outputs)
            free = [default, made[value], R, RP, *targets]
            states[value] = rng.choice(free) if value == op.results[0] else default
    for value in layouts.block.parameters:
        targets = [t for t in layouts.targets(value, chosen) if t.sharded]
        states[value] = rng.choice([R, *targets])
    return Assignment(strategies=chosen, states=states)


def boundary(layouts: BlockLayouts, rng: random.Random) -> dict[str, Placement]:
    options = [R, ROWS, COLUMNS]
    return {name: rng.choice(options) for name in layouts.block.inputs}


@settings(max_examples=30)
@given(st.sampled_from(MODELS), st.sampled_from([2, 4]), st.integers(0, 2**32 - 1))
def test_any_assignment_comes_back(name: str, degree: int, seed: int) -> None:
    """Completing nothing, and compressing that, gives nothing; a subset of decisions is a plan."""
    rng = random.Random(seed)
    for layouts in layouts_of(graph_of(name), degree):
        inputs = boundary(layouts, rng)
        wanted = random_assignment(layouts, inputs, rng)
        assert layouts.complete(written(layouts.compress(wanted, inputs)), inputs) == wanted
        assert layouts.compress(layouts.complete({}, inputs), inputs) == {}
        every = layouts.compress(wanted, inputs)
        some = {key: entry for key, entry in every.items() if rng.random() < 0.5}
        found = layouts.complete(some, inputs)
        assert layouts.complete(layouts.compress(found, inputs), inputs) == found
        for op in layouts.block.ops:
            entry = some.get(op.name, Entry())
            assert entry.strategy in (None, found.strategies[op.name].name)
            assert entry.state in (None, found.states[op.results[0]])


def test_what_leaves_a_stage_is_replicated_and_parameters_stored_as_first_read() -> None:
    layouts = layouts_of(graph_of("llama"), 2)[1]
    out = layouts.block.outputs[0]
    last = next(op for op in layouts.block.ops if out in op.results)
    entries = {last.name: Entry(state=COLUMNS)}
    inside = layouts.complete(entries, {})
    leaving = layouts.complete(entries, {}, leaving=[out])
    assert inside.states[out] == COLUMNS
    assert leaving.states[out] == R
    assert leaving.strategies == inside.strategies
    assert stored_state([COLUMNS, R]) == COLUMNS
    assert stored_state([RP, COLUMNS]) == R
    assert stored_state([]) == R


def test_megatron_follows_from_two_decisions() -> None:
    """Columns of the first product; heads, rows and the sum after them follow."""
    of = large_gpt2()
    layouts = BlockLayouts(of.graph, of.table, of.graph.blocks[1], 8)
    ops = {op.key.removeprefix("transformer.h.0."): op for op in layouts.block.ops}
    entries = {
        ops["attn.c_attn:addmm"].name: Entry(strategy="colwise.1"),
        ops["mlp.c_fc:addmm"].name: Entry(strategy="colwise"),
    }
    found = layouts.complete(entries, {})
    names = {key: found.strategies[op.name].name for key, op in ops.items()}
    assert names["attn:scaled_dot_product_attention"] == "heads"
    assert names["attn.c_proj:addmm"].startswith("rowwise")
    assert names["mlp.c_proj:addmm"] == "rowwise"
    assert found.states[ops["attn.c_proj:addmm"].results[0]].kind in ("P", "R")
    assert found.states[layouts.block.outputs[0]] == R
    stored = {of.graph.parameters[v]: found.states[v] for v in layouts.block.parameters}
    assert stored["transformer.h.0.attn.c_attn.weight"] == FUSED
    assert stored["transformer.h.0.mlp.c_fc.weight"] == COLUMNS
    assert stored["transformer.h.0.mlp.c_proj.weight"] == ROWS
    assert stored["transformer.h.0.ln_1.weight"] == R


def test_entries() -> None:
    for text, entry in (
        ("colwise", Entry(strategy="colwise")),
        ("heads -> S(1)", Entry(strategy="heads", state=COLUMNS)),
        ("heads->S(1/3)", Entry(strategy="heads", state=FUSED)),
        ("-> Rp", Entry(state=RP)),
        ("follow", Entry()),
    ):
        assert Entry.parse(text) == Entry.parse(f"  {entry} ") == entry
    for text in ("-> Q", "colwise -> S", "-> S(-1)", "-> S(1/)", "-> S(1) x"):
        state = text.partition("->")[2].strip()
        with pytest.raises(ValueError, match=rf"{re.escape(state)}.*legal: R, P, S\(dim\)"):
            Entry.parse(text)


@pytest.mark.parametrize(
    ("made", "targets", "is_output", "state"),
    [
        (COLUMNS, [R], True, R),  # blocks hand on whole tensors
        (P, [P], True, R),
        (P, [P], False, P),  # carried on to a linear reader
        (P, [P, R], False, R),  # summed once for both
        (P, [R], False, R),
        (P, [RP], False, R),
        (P, [ROWS], False, ROWS),  # reduce-scattered where the only reader wants a shard
        (P, [ROWS, COLUMNS], False, R),
        (P, [], False, P),
        (COLUMNS, [COLUMNS], False, COLUMNS),
        (COLUMNS, [ROWS], False, COLUMNS),
        (COLUMNS, [RP], False, COLUMNS),
        (COLUMNS, [R, RP], False, RP),  # gathered once, gradient scattered back once
        (COLUMNS, [P], False, R),  # there is no way from a shard to a partial value
        (R, [RP], False, R),
        (R, [COLUMNS, RP], False, R),
    ],
)
def test_default_state(
    made: Placement, targets: list[Placement], is_output: bool, state: Placement
) -> None:
    assert default_state(made, targets, is_output) == state


def at(name: str, key: str, degree: int) -> tuple[BlockLayouts, Op]:
    of = graph_of(name)
    block, op = next((b, op) for b in of.graph.blocks for op in b.ops if op.key == key)
    return BlockLayouts(of.graph, of.table, block, degree), op


def test_names_of_a_matrix_product() -> None:
    layouts, op = at("llama", "model.layers.0.mlp.up_proj:linear", 2)
    assert layouts.named(op, "colwise").results[0].sharded
    assert layouts.named(op, "out") == layouts.named(op, "colwise")
    assert layouts.named(op, "rowwise").results == (P,)
    assert layouts.named(op, "replicate").results == (R,)
    # query columns are (key heads × queries each × head dim) = (2 × 2 × 8)
    for degree, name, split in ((2, "colwise.0", 1), (4, "colwise.2", 2 * 2)):
        layouts, op = at("llama", "model.layers.0.self_attn.q_proj:linear", degree)
        found = layouts.named(op, "colwise")
        assert (found.name, found.operands[1]) == (name, Placement("S", 0, split))


def test_an_unknown_name_is_answered_with_the_nearest_and_the_legal_ones() -> None:
    layouts, op = at("llama", "model.layers.0.mlp.up_proj:linear", 2)
    message = r"sharding '{}' of model\.layers\.0\.mlp\.up_proj:linear: not possible with tp=2"
    for name, nearest in (("colwize", "colwise"), ("zzz", None)):
        with pytest.raises(ValueError, match=message.format(name)) as refused:
            layouts.named(op, name)
        text = str(refused.value)
        assert ("did you mean" in text) == bool(nearest)
        assert f"did you mean '{nearest}'?" in text or not nearest
        legal_names = text.partition("legal: ")[2].partition(";")[0].split(", ")
        assert legal_names == [option.name for option in layouts.options(op)]


def test_a_degree_that_divides_nothing_leaves_replication() -> None:
    layouts, op = at("llama", "model.layers.0.self_attn.q_proj:linear", 3)
    assert [s.split_factor for s in layouts.options(op) if s.split_factor] == ["in"]  # 11, 11, 10
    message = r"not possible with tp=3 \(out = 32; degrees that divide: 2, 4, 8\)"
    with pytest.raises(ValueError, match=message):
        layouts.named(op, "colwise")
    assert indivisible(graph_of("llama").table, op, 3) == {"out": 32, "b0": 16}


def run_in_mind(steps: Sequence[Step]) -> None:
    """Raise AssertionError where a step reads what is not there, or makes what is."""
    there: set[tuple[str, Placement]] = set()

    def made(value: str, state: Placement) -> None:
        assert (value, state) not in there
        there.add((value, state))

    for step in steps:
        match step:
            case Enter(value, state):
                made(value, state)
            case Move(value, source, target):
                assert source != target
                assert (value, source) in there
                assert step.known == ((value, target) in there)
                there.add((value, target))
            case Run(op, strategy):
                assert there.issuperset(zip(op.operands, strategy.operands, strict=True))
                for value, state in zip(op.results, strategy.results, strict=True):
                    made(value, state)
            case Leave(value, state):
                assert (value, state) in there


def belong(steps: Sequence[Step]) -> None:
    """A move is for the operator that comes next and reads it, or for the last, which made it."""
    order = {step.op.name: k for k, step in enumerate(steps) if isinstance(step, Run)}
    for k, step in enumerate(steps):
        if isinstance(step, (Move, Leave)) and step.op:
            run = steps[order[step.op]]
            assert isinstance(run, Run)
            assert step.value in (run.op.operands if k < order[step.op] else run.op.results)
            between = steps[min(k, order[step.op]) + 1 : max(k, order[step.op])]
            assert not any(isinstance(other, Run) for other in between)


@settings(max_examples=30)
@given(st.sampled_from(MODELS), st.sampled_from([2, 4]), st.integers(0, 2**32 - 1))
def test_any_assignment_runs(name: str, degree: int, seed: int) -> None:
    rng = random.Random(seed)
    for layouts in layouts_of(graph_of(name), degree):
        inputs, block = boundary(layouts, rng), layouts.block
        assignment = random_assignment(layouts, inputs, rng)
        steps = moves(layouts, assignment, inputs)
        run_in_mind(steps)
        belong(steps)
        assert [step.op for step in steps if isinstance(step, Run)] == list(block.ops)
        assert {s.value: s.state for s in steps if isinstance(s, Leave)} == {
            value: assignment.states[value] for value in block.outputs
        }
        outside = (*block.inputs, *block.derived, *block.parameters, *block.buffers)
        entering = [step.value for step in steps[: len(outside)] if isinstance(step, Enter)]
        assert tuple(entering) == outside


@settings(max_examples=20)
@given(st.sampled_from(MODELS), st.integers(0, 2**32 - 1))
def test_partial_gradients_of_parameters_wait(name: str, seed: int) -> None:
    """And a parameter that its stage holds partial, as its readers take it, is not moved."""
    rng = random.Random(seed)
    for layouts in layouts_of(graph_of(name), 2):
        inputs, parameters = boundary(layouts, rng), layouts.block.parameters
        assignment = random_assignment(layouts, inputs, rng)
        targets = {v: layouts.targets(v, assignment.strategies) for v in parameters}
        for step in moves(layouts, assignment, inputs):
            if isinstance(step, Move):
                readers = len(layouts.readers.get(step.value, ()))
                alone = readers == 1 or targets.get(step.value) == [RP]
                assert step.once == (step.value in parameters and alone)
        partial = {v: RP for v in parameters if targets[v] == [RP]}
        again = moves(layouts, assignment, inputs | partial)
        assert not any(isinstance(step, Move) and step.value in partial for step in again)


def test_what_is_replicated_is_not_moved() -> None:
    ops = graph_of("gpt2_tied").graph.derived
    made = {value for op in ops for value in op.results}
    read = tuple(dict.fromkeys(v for op in ops for v in op.operands if v not in made))
    steps = replicated_steps(ops, read, tuple(made))
    run_in_mind(steps)
    assert {type(step) for step in steps} == {Enter, Run, Leave}


@cache
def shared() -> Traced:
    linears = {name: nn.Linear(8, 8, bias=False) for name in "abc"}
    model = with_forward(lambda self, x: self.b(y := self.a(x)) + self.c(y), **linears)
    return cut(model, (torch.empty(4, 8), torch.empty(4, 8)), F.mse_loss, precision="fp32")


def moves_of(of: Traced, value: str, entries: Sequence[str]) -> list[Move]:
    """Of a value, where the products of a block of all operators have these entries."""
    block = Block(
        name="all", ops=of.graph.ops, inputs=(), outputs=(), derived=tuple(of.graph.inputs),
        parameters=tuple(of.graph.parameters), buffers=(), class_id="all",
    )  # fmt: skip
    layouts = BlockLayouts(of.graph, of.table, block, 2)
    products = [op.name for op in block.ops if op.short == "linear"]
    parsed = map(Entry.parse, entries)
    chosen = layouts.complete(dict(zip(products, parsed, strict=True)), {})
    return [s for s in moves(layouts, chosen, {}) if isinstance(s, Move) and s.value == value]


def moved(state: str, *readers: str) -> list[tuple[Placement, Placement]]:
    """Re-shards of the value between a product by rows, which makes it partial, and two others.
    `state` names its hub."""
    of = shared()
    value = next(op.results[0] for op in of.graph.ops if op.short == "linear")
    found = moves_of(of, value, [f"rowwise{state}", *readers])
    return [(s.source, s.target) for s in found]


@pytest.mark.parametrize(("second", "once"), [("b0", True), ("colwise", False)])
def test_of_a_weight_read_twice_the_gradient_waits_where_both_leave_it_partial(
    second: str, once: bool
) -> None:
    batch = torch.empty(4, 6, 8), torch.empty(4, 6, 8)
    linear = nn.Linear(8, 8, bias=False)
    model = with_forward(lambda self, x: self.a(torch.relu(self.a(x))), a=linear)
    of = cut(model, batch, F.mse_loss, precision="fp32")
    (weight,) = of.graph.parameters
    found = moves_of(of, weight, ["b0", second])
    assert found and all(step.once == once for step in found)


def test_readers_share_a_re_shard_and_go_through_the_hub() -> None:
    assert moved("", "rowwise", "rowwise") == [(P, COLUMNS)]
    assert moved("", "colwise", "colwise") == [(P, R), (R, RP)]
    assert moved(" -> R", "rowwise", "rowwise") == [(P, R), (R, COLUMNS)]
    assert moved(" -> S(1)", "rowwise", "rowwise") == [(P, COLUMNS)]
    assert moved(" -> P", "rowwise", "rowwise") == [(P, COLUMNS)]
    assert moved("", "rowwise", "colwise") == [(P, R), (R, COLUMNS), (R, RP)]
    assert moved(" -> S(1)", "rowwise", "colwise") == [(P, COLUMNS), (COLUMNS, RP)]
