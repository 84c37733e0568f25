"""Checks of the executor that need several ranks and are no cell of the parity matrix.

All ranks run each; what it returns is rank 0's.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.costmodel.schedules import Action
from meshwright.costmodel.sharding.factors import analyse
from meshwright.executor.ranks import launch
from meshwright.executor.transfers import Channel
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.tracing.trace import trace
from tests.helpers.plan_building import Knobs, build_plan
from tests.models.models import CASES, GLOBAL_BATCH, Traced, parallelize
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import (
    STEPS,
    TOLERANCE,
    built,
    compare,
    difference,
    reference_of,
    runtime_loop,
    train,
)

DROPOUT_SEED = 7
FP32 = TOLERANCE["fp32"]


def saved_plan(cell: Cell, path: Path) -> None:
    """A plan read from a file is equal, and trains bit for bit as before."""
    plan, of = plan_of(cell)
    if launch.rank() == 0:
        plan.save(path)
    launch.agree_on(lambda: None)
    loaded = Plan.load(path)
    model = CASES[cell.case].model
    before, after = (train(parallelize(model(), p, of), cell.case) for p in (plan, loaded))
    assert loaded == plan
    assert len(before) == STEPS
    assert before == after


def dropout(cell: Cell, alone: list[float]) -> None:
    """Losses with dropout are those of one device, and without it plain PyTorch's."""
    case = CASES[cell.case]
    model, batch = case.model(), case.batch(GLOBAL_BATCH, 0)
    with torch.no_grad():
        plain = float(case.loss(case.model().eval(), batch))
    plan, of = plan_of(cell)
    torch.manual_seed(DROPOUT_SEED)  # of which the runtime draws its own
    runtime = parallelize(model, plan, of)
    assert float(runtime.eval_step(batch)) == pytest.approx(plain, rel=FP32)
    assert train(runtime, cell.case) == pytest.approx(alone, rel=FP32)


class Carried(nn.Module):
    """Hidden states of the last batch, row by row, as in truncated backpropagation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("states", torch.zeros(GLOBAL_BATCH, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x) + self.states)
        self.states = hidden.detach()
        return self.head(hidden)


def carried_rows() -> None:
    """A buffer that holds the batch, on data ranks of a part of it each."""
    model, batches = Carried(), torch.randn(STEPS, GLOBAL_BATCH, 8)
    labels = torch.arange(GLOBAL_BATCH) % 3
    graph = trace(model, (batches[0], labels), loss_fn=F.cross_entropy, batch_size=GLOBAL_BATCH)
    table = analyse(graph)
    of = Traced(graph=cut_blocks(graph, table), table=table)
    meshes = ((launch.world_size(), 1),)
    plan = build_plan(of.graph, Knobs(meshes=meshes, rows=GLOBAL_BATCH, num_microbatches=1))
    runtime = parallelize(copy.deepcopy(model), plan, of)
    losses = [float(runtime.train_step((x, labels))) for x in batches]
    plain = [float(F.cross_entropy(model(x), labels).detach()) for x in batches]
    assert losses == pytest.approx(plain, rel=FP32)
    torch.testing.assert_close(runtime.full_state_dict()["states"], model.states)


def half_precision(cell: Cell, fp32: list[float]) -> None:
    """bf16 compute on fp32 master weights."""
    runtime = built(cell)
    losses = train(runtime, cell.case)
    assert losses == pytest.approx(fp32, rel=0.02)
    assert losses != fp32
    assert {p.leaf.dtype for p in runtime.stage_parameters} == {torch.bfloat16}
    masters = {x.dtype for p in runtime.stage_parameters for x in (p.api, p.api.grad)}
    assert masters == {torch.float32}


def state_round_trip(first: Cell, other: Cell) -> None:
    """A trained state goes to the user's model, to another plan, and to a model without weights."""
    case = CASES[first.case]
    runtime = built(first)
    train(runtime, first.case)
    state = runtime.full_state_dict()
    whole = case.model(seed=5)
    assert "All keys matched" in str(whole.load_state_dict(state, strict=True))
    batch = case.batch(GLOBAL_BATCH, STEPS)
    loss = float(runtime.train_step(batch))
    for source in (case.model(seed=5), parameters_on_meta(case.model(seed=6))):
        second = built(other, source)
        second.load_state_dict(state)
        again = second.full_state_dict()
        assert set(again) == set(state)
        assert all(torch.equal(again[name], x) for name, x in state.items())
        assert float(second.train_step(batch)) == pytest.approx(loss, rel=FP32)


