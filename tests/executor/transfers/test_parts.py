"""Activations that go from stage to stage as blocks leave them: each rank of the tensor axis sends
its part of the tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.planner.plan import arriving_states, sent_in_parts
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered

RANKS = 4
SPLIT = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*:add": "-> S(1)"}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zb_h1": {"schedule": "zb_h1"},
    "interleaved": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
    "zb_v": {"schedule": "zb_v"},
}


def step(overrides: Mapping[str, Any], sequence: int) -> tuple[float, Any, list[dict[str, str]]]:
    """Loss and gradients of a step, and the states in which activations arrive at each stage."""
    ids = torch.randint(tiny.VOCAB, (8, sequence), generator=torch.Generator().manual_seed(0))
    result = auto_parallelize(
        tiny.net(),
        Cluster.local(RANKS, measure=False),
        example_inputs=(ids, ids.roll(-1, 1)),
        global_batch_size=8,
        loss_fn=tiny.loss,
        overrides=Overrides(pp=2, tp=2, num_microbatches=4, shardings=SPLIT, **overrides),
    )
    loss = float(result.train_step((ids, ids.roll(-1, 1))))
    checked = result.runtime.planned.checked
    states = arriving_states(checked.plan, checked.graph, checked.assignments)
    shown = [{value: str(state) for value, state in of.items()} for of in states]
    return loss, result.runtime.full_gradients(), shown


def alone(sequence: int) -> tuple[float, nn.Module]:
    ids = torch.randint(tiny.VOCAB, (8, sequence), generator=torch.Generator().manual_seed(0))
    model = copy.deepcopy(tiny.net())
    loss = tiny.loss(model(ids), ids.roll(-1, 1))
    loss.backward()
    return float(loss), model


OTHERS = "channels both ways between the same ranks are kept"


@pytest.mark.parametrize("name", tiered(LAYOUTS, "zb_v".__eq__, OTHERS))
def test_stages_send_parts(name: str) -> None:
    loss, gradients, states = on_ranks(RANKS, step, LAYOUTS[name], tiny.SEQUENCE)
    expected, model = alone(tiny.SEQUENCE)
    assert loss == pytest.approx(expected, rel=1e-6)
    for fqn, p in model.named_parameters():
        torch.testing.assert_close(gradients[fqn], p.grad, rtol=1e-4, atol=1e-6)
    assert {state for of in states for state in of.values()} == {"S(1)"}


def test_parts_go_between_meshes_of_the_same_degrees_alone() -> None:
    """Of rows that the tensor axis splits, a rank's counterpart on more data ranks has others."""
    graph, _ = tiny.cut(tiny.net())
    plan = tiny.plan_for(graph, stages=2, dp=1, tp=2)
    (sent,) = sent_in_parts(plan, graph)
    more = tiny.with_stage(plan, 1, dp=2, ranks=(2, 3, 4, 5))
    assert not sent_in_parts(more, graph)
    whole = tiny.plan_for(graph, stages=2, dp=2, tp=1)
    assert sent and not sent_in_parts(whole, graph)
