"""One rank of a launch of models with leaves: parity with plain PyTorch under several plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.executor.ranks import launch
from tests.models.leaf_models import batch, loss_fn, model_of
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_reference import Reference, compare

ROWS, STEPS, RATE = 8, 3, 0.1
ALL = ("scan", "rounded", "swish", "branch", "routed", "kernel")
SPLIT = {"layers.0.part:leaf": "d", "layers.2:leaf": "d0", "layers.5:random_leaf": "i"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    kinds: tuple[str, ...] = ALL
    precision: str = "fp32"
    compile: bool | str = False
    overrides: Mapping[str, Any] = field(default_factory=dict)


RUNS: Mapping[str, Run] = {
    "dp2 tp2": Run(overrides={"dp": 2, "tp": 2, "num_microbatches": 2, "shardings": SPLIT}),
    "tp4": Run(overrides={"tp": 4, "num_microbatches": 1, "shardings": SPLIT}),
    "dp4 zero3": Run(overrides={"dp": 4, "num_microbatches": 2, "zero": 3}),
    "pp2 tp2": Run(
        kinds=("scan", "rounded", "branch", "kernel"),
        overrides={"pp": 2, "tp": 2, "num_microbatches": 4, "recompute": "full"},
    ),
    "compiled": Run(
        kinds=("scan", "swish"), compile="aot_eager", overrides={"dp": 2, "tp": 2},
    ),
    "bf16": Run(precision="bf16", overrides={"dp": 2, "tp": 2, "shardings": SPLIT}),
}  # fmt: skip
NOISY = ("noisy", "noisy")
DRAWN: Mapping[str, Run] = {
    f"noisy {recompute}": Run(
        kinds=NOISY, overrides={"tp": 4, "num_microbatches": 2, "recompute": recompute}
    )
    for recompute in ("none", "full")
}


def train(run: Run) -> tuple[Reference, int]:
    """Three steps of a planned model, and its micro-batches."""
    made = auto_parallelize(
        model_of(run.kinds),
        Cluster.local(4, "cpu", measure=False),
        example_inputs=batch(2),
        global_batch_size=ROWS,
        loss_fn=loss_fn,
        precision=run.precision,
        profile=False,
        overrides=Overrides(**run.overrides),
        compile=run.compile,
    )
    optimizer = torch.optim.SGD(made.parameters(), lr=RATE)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(made.train_step(batch(ROWS, step))))
        assert made.runtime is not None
        gradients.append(made.runtime.full_gradients())
        optimizer.step()
    found = Reference(losses=losses, gradients=gradients, state=made.full_state_dict())
    return found, made.plan.num_microbatches


def plain(kinds: tuple[str, ...], microbatches: int) -> Reference:
    """The same on one device; what branches on values sees the same micro-batches."""
    model = model_of(kinds)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        ids, targets = (x.chunk(microbatches) for x in batch(ROWS, step))
        for part in zip(ids, targets, strict=True):
            loss = loss_fn(model(part[0]), part[1]) / microbatches
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        named = model.named_parameters()
        gradients.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}
        )
        optimizer.step()
    state = {name: x.detach().clone() for name, x in model.state_dict().items()}
    return Reference(losses=losses, gradients=gradients, state=state)


def parity(run: Run) -> dict[str, Any]:
    found, microbatches = train(run)
    if launch.rank():
        return {}
    return compare(found, plain(run.kinds, microbatches))


def drawn(run: Run) -> dict[str, Any]:
    """Losses and a gradient on every rank."""
    found, _ = train(run)
    mine = (found.losses, found.gradients[-1]["embed.weight"].double().norm().item())
    ranks: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(ranks, mine)
    return {"ranks": ranks}


def main(folder: Path) -> None:
    work = {name: partial(parity, run) for name, run in RUNS.items()}
    run_all({**work, **{name: partial(drawn, run) for name, run in DRAWN.items()}}, folder, "")


if __name__ == "__main__":
    on_ranks(main)
