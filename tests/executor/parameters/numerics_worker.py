"""Norms, clipping, skipped steps and optimizers on one of four ranks, compared with one device.

The single device is plain torch: the user's model, its own loop, `torch.nn.utils` for norms, the
same optimizer over the model's parameters. Rank 0 writes the results after each check.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.torch_version import TorchVersion

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.parameters.loss_scale import LossScale, StepGuard
from meshwright.executor.parameters.norms import clip_, norm_share, total_norm
from meshwright.executor.parameters.parameters import local_of
from meshwright.executor.parameters.partial_dtensors import Reduced
from meshwright.executor.parameters.whole_tensors import WholeTensors
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from tests.models.models import CASES, GLOBAL_BATCH, parallelize
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import difference

CASE = CASES["gpt2_tied"]  # fused projections, biases, and an embedding that two stages share
LAYOUTS = ("gpt2_tied dp2xtp2 m2 zero1", "gpt2_tied pp2xdp2 m2 zero1", "gpt2_tied pp2xtp2 m2")
OPTIMIZER_LAYOUTS = LAYOUTS[:2]
NORM_LAYOUTS = (
    *LAYOUTS,
    "gpt2_tied dp4 m2 zero1 shard2",
    "gpt2_tied dp4 m2 zero2",
    "gpt2_tied dp4 m2 zero3",
    "gpt2_tied pp2xdp2 m4 zb_v",  # the tied embedding twice on the same ranks
)
NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
STEPS = 3
MAX_NORM = 0.2  # below the norms of this model, so that every step is clipped
EPS = 1e-2  # far above the rounding noise of gradients that are zero in exact arithmetic

Groups = list[dict[str, Any]]
Named = list[tuple[str, nn.Parameter]]


class Lamb(optim.Optimizer):
    """LAMB as its paper has it (arXiv:1904.00962): Adam's update u of a layer, scaled by ‖w‖/‖u‖.

    Written as one writes it for one device; the norms of shards are for DTensor to add up.
    """

    def __init__(self, groups: Groups, *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for w in group["params"]:
                state = self.state[w]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(w), "v": torch.zeros_like(w)}
                state["step"] += 1
                m = state["m"].mul_(first).add_(w.grad, alpha=1 - first)
                v = state["v"].mul_(second).addcmul_(w.grad, w.grad, value=1 - second)
                m_hat = m / (1 - first ** state["step"])
                v_hat = v / (1 - second ** state["step"])
                u = m_hat / (v_hat.sqrt() + EPS) + group["weight_decay"] * w
                layer, update = w.norm(), u.norm()
                known = (layer > 0) & (update > 0)
                trust = torch.where(known, layer / update, torch.ones_like(layer))
                w.sub_(u * trust * group["lr"])


class Shampoo(optim.Optimizer):
    """Shampoo (arXiv:1802.09568) for matrices: g -> (Σ g gᵀ)^-1/4 · g · (Σ gᵀ g)^-1/4, by the
    eigenvectors of sums that a shard does not have."""

    def __init__(self, groups: Groups, *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                g, state = w.grad, self.state[w]
                w.mul_(1 - group["lr"] * group["weight_decay"])
                if w.ndim != 2:
                    w.sub_(g, alpha=group["lr"])
                    continue
                for side, product in (("left", g @ g.T), ("right", g.T @ g)):
                    state[side] = state.get(side, torch.zeros_like(product)) + product
                w.sub_(_root(state["left"]) @ g @ _root(state["right"]), alpha=group["lr"])


def _root(x: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(x.double() + EPS * torch.eye(len(x)))
    return ((vectors * values**-0.25) @ vectors.T).float()


WHOLE = {"shampoo", "whole_muon", "whole_adamw"}  # on whole tensors, each at its owner
OPTIMIZERS: Mapping[str, Callable[[Groups], optim.Optimizer]] = {
    "sgd": lambda g: optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda g: optim.Adam(g, lr=1e-2, eps=EPS, foreach=False),
    "adamw_foreach": lambda g: optim.AdamW(g, lr=1e-2, eps=EPS, foreach=True),
    "adamw_fused": lambda g: optim.AdamW(g, lr=1e-2, eps=EPS, fused=True),
    "adagrad": lambda g: optim.Adagrad(g, lr=1e-2, eps=EPS, foreach=True),
    "rmsprop": lambda g: optim.RMSprop(g, lr=1e-3, eps=EPS, momentum=0.5, foreach=True),
    "adafactor": lambda g: optim.Adafactor(g, lr=1e-2, eps=(EPS, 1e-3)),
    **(
        {"adafactor_foreach": lambda g: optim.Adafactor(g, lr=1e-2, eps=(EPS, 1e-3), foreach=True)}
        if TorchVersion(torch.__version__) >= "2.13"  # which has _foreach_lerp_ of DTensors
        else {}
    ),
    "lamb": lambda g: Lamb(g, lr=1e-2),
    "muon": lambda g: optim.Muon([g[0]], lr=1e-2),  # takes matrices only
    "shampoo": lambda g: Shampoo(g, lr=1e-2),
    "whole_muon": lambda g: optim.Muon([g[0]], lr=1e-2),
    "whole_adamw": lambda g: optim.AdamW(g, lr=1e-2, eps=EPS),
}  # fmt: skip


def grouped(named: Named) -> Groups:
    """Weight decay for matrices and embeddings, by FQN; none for biases and norms."""
    decayed = [p for n, p in named if n.endswith(".weight") and ".ln_" not in n]
    spared = [p for n, p in named if not n.endswith(".weight") or ".ln_" in n]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]


def around(name: str) -> contextlib.AbstractContextManager[Any]:
    """What an optimizer steps inside. Muon orthogonalises in bf16, whose rounding depends on the
    order of summation; in fp32 it is comparable."""
    if name.endswith("muon"):
        return mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)
    return contextlib.nullcontext()


# --- one loop for one device and for many ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Losses and gradient norms of each step, and the state after the last."""

    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]


