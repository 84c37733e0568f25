"""Operators that know the axis they are split on.

Each replaces one ATen operator where its rule names an implementation: vocabulary-parallel
cross-entropy, masked embedding, synchronised batch norm; the loss normalised by a global count; and
dropout whose mask is a function of global indices, so that every plan draws the same one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from costmodel.strategies import RP, P, Placement
from executor.reshard import Axis, Reshard, all_reduce, local_part


class ParallelEmbedding(nn.Module):
    """Rows of the table split over `axis`: ids of other ranks look up zero; results are partial."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(
        self, weight: torch.Tensor, ids: torch.Tensor, padding_idx: int = -1, *rest: Any
    ) -> torch.Tensor:
        rows = weight.shape[0]
        local = ids - self.axis.rank * rows
        outside = (local < 0) | (local >= rows)
        padding = padding_idx - self.axis.rank * rows if padding_idx >= 0 else -1
        own = padding if 0 <= padding < rows else None
        found = F.embedding(local.masked_fill(outside, 0), weight, padding_idx=own)
        return found.masked_fill(outside.unsqueeze(-1), 0)


class _VocabularyLoss(torch.autograd.Function):
    """Σ cross-entropy over rows with classes split over an axis: three numbers per row are
    exchanged, in single precision at least.

    Source: Megatron-LM's vocabulary-parallel cross-entropy (max, Σ exponentials, target logit).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, axis: Axis
    ) -> torch.Tensor:
        classes = logits.shape[1]
        top = all_reduce(logits.max(dim=1).values, axis, "max")
        wide = torch.promote_types(logits.dtype, torch.float32)
        shifted = logits.to(wide) - top.unsqueeze(1)
        exponentials = shifted.exp()
        local = target - axis.rank * classes
        outside = (local < 0) | (local >= classes)
        safe = local.masked_fill(outside, 0)
        hit = shifted.gather(1, safe.unsqueeze(1)).squeeze(1).masked_fill(outside, 0)
        total, hit = all_reduce(torch.stack([exponentials.sum(dim=1), hit]), axis)
        kept = target != ignore_index
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), safe, outside, kept)
        ctx.dtype = logits.dtype
        return ((total.log() - hit) * kept).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, safe, outside, kept = ctx.saved_tensors
        grad = softmax * kept.unsqueeze(1)
        inside = (~outside & kept).to(grad.dtype)
        grad.scatter_add_(1, safe.unsqueeze(1), -inside.unsqueeze(1))
        return (grad * grads[0]).to(ctx.dtype), None, None, None


class GlobalLoss(nn.Module):
    """Cross-entropy or NLL of local rows, divided by a count that spans ranks and micro-batches.

    `classes` is the axis the class dim is split over, if any; `count` the axes over which rows are
    counted when no `denominator` is handed in. Reduction "sum" divides by nothing.
    """

    def __init__(
        self, kind: str, reduction: int, classes: Axis | None, count: tuple[Axis, ...]
    ) -> None:
        super().__init__()
        self.kind, self.reduction, self.classes, self.count = kind, reduction, classes, count

    def forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignore_index: int,
        label_smoothing: float,
        denominator: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.classes is not None:
            loss = _VocabularyLoss.apply(logits, target, ignore_index, self.classes)
        else:
            loss = self._of_rows(logits, target, ignore_index, label_smoothing)
        if self.reduction == 2:
            return loss
        if denominator is None:
            denominator = (target != ignore_index).sum()
            for axis in self.count:
                denominator = all_reduce(denominator, axis)
        return loss / denominator.to(loss.dtype)

    def _of_rows(
        self, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float
    ) -> torch.Tensor:
        """Σ over rows, in single precision at least: fp16 ends at 65504."""
        half = logits.dtype in (torch.float16, torch.bfloat16)
        reduction = "none" if half else "sum"
        if self.kind == "nll":
            rows = F.nll_loss(logits, target, ignore_index=ignore_index, reduction=reduction)
        else:
            rows = F.cross_entropy(
                logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing,
                reduction=reduction,
            )  # fmt: skip
        return rows.float().sum() if half else rows


class SyncBatchNorm(nn.Module):
    """Batch norm in training mode with statistics over the whole micro-batch, as on one device, in
    single precision at least."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.sum = Reshard(P, RP, axis)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
        mean: torch.Tensor | None, var: torch.Tensor | None, training: bool, momentum: float,
        eps: float, *rest: Any,
    ) -> torch.Tensor:  # fmt: skip
        dims = [0, *range(2, x.dim())]
        count = x.numel() // x.shape[1] * self.axis.size
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        batch_mean = self.sum(wide.sum(dims)) / count
        centred = wide - batch_mean.view(shape)
        batch_var = self.sum((centred * centred).sum(dims)) / count
        if mean is not None and var is not None:
            with torch.no_grad():
                mean.lerp_(batch_mean.to(mean.dtype), momentum)
                var.lerp_((batch_var * (count / max(count - 1, 1))).to(var.dtype), momentum)
        out = centred * (batch_var + eps).rsqrt().view(shape)
        if weight is not None:
            out = out * weight.view(shape)
        return (out if bias is None else out + bias.view(shape)).to(x.dtype)


