"""Pipelines without a flush train what one device trains that steps with gradients so many steps
late: losses of all batches, weights and moments after draining."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn, optim

from meshwright.planner.plan.plan import Plan
from tests.helpers.ranks import on_ranks
from tests.models.models import CASES, Case, Traced, parallelize
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import difference

STEPS = 5
OPTIMIZERS: Mapping[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=3e-3, eps=1e-3),
}
CELLS = (
    "gpt2_untied pp2 pipedream_2bw m4",
    "gpt2_untied pp3 pipedream_2bw m4",
    "gpt2_untied pp3 pipedream_2bw m2",
    "gpt2_untied pp4 pipedream m1",
    "gpt2_untied pp3 pipedream m4",
    "gpt2_untied pp4 pipedream m2",
    "llama pp2xdp2 pipedream_2bw m4",
    "llama pp2xdp2 pipedream_2bw m4 zero1 full",
    "llama pp2xtp2 pipedream_2bw m4",
    "llama pp2xtp2 pipedream m2 mixed",
)


def queued(case: Case, rows: int, late: Mapping[str, int], kind: str) -> tuple[list[float], Any]:
    """Losses and weights of one device, where the gradient of a parameter is stepped with so many
    steps late."""
    model = case.model()
    optimizer, named = OPTIMIZERS[kind](model.parameters()), dict(model.named_parameters())
    losses: list[float] = []
    waiting: list[dict[str, torch.Tensor]] = []
    for step in range(STEPS + max(late.values())):
        optimizer.zero_grad()
        if step < STEPS:
            loss = case.loss(model, case.batch(rows, step))
            made = torch.autograd.grad(loss, [*named.values()])
            waiting.append(dict(zip(named, made, strict=True)))
            losses.append(float(loss.detach()))
        for name, p in named.items():
            if 0 <= (of := step - late[name]) < STEPS:
                p.grad = waiting[of][name].clone()
        optimizer.step()
    return losses, {n: x.detach().clone() for n, x in model.state_dict().items()}


def trained(cell: Cell, kind: str, plan: Plan, of: Traced) -> tuple[list[float], Any]:
    """Losses as they come, and weights after draining."""
    case = CASES[cell.case]
    runtime = parallelize(case.model(), plan, of)
    optimizer = OPTIMIZERS[kind]([*runtime.parameters()] or [nn.Parameter(torch.zeros(()))])
    losses: list[float] = []

    def stepped(loss: torch.Tensor | None) -> torch.Tensor | None:
        if loss is not None:
            losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
        return loss

    for step in range(STEPS):
        stepped(runtime.train_step(case.batch(cell.rows, step)))
    while stepped(runtime.drain()) is not None:
        pass
    return losses, runtime.full_state_dict()


def delays(plan: Plan, of: Traced) -> dict[str, int]:
    """By parameter: 1 under PipeDream-2BW, of PipeDream the micro-batches that are under way behind
    a stage, in whole steps."""
    found = {}
    for k, stage in enumerate(plan.stages):
        behind = len(plan.stages) - 1 - k
        late = 1 if plan.schedule == "pipedream_2bw" else -(-behind // plan.num_microbatches)
        for block in of.graph.blocks:
            if block.name in stage.blocks:
                found |= {of.graph.parameters[value]: late for value in block.parameters}
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("line", CELLS)
def test_trains_with_gradients_of_earlier_steps(line: str, kind: str) -> None:
    cell = Cell.parse(line)
    plan, of = plan_of(cell)
    losses, state = queued(CASES[cell.case], cell.rows, delays(plan, of), kind)
    found, weights = on_ranks(cell.world, trained, cell, kind, plan, of)
    first, rest = found[: plan.staleness], found[plan.staleness :]
    assert all(map(math.isnan, first)) and len(first) == plan.staleness > 0
    assert rest == pytest.approx(losses, rel=1e-5)
    assert difference(weights, state)[0] < 1e-5