def parameters_on_meta(model: nn.Module) -> nn.Module:
    """The same modules without weights; buffers stay, because not all are in a state dict."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta")) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def zero_shares(cell: Cell) -> None:
    """ZeRO leaves each rank its part of parameters, gradients and optimizer states."""
    runtime = built(cell)
    parameters = [p for _, p in runtime.named_parameters()]
    optimizer = torch.optim.AdamW(parameters)
    runtime.train_step(CASES[cell.case].batch(GLOBAL_BATCH, 0))
    optimizer.step()
    held = [
        sum(_local(p).numel() for p in parameters),
        sum(_local(p.grad).numel() for p in parameters if p.grad is not None),
        sum(_local(s["exp_avg"]).numel() for s in optimizer.state.values()),
    ]
    parts = launch.world_size() if cell.zero else 1
    assert held == [sum(p.numel() for p in parameters) // parts] * 3


def repeated_layer(cell: Cell) -> dict[str, Any]:
    """One layer on several stages of one rank and on other ranks. As on one device, what the loss
    does not depend on has no gradient, rather than zero."""
    result = runtime_loop(CASES[cell.case], *plan_of(cell))
    if launch.rank():
        return {}
    assert {"detached", "frozen"}.isdisjoint(result.gradients[0])
    norm = math.inf if cell.precision == "fp32" else 2
    return compare(result, reference_of(cell), norm)


def accumulated(cell: Cell) -> None:
    """Gradients of steps add up: into the same `.grad`, and into one set to zero; those that were
    kept while others were made are the user's."""
    runtime = built(cell)
    batch, other = (CASES[cell.case].batch(cell.rows, step) for step in (0, 1))
    optimizer = torch.optim.SGD(runtime.parameters(), lr=0.0)
    runtime.train_step(batch)
    kept = [p.grad for p in runtime.parameters()]
    once = runtime.full_gradients()
    before = [_local(g).clone() for g in kept]
    optimizer.zero_grad()
    runtime.train_step(other)
    assert all(torch.equal(_local(g), b) for g, b in zip(kept, before, strict=True))
    optimizer.zero_grad(set_to_none=False)
    runtime.train_step(batch)
    again = runtime.full_gradients()
    runtime.train_step(batch)
    twice = {name: g / 2 for name, g in runtime.full_gradients().items()}
    evaluated = float(runtime.eval_step(batch))
    assert evaluated == pytest.approx(float(runtime.train_step(batch)), rel=1e-6)
    assert difference(again, once)[0] <= FP32
    assert difference(twice, once)[0] <= FP32


def strange(cell: Cell) -> None:
    """A step is skipped on all ranks where one row of the first micro-batch, on one rank, is not a
    number; the next one counts."""
    runtime = built(cell)
    x, y = CASES[cell.case].batch(cell.rows, 0)
    runtime.train_step((x.index_fill(0, torch.tensor([0]), math.nan), y))
    assert runtime.guard.skipped_steps == 1
    assert all(p.grad is None for p in runtime.parameters())
    runtime.train_step((x, y))
    assert runtime.guard.skipped_steps == 1
    assert all(p.grad is not None for p in runtime.parameters())


def transfers(cell: Cell) -> dict[str, Any]:
    """Bytes that ranks send to each other in one step between stages of unequal meshes: those that
    go out, and those that the channels name, by edge of the stage graph, way and rank."""
    runtime = built(cell)
    with _counted_sends() as sent:
        runtime.train_step(CASES[cell.case].batch(cell.rows, 0))
    mine: dict[str, int] = {}
    for k, stage in runtime.stages.items():
        for (action, peer), channels in stage.lowered.parts[0].channels.items():
            if action in (Action.SEND_ACTIVATION, Action.SEND_GRADIENT):
                mine[f"{k}->{peer}"] = sum(c.bytes_sent for c in channels.values())
    gathered: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(gathered, (sum(sent), mine))
    return {"sent": [n for n, _ in gathered], "channels": [channels for _, channels in gathered]}


@contextmanager
def _counted_sends() -> Iterator[list[int]]:
    """Bytes of each message between stages."""
    sizes: list[int] = []
    send = Channel.send

    def counted(channel: Channel, x: torch.Tensor) -> Any:
        started = send(channel, x)
        sizes.extend(part.nbytes for _, part in started)
        return started

    Channel.send = counted
    try:
        yield sizes
    finally:
        Channel.send = send


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
