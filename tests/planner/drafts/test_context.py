"""Context-parallel degrees: offered for decoders that shift labels inside, and said where not."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn

from meshwright.planner.drafts.space import MIN_CONTEXT, Space
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.restrictions import restrict
from meshwright.planner.plan.words import describe
from meshwright.planner.search.search import Search
from tests.helpers.planning import Traced, cluster, cut, problem_of, token_batch


@cache
def decoder(length: int) -> Traced:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    return cut(model, token_batch(2, length))


class Cumulative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(dim=1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.time = nn.Linear(8, 8), Cumulative()

    def forward(self, x: Tensor) -> Tensor:
        return self.time(self.first(x)).mean()


def space(of: Traced, devices: int = 8, batch: int = 8) -> Space:
    return Space(
        problem=problem_of(of, cluster(devices)),
        global_batch_size=batch,
        restrictions=restrict(Overrides(), of.graph),
    )


@pytest.mark.parametrize(
    ("length", "batch", "offered"),
    [
        (MIN_CONTEXT, 8, {1}),
        (MIN_CONTEXT, 4, set()),  # half a sequence would be too short
        (2 * MIN_CONTEXT, 4, {2}),
        (8 * MIN_CONTEXT, 8, {1}),
        (8 * MIN_CONTEXT, 1, {8}),
    ],
)
def test_the_least_cp_that_divides_the_rows(length: int, batch: int, offered: set[int]) -> None:
    meshes = space(decoder(length), batch=batch).meshes(8, 1)
    assert {mesh.cp for mesh in meshes if mesh.tp == 1} == offered


def test_a_decoder_with_its_loss_inside_is_planned_with_cp() -> None:
    of = decoder(2 * MIN_CONTEXT)
    best = Search(problem_of(of, cluster(4)), 2, Overrides(tp=1, pp=1)).run().best
    assert "cp2" in describe(best.plan)


def test_a_note_says_what_keeps_cp_from_long_sequences() -> None:
    with torch.device("meta"):
        of = cut(Recurrent(), (torch.empty(2, 2 * MIN_CONTEXT, 8),))
    (note,) = [line for line in space(of).notes() if line.startswith("cp can't")]
    assert f"sequences of {2 * MIN_CONTEXT}: time:cumsum needs whole sequences" in note
    assert not any("cp" in line for line in space(of, devices=1).notes())
    assert not any("cp" in line for line in space(decoder(2 * MIN_CONTEXT)).notes())
