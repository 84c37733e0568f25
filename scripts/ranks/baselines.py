"""What an expert writes by hand with torch's own tools: the other side of `bench_executor`.

A GPT of torch.nn only, and for each way to train it in parallel a function from the `Setting` to a
`Trainer`: DistributedDataParallel, ZeroRedundancyOptimizer, `fully_shard` per layer,
`parallelize_module`, PipelineStage with a schedule, and these combined. Ranks of a combined mesh
are numbered as torch's `init_device_mesh` numbers them, the last axis fastest: (pp, dp, tp).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 1e-4
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # two stages a rank, there and back again

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, [rows, length] each


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The model, the global batch and its micro-batches."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    rows: int
    microbatches: int = 1
    adapters: int = 0  # the rank of those beside frozen weights (LoRA); 0: all is trained

    def batch(self, rows: int | None = None) -> Batch:
        """The same rows in every process."""
        generator = torch.Generator().manual_seed(1)
        shape = (rows or self.rows, self.length + 1)
        ids = torch.randint(self.vocabulary, shape, generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def model(self) -> GPT:
        """The same weights in every process."""
        torch.manual_seed(0)
        model = GPT(self)
        if self.adapters:
            model.requires_grad_(False)
            for module in model.layers.modules():
                if isinstance(module, Attention):
                    module.q, module.v = (Adapted(m, self.adapters) for m in (module.q, module.v))
        return model


class Adapted(nn.Module):
    """A frozen projection with an adapter of low rank beside it, which is trained."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Attention(nn.Module):
    """Causal self-attention; the number of heads follows from how many the projections make."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A Transformer layer, norms first."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits of tokens. A pipeline stage is the same module without what other stages hold."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(setting.vocabulary, setting.hidden)
        self.positions: nn.Module | None = nn.Embedding(setting.length, setting.hidden)
        self.layers = nn.ModuleDict(
            {str(k): Layer(setting.hidden, setting.heads) for k in range(setting.layers)}
        )
        self.norm: nn.Module | None = nn.LayerNorm(setting.hidden)
        self.head: nn.Module | None = nn.Linear(setting.hidden, setting.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None and self.positions is not None:
            x = self.embed(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stage_of(model: GPT, index: int, stages: int) -> GPT:
    """Stage `index`: an equal share of the layers, the embeddings in the first, the head in the
    last."""
    kept = layers_of(len(model.layers), index, stages)
    for k in set(range(len(model.layers))) - set(kept):
        del model.layers[str(k)]
    if index > 0:
        model.embed = model.positions = None
    if index < stages - 1:
        model.norm = model.head = None
    return model


def layers_of(layers: int, index: int, stages: int) -> range:
    """The layers of a stage, equally many in each."""
    if layers % stages:
        raise ValueError(
            f"layers={layers} do not divide into {stages} equal stages; legal: a multiple of "
            f"{stages}"
        )
    each = layers // stages
    return range(index * each, (index + 1) * each)


# --- one step ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """`step` takes the global batch through forward, backward and the optimizer, and returns the
    mean loss over this rank's rows, or None on a rank that does not see it."""

    step: Callable[[Batch], torch.Tensor | None]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Of all variants; one group per mesh, because the fused kernel takes no mixture of them."""
    groups: dict[object, list[nn.Parameter]] = {}
    for p in (p for p in parameters if p.requires_grad):
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()], lr=LEARNING_RATE, fused=True
    )


def _plainly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    dp: int = 1,
    microbatches: int = 1,
    split_loss: bool = False,
) -> Trainer:
    """The usual loop over this rank's rows; `split_loss` where the logits are split over the
    vocabulary."""

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        x, y = rows_of(batch, dist.get_rank() if dp > 1 else 0, dp)
        losses = []
        with loss_parallel() if split_loss else contextlib.nullcontext():
            for part, targets in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
                loss = loss_of(model(part), targets) / microbatches
                loss.backward()
                losses.append(loss.detach())
        optimizer.step()
        return _whole(torch.stack(losses).sum())

    return Trainer(step=step)


def rows_of(batch: Batch, index: int, parts: int) -> Batch:
    x, y = batch
    return x.chunk(parts)[index], y.chunk(parts)[index]


def _whole(loss: torch.Tensor) -> torch.Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


# --- one technique each --------------------------------------------------------------------------


def eager(setting: Setting) -> Trainer:
    model = setting.model()
    return _plainly(model, adamw(model.parameters()), microbatches=setting.microbatches)


def compiled(setting: Setting) -> Trainer:
    model = setting.model()
    model.compile()
    return _plainly(model, adamw(model.parameters()), microbatches=setting.microbatches)


def ddp(setting: Setting) -> Trainer:
    return _replicated(setting.model())


def compiled_ddp(setting: Setting) -> Trainer:
    model = setting.model()
    model.compile()
    return _replicated(model)


def _replicated(module: nn.Module) -> Trainer:
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    return _plainly(model, adamw(model.parameters()), dp=dist.get_world_size())


def ddp_zero1(setting: Setting) -> Trainer:
    model = DistributedDataParallel(setting.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True
    )
    return _plainly(model, optimizer, dp=dist.get_world_size())


def fsdp(setting: Setting) -> Trainer:
    return _divided(setting.model())


def compiled_fsdp(setting: Setting) -> Trainer:
    """Each layer compiled, then divided."""
    model = setting.model()
    for layer in model.layers.values():
        layer.compile()
    return _divided(model)


def _divided(module: GPT) -> Trainer:
    ranks = dist.get_world_size()
    model = _sharded(module, init_device_mesh("cpu", (ranks,)))
    return _plainly(model, adamw(model.parameters()), dp=ranks)


def tensor_parallel(setting: Setting) -> Trainer:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _tensor_parallel(setting.model(), mesh)
    return _plainly(model, adamw(model.parameters()), split_loss=True)


def _sharded(model: GPT, mesh: DeviceMesh, *, reshard: bool | None = None) -> GPT:
    """By default torch lets go of each layer's weights after its forward, and keeps the root's."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def _tensor_parallel(model: GPT, mesh: DeviceMesh) -> GPT:
    """Megatron's layout: heads and the MLP's middle split, vocabulary split in the embedding, the
    head and the loss."""
    if model.embed is not None:
        parallelize_module(model.embed, mesh, RowwiseParallel(input_layouts=Replicate()))
    if model.head is not None:
        parallelize_module(model.head, mesh, ColwiseParallel(use_local_output=False))
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh,
            {
                **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
                "attention.o": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )
    return model


