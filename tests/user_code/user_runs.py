"""User models under forced layouts: plans, references by plain PyTorch, and runs on ranks.

The links of the cluster cost nothing, so that everything is sharded that can be.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright import Cluster, Overrides, ParallelModel
from meshwright.costmodel.sharding.factors import analyse
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.batch import split_batch
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.tracing.trace import trace
from meshwright.profiles.hardware.device import Link
from tests.helpers import tiny
from tests.helpers.stored import stored
from tests.models.models import Traced, parallelize
from tests.parity.parity_reference import Reference, compare, trained
from tests.user_code import user_models
from tests.user_code.user_models import USERS, UserModel

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
    """Local ranks whose links cost next to nothing, nor to issue a message."""
    link = Link(name="free", latency_s=1e-12, bandwidth=1e18)
    local = Cluster.local(ranks, measure=False)
    device = dataclasses.replace(local.device, launch_overhead_s=0.0)
    return dataclasses.replace(local, device=device, intra_link=link, inter_link=link)


_planned: dict[str, ParallelModel] = {}


def plan_of(name: str, layout: str) -> Plan:
    """A user's model planned for all ranks; later layouts are a `replan` of the first."""
    user = USERS[name]
    overrides = _sharded(user, LAYOUTS[layout])
    if name in _planned:
        return _planned[name].replan(overrides).plan
    _planned[name] = tiny.planned(
        built(user), cluster=free_links(RANKS), example_inputs=batch_of(user, 0),
        loss_fn=user.loss_fn, overrides=overrides,
        rows_meet="per_microbatch",  # as the references
    )  # fmt: skip
    return _planned[name].plan


def prepared(name: str, layout: str) -> Prepared:
    user, plan = USERS[name], plan_of(name, layout)
    alone = runtime_steps if user.own_masks else plain_steps
    of, reference = traced_at(name, plan.microbatch_rows), alone(user, plan.num_microbatches)
    return Prepared(plan=plan, of=of, reference=reference)


def _sharded(user: UserModel, overrides: Overrides) -> Overrides:
    """The overrides with Megatron's shardings, where the model has the layers for it."""
    linear = [n for n, m in built(user).named_modules() if type(m) is nn.Linear]
    found = {f"**.{k}": v for k, v in SHARDED.items() if any(n.endswith(f".{k}") for n in linear)}
    return dataclasses.replace(overrides, shardings=found) if overrides.tp == 2 else overrides


def traced_at(name: str, rows: int) -> Traced:
    """At so many rows, cut into the blocks of the whole batch."""

    def make() -> Traced:
        user = USERS[name]
        graph = trace(
            built(user), batch_of(user, 0), loss_fn=user.loss_fn, batch_size=rows, precision="fp32"
        )
        table = analyse(graph)
        like = traced_at(name, ROWS).graph if rows != ROWS else None
        return Traced(graph=cut_blocks(graph, table, like), table=table)

    return stored("user", name, rows, make=make, models=(user_models,))


def plain_steps(user: UserModel, parts: int) -> Reference:
    """Ordinary PyTorch on one device, in `parts` micro-batches of equal weight."""
    model = built(user)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    before: dict[str, torch.Tensor] = {}

    def loss(step: int, k: int) -> torch.Tensor:
        for name in user.once:
            buffer = model.get_buffer(name)
            if k == 0:
                before[name] = buffer.clone()
            buffer.copy_(before[name])
        return _loss(user, model, _rows(batch_of(user, step), k, ROWS // parts))

    return trained(model, optimizer, loss, steps=STEPS, parts=parts)


def _rows(batch: Any, k: int, count: int) -> Any:
    part = slice(k * count, (k + 1) * count)
    return pytree.tree_map_only(
        torch.Tensor, lambda x: x[part] if x.shape[:1] == (ROWS,) else x, batch
    )


def _loss(user: UserModel, model: nn.Module, batch: Any) -> torch.Tensor:
    args, kwargs, targets = split_batch(batch, user.loss_fn)
    output = model(*args, **kwargs)
    if user.loss_fn is not None:
        return user.loss_fn(output, *targets)
    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output.loss


def runtime_steps(user: UserModel, parts: int) -> Reference:
    """The lowered model on one device, in so many micro-batches: its dropout masks are those of
    every plan."""
    given = {"example_inputs": batch_of(user, 0), "loss_fn": user.loss_fn}
    alone = tiny.planned(built(user), overrides=Overrides(num_microbatches=parts), **given)
    return steps_of(user, alone.runtime)


def steps_of(user: UserModel, runtime: Runtime) -> Reference:
    """The same steps on the ranks of a plan."""
    runtime.seed = 1
    optimizer = torch.optim.SGD([p for p in runtime.parameters() if p.requires_grad], lr=0.05)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(batch_of(user, step))))
        gradients.append(runtime.full_gradients())
        optimizer.step()
    return Reference(losses=losses, gradients=gradients, state=runtime.full_state_dict())


def train_as_alone(name: str, layout: str, prepared: Prepared) -> None:
    """Losses, gradients (and which there are none of) and state of two steps are the reference's.
    Of all ranks."""
    user = USERS[name]
    runtime = parallelize(built(user), prepared.plan, prepared.of)
    found = steps_of(user, runtime)
    if launch.rank():
        return
    off = compare(found, prepared.reference)
    assert off["loss"] < user.tolerance
    for what in ("gradient", "state"):
        assert off[what][0] < user.tolerance, off[what]
    assert off["names"] == []
    for ours, theirs in zip(found.gradients, prepared.reference.gradients, strict=True):
        assert ours.keys() == theirs.keys()
    if layout == "dp2×tp2":  # something was sharded
        whole = sum(math.prod(p.shape) for p in runtime.stage_parameters)
        assert sum(p.stored.numel() for p in runtime.stage_parameters) < whole
