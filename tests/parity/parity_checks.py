"""Checks of the executor that need several ranks and are no cell of the parity matrix.

Each takes the launch's folder and returns what `test_parity.py` looks at; all ranks run them.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.costmodel.schedules.schedule import Action
from meshwright.costmodel.sharding.factors import analyse
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.executor.stages.transfer import Channel
from meshwright.planner.blocks.cut import cut_blocks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.tracing.trace import trace
from tests.helpers.plan_building import Knobs, build_plan
from tests.models.models import CASES, GLOBAL_BATCH, Traced, parallelize
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import (
    STEPS,
    compare,
    difference,
    load_graph,
    load_reference,
    runtime_loop,
)

DROPOUT_SEED = 7
SAVED = Cell.parse("gpt2_tied pp2xtp2 m2 zero1 front")
HALF = Cell.parse("gpt2_untied dp2xtp2 m2 zero1 bf16")
ROUND_TRIPS = {
    name: (Cell.parse(f"{name} dp2xtp2 m2 zero1"), Cell.parse(f"{name} pp2xtp2 m2 front"))
    for name in ("gpt2_tied", "resnet", "llama", "bert")
}
REPEATED = tuple(
    Cell.parse(f"recurrent {rest}")
    for rest in (
        "pp2xdp2 interleaved_1f1b m4 v2 zero1",
        "pp2xdp2 zb_v m4 zero2",
        "pp2xtp2 dualpipe_v m4",
        "pp2xdp2 interleaved_1f1b m4 v2 bf16",
        "dp4 m2 zero3",
    )
)
ACCUMULATED = tuple(
    Cell.parse(line)
    for line in (
        "gpt2_tied dp4 m2",
        "gpt2_tied dp2xtp2 m2 zero1",
        "gpt2_tied dp4 m2 zero2",
        "llama dp2xtp2 m2 zero3",
        "gpt2_tied pp2xdp2 m2 front",
    )
)
STRANGE = {zero: Cell.parse(f"mlp dp4 m2 zero{zero}") for zero in (0, 1, 2, 3)}
SHARES = {zero: Cell.parse(f"gpt2_untied dp4 m2 zero{zero}") for zero in (0, 1, 2, 3)}
DROPOUT = {
    "dp4": Cell.parse("gpt2_dropout dp4 m2"),
    "tp4": Cell.parse("gpt2_dropout tp4 m1"),
    "pp2dp2": Cell.parse("gpt2_dropout pp2xdp2 m4 full front"),
    "cp4": Cell.parse("gpt2_dropout cp4 ring m2"),
    "cp2tp2": Cell.parse("gpt2_dropout cp2xtp2 ulysses m1"),
}
UNEQUAL = tuple(
    Cell.parse(line)
    for line in (
        "llama 1|dp3 rows12",
        "llama 1|dp2|1",
        "unet 1|dp2|1 gpipe front",
        "llama dp2|tp2",
        "llama tp2|dp2",
        "unet 1|tp2|1",
        "llama dp2|dp4|dp2",
        "t5 dp2xtp2|tp2|tp2",
    )
)
CELLS = (
    *UNEQUAL,
    SAVED,
    HALF,
    *(cell for pair in ROUND_TRIPS.values() for cell in pair),
    *SHARES.values(),
    *STRANGE.values(),
    *DROPOUT.values(),
    *REPEATED,
    *ACCUMULATED,
)


def build(folder: Path, cell: Cell, model: nn.Module | None = None) -> Runtime:
    """A runtime of the cell's plan over its case's model, or another of the same kind."""
    plan, of = plan_of(cell, load_graph(folder, cell))
    return parallelize(model or CASES[cell.case].model(), plan, of)


def train(runtime: Runtime, name: str, steps: int = STEPS) -> list[float]:
    """Losses of an ordinary training loop over a runtime."""
    case = CASES[name]
    optimizer = case.optimize(runtime)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(case.batch(GLOBAL_BATCH, step))))
        optimizer.step()
    return losses


def saved_plan(folder: Path) -> dict[str, Any]:
    """Losses of a plan and of the same plan after a file."""
    plan, of = plan_of(SAVED, load_graph(folder, SAVED))
    path = folder / "plan.json"
    if launch.rank() == 0:
        plan.save(path)
    launch.agree_on(lambda: None)
    loaded = Plan.load(path)
    case = CASES["gpt2_tied"]
    losses = [train(parallelize(case.model(), p, of), "gpt2_tied") for p in (plan, loaded)]
    return {"losses": losses, "equal": loaded == plan}


def dropout(folder: Path) -> dict[str, Any]:
    """Losses with dropout on several meshes, against those of one rank that the folder holds; and
    the loss before, without dropout, against plain PyTorch's."""
    found, evaluated = {}, {}
    for name, cell in DROPOUT.items():
        case = CASES[cell.case]
        model, batch = case.model(), case.batch(GLOBAL_BATCH, 0)
        torch.manual_seed(DROPOUT_SEED)
        runtime = build(folder, cell, model)
        evaluated[name] = float(runtime.eval_step(batch))
        found[name] = train(runtime, cell.case)
    with torch.no_grad():
        plain = float(case.loss(case.model().eval(), batch))
    reference = json.loads((folder / "dropout.json").read_text())
    return {"losses": found, "reference": reference, "evaluated": evaluated, "plain": plain}


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