# --- pipelines -----------------------------------------------------------------------------------


def pipeline(schedule: str = "1F1B", stages_per_rank: int = 1) -> Callable[[Setting], Trainer]:
    """Each rank is a device group; the schedule by torch's name."""

    def made(setting: Setting) -> Trainer:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        indices = stages_of_rank(rank, ranks, stages_per_rank, v_shaped=schedule in V_SHAPED)
        total = ranks * stages_per_rank
        modules = [stage_of(setting.model(), k, total) for k in indices]
        stages = [
            PipelineStage(module, k, total, torch.device("cpu"))
            for module, k in zip(modules, indices, strict=True)
        ]
        optimizer = adamw(p for module in modules for p in module.parameters())
        kind = get_schedule_class(schedule)
        mine = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        run = kind(mine, setting.microbatches, loss_fn=loss_of)
        return _in_pipeline(run, indices, total, optimizer)

    return made


def stages_of_rank(
    rank: int, ranks: int, stages_per_rank: int, *, v_shaped: bool
) -> tuple[int, ...]:
    """Stage k lies on rank k mod p, or there and back again."""
    if v_shaped:
        return rank, 2 * ranks - 1 - rank
    return tuple(rank + k * ranks for k in range(stages_per_rank))


def _in_pipeline(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti,
    indices: Sequence[int],
    stages: int,
    optimizer: torch.optim.Optimizer,
    *,
    dp: DeviceMesh | None = None,
    split_loss: bool = False,
) -> Trainer:
    first, last = 0 in indices, stages - 1 in indices

    def step(batch: Batch) -> torch.Tensor | None:
        optimizer.zero_grad()
        x, y = rows_of(batch, dp.get_local_rank(), dp.size()) if dp is not None else batch
        losses: list[torch.Tensor] = []
        with loss_parallel() if split_loss else contextlib.nullcontext():
            schedule.step(
                *((x,) if first else ()),
                target=y if last else None,
                losses=losses if last else None,
                return_outputs=False,
            )
        optimizer.step()
        return _whole(torch.stack([loss.detach() for loss in losses]).mean()) if last else None

    return Trainer(step=step)


def combined(*, dp: int, tp: int, pp: int) -> Callable[[Setting], Trainer]:
    """Tensor parallelism inside `fully_shard` inside 1F1B. Parameters stay gathered from forward to
    backward, so that they and the gradients travel once a step, as with ZeRO-1."""

    def made(setting: Setting) -> Trainer:
        mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        index = mesh["pp"].get_local_rank()
        module = _tensor_parallel(stage_of(setting.model(), index, pp), mesh["tp"])
        module = _sharded(module, mesh["dp"], reshard=False)
        stage = PipelineStage(module, index, pp, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = Schedule1F1B(stage, setting.microbatches, loss_fn=loss_of)
        return _in_pipeline(
            schedule, (index,), pp, adamw(module.parameters()), dp=mesh["dp"], split_loss=True
        )

    return made


# --- one loss of all ranks -----------------------------------------------------------------------


def mean_loss(losses: Iterable[float | None]) -> float:
    """Of the ranks that see a loss, each the mean over as many rows."""
    seen = [loss for loss in losses if loss is not None]
    return math.fsum(seen) / len(seen)
