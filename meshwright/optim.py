"""Optimizers and learning rates of large batches: LAMB, LARS, rules that scale a rate with the rows
of a step, warm-up.

Both optimizers give each parameter a rate of its own, by the norm of its weights over the norm of
its update (the trust ratio). They are plain torch optimizers: norms in a step are those of whole
parameters under every plan, as with all optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from meshwright.costmodel.memory import FUSED
from meshwright.profiles.inputs import ArgumentError, shown


class _LayerWise(torch.optim.Optimizer):
    """Steps parameter by parameter, with a trust ratio where a group's `adapt` is True."""

    def __init__(self, params: Iterable[Any], options: Mapping[str, Any]) -> None:
        self._check(options)
        super().__init__(params, dict(options))
        for group in self.param_groups:
            self._check(group)

    def _check(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            values = value if name == "betas" and isinstance(value, tuple | list) else [value]
            if name in _RANGES:
                low, high = _RANGES[name]
                if not all(isinstance(x, int | float) and low <= x < high for x in values):
                    raise ArgumentError.refused(
                        f"{type(self).__name__}: {name}", value,
                        legal=f"from {low}, below {high}" if high < math.inf else f"from {low}",
                    )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter with a gradient; the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ArgumentError(
                        ": a gradient is sparse", place=type(self).__name__,
                        legal="dense gradients", way_out="nn.Embedding(sparse=False)",
                    )  # fmt: skip
                self._step_one(p, p.grad, self.state[p], group)
        return loss

    def _step_one(
        self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class LAMB(_LayerWise):
    """Adam's update with decay, r = m̂ / (√v̂ + ε) + λw, scaled to the weights' norm:
    w ← w − η (‖w‖ / ‖r‖) r, where a ratio without a norm is 1 (You et al., arXiv 1904.00962,
    algorithm 2, its φ the identity).

    `params` as any torch optimizer takes them. A group with `adapt=False` steps without the ratio,
    as AdamW with the decay in its update: biases and gains of norms, by custom. Raises
    `ArgumentError` for values out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt},
        )

    def _step_one(
        self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        state["step"] += 1
        steps = state["step"].item()
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = square.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(group["eps"])
        update = (mean / root).div_(1 - beta1**steps).add_(p, alpha=decay)
        if group["adapt"]:
            update.mul_(_ratio(_norm(p), _norm(update)))
        p.add_(update, alpha=-group["lr"])


class LARS(_LayerWise):
    """Momentum with a rate for each parameter: v ← μv + η (θ‖w‖ / (‖g‖ + λ‖w‖)) (g + λw),
    w ← w − v, where a ratio without a norm is 1 (You et al., arXiv 1708.03888, algorithm 1).

    `trust` is θ, `momentum` μ, `weight_decay` λ. A group with `adapt=False` steps with plain
    momentum. Raises `ArgumentError` for values out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        adapt: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "trust": trust,
                "adapt": adapt,
            },
        )

    def _step_one(
        self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        decay = group["weight_decay"]
        update = gradient.add(p, alpha=decay)
        if group["adapt"]:
            weights, norm = _norm(p), _norm(gradient)
            update.mul_(_ratio(group["trust"] * weights, norm + decay * weights))
        velocity = state["momentum_buffer"].mul_(group["momentum"])
        velocity.add_(update, alpha=group["lr"])
        p.sub_(velocity)


_RANGES = {
    "lr": (0.0, math.inf), "betas": (0.0, 1.0), "eps": (0.0, math.inf), "momentum": (0.0, 1.0),
    "weight_decay": (0.0, math.inf), "trust": (0.0, math.inf),
}  # fmt: skip


def _norm(x: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x)
    return norm


def _ratio(over: torch.Tensor, under: torch.Tensor) -> torch.Tensor:
    """The one norm over the other; 1 where either is 0."""
    either = (over > 0) & (under > 0)
    return torch.where(either, over / under, torch.ones_like(over))


# --- names ----------------------------------------------------------------------------------------

# Optimizers as plans name them (`costmodel/memory/optimizers.py`).

MADE_BY_NAME: Mapping[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = MappingProxyType({
    "adamw": torch.optim.AdamW,
    "adamw_fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adam": torch.optim.Adam,
    "adam_fused": lambda params: torch.optim.Adam(params, fused=True),
    "adagrad": torch.optim.Adagrad,
    "lamb": LAMB,
    "lars": LARS,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
})  # fmt: skip


def name_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Name of an optimizer in plans; None for one that they don't know."""
    group, kind = optimizer.param_groups[0], type(optimizer).__name__.lower()
    if "8bit" in kind:
        return "adamw8bit"
    if named := next((name for name in ("lamb", "lars", "lion") if name in kind), None):
        return named  # whoever wrote it
    if isinstance(optimizer, torch.optim.Adam):  # AdamW too
        plain = "adamw" if isinstance(optimizer, torch.optim.AdamW) else "adam"
        return plain + FUSED * bool(group.get("fused"))
    if isinstance(optimizer, torch.optim.SGD):
        return "momentum" if group["momentum"] else "sgd"
    return "adagrad" if isinstance(optimizer, torch.optim.Adagrad) else None


# --- learning rates -------------------------------------------------------------------------------


def linear_rate(lr: float, rows: int, rows_before: int) -> float:
    """The rate for steps of `rows`, in proportion to the rows, where `lr` was good for
    `rows_before`: SGD's rule, with a warm-up (Goyal et al., arXiv 1706.02677)."""
    return lr * _times(rows, rows_before)


def square_root_rate(lr: float, rows: int, rows_before: int) -> float:
    """The rate for steps of `rows`, by the root of the rows: the rule of adaptive optimizers (Adam:
    Malladi et al., arXiv 2205.10287; LAMB: arXiv 1904.00962, section 4)."""
    return lr * math.sqrt(_times(rows, rows_before))


def betas_of_adam(betas: tuple[float, float], rows: int, rows_before: int) -> tuple[float, float]:
    """Betas of Adam that forget as many rows as those for `rows_before` do: 1 − β in proportion to
    the rows, beside the rate of `square_root_rate` and eps over the root of as many times (Malladi
    et al., arXiv 2205.10287, square root scaling rule). Raises `ArgumentError` where one would be
    below 0."""
    times = _times(rows, rows_before)
    found = tuple(1 - times * (1 - beta) for beta in betas)
    if min(found) < 0:
        raise ArgumentError(
            f": {rows} rows a step would need betas of {shown(found)}", place="betas_of_adam",
            legal="from 0", way_out="fewer rows, or betas nearer to 1",
        )  # fmt: skip
    return found[0], found[1]


def warmup(steps: int, total: int | None = None, power: float = 1.0) -> Callable[[int], float]:
    """Factors of a rate by step, for `torch.optim.lr_scheduler.LambdaLR`: from 1/`steps` up in
    equal parts to 1 (Goyal et al., section 2.2); then 1, or with a `total` down to 0 there by
    (1 − part)^`power` (linear for LAMB, 2 for LARS, as their papers have it)."""
    for name, value in (("steps", steps), ("total", total)):
        if value is not None and (type(value) is not int or value < 1):
            raise ArgumentError.refused(f"warmup: {name}", value, legal="an integer from 1")
    if total is not None and total <= steps:
        raise ArgumentError.refused("warmup: total", total, legal=f"more than steps={steps}")
    return partial(_factor, steps, total, power)


def _factor(steps: int, total: int | None, power: float, step: int) -> float:
    if step < steps:
        return (step + 1) / steps
    if total is None:
        return 1.0
    left = max(0.0, 1 - (step - steps) / (total - steps))
    return math.pow(left, power)


def _times(rows: int, rows_before: int) -> float:
    for name, value in (("rows", rows), ("rows_before", rows_before)):
        if type(value) is not int or value < 1:
            raise ArgumentError.refused(name, value, legal="an integer from 1")
    return rows / rows_before