def carried_rows(folder: Path) -> dict[str, Any]:
    """A buffer that holds the batch, on data ranks of a part of it each: losses and its last value,
    and those of plain PyTorch."""
    torch.manual_seed(0)
    model, batches = Carried(), torch.randn(STEPS, GLOBAL_BATCH, 8)
    labels = torch.arange(GLOBAL_BATCH) % 3
    graph = trace(model, (batches[0], labels), loss_fn=F.cross_entropy, batch_size=GLOBAL_BATCH)
    table = analyse(graph)
    of = Traced(graph=cut_blocks(graph, table), table=table)
    ranks = launch.world_size()
    plan = build_plan(of.graph, Knobs(meshes=((ranks, 1),), rows=GLOBAL_BATCH, num_microbatches=1))
    runtime = parallelize(copy.deepcopy(model), plan, of)
    return {
        "losses": [float(runtime.train_step((x, labels))) for x in batches],
        "states": runtime.full_state_dict()["states"].tolist(),
        "plain losses": [float(F.cross_entropy(model(x), labels).detach()) for x in batches],
        "plain states": model.states.tolist(),
    }


def half_precision(folder: Path) -> dict[str, Any]:
    """bf16 compute on fp32 master weights, against fp32."""
    runtime = build(folder, HALF)
    losses = train(runtime, HALF.case)
    return {
        "losses": losses,
        "reference": load_reference(folder, SHARES[0]).losses,
        "compute": sorted({str(p.leaf.dtype) for p in runtime.stage_parameters}),
        "master": sorted(
            {str(x.dtype) for p in runtime.stage_parameters for x in (p.api, p.api.grad)}
        ),
    }


def state_round_trip(folder: Path) -> dict[str, Any]:
    """A trained state goes to the user's model, to another plan, and to a model without weights."""
    found: dict[str, Any] = {}
    for name, (first, other) in ROUND_TRIPS.items():
        case = CASES[name]
        runtime = build(folder, first)
        train(runtime, name)
        state = runtime.full_state_dict()
        whole = case.model(seed=5)
        keys = whole.load_state_dict(state, strict=True)
        targets = {"other_plan": case.model(seed=5), "meta": parameters_on_meta(case.model(seed=6))}
        batch = case.batch(GLOBAL_BATCH, STEPS)
        loss = float(runtime.train_step(batch))
        found[name] = {"strict": str(keys), "loss": loss}
        for kind, source in targets.items():
            second = build(folder, other, source)
            second.load_state_dict(state)
            again = second.full_state_dict()
            same = all(torch.equal(again[n], x) for n, x in state.items())
            found[name][kind] = {
                "same": same and set(again) == set(state),
                "loss": float(second.train_step(batch)),
            }
    return found


