"""Experts whose products are in 8 bits, shared out among ranks or not, beside 16 bits."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from meshwright.costmodel.rules import is_narrow
from meshwright.executor.runtime.runtime import Runtime
from meshwright.executor.stages import CheckedPlan
from meshwright.moe import MoE
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.models.experts_models import SEQUENCE, VOCAB, batch, token_loss
from tests.models.models import Case, Traced, adamw, traced

WORLD, ROWS, MICROBATCHES, STEPS, WIDTH = 4, 8, 2, 3, 32


class Layers(nn.Module):
    """Three layers of the library between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            MoE(hidden=WIDTH, ffn=2 * WIDTH, experts=4, topk=2) for _ in range(3)
        )
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.out(x)
        return out


def model() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def graph_of(precision: str) -> Traced:
    case = Case(build=model, batch=batch, optimizer=adamw, loss_fn=token_loss)
    return traced(case, ROWS // MICROBATCHES, precision)


def losses_of(dp: int, tp: int, ep: int, precision: str) -> list[float]:
    of = graph_of(precision)
    knobs = Knobs(
        meshes=((dp, tp),), rows=ROWS, num_microbatches=MICROBATCHES, zero=1, precision=precision
    )
    plan = build_plan(of.graph, knobs)
    plan = replace(plan, stages=tuple(replace(stage, ep=ep) for stage in plan.stages))
    runtime = Runtime(CheckedPlan.of(plan, of.graph, of.table), model())
    optimizer, losses = adamw(runtime.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(batch(ROWS, step)).detach()))
        optimizer.step()
    return losses


@second_tier("products of experts in 8 bits are kept, and plans whose other products are")
@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_experts_in_8_bits_learn_as_in_16_wherever_they_are(precision: str) -> None:
    assert SEQUENCE % 2 == 0
    graph = graph_of(precision).graph
    middle = [op for op in graph.ops if op.short == "grouped_linear" and op.name in graph.in_layers]
    assert middle and all(is_narrow(graph, op) for op in middle)
    run = partial(on_ranks, WORLD, losses_of)
    wide, alone, shared = run(4, 1, 1, "bf16"), run(4, 1, 1, precision), run(4, 1, 2, precision)
    assert alone != wide and alone == pytest.approx(wide, rel=2**-5)
    assert shared == pytest.approx(alone, rel=2**-7)
