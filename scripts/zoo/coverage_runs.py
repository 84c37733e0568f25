"""Small models under several plans on all ranks of a launch, each step compared with plain PyTorch.

Compared are the loss of one step, every gradient and every buffer after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshwright import Cluster, OverrideError, Overrides, auto_parallelize
from meshwright.executor.ranks import launch
from meshwright.planner.batch import split_batch
from meshwright.planner.errors import TraceError
from meshwright.planner.plan import describe
from meshwright.profiles.hardware.device import Link
from scripts.zoo.models import SMALL, ZOO, Built
from tests.parity.parity_reference import difference

ROWS = 8
RANKS = 4
CHOSEN = "chosen"
LAYOUTS: Mapping[str, Overrides] = {
    CHOSEN: Overrides(),
    "dp4": Overrides(dp=4, tp=1, pp=1),
    "tp4": Overrides(dp=1, tp=4, pp=1),
    "pp4": Overrides(dp=1, tp=1, pp=4),
    "dp2×tp2": Overrides(dp=2, tp=2, pp=1),
    "pp2×tp2": Overrides(dp=1, tp=2, pp=2),
}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one training step leaves."""

    loss: float
    gradients: Tensors
    buffers: Tensors


def built(name: str) -> Built:
    torch.manual_seed(0)
    return ZOO[name].build(SMALL, ROWS)


def rows_of(batch: Any, start: int, stop: int) -> Any:
    def cut(x: Any) -> Any:
        return x[start:stop] if isinstance(x, torch.Tensor) and x.shape[:1] == (ROWS,) else x

    return pytree.tree_map(cut, batch)


def plain_step(made: Built, parts: int) -> Step:
    """Ordinary PyTorch, in `parts` micro-batches of equal weight."""
    model, total = made.model, 0.0
    per_part = ROWS // parts
    for k in range(parts):
        batch = rows_of(made.batch, k * per_part, (k + 1) * per_part)
        args, kwargs, targets = split_batch(batch, made.loss_fn)
        output = model(*args, **kwargs)
        loss = made.loss_fn(output, *targets) if made.loss_fn else output["loss"]
        (loss / parts).backward()
        total += float(loss.detach()) / parts
    return Step(loss=total, gradients=_gradients(model), buffers=dict(model.named_buffers()))


def _gradients(model: nn.Module) -> Tensors:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def free_links(cluster: Cluster) -> Cluster:
    """The same with links that cost next to nothing, nor to issue a message, on which small models
    are sharded as far as their rules allow."""
    link = Link(name="free", latency_s=1e-12, bandwidth=1e18)
    device = dataclasses.replace(cluster.device, launch_overhead_s=0.0)
    return dataclasses.replace(cluster, device=device, intra_link=link, inter_link=link)


def _held(parameters: Iterable[nn.Parameter]) -> float:
    """The share of its stage's parameters that a rank holds."""
    pairs = [
        (p.to_local().numel() if isinstance(p, DTensor) else p.numel(), p.numel())
        for p in parameters
    ]
    return sum(own for own, _ in pairs) / sum(whole for _, whole in pairs)


def run(name: str, layout: str) -> dict[str, Any]:
    """Errors of one model under one layout against the same on one device, and the plan."""
    made = built(name)
    cluster = Cluster.local(RANKS, measure=False)
    try:
        result = auto_parallelize(
            made.model,
            cluster if layout == CHOSEN else free_links(cluster),
            example_inputs=made.batch,
            global_batch_size=ROWS,
            loss_fn=made.loss_fn,
            precision="fp32",
            overrides=LAYOUTS[layout],
        )
    except OverrideError as error:  # on all ranks alike
        return {"refused": str(error)}
    except TraceError as error:
        if ZOO[name].refused and ZOO[name].refused in str(error):
            return {"refused": str(error)}
        raise
    loss = float(result.train_step(made.batch))
    gradients = result.runtime.full_gradients()
    state = result.full_state_dict()
    held = _held(result.parameters())
    if launch.rank():
        return {}
    wanted = plain_step(built(name), result.plan.num_microbatches)
    known = {n: b for n, b in wanted.buffers.items() if n in state and b.any()}
    buffers = {n: b.double() for n, b in known.items()}  # numbers of batches, indices
    return {
        "layout": describe(result.plan),
        "held": held,
        "loss": abs(loss - wanted.loss) / abs(wanted.loss),
        "gradient": difference(gradients, wanted.gradients),
        "buffers": difference(state, buffers) if buffers else (0.0, ""),
        "extra": sorted(set(gradients) - set(wanted.gradients)),
    }