def parameters_on_meta(model: nn.Module) -> nn.Module:
    """The same modules without weights; buffers stay, because not all are in a state dict."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta")) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def zero_shares(folder: Path) -> dict[str, Any]:
    """Elements that each stage of ZeRO leaves on a rank, of parameters, gradients and optimizer
    states."""
    found = {}
    for zero, cell in SHARES.items():
        runtime = build(folder, cell)
        parameters = [p for _, p in runtime.named_parameters()]
        optimizer = torch.optim.AdamW(parameters)
        runtime.train_step(CASES[cell.case].batch(GLOBAL_BATCH, 0))
        optimizer.step()
        found[str(zero)] = {
            "parameters": sum(_local(p).numel() for p in parameters),
            "gradients": sum(_local(p.grad).numel() for p in parameters if p.grad is not None),
            "moments": sum(_local(s["exp_avg"]).numel() for s in optimizer.state.values()),
            "all": sum(p.numel() for p in parameters),
        }
    return found


def repeated_layer(folder: Path) -> dict[str, Any]:
    """One layer on several stages of one rank and on other ranks, and parameters that get no
    gradient, against one device."""
    found: dict[str, Any] = {}
    for cell in REPEATED:
        result = runtime_loop(CASES[cell.case], *plan_of(cell, load_graph(folder, cell)))
        if launch.rank() == 0:
            norm = math.inf if cell.precision == "fp32" else 2
            found[cell.name] = compare(result, load_reference(folder, cell), norm)
            found[cell.name]["gradients"] = sorted(result.gradients[0])
    return found


def accumulated(folder: Path) -> dict[str, Any]:
    """Gradients of two steps relative to those of one: into the same `.grad`, into one set to zero,
    and those that were kept while others were made."""
    found: dict[str, Any] = {}
    for cell in ACCUMULATED:
        runtime = build(folder, cell)
        batch = CASES[cell.case].batch(cell.rows, 0)
        optimizer = torch.optim.SGD(runtime.parameters(), lr=0.0)
        runtime.train_step(batch)
        kept = [p.grad for p in runtime.parameters()]
        once = runtime.full_gradients()
        before = [_local(g).clone() for g in kept]
        optimizer.zero_grad()
        runtime.train_step(CASES[cell.case].batch(cell.rows, 1))
        same = all(torch.equal(_local(g), b) for g, b in zip(kept, before, strict=True))
        optimizer.zero_grad(set_to_none=False)
        runtime.train_step(batch)
        again = runtime.full_gradients()
        runtime.train_step(batch)
        twice = runtime.full_gradients()
        evaluated = float(runtime.eval_step(batch))
        found[cell.name] = {
            "kept": same,
            "again": difference(again, once)[0],
            "twice": difference({n: g / 2 for n, g in twice.items()}, once)[0],
            "evaluated": evaluated,
            "trained": float(runtime.train_step(batch)),
        }
    return found


def strange(folder: Path) -> dict[str, Any]:
    """Steps skipped, and gradients delivered, where one row of the first micro-batch, on one rank,
    is not a number; and where all are."""
    found: dict[str, Any] = {}
    for zero, cell in STRANGE.items():
        runtime = build(folder, cell)
        x, y = CASES[cell.case].batch(cell.rows, 0)
        runtime.train_step((x.index_fill(0, torch.tensor([0]), math.nan), y))
        skipped = runtime.guard.skipped_steps
        delivered = sum(p.grad is not None for p in runtime.parameters())
        runtime.train_step((x, y))
        found[str(zero)] = {
            "skipped": (skipped, runtime.guard.skipped_steps),
            "delivered": delivered,
            "afterwards": all(p.grad is not None for p in runtime.parameters()),
        }
    return found


def transfers(folder: Path) -> dict[str, Any]:
    """Bytes that ranks send to each other in one step between stages of unequal meshes: those that
    go out, and those that the channels name, by edge of the stage graph, way and rank."""
    found: dict[str, Any] = {}
    for cell in UNEQUAL:
        if cell.world != launch.world_size():
            continue
        runtime = build(folder, cell)
        with _counted_sends() as sent:
            runtime.train_step(CASES[cell.case].batch(cell.rows, 0))
        mine: dict[str, int] = {}
        for k, stage in runtime.stages.items():
            for (action, peer), channels in stage.lowered.channels.items():
                if action in (Action.SEND_ACTIVATION, Action.SEND_GRADIENT):
                    mine[f"{k}->{peer}"] = sum(c.bytes_sent for c in channels.values())
        gathered: list[Any] = [None] * launch.world_size()
        dist.all_gather_object(gathered, (sum(sent), mine))
        found[cell.name] = {
            "sent": [nbytes for nbytes, _ in gathered],
            "channels": [channels for _, channels in gathered],
        }
    return found


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


Check = Callable[[Path], dict[str, Any]]

CHECKS: Mapping[int, tuple[Check, ...]] = {
    4: (
        saved_plan, dropout, half_precision, state_round_trip, zero_shares, repeated_layer,
        accumulated, strange, transfers, carried_rows,
    ),
    8: (transfers,),
}  # fmt: skip  # by world size
