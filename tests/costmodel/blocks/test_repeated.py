"""Which operators recompute policies repeat, against all sets there are; what is kept, beside what
hooks see."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.blocks import known_steps
from meshwright.costmodel.blocks.known_steps import KnownSteps
from meshwright.costmodel.blocks.memory import BlockMemory, block_memory
from meshwright.costmodel.blocks.repeated import least_kept, repeated_ops
from meshwright.costmodel.graph import Block, Op
from meshwright.costmodel.memory.storage import Storage
from meshwright.costmodel.sharding.moves import moves
from tests.costmodel.memory.saved_tensors import pricer, setup
from tests.costmodel.traces import graph_of
from tests.models.architectures import SEQUENCE
from tests.models.models import CASES, Traced


def again(policy: str, block: Block, of: Traced) -> list[Op]:
    """The operators of a block that a policy repeats."""
    return [block.ops[k] for k in sorted(repeated_ops(block, of.graph, of.table)[policy])]


# --- the cut --------------------------------------------------------------------------------------


@st.composite
def memories_and_costs(draw: st.DrawFn) -> tuple[BlockMemory, dict[str, int]]:
    """Up to seven operators that each read some values before them and make one or two."""
    values = [Storage(float(draw(st.integers(1, 9))), "input")]
    entering, makers, reads = set(values), {}, {}
    for k in range(draw(st.integers(1, 7))):
        name = f"op{k}"
        reads[name] = tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=2)))
        for _ in range(draw(st.integers(1, 2))):
            made = Storage(float(draw(st.integers(1, 9))))
            makers[made] = name
            values.append(made)
    kept = frozenset(draw(st.sets(st.sampled_from(values))))
    outside = frozenset(entering | draw(st.sets(st.sampled_from(values), max_size=1)))
    memory = BlockMemory(kept=kept, leaving={}, outside=outside, makers=makers, reads=reads)
    may = draw(st.sets(st.sampled_from(sorted(reads))))
    return memory, {name: draw(st.integers(0, 6)) for name in sorted(may)}


@given(memories_and_costs())
def test_no_set_of_operators_keeps_less_for_its_cost(
    given: tuple[BlockMemory, dict[str, int]],
) -> None:
    memory, costs = given

    def price(names: Collection[str]) -> float:
        return memory.saved_bytes_repeating(names) + sum(costs[name] for name in names)

    sets = itertools.chain.from_iterable(
        itertools.combinations(sorted(costs), count) for count in range(len(costs) + 1)
    )
    found = least_kept(memory, costs)
    assert found <= costs.keys()
    assert price(found) == min(map(price, sets))
    # a cheaper repeat is no reason to repeat less
    assert found <= least_kept(memory, {name: cost // 2 for name, cost in costs.items()})


# --- attention that is written out ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "repeated"),
    [
        ("gpt2_eager", {"matmul", "softmax"}),
        ("gpt2_eager_dropout", {"matmul", "softmax", "dropout"}),
        ("bert_eager_dropout", {"matmul", "softmax", "dropout"}),
        ("gpt2_dropout", {"scaled_dot_product_attention"}),  # its dropout is written out
        ("gpt2_tied", set()),
        ("resnet", set()),
        ("mlp", set()),
    ],
)
def test_selective_recompute_repeats_scores_and_probabilities(
    name: str, repeated: set[str]
) -> None:
    of = graph_of(name)
    for block in of.graph.blocks[1:2] if repeated else of.graph.blocks:
        picked = again("selective", block, of)
        squares = {op.short for op in picked}
        if "matmul" not in repeated:
            assert len(picked) == len(repeated) and squares == repeated
            continue
        assert squares >= repeated
        assert not squares & {"linear", "addmm", "gelu", "layer_norm"}
        shapes = {of.graph.values[v].shape[-2:] for op in picked for v in op.results}
        assert shapes == {(SEQUENCE, SEQUENCE)}
        assert sum(op.short == "matmul" for op in picked) == 1
        assert ("dropout" in squares) == ("dropout" in repeated)


# --- known steps at other rows --------------------------------------------------------------------

ROWS = (4.0, 1.0, 2.0, 3.0, 16.0, 1.0, 7.0)


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("resnet", 1), ("moe", 2)])
def test_other_rows_are_as_walked(name: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = setup(graph_of(name), CASES[name].shardings if tp > 1 else None, mesh=(1, tp))
    walks: list[float] = []

    def walked(prices: object, steps: object) -> object:
        walks.append(rows)
        return block_memory(prices, steps)

    monkeypatch.setattr(known_steps, "block_memory", walked)
    for block in of.blocks:
        steps = moves(of.layouts[block.name], of.assignments[block.name], of.inputs(block))
        known = KnownSteps(steps)
        walks.clear()
        for rows in ROWS:
            prices = pricer(dataclasses.replace(of, rows=rows))
            found, true = known.memory(prices), block_memory(prices, steps)
            assert found.saved_bytes == true.saved_bytes
            for again in ([op.name for op in block.ops[::2]], [op.name for op in block.ops[1::2]]):
                assert found.saved_bytes_repeating(again) == true.saved_bytes_repeating(again)
        assert len(walks) <= 3
