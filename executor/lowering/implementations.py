"""Operators that know the axis they are split on.

Each replaces one ATen operator where its rule names an implementation: vocabulary-parallel
cross-entropy, masked embedding, synchronised batch norm; the loss normalised by a global count, and
in parts of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.costmodel.rules import SCORES
from meshwright.costmodel.sharding import RP, P
from meshwright.executor.resharding import Axis, Reshard, all_reduce


class ParallelEmbedding(nn.Module):
    """Rows of the table from `first` on: ids of other ranks look up zero; results are partial."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def forward(
        self, weight: torch.Tensor, ids: torch.Tensor, padding_idx: int = -1, *rest: Any
    ) -> torch.Tensor:
        rows = weight.shape[0]
        local = ids - self.first
        outside = (local < 0) | (local >= rows)
        padding = padding_idx - self.first if padding_idx >= 0 else -1
        local_padding = padding if 0 <= padding < rows else None
        rows_found = F.embedding(local.masked_fill(outside, 0), weight, padding_idx=local_padding)
        return rows_found.masked_fill(outside.unsqueeze(-1), 0)


class _VocabularyLoss(torch.autograd.Function):
    """Σ cross-entropy over rows with classes split over an axis: three numbers per row are
    exchanged, in single precision at least.

    Source: Megatron-LM's vocabulary-parallel cross-entropy (max, Σ exponentials, target logit).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignore_index: int,
        axis: Axis,
        first_class: int,
    ) -> torch.Tensor:
        classes = logits.shape[1]
        top = all_reduce(logits.max(dim=1).values, axis, "max")
        wide = torch.promote_types(logits.dtype, torch.float32)
        shifted = logits.to(wide) - top.unsqueeze(1)
        exponentials = shifted.exp()
        local = target - first_class
        outside = (local < 0) | (local >= classes)
        safe = local.masked_fill(outside, 0)
        hit = shifted.gather(1, safe.unsqueeze(1)).squeeze(1).masked_fill(outside, 0)
        total, hit = all_reduce(torch.stack([exponentials.sum(dim=1), hit]), axis)
        counted = target != ignore_index
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), safe, outside, counted)
        ctx.dtype = logits.dtype
        loss: torch.Tensor = ((total.log() - hit) * counted).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, safe, outside, counted = ctx.saved_tensors
        grad = softmax * counted.unsqueeze(1)
        inside = (~outside & counted).to(grad.dtype)
        grad.scatter_add_(1, safe.unsqueeze(1), -inside.unsqueeze(1))
        return (grad * grads[0]).to(ctx.dtype), None, None, None, None


_vocabulary_loss: Callable[..., torch.Tensor] = _VocabularyLoss.apply


class GlobalLoss(nn.Module):
    """Cross-entropy or NLL of local rows, divided by a count that spans ranks and micro-batches.

    `classes` is the axis the class dim is split over, if any, and `first_class` the one that this
    rank's part begins with; `count` the axes over which rows are counted when no `denominator` is
    handed in. Reduction "sum" divides by nothing. Class weights count a row as its class does.
    """

    def __init__(
        self,
        kind: str,
        reduction: int,
        classes: Axis | None,
        count: tuple[Axis, ...],
        *,
        first_class: int = 0,
    ) -> None:
        super().__init__()
        self.kind, self.reduction, self.classes, self.count = kind, reduction, classes, count
        self.first_class = first_class

    def forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignore_index: int,
        label_smoothing: float,
        denominator: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.classes is not None:
            loss = _vocabulary_loss(logits, target, ignore_index, self.classes, self.first_class)
        else:
            options: dict[str, Any] = {"ignore_index": ignore_index, "weight": weight}
            if label_smoothing:
                options["label_smoothing"] = label_smoothing
            loss = self._of_rows(logits, target, options)
        return self.divided(loss, target, ignore_index, denominator, weight)

    def divided(
        self,
        loss: torch.Tensor,
        target: torch.Tensor,
        ignore_index: int,
        denominator: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The Σ over rows as it is reduced."""
        if self.reduction == 2:
            return loss
        if denominator is None:
            denominator = row_weight(target, ignore_index, weight)
            for axis in self.count:
                denominator = all_reduce(denominator, axis)
        return loss / denominator.to(loss.dtype)

    def _of_rows(
        self, logits: torch.Tensor, target: torch.Tensor, options: Mapping[str, Any]
    ) -> torch.Tensor:
        """Σ over rows, in single precision at least: fp16 ends at 65504."""
        half = logits.dtype in (torch.float16, torch.bfloat16)
        loss = F.nll_loss if self.kind == "nll" else F.cross_entropy
        rows = loss(logits, target, reduction="none" if half else "sum", **options)
        return rows.float().sum() if half else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The way to take a loss in `parts`: what makes logits of rows, which class each wants. `steps`
    are (operator, arguments, keywords) on logits, of which `SCORES` stands for those before;
    gradients of the weight are added up in `summed`, or as they are made."""

    parts: int
    steps: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]
    transposed: bool  # the weight is [classes, d], else [d, classes]
    summed: torch.dtype | None
    ignore_index: int
    label_smoothing: float
    classes: Axis | None
    first_class: int

    def logits(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.linear(x, weight if self.transposed else weight.t(), bias)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after the steps."""

        def given(argument: Any) -> Any:
            return logits if isinstance(argument, str) and argument == SCORES else argument

        for step, args, kwargs in self.steps:
            logits = step(*map(given, args), **kwargs)
        return logits

    def places(self, target: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The place of each row's class among those here, and whether it is one and counts."""
        local = target - self.first_class
        here = (local >= 0) & (local < classes) & (target != self.ignore_index)
        return local.masked_fill(~here, 0).unsqueeze(1), here


class _ChunkedLoss(torch.autograd.Function):
    """Σ cross-entropy over rows of `x weightᵀ + bias`, of one part of the rows after the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: Chunks,
    ) -> torch.Tensor:
        parts = zip(x.chunk(how.parts), target.chunk(how.parts), strict=True)
        losses, sums = zip(*(_of_part(how, *part, weight, bias) for part in parts), strict=True)
        ctx.how = how
        ctx.save_for_backward(x, target, weight, bias, torch.cat(sums))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        how, (x, target, weight, bias, sums) = ctx.how, ctx.saved_tensors
        to_x, _, to_weight, to_bias, _ = ctx.needs_input_grad
        wide = how.summed or weight.dtype
        of_x = torch.empty_like(x) if to_x else x
        of_weight = torch.zeros_like(weight, dtype=wide) if to_weight else None
        of_bias = torch.zeros_like(bias, dtype=wide) if to_bias else None
        parts = zip(*(t.chunk(how.parts) for t in (x, target, sums)), strict=True)
        for (rows, wanted, total), of_rows in zip(parts, of_x.chunk(how.parts), strict=True):
            grad = _of_logits(how, (rows, wanted, total), weight, bias, grads[0])
            if to_x:
                torch.mm(grad, weight if how.transposed else weight.t(), out=of_rows)
            if of_weight is not None:
                _add_product(of_weight, *((grad, rows) if how.transposed else (rows, grad)))
            if of_bias is not None:
                of_bias += grad.sum(0, dtype=wide)
            del grad  # before the next part's is made
        return (
            of_x if to_x else None,
            None,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(weight.dtype),
            None,
        )


def _wide(scores: torch.Tensor, *, own: bool) -> torch.Tensor:
    """Logits in single precision at least, in memory of their own."""
    wide = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
    return wide.clone() if wide.dtype == scores.dtype and not own else wide


def _of_part(
    how: Chunks,
    rows: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a part of the rows, and of each row the logarithm of its Σ exponentials."""
    scores = _wide(how.scores(how.logits(rows, weight, bias)), own=True)
    counted = target != how.ignore_index
    mean = scores.mean(1) if how.label_smoothing else 0.0
    top = scores.amax(1)
    if how.classes is not None:
        place, here = how.places(target, scores.shape[1])
        hit = scores.gather(1, place).squeeze(1).masked_fill(~here, 0)
        top = all_reduce(top, how.classes, "max")
    else:  # which refuses a class that there is not
        hit = -torch.ops.aten.nll_loss_nd(scores, target, None, 0, how.ignore_index)
    total = scores.sub_(top.unsqueeze(1)).exp_().sum(1)
    if how.classes is not None:
        total, hit = all_reduce(torch.stack([total, hit]), how.classes)
    total = total.log() + top
    loss = total - (1 - how.label_smoothing) * hit - how.label_smoothing * mean
    return loss.masked_fill(~counted, 0).sum(), total


def _of_logits(
    how: Chunks,
    part: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    of_loss: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the logits, which are made again, of a part: rows of x, their classes, and
    the logarithms of their Σ exponentials."""
    rows, target, total = part
    logits = how.logits(rows, weight, bias)
    with torch.enable_grad():
        scores = how.scores(logits.requires_grad_(bool(how.steps)))
    dtype, classes = scores.dtype, scores.shape[1]
    grad = _wide(scores, own=not how.steps)
    if not how.steps:
        del logits, scores
    grad.sub_(total.unsqueeze(1)).exp_()  # the softmax
    place, here = how.places(target, classes)
    if how.label_smoothing:
        grad.sub_(how.label_smoothing / classes)
    grad.scatter_add_(1, place, (here * (how.label_smoothing - 1)).to(grad.dtype).unsqueeze(1))
    grad.mul_(of_loss).masked_fill_((target == how.ignore_index).unsqueeze(1), 0)
    grad = grad.to(dtype)
    return torch.autograd.grad(scores, logits, grad)[0] if how.steps else grad


def _add_product(to: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add leftᵀ · right to a sum, in place where it has the product's type."""
    if to.dtype == left.dtype:
        to.addmm_(left.t(), right)
    else:
        to += left.t() @ right


_chunked_loss: Callable[..., torch.Tensor] = _ChunkedLoss.apply


class ChunkedLoss(nn.Module):
    """The cross-entropy of a product, in parts; `loss` divides its sum over rows."""

    def __init__(self, loss: GlobalLoss, how: Chunks) -> None:
        super().__init__()
        self.loss, self.how = loss, how

    def forward(
        self,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        denominator: torch.Tensor | None = None,
    ) -> torch.Tensor:
        total = _chunked_loss(x, target, weight, bias, self.how)
        return self.loss.divided(total, target, self.how.ignore_index, denominator)


class ScatteredRows(nn.Module):
    """`masked_scatter` in one micro-batch of several: a batch's elements, written in order, are
    those of its micro-batches one after the other where each has as many flags as elements."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        flags = mask.expand(torch.broadcast_shapes(x.shape, mask.shape)).sum()
        torch._assert_async(
            flags == source.numel(),
            "masked_scatter: in a micro-batch the flags are not as many as the elements that they "
            "select places for, so that elements of other micro-batches would be taken. Give "
            "batches in which each row has its own (as many image tokens as features), or plan "
            "with num_microbatches=1",
        )
        return x.masked_scatter(mask, source)


def row_weight(
    target: torch.Tensor, ignore_index: int, weight: torch.Tensor | None
) -> torch.Tensor:
    """The number of rows that are not ignored, or the sum of their classes' weights."""
    counted = target != ignore_index
    return counted.sum() if weight is None else weight[target[counted]].sum()


class SyncBatchNorm(nn.Module):
    """Batch norm in training mode with statistics over the whole micro-batch, as on one device, in
    single precision at least. `size` is that of the whole factor of which the rows are a part."""

    def __init__(self, axis: Axis, size: int) -> None:
        super().__init__()
        self.size, self.own = size, axis.part(size)[1]
        self.sum = Reshard(P, RP, axis)

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        *rest: Any,
    ) -> torch.Tensor:
        dims = [0, *range(2, x.dim())]
        count = x.numel() // x.shape[1] // self.own * self.size
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
        out = out if bias is None else out + bias.view(shape)
        narrow: torch.Tensor = out.to(x.dtype)
        return narrow


class RunningNorm(nn.Module):
    """A norm with running statistics: in training it takes those of the batch, by `trained` where
    rows are split, and in evaluation it reads the running ones. `norm` is the operator, `flag` the
    position of its argument that tells."""

    def __init__(self, trained: nn.Module | None, norm: Callable[..., Any], flag: int) -> None:
        super().__init__()
        self.trained, self.norm, self.flag = trained, norm, flag

    def forward(self, *args: Any) -> Any:
        if self.training:
            return (self.trained or self.norm)(*args)
        return self.norm(*args[: self.flag], False, *args[self.flag + 1 :])


# implementation -> the module that runs it, for an axis that splits a factor of a size
MODULES: Mapping[str, Callable[[Axis, int], nn.Module]] = MappingProxyType({
    "embedding": lambda axis, size: ParallelEmbedding(axis.part(size)[0]),
    "batch_norm": SyncBatchNorm,
})  # fmt: skip


class Scaled(nn.Module):
    """Turns a mean over local elements into this rank's share of the mean over all, and a sum into
    the micro-batch's share."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale
