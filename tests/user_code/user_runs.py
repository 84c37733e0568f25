"""User models under forced layouts: plans made in one process, references by plain PyTorch, and the
runs on ranks that are compared with them.

The links of the cluster cost nothing, so that everything is sharded that can be.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright import Cluster, Overrides, ParallelModel, auto_parallelize
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding.factors import analyse
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.batch import split_batch
from meshwright.planner.blocks.cut import cut_blocks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.tracing.trace import trace
from meshwright.profiles.hardware.device import Link
from tests.models.models import Traced, parallelize
from tests.parity.parity_reference import Reference, compare, trained
from tests.user_code.user_models import USERS
from tests.user_code.user_parts import UserModel

ROWS, RANKS, STEPS = 8, 4, 2
LAYOUTS: Mapping[str, Overrides] = {
    "dp4": Overrides(dp=4, tp=1, pp=1, zero=0),
    "zero3": Overrides(dp=4, tp=1, pp=1, zero=3),
    "dp2×tp2": Overrides(dp=2, tp=2, pp=1),
    "pp4": Overrides(dp=1, tp=1, pp=4),
    "pp2×tp2": Overrides(dp=1, tp=2, pp=2, num_microbatches=2),
}


SHARDED = {"up": "colwise", "down": "rowwise"}  # a decision for these modules, where tp may be idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the ranks need to run one model under one layout, and what should come out."""

    plan: Plan
    of: Traced
    reference: Reference


def built(user: UserModel) -> nn.Module:
    torch.manual_seed(0)
    return user.build()


def batch_of(user: UserModel, step: int, rows: int = ROWS) -> Any:
    torch.manual_seed(100 + step)
    return user.batch(rows)


def free_links(ranks: int) -> Cluster:
    """Local ranks whose links cost next to nothing."""
    link = Link(name="free", latency_s=1e-12, bandwidth=1e18)
    local = Cluster.local(ranks, measure=False)
    return dataclasses.replace(local, intra_link=link, inter_link=link)


def prepare(folder: Path, names: list[str]) -> dict[str, str]:
    """Write what the ranks need for these models; why there is no plan, by run."""
    refused: dict[str, str] = {}
    for name in names:
        user = USERS[name]
        traced = {ROWS: traced_at(user, ROWS)}
        references: dict[int, Reference] = {}
        first = auto_parallelize(
            built(user),
            free_links(RANKS),
            example_inputs=batch_of(user, 0),
            global_batch_size=ROWS,
            loss_fn=user.loss_fn,
            precision="fp32",
            executable=True,
            overrides=LAYOUTS["dp4"],
            rows_meet="per_microbatch",  # as the references
        )
        for layout, overrides in LAYOUTS.items():
            try:
                plan = first.replan(_sharded(user, overrides)).plan
            except ValueError as error:
                refused[f"{name} {layout}"] = str(error)
                continue
            rows, parts = plan.microbatch_rows, plan.num_microbatches
            if rows not in traced:
                traced[rows] = traced_at(user, rows, traced[ROWS].graph)
            if parts not in references:
                alone = runtime_steps if user.own_masks else plain_steps
                references[parts] = alone(user, parts)
            prepared = Prepared(plan=plan, of=traced[rows], reference=references[parts])
            (folder / f"{name} {layout}.run").write_bytes(pickle.dumps(prepared))
    return refused


def _sharded(user: UserModel, overrides: Overrides) -> Overrides:
    """The overrides with Megatron's shardings, where the model has the layers for it."""
    linear = [n for n, m in built(user).named_modules() if type(m) is nn.Linear]
    found = {f"**.{k}": v for k, v in SHARDED.items() if any(n.endswith(f".{k}") for n in linear)}
    return dataclasses.replace(overrides, shardings=found) if overrides.tp == 2 else overrides


def traced_at(user: UserModel, rows: int, like: Graph | None = None) -> Traced:
    graph = trace(
        built(user), batch_of(user, 0), loss_fn=user.loss_fn, batch_size=rows, precision="fp32"
    )
    table = analyse(graph)
    return Traced(graph=cut_blocks(graph, table, like), table=table)


def plain_steps(user: UserModel, parts: int) -> Reference:
    """Ordinary PyTorch on one device, in `parts` micro-batches of equal weight."""
    model = built(user)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def loss(step: int, k: int) -> torch.Tensor:
        return _loss(user, model, _rows(batch_of(user, step), k, ROWS // parts))

    return trained(model, optimizer, loss, steps=STEPS, parts=parts)


def _rows(batch: Any, k: int, count: int) -> Any:
    def cut(x: Any) -> Any:
        whole = isinstance(x, torch.Tensor) and x.shape[:1] == (ROWS,)
        return x[k * count : (k + 1) * count] if whole else x

    return pytree.tree_map(cut, batch)


def _loss(user: UserModel, model: nn.Module, batch: Any) -> torch.Tensor:
    args, kwargs, targets = split_batch(batch, user.loss_fn)
    output = model(*args, **kwargs)
    if user.loss_fn is not None:
        return user.loss_fn(output, *targets)
    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output.loss


def on_one_device(user: UserModel, parts: int, precision: str = "fp32") -> ParallelModel:
    """The model planned for one device in so many micro-batches."""
    return auto_parallelize(
        built(user),
        Cluster.local(1, measure=False),
        example_inputs=batch_of(user, 0),
        global_batch_size=ROWS,
        loss_fn=user.loss_fn,
        precision=precision,
        overrides=Overrides(num_microbatches=parts),
    )


def runtime_steps(user: UserModel, parts: int) -> Reference:
    """The lowered model on one device: its dropout masks are those of every plan."""
    return steps_of(user, on_one_device(user, parts).runtime)


def steps_of(user: UserModel, runtime: Runtime) -> Reference:
    """The same steps on the ranks of a plan."""
    runtime.seed = 1
    trained = [p for p in runtime.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05) if trained else None
    losses, gradients = [], []
    for step in range(STEPS):
        if optimizer:
            optimizer.zero_grad()
        losses.append(float(runtime.train_step(batch_of(user, step))))
        gradients.append(runtime.full_gradients())
        if optimizer:
            optimizer.step()
    return Reference(losses=losses, gradients=gradients, state=runtime.full_state_dict())


def run(folder: Path, name: str) -> dict[str, Any]:
    """One prepared run on this rank; rank 0 says how far it is off, and what was sharded."""
    prepared: Prepared = pickle.loads((folder / f"{name}.run").read_bytes())
    user = USERS[name.rsplit(" ", 1)[0]]
    runtime = parallelize(built(user), prepared.plan, prepared.of)
    found = steps_of(user, runtime)
    if launch.rank():
        return {}
    local = sum(p.stored.numel() for p in runtime.stage_parameters)
    whole = sum(math.prod(p.shape) for p in runtime.stage_parameters)
    result = compare(found, prepared.reference)
    steps = zip(found.gradients, prepared.reference.gradients, strict=True)
    extra = {name for ours, theirs in steps for name in ours.keys() ^ theirs.keys()}
    return result | {"held": local / whole, "extra": sorted(extra)}