class ScaledMean(nn.Module):
    """Turns the mean over local elements into this rank's share of the mean over all."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


# --- dropout by counter --------------------------------------------------------------------------


class IndexGrid(nn.Module):
    """Global element numbers of a local tensor: every plan sees the same number for the same
    element.

    `shape` is the global shape of one micro-batch; `cuts` the placements that made it local, in
    order, with the size and rank of their axes; `per_row` the elements of one batch row, by which
    the micro-batch's first row shifts the numbers. With the batch outermost, as in batch-first
    tensors, the numbers do not depend on how the batch is cut into micro-batches either.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        cuts: list[tuple[Placement, int, int]],
        per_row: int,
    ) -> None:
        super().__init__()
        self.shape, self.cuts, self.per_row = shape, cuts, per_row

    def forward(self, first_row: torch.Tensor) -> torch.Tensor:
        total = first_row * self.per_row
        stride = 1
        for d in reversed(range(len(self.shape))):
            index = torch.arange(self.shape[d], dtype=torch.int64, device=first_row.device)
            for placement, n, rank in self.cuts:
                if placement.sharded and placement.dim == d:
                    index = local_part(index, Placement("S", 0, placement.split), n, rank)
            total = total + (index * stride).view([-1] + [1] * (len(self.shape) - 1 - d))
            stride *= self.shape[d]
        return total


def keep_mask(index: torch.Tensor, seed: torch.Tensor, salt: int, p: float) -> torch.Tensor:
    """True with probability 1-p, a pure function of (seed, salt, index): 32-bit integer mixes, of
    the stream's number first, so that no stream is another one shifted, and of the index's high
    part, so that none repeats after 2^32 elements.

    Source of the mixer: the "lowbias32" constants of C. Wellons' hash prospector.
    """
    stream = _mixed(_mixed(seed & _LOW) ^ (salt * 0x9E3779B1 & _LOW))
    return _mixed((index & _LOW) ^ _mixed((index >> 32) + stream & _LOW)) >= int(p * 2**32)


_LOW = 0xFFFFFFFF


def _mixed(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _LOW
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _LOW
    return h ^ (h >> 16)


class CounterDropout(nn.Module):
    """Dropout whose mask is the same under every plan. `rng` is the pair (step seed, first row)."""

    def __init__(self, grid: IndexGrid, salt: int) -> None:
        super().__init__()
        self.grid, self.salt = grid, salt

    def forward(self, x: torch.Tensor, p: float, train: bool, rng: torch.Tensor) -> torch.Tensor:
        if not (train and self.training) or p == 0.0:
            return x
        if p == 1.0:
            return x * 0
        mask = keep_mask(self.grid(rng[1]), rng[0], self.salt, p)
        return x * mask.to(x.dtype) * (1.0 / (1.0 - p))


class DropoutAttention(nn.Module):
    """Scaled dot-product attention with counter dropout on its probabilities, written out."""

    def __init__(self, grid: IndexGrid, salt: int) -> None:
        super().__init__()
        self.drop = CounterDropout(grid, salt)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
        p: float, causal: bool, scale: float | None, grouped: bool, rng: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        if grouped:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, float("-inf"))
                if mask.dtype == torch.bool
                else scores + mask
            )
        return self.drop(scores.softmax(-1), p, True, rng) @ v
