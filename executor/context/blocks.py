"""Attention with one block of keys: its output and the logarithm of its sum, and the gradients.

Where torch has a fused kernel that gives the sum (CPU; NVIDIA GPUs in half precision, no mask), it
is used; else the scores are written out. A query that a mask keeps from every key of a block has
the sum exp(-∞): its output there counts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

HALF = (torch.float16, torch.bfloat16)
_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Part:
    """Of some queries the output [batch, heads, tokens, features], and the log of the sum of
    exp(scores) [batch, heads, tokens], in single precision at least."""

    out: torch.Tensor
    log_sum: torch.Tensor

    def joined(self, other: Part, rows: slice) -> Part:
        """With the part of other keys for the queries `rows` of this one."""
        own = self.log_sum[:, :, rows]
        log_sum = torch.logaddexp(own, other.log_sum)
        # (-∞) - (-∞): queries that have read no key yet
        weights = [
            torch.exp(x - log_sum).nan_to_num(0.0).unsqueeze(-1) for x in (own, other.log_sum)
        ]
        out, sums = self.out.to(log_sum.dtype, copy=True), self.log_sum.clone()
        out[:, :, rows] = out[:, :, rows] * weights[0] + other.out * weights[1]
        sums[:, :, rows] = log_sum
        return Part(out, sums)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float | None,
) -> Part:
    """The part of a block of keys. Groups of query heads may share keys and values."""
    k, v = (_for_each_query(x, q) for x in (k, v))
    if _has_kernel(q, v, mask):
        return Part(*_kernel(q)(q, k, v, 0.0, causal, scale=scale)[:2])
    scores = _scores(q, k, mask, causal, scale)
    log_sum = scores.logsumexp(-1)
    weights = torch.exp(scores - log_sum.unsqueeze(-1)).nan_to_num(0.0)
    return Part(weights @ v.to(weights.dtype), log_sum)


def attend_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    whole: Part,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v by a block of keys; `whole` is what all keys together gave."""
    wide_k, wide_v = (_for_each_query(x, q) for x in (k, v))
    if _has_kernel(q, v, mask):
        found = _kernel_backward(gradient, q, wide_k, wide_v, whole, causal, scale)
    else:
        found = _written_out(gradient, q, wide_k, wide_v, mask, whole, causal, scale)
    grad_q, *others = found
    grad_k, grad_v = (_of_groups(own, x) for own, x in zip(others, (k, v), strict=True))
    return grad_q, grad_k, grad_v


def _written_out(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    whole: Part,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, mask, causal, scale)
    wide = scores.dtype
    weights = torch.exp(scores - whole.log_sum.unsqueeze(-1)).nan_to_num(0.0)
    gradient, q, k, v, out = (x.to(wide) for x in (gradient, q, k, v, whole.out))
    passed = (gradient * out).sum(-1, keepdim=True)
    of_scores = weights * (gradient @ v.transpose(-2, -1) - passed) * _scale(q, scale)
    return of_scores @ k, of_scores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ gradient


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> torch.Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * _scale(q, scale)) @ k.to(wide).transpose(-2, -1)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _for_each_query(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values, repeated for the query heads that share them."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _of_groups(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of what was repeated."""
    groups = gradient.shape[1] // x.shape[1]
    return gradient if groups == 1 else gradient.unflatten(1, (x.shape[1], groups)).sum(2)


# --- fused kernels --------------------------------------------------------------------------------


def _has_kernel(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    if mask is not None or q.dtype == torch.float64 or q.shape[-1] != v.shape[-1]:
        return False
    on_gpu = q.device.type == "cuda" and q.dtype in HALF and q.shape[-1] % 8 == 0
    return on_gpu or q.device.type == "cpu"


def _kernel(q: torch.Tensor) -> Any:
    if q.device.type == "cpu":
        return _ATEN._scaled_dot_product_flash_attention_for_cpu.default
    return _flash


def _flash(*args: Any, scale: float | None) -> Any:
    return _ATEN._scaled_dot_product_flash_attention.default(*args, scale=scale)


def _kernel_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    whole: Part,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = (gradient, q, k, v, whole.out.to(q.dtype), whole.log_sum)
    if q.device.type == "cpu":
        backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = backward(
            *given, 0.0, causal, scale=scale
        )
        return found
    nothing = torch.empty(0, dtype=torch.int64, device=q.device)  # no dropout: no state of it
    lengths = (nothing.int(), nothing.int(), q.shape[2], k.shape[2])
    backward = _ATEN._scaled_dot_product_flash_attention_backward.default
    found = backward(
        *(x.contiguous() for x in given), *lengths, 0.0, causal, nothing, nothing, scale=scale
    )
    return found
