"""Memory of known steps at other rows: what a walk over them finds, to the byte."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.costmodel.blocks import known_steps
from meshwright.costmodel.blocks.known_steps import KnownSteps
from meshwright.costmodel.blocks.memory import block_memory
from meshwright.costmodel.sharding.moves import moves
from tests.costmodel.memory.saved_tensors import pricer, setup
from tests.costmodel.traces import graph_of
from tests.helpers.tiers import tiered
from tests.models.models import CASES

ROWS = (4.0, 1.0, 2.0, 3.0, 16.0, 1.0, 7.0)


@pytest.mark.parametrize(
    "at",
    tiered(
        [
            (name, tp)
            for name in ("gpt2_tied", "llama", "resnet", "moe", "t5", "unet")
            for tp in (1, 2)
        ],
        lambda at: at in (("llama", 2), ("resnet", 1), ("moe", 2)),
        "the change tier has both degrees, tokens, images and experts",
    ),
)
def test_other_rows_are_as_walked(at: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    name, tp = at
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
