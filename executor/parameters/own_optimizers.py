"""LAMB, LARS and Muon, which give each parameter a rate of its own.

LAMB and LARS take the norm of its weights over the norm of its update (the trust ratio), Muon a
matrix's orthogonal factor. They are plain torch optimizers: norms in a step are those of whole
parameters under every plan, as with all optimizers; Muon's matrices are stepped by owners
(`whole_tensors.py`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from meshwright.costmodel.memory import NEWTON_SCHULZ, Sides
from meshwright.profiles.inputs import ArgumentError
from meshwright.profiles.inputs.limits import is_number


class _LayerWise(torch.optim.Optimizer):
    """Steps parameter by parameter, with a trust ratio where a group's `adapt` is True."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        self._check(options)
        super().__init__(params, options)
        for group in self.param_groups:
            self._check(group)

    def _check(self, options: Mapping[str, Any]) -> None:
        place = type(self).__name__
        for name, value in options.items():
            if name == "adapt" and not isinstance(value, bool):
                raise ArgumentError.refused(f"{place}: adapt", value, legal="True or False")
            if name not in _RANGES:
                continue
            low, high = _RANGES[name]
            legal = f"from {low}" + (f", below {high}" if high < math.inf else "")
            values = [value]
            if name == "betas":
                legal = f"two numbers {legal}"
                values = [*value] if isinstance(value, tuple | list) else []
            right = all(is_number(x) and low <= x < high for x in values)
            if not right or len(values) != 1 + (name == "betas"):
                raise ArgumentError.refused(f"{place}: {name}", value, legal=legal)

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

    @abstractmethod
    def _step_one(
        self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        """Step one parameter with its gradient."""


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
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adapt=adapt,
        )  # fmt: skip

    def _step_one(
        self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        update = _adam_update(gradient, state, group).add_(p, alpha=group["weight_decay"])
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
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust, adapt=adapt,
        )  # fmt: skip

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


class Muon(_LayerWise):
    """Momentum of matrices, replaced by its orthogonal factor: m <- μm + (1 - μ)g,
    w ← w − ηλw − 0.2 η √max(a, b) O(μm + (1 − μ)g) for a × b elements, with O by five
    Newton-Schulz iterations in bf16 (Jordan et al. 2024, Muon; the factor, with which AdamW's rate
    serves both: arXiv 2502.16982, section 2.2).

    A parameter of three dims is a stack of matrices, of more its first dim by all others. Vectors,
    and groups with `adapt=False` (tables and the last product's weights, by custom), step by AdamW
    with `betas` and `eps`. Raises `ArgumentError` for values out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adapt: bool = True,
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, betas=betas, eps=eps,
            adapt=adapt,
        )  # fmt: skip

    def _step_one(
        self, p: torch.Tensor, gradient: torch.Tensor, state: Any, group: dict[str, Any]
    ) -> None:
        sides, rate, momentum = Sides.of(p.shape), group["lr"], group["momentum"]
        if not group["adapt"] or sides is None:
            update = _adam_update(gradient, state, group)
        else:
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            update = _orthogonal(gradient.lerp(mean, momentum), group["eps"])
            rate *= 0.2 * math.sqrt(max(sides.rows, sides.columns))
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)


def _orthogonal(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Nearly the orthogonal factor of a matrix, or of each of a stack, in bf16."""
    shape = x.shape
    x = x.flatten(1).bfloat16() if x.ndim != 3 else x.bfloat16()
    turned = x.shape[-2] > x.shape[-1]
    x = x.mT if turned else x
    x = x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=eps))
    a, b, c = _QUINTIC
    added = torch.baddbmm if x.ndim == 3 else torch.addmm
    for _ in range(NEWTON_SCHULZ):
        gram = x @ x.mT
        x = added(x, added(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    found: torch.Tensor = (x.mT if turned else x).reshape(shape)
    return found


_QUINTIC = 3.4445, -4.7750, 2.0315  # of X, of X X^T X and of (X X^T)^2 X (Jordan et al. 2024)


def _adam_update(gradient: torch.Tensor, state: Any, group: Mapping[str, Any]) -> torch.Tensor:
    """Adam's update of a step, without decay; its moments are updated."""
    if not state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(gradient)
        state["exp_avg_sq"] = torch.zeros_like(gradient)
    beta1, beta2 = group["betas"]
    state["step"] += 1
    steps = state["step"]
    mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = square.sqrt().div_(math.sqrt(1 - beta2**steps)).add_(group["eps"])
    update: torch.Tensor = (mean / root).div_(1 - beta1**steps)
    return update


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
