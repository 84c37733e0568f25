"""Pipelines without a flush train what one device trains that steps with gradients so many steps
late: losses of all batches, weights and moments after draining."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim

from meshwright import Overrides, auto_parallelize, fit
from meshwright.executor.errors import BatchError, StateError
from meshwright.planner.plan.plan import Plan
from tests.helpers import tiny
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


# --- between steps --------------------------------------------------------------------------------

SMALL = Cell.parse("gpt2_untied pp2 pipedream_2bw m4")


def between(cell: Cell, plan: Plan, of: Traced) -> dict[str, Any]:
    """A run with an evaluation, refused loads and batches in the midst; what it said."""
    case, refused = CASES[cell.case], dict[str, str]()
    runtime = parallelize(case.model(), plan, of)
    optimizer = OPTIMIZERS["sgd"](runtime.parameters())
    evaluated: list[float] = []
    for step in range(3):
        runtime.train_step(case.batch(cell.rows, step))
        evaluated.append(float(runtime.eval_step(case.batch(cell.rows, 50))))
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(StateError) as error:
        runtime.check_drained("save_checkpoint")
    refused["save"] = str(error.value)
    versions = [p.versions for p in runtime.stage_parameters]
    counts = {len(leaves) for leaves in versions}
    while runtime.drain() is not None:
        optimizer.step()
        optimizer.zero_grad()
    runtime.check_drained("save_checkpoint")
    assert runtime.drain() is None
    return {
        "evaluated": evaluated, "refused": refused, "counts": counts,
        "state": runtime.full_state_dict(), "after": float(runtime.train_step(case.batch(16, 7))),
    }  # fmt: skip


def test_evaluations_read_the_newest_weights_and_leave_passes_alone() -> None:
    """Also after a step without gradients yet; a save is refused until the pipeline is drained."""
    cell, case = SMALL, CASES[SMALL.case]
    plan, of = plan_of(cell)
    found = on_ranks(cell.world, between, cell, plan, of)
    model = case.model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    waiting, wanted = list[Any](), list[float]()
    for step in range(4):
        if step < 3:
            loss = case.loss(model, case.batch(cell.rows, step))
            waiting.append(torch.autograd.grad(loss, [*model.parameters()]))
            with torch.no_grad():
                wanted.append(float(case.loss(model, case.batch(cell.rows, 50))))
        if step:
            for p, gradient in zip(model.parameters(), waiting[step - 1], strict=True):
                p.grad = gradient
            optimizer.step()
    assert found["evaluated"] == pytest.approx(wanted, rel=1e-5)
    assert difference(found["state"], dict(model.state_dict()))[0] < 1e-5
    assert "call `while result.drain() is not None:`" in found["refused"]["save"]
    assert found["counts"] == {2}  # versions on the first stage
    assert math.isnan(found["after"])  # as at first


def not_finite(cell: Cell, plan: Plan, of: Traced) -> tuple[list[bool], int]:
    """Whether the first stage got gradients in each call, of which the second batch's are NaN."""
    case = CASES[cell.case]
    runtime = parallelize(case.model(), plan, of)
    got, kept = [], list[torch.Tensor]()
    for step in range(4):
        runtime.guard.warned = True
        with torch.no_grad():
            for p in runtime.parameters():
                p.mul_(math.nan if step == 1 else 1.0)
        kept = [p.detach().clone() for p in runtime.parameters()] if step == 0 else kept
        runtime.train_step(case.batch(cell.rows, step))
        with torch.no_grad():
            for p, x in zip(runtime.parameters(), kept, strict=True):
                p.copy_(x)
        got.append(any(p.grad is not None for p in runtime.parameters()))
        for p in runtime.parameters():
            p.grad = None
    while runtime.drain() is not None:
        pass
    return got, runtime.guard.skipped_steps


def test_gradients_that_are_not_finite_are_dropped_on_all_groups() -> None:
    plan, of = plan_of(SMALL)
    got, skipped = on_ranks(SMALL.world, not_finite, SMALL, plan, of)
    assert got == [False, True, False, True] and skipped == 1


def other_shapes(cell: Cell, plan: Plan, of: Traced) -> str:
    case = CASES[cell.case]
    runtime = parallelize(case.model(), plan, of)
    runtime.late.check_step(runtime.planned)
    runtime.train_step(case.batch(cell.rows, 0))
    with pytest.raises(BatchError) as error:
        runtime.late.check_step(replace(runtime.planned))
    while runtime.drain() is not None:
        pass
    runtime.late.check_step(replace(runtime.planned))
    with pytest.raises(BatchError, match="takes 4 a step"):
        fewer = replace(runtime.plan, num_microbatches=2)
        runtime.late.check_step(replace(runtime.planned, plan=fewer))
    return str(error.value)


def test_a_batch_of_another_shape_waits_for_draining() -> None:
    plan, of = plan_of(SMALL)
    said = on_ranks(SMALL.world, other_shapes, SMALL, plan, of)
    assert "another shape than the last one, of which passes are under way" in said


FITTED = 5


def fitted(allow: list[str]) -> tuple[float, list[float], Any]:
    """`fit` on two ranks: the last loss, those that were logged, and weights."""
    result = auto_parallelize(
        tiny.net(), tiny.host(2), global_batch_size=8, example_inputs=tiny.batch(4),
        loss_fn=tiny.loss, allow=allow, overrides=Overrides(
            pp=2, schedule="pipedream_2bw", num_microbatches=4
        ),
    )  # fmt: skip
    logged: list[float] = []
    done = fit(
        result, [tiny.batch(8, seed) for seed in range(FITTED)], steps=FITTED,
        optimizer=lambda result: optim.SGD(result.parameters(), lr=0.1), max_grad_norm=0.5,
        log_to=lambda numbers: logged.append(numbers["loss"]), log_every=1, progress=False,
    )  # fmt: skip
    assert not result.runtime.outstanding and result.drain() is None
    return float(done.loss), logged, result.full_state_dict()


def test_fit_drains_at_its_end() -> None:
    last, logged, state = on_ranks(2, fitted, [])
    model = tiny.net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    losses, waiting = list[float](), list[Any]()
    for step in range(FITTED + 1):
        if step < FITTED:
            ids, targets = tiny.batch(8, step)
            loss = tiny.loss(model(ids), targets)
            losses.append(float(loss.detach()))
            waiting.append(torch.autograd.grad(loss, [*model.parameters()]))
        if step:
            for p, gradient in zip(model.parameters(), waiting[step - 1], strict=True):
                p.grad = gradient.clone()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert logged[1:] == pytest.approx(losses[:-1], rel=1e-5) and last == pytest.approx(losses[-1])
    assert difference(state, dict(model.state_dict()))[0] < 1e-5
