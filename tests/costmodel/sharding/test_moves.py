"""The steps of a block are consistent under any assignment: operands come in the states that their
readers take, every state is made once, and only from one in which the value is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Block
from meshwright.costmodel.sharding.layouts import BlockLayouts, Entry
from meshwright.costmodel.sharding.moves import (
    Enter,
    Leave,
    Move,
    Run,
    Step,
    moves,
    replicated_steps,
)
from meshwright.costmodel.sharding.strategies import RP, P, Placement, R
from tests.costmodel.sharding.test_layouts import MODELS, boundary, layouts_of, random_assignment
from tests.costmodel.traces import graph_of
from tests.helpers.planning import Traced, cut

COLUMNS = Placement("S", 1)


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
    runs = {step.op.name: step for step in steps if isinstance(step, Run)}
    for k, step in enumerate(steps):
        if isinstance(step, (Move, Leave)) and step.op:
            op = runs[step.op].op
            assert step.value in (op.operands if k < order[step.op] else op.results)
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
        assert tuple(step.value for step in steps[: len(outside)] if isinstance(step, Enter)) == (
            outside
        )


@settings(max_examples=20)
@given(st.sampled_from(MODELS), st.integers(0, 2**32 - 1))
def test_gradients_of_parameters_wait_for_the_step_where_all_are_partial(
    name: str, seed: int
) -> None:
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


# --- one value ------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One value with several readers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return self.b(y) + self.c(y)


@cache
def shared() -> Traced:
    batch = torch.empty(4, 8), torch.empty(4, 8)
    return cut(Shared(), batch, F.mse_loss, precision="fp32")


def moved(state: str, *readers: str) -> list[tuple[Placement, Placement]]:
    """Re-shards of the value between a product by rows, which makes it partial, and two others.
    `state` names its hub."""
    of = shared()
    block = Block(
        name="all", ops=of.graph.ops, inputs=(), outputs=(), derived=tuple(of.graph.inputs),
        parameters=tuple(of.graph.parameters), buffers=(), class_id="all",
    )  # fmt: skip
    layouts = BlockLayouts(of.graph, of.table, block, 2)
    first, *others = [op for op in layouts.block.ops if op.short == "linear"]
    entries = {first.name: Entry.parse(f"rowwise{state}")}
    entries |= {op.name: Entry.parse(name) for op, name in zip(others, readers, strict=True)}
    steps = moves(layouts, layouts.complete(entries, {}), {})
    (value,) = first.results
    return [(s.source, s.target) for s in steps if isinstance(s, Move) and s.value == value]


def test_readers_of_one_state_share_its_re_shard() -> None:
    assert moved("", "rowwise", "rowwise") == [(P, COLUMNS)]
    assert moved("", "colwise", "colwise") == [(P, R), (R, RP)]


def test_a_hub_is_passed_through_where_it_is_neither_end() -> None:
    assert moved(" -> R", "rowwise", "rowwise") == [(P, R), (R, COLUMNS)]
    assert moved(" -> S(1)", "rowwise", "rowwise") == [(P, COLUMNS)]
    assert moved(" -> P", "rowwise", "rowwise") == [(P, COLUMNS)]


def test_different_states_are_made_from_the_hub() -> None:
    assert moved("", "rowwise", "colwise") == [(P, R), (R, COLUMNS), (R, RP)]
    assert moved(" -> S(1)", "rowwise", "colwise") == [(P, COLUMNS), (COLUMNS, RP)]