def train(
    name: str,
    named: Named,
    step: Callable[[int], torch.Tensor],
    clip: Callable[[], torch.Tensor],
    state: Callable[[], Mapping[str, torch.Tensor]],
    runtime: Runtime | None = None,
) -> Trained:
    make = OPTIMIZERS[name]
    whole = runtime is not None and name in WHOLE
    groups = grouped(named)
    optimizer = over_whole(runtime, make, groups) if whole else make(groups)
    scheduler = LambdaLR(optimizer, lambda k: 1 / (1 + k))
    losses, norms = [], []
    for k in range(STEPS):
        for _, p in named:
            p.grad = None
        losses.append(float(step(k)))
        norms.append(float(clip()))
        with around(name):
            optimizer.step()
        scheduler.step()
    return Trained(losses=losses, norms=norms, state=dict(state()))


def backward(model: nn.Module, k: int) -> torch.Tensor:
    loss = CASE.loss(model, CASE.batch(GLOBAL_BATCH, k))
    loss.backward()
    return loss.detach()


@functools.cache
def reference(name: str) -> Trained:
    model = CASE.model()
    return train(
        name,
        list(model.named_parameters()),
        lambda k: backward(model, k),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
        model.state_dict,
    )


@functools.cache
def runtime_of(layout: str) -> Runtime:
    plan, of = plan_of(Cell.parse(layout))
    return parallelize(CASE.model(), plan, of)


def stepped(runtime: Runtime, k: int = 0) -> None:
    """One step's gradients in `.grad`, whatever was there before."""
    for p in runtime.parameters():
        p.grad = None
    runtime.train_step(CASE.batch(GLOBAL_BATCH, k))


def over_whole(runtime: Runtime, make: Callable[..., Any], groups: Groups) -> WholeTensors:
    held, place = runtime.stage_parameters, runtime.place
    return WholeTensors(make, groups, held=held, place=place, options={})


def of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(found, value)
    return found


# --- checks ---------------------------------------------------------------------------------------


def optimizers(layout: str) -> dict[str, Any]:
    """Differences from one device after three clipped steps, by optimizer."""
    runtime, start = runtime_of(layout), CASE.model().state_dict()
    found = {}
    for name in OPTIMIZERS:
        runtime.load_state_dict(start)
        ours = train(
            name,
            list(runtime.named_parameters()),
            lambda k: runtime.train_step(CASE.batch(GLOBAL_BATCH, k)),
            lambda: clip_(runtime.stage_parameters, runtime.place, MAX_NORM),
            runtime.full_state_dict,
            runtime,
        )
        if launch.rank() == 0:
            one = reference(name)
            found[name] = {
                "loss": _relative(ours.losses, one.losses),
                "norm": _relative(ours.norms, one.norms),
                "clipped": min(one.norms) > MAX_NORM,
                "state": difference(ours.state, one.state),
            }
    return found


def resumed(layout: str) -> dict[str, Any]:
    """The difference of the weights after a step of an optimizer over whole tensors, from those
    after the same step of a new one that took its states from a checkpoint."""
    runtime, place = runtime_of(layout), Path(sys.argv[1], f"checkpoint {layout}")
    runtime.load_state_dict(CASE.model().state_dict())

    def made() -> WholeTensors:
        return over_whole(runtime, OPTIMIZERS["shampoo"], grouped(list(runtime.named_parameters())))

    first = made()
    for k in range(STEPS):
        if k == STEPS - 1:
            weights = runtime.full_state_dict()
            checkpoint.save(runtime, place, extra={"optimizer": first})
        stepped(runtime, k)
        first.step()
    wanted = runtime.full_state_dict()
    second = made()
    checkpoint.load(runtime, place, extra={"optimizer": second})
    stepped(runtime, STEPS - 1)
    second.step()
    return {
        "difference": difference(runtime.full_state_dict(), wanted),
        "moved": difference(weights, wanted)[0] > 0,
    }


