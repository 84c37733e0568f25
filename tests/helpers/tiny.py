"""A model that traces in a moment, plans for it, clusters where splitting pays and where not."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright import ParallelModel, auto_parallelize
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.plan.check import fingerprint
from meshwright.planner.plan.plan import Plan, StagePlan
from meshwright.planner.tracing.trace import trace
from meshwright.profiles.cluster import Cluster

WIDTH, VOCAB, SEQUENCE, ROWS = 16, 24, 6, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, three equal layers, a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(*, tied: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(tied=tied)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (rows, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    return ids, ids.roll(-1, dims=1)


def cut(
    model: nn.Module,
    *,
    rows: int = 4,
    precision: str = "fp32",
    loss_fn: Callable[..., torch.Tensor] = loss,
) -> tuple[Graph, FactorTable]:
    """The model traced and cut into blocks."""
    graph = trace(model, batch(4), loss_fn=loss_fn, batch_size=rows, precision=precision)
    table = analyse(graph)
    return cut_blocks(graph, table), table


def host(devices: int) -> Cluster:
    """CPU processes with the catalog's figures: the same on every machine."""
    return Cluster.local(devices, measure=False)


def slow_host(devices: int) -> Cluster:
    """Devices so slow, and links so fast, that everything is worth splitting."""
    base = host(devices)
    device = dataclasses.replace(
        base.device,
        peak_flops={"fp32": 1e7, "bf16": 1e7},
        memory_bandwidth=1e7,
        launch_overhead_s=1e-9,
    )
    link = dataclasses.replace(base.intra_link, latency_s=1e-7, bandwidth=1e10)
    return dataclasses.replace(base, device=device, intra_link=link, inter_link=link)


def small_host(devices: int, room_bytes: int) -> Cluster:
    """Devices with `room_bytes` left for tensors."""
    base = host(devices)
    device = dataclasses.replace(base.device, memory_bytes=base.device.reserved_bytes + room_bytes)
    return dataclasses.replace(base, device=device)


def plan_for(graph: Graph, *, stages: int = 1, dp: int = 2, tp: int = 2, **changes: Any) -> Plan:
    """Equal meshes; all blocks but one each of the other stages in the first."""
    names = [block.name for block in graph.blocks]
    first = len(names) - stages + 1
    runs = [names[:first], *([name] for name in names[first:])]
    made = Plan(
        model=fingerprint(graph),
        global_batch_size=16,
        num_microbatches=2,
        schedule="1f1b",
        precision="fp32",
        stages=tuple(
            StagePlan(
                blocks=tuple(run), ranks=tuple(range(k * dp * tp, (k + 1) * dp * tp)), dp=dp, tp=tp
            )
            for k, run in enumerate(runs)
        ),
    )
    return dataclasses.replace(made, **changes)


def with_stage(plan: Plan, k: int = 0, **changes: Any) -> Plan:
    stages = list(plan.stages)
    stages[k] = dataclasses.replace(stages[k], **changes)
    return dataclasses.replace(plan, stages=tuple(stages))


def planned(model: nn.Module, devices: int = 1, **changes: Any) -> ParallelModel:
    """`auto_parallelize` on that host, with `changes` to its arguments."""
    given: dict[str, Any] = {
        "example_inputs": batch(4),
        "loss_fn": loss,
        "global_batch_size": ROWS,
        "precision": "fp32",
    }
    cluster = changes.pop("cluster", None) or host(devices)
    return auto_parallelize(model, cluster, **{**given, **changes})