def _relative(found: Iterable[float], wanted: Iterable[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))


def norms(layout: str) -> dict[str, Any]:
    """Norms of one step's gradients: ours on every rank, and one device's; then, clipped to a
    tenth, the gradients' difference from one device's."""
    runtime = runtime_of(layout)
    runtime.load_state_dict(CASE.model().state_dict())
    model = CASE.model()
    backward(model, 0)
    found: dict[str, Any] = {"norms": {}}
    for norm_type in NORM_TYPES:
        stepped(runtime)
        norm = clip_(runtime.stage_parameters, runtime.place, math.inf, norm_type)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        wanted = nn.utils.get_total_norm(grads, norm_type)
        found["norms"][str(norm_type)] = {
            "ours": of_all_ranks(norm.item().hex()), "wanted": wanted.item()
        }  # fmt: skip
    tenth = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)) / 10
    nn.utils.clip_grad_norm_(model.parameters(), tenth)
    clip_(runtime.stage_parameters, runtime.place, tenth)
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | {"clipped": difference(runtime.full_gradients(), wanted)}


def guard(layout: str) -> dict[str, Any]:
    """What every rank's guard says of scaled gradients of which each rank in turn has one that is
    not finite, and what an optimizer then does."""
    runtime = runtime_of(layout)
    runtime.load_state_dict(CASE.model().state_dict())
    guards = StepGuard(place=runtime.place, scale=LossScale(value=2.0**10))
    optimizer = optim.AdamW(runtime.parameters(), lr=1e-2)
    trained = [p for p in runtime.stage_parameters if p.trainable]
    stepped(runtime)
    optimizer.step()  # moments that a step with zero gradients would move along
    before = {n: local_of(p).detach().clone() for n, p in runtime.named_parameters()}
    admitted, scales = [], []
    for poisoned, value in ((None, 0.0), *enumerate((math.nan, math.inf, -math.inf, math.nan))):
        stepped(runtime)
        for p in trained:
            p.gradient, p.api.grad = local_of(p.api.grad) * guards.seed, None
        if poisoned == launch.rank():
            smallest = min((p.gradient for p in trained), key=torch.Tensor.numel)
            smallest.view(-1)[-1] = value
        scales.append(guards.seed)
        admitted.append(guards.admit(trained))
        if admitted[-1]:
            unscaled = _equal_to_unscaled(runtime)
        else:
            optimizer.step()
    same = all(torch.equal(local_of(p), before[n]) for n, p in runtime.named_parameters())
    dropped = all(p.gradient is None for p in trained)
    return {
        "admitted": of_all_ranks(admitted), "scales": of_all_ranks(scales),
        "skipped": of_all_ranks(guards.skipped_steps), "unscaled": all(of_all_ranks(unscaled)),
        "untouched": all(of_all_ranks(same)), "dropped": all(of_all_ranks(dropped)),
    }  # fmt: skip


def _equal_to_unscaled(runtime: Runtime) -> bool:
    """Whether admitted gradients have the very bits of a step that nothing scaled."""
    held = [p for p in runtime.stage_parameters if p.trainable]
    admitted = [p.gradient.clone() for p in held]
    for p in held:
        p.gradient = None
    stepped(runtime)
    return all(torch.equal(local_of(p.api.grad), g) for p, g in zip(held, admitted, strict=True))


def reduced(layout: str) -> dict[str, Any]:
    """What `.item()` makes of norms of sharded parameters inside `Reduced`, and of the shares."""
    runtime = runtime_of(layout)
    runtime.load_state_dict(CASE.model().state_dict())
    whole = dict(CASE.model().named_parameters())
    worst, divided = 0.0, 0
    for name, p in runtime.named_parameters():
        assert isinstance(p, DTensor)
        divided += p.to_local().numel() < p.numel()
        if float(whole[name].norm()):
            with Reduced():
                norms = (p.detach().norm().item(), p.detach().square().sum().sqrt().item())
            worst = max(worst, *(abs(x / whole[name].norm().item() - 1) for x in norms))
    stored = norm_share(((p, p.stored) for p in runtime.stage_parameters), runtime.place)
    total = total_norm(stored, runtime.place).item()
    wanted = nn.utils.get_total_norm(list(whole.values())).item()
    return {
        "norm": max(of_all_ranks(worst)), "divided": sum(of_all_ranks(divided)),
        "stored": abs(total / wanted - 1),
    }  # fmt: skip


def main(folder: Path) -> None:
    checks = {
        optimizers: OPTIMIZER_LAYOUTS, norms: NORM_LAYOUTS, guard: LAYOUTS, reduced: LAYOUTS,
        resumed: LAYOUTS,
    }  # fmt: skip
    results: dict[str, Any] = {}
    for check, layouts in checks.items():
        for layout in layouts:
            results[f"{check.__name__} {layout}"] = check(layout)
            if launch.rank() == 0:
                (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    with launch.distributed("gloo"):
        main(Path(sys.argv[1]))
