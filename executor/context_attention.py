"""Attention over tokens that are split over the context axis, put together from blocks.

Let rank r have the queries Q_r and the keys and values K_j, V_j be those of rank j. Of a block of
keys, attention gives its part of the output O_j and L_j = log Σ exp(scores), both of each query,
and the whole is (Milakov and Gimelshein, arXiv 1805.02867)

    L = log Σ_j exp L_j,        O = Σ_j exp(L_j - L) O_j.

The backward of a block needs O and L of the whole alone (FlashAttention-2, arXiv 2307.08691), and
gives its part of dQ_r, and dK_j and dV_j, which are summed over r. So nothing is kept for it but
what a rank has by itself. Keys of other ranks come, by `kind`,

    all_gather   all at once; in the backward once more, and their gradients are reduce-scattered
    ring         from the rank before, the next ones while the scores of those at hand are computed;
                 in the backward their gradients go round behind them

Causal attention in zigzag, rank r having the chunks r and 2n-1-r of its tokens, has three kinds of
blocks: its own, causal as they lie; of an earlier rank j < r all queries with K_j's first chunk; of
a later one the queries of the second chunk with all of K_j. In the plain order earlier ranks'
keys are read whole, later ones' not at all.

The slices of a micro-batch that goes through a pipeline in parts are such blocks in time: a slice's
queries read the keys and values of the slices before it, which the same rank has kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.costmodel.mesh import RING, ContextKind
from meshwright.executor.devices import kind_of
from meshwright.executor.resharding import (
    Axis,
    SliceAxis,
    all_gather_flat,
    reduce_scatter_flat,
    zigzag_chunks,
)

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of attention that a rank computes, by the layout of tokens and by whether it is
    `causal`."""

    axis: Axis
    kind: ContextKind
    causal: bool
    zigzag: bool
    scale: float | None

    def with_rank(self, j: int, tokens: int) -> tuple[slice, slice, bool] | None:
        """Queries that read the keys of rank j, the keys that are read, and whether the block is
        causal; None where none are. Both ranks have so many `tokens`."""
        r, half, full = self.axis.rank, tokens // 2, slice(0, tokens)
        if not self.causal:
            return full, full, False
        if j == r:
            return full, full, True
        if not self.zigzag:
            return (full, full, False) if j < r else None
        return (full, slice(0, half), False) if j < r else (slice(half, tokens), full, False)

    def columns(self, mask: torch.Tensor, j: int) -> torch.Tensor:
        """The mask's columns for the keys of rank j, in their order; one column is for all."""
        if mask.shape[-1] == 1:
            return mask
        if not self.zigzag:
            return mask.chunk(self.axis.size, -1)[j]
        chunks = mask.chunk(2 * self.axis.size, -1)
        return torch.cat([chunks[k] for k in zigzag_chunks(self.axis.size)[2 * j : 2 * j + 2]], -1)


class ContextAttention(nn.Module):
    """Scaled dot-product attention [batch, heads, tokens, features] of this rank's tokens; the
    mask, if any, has this rank's rows and all columns."""

    def __init__(self, axis: Axis, kind: ContextKind, *, causal: bool, zigzag: bool) -> None:
        super().__init__()
        self.axis, self.kind, self.causal, self.zigzag = axis, kind, causal, zigzag

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        blocks = Blocks(
            axis=self.axis, kind=self.kind, causal=self.causal, zigzag=self.zigzag, scale=scale
        )
        out: torch.Tensor = _ContextAttention.apply(q, k, v, mask, blocks)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        return f"{self.kind} on {self.axis.name}"


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        blocks: Blocks,
    ) -> torch.Tensor:
        total: Part | None = None
        for j, (keys, values) in _arriving(blocks, (k, v)):
            where = blocks.with_rank(j, q.shape[2])
            if where is None:
                continue
            rows, columns, causal = where
            block = attend(
                q[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                None if mask is None else blocks.columns(mask, j),
                causal=causal,
                scale=blocks.scale,
            )
            total = block if total is None else total.joined(block, rows)
        assert total is not None  # its own keys come first
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, out, total.log_sum)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, out, log_sum = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        gathering = _Returning(blocks, k, v)
        for j, (keys, values) in _arriving(blocks, (k, v)):
            where = blocks.with_rank(j, q.shape[2])
            if where is not None:
                rows, columns, causal = where
                grads = attend_backward(
                    gradients[0][:, :, rows],
                    q[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    None if mask is None else blocks.columns(mask, j),
                    Part(out[:, :, rows], log_sum[:, :, rows]),
                    causal=causal,
                    scale=blocks.scale,
                )
                grad_q[:, :, rows] += grads[0]
                gathering.add(j, columns, grads[1:])
            gathering.pass_on()
        grad_k, grad_v = gathering.whole()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


# --- keys and values of other ranks ---------------------------------------------------------------


def _arriving(blocks: Blocks, local: Tensors) -> Iterator[tuple[int, Tensors]]:
    """(rank, its keys and values), this rank's own first, then those before it."""
    axis = blocks.axis
    at_hand = local
    gathered = None if blocks.kind == RING else [_gathered(x, axis) for x in local]
    for step in range(axis.size):
        j = (axis.rank - step) % axis.size
        if gathered is not None:
            yield j, local if step == 0 else tuple(x[j] for x in gathered)
            continue
        coming = _sent_on(at_hand, axis) if step + 1 < axis.size else None
        yield j, at_hand
        if coming is not None:
            at_hand = coming.wait()


def _gathered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[n, ...]: a tensor of every rank."""
    gathered, work = all_gather_flat(x.contiguous().view(-1), axis)
    work.wait()
    return gathered.view(axis.size, *x.shape)


@dataclass(slots=True)
class _Coming:
    """Tensors on their way from the rank before."""

    sent: Tensors  # to live as long
    received: Tensors
    works: Sequence[dist.Work]

    def wait(self) -> Tensors:
        for work in self.works:
            work.wait()
        return self.received


def _sent_on(tensors: Tensors, axis: Axis) -> _Coming:
    """Start sending tensors to the next rank, and receiving as many from the one before."""
    following, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    to, source = (dist.get_global_rank(axis.group, rank) for rank in (following, before))
    sent = tuple(x.contiguous() for x in tensors)
    received = tuple(torch.empty_like(x) for x in sent)
    sends = [dist.P2POp(dist.isend, x, to, group=axis.group) for x in sent]
    receives = [dist.P2POp(dist.irecv, x, source, group=axis.group) for x in received]
    pairs = [op for pair in zip(sends, receives, strict=True) for op in pair]
    return _Coming(sent, received, dist.batch_isend_irecv(pairs))


class _Returning:
    """Gradients of keys and values on their way back to the ranks that have them."""

    def __init__(self, blocks: Blocks, k: torch.Tensor, v: torch.Tensor) -> None:
        self.axis, self.ring = blocks.axis, blocks.kind == RING
        self.coming: _Coming | None = None
        held = 1 if self.ring else self.axis.size
        self.parts = tuple(x.new_zeros((held, *x.shape)) for x in (k, v))

    def add(self, j: int, columns: slice, grads: Sequence[torch.Tensor]) -> None:
        """Add gradients of keys and values of rank j."""
        self._arrive()
        for part, grad in zip(self.parts, grads, strict=True):
            part[0 if self.ring else j, :, :, columns] += grad

    def pass_on(self) -> None:
        """After each rank's keys: in a ring their gradients follow them, while the next ones' are
        computed."""
        if self.ring:
            self._arrive()
            self.coming = _sent_on(self.parts, self.axis)

    def _arrive(self) -> None:
        if self.coming is not None:
            self.parts, self.coming = self.coming.wait(), None

    def whole(self) -> Tensors:
        """Gradients of this rank's own keys and values."""
        self._arrive()
        if self.ring:
            return tuple(part[0] for part in self.parts)
        return tuple(self._scattered(part) for part in self.parts)

    def _scattered(self, parts: torch.Tensor) -> torch.Tensor:
        shard, work = reduce_scatter_flat(parts.view(self.axis.size, -1), self.axis)
        work.wait()
        return shard.view(parts.shape[1:])


# --- blocks of attention --------------------------------------------------------------------------

# Attention with one block of keys: its output and the logarithm of its sum, and the gradients.
#
# Where torch has a fused kernel that gives the sum (CPU; NVIDIA GPUs in half precision, no mask),
# it is used; else the scores are written out. A query that a mask keeps from every key of a block
# has the sum exp(-∞): its output there counts nothing.


HALF = (torch.float16, torch.bfloat16)
_ATEN = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Part:
    """Output of some queries [batch, heads, tokens, features], and the log of the sum of
    exp(scores) [batch, heads, tokens], in single precision at least."""

    out: torch.Tensor
    log_sum: torch.Tensor

    def joined(self, other: Part, rows: slice) -> Part:
        """With the part of other keys for the queries `rows` of this one."""
        log_sums = self.log_sum[:, :, rows]
        log_sum = torch.logaddexp(log_sums, other.log_sum)
        # (-∞) - (-∞): queries that have read no key yet
        weights = [
            torch.exp(x - log_sum).nan_to_num(0.0).unsqueeze(-1) for x in (log_sums, other.log_sum)
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
    total: Part,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v by a block of keys; `whole` is what all keys together gave."""
    wide_k, wide_v = (_for_each_query(x, q) for x in (k, v))
    if _has_kernel(q, v, mask):
        grads = _kernel_backward(gradient, q, wide_k, wide_v, total, causal, scale)
    else:
        grads = _written_out(gradient, q, wide_k, wide_v, mask, total, causal, scale)
    grad_q, *others = grads
    grad_k, grad_v = (_of_groups(grad, x) for grad, x in zip(others, (k, v), strict=True))
    return grad_q, grad_k, grad_v


def _written_out(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    total: Part,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, mask, causal, scale)
    wide = scores.dtype
    weights = torch.exp(scores - total.log_sum.unsqueeze(-1)).nan_to_num(0.0)
    gradient, q, k, v, out = (x.to(wide) for x in (gradient, q, k, v, total.out))
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
    on_gpu = kind_of(q.device) == "cuda" and q.dtype in HALF and q.shape[-1] % 8 == 0
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
    total: Part,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    operands = (gradient, q, k, v, total.out.to(q.dtype), total.log_sum)
    if q.device.type == "cpu":
        backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = backward(
            *operands, 0.0, causal, scale=scale
        )
        return grads
    nothing = torch.empty(0, dtype=torch.int64, device=q.device)  # no dropout: no state of it
    lengths = (nothing.int(), nothing.int(), q.shape[2], k.shape[2])
    backward = _ATEN._scaled_dot_product_flash_attention_backward.default
    grads = backward(
        *(x.contiguous() for x in operands), *lengths, 0.0, causal, nothing, nothing, scale=scale
    )
    return grads


# --- keys and values of earlier slices ------------------------------------------------------------

# Of slice i with the tokens a to b, causal attention is that of its own block, joined with the
# block of all keys before a. Its backward gives gradients of those, which are summed until the
# backward of their own slice takes them: backwards go from the last slice to the first, so that by
# then all who have read a slice's keys have added theirs. No graph of autograd leads from slice to
# slice.


class KeptTokens:
    """Keys and values of a micro-batch that one attention has seen so far, [batch, heads, tokens,
    features], in memory for all its tokens from its first slice on, and the sums of their gradients
    by later slices, in single precision at least, from its first backward on."""

    def __init__(self) -> None:
        self.held: Tensors = ()
        self.sums: Tensors = ()
        self.end = 0  # of the tokens that are there

    def take(self, part: Tensors, axis: SliceAxis) -> None:
        """Keep those of a slice."""
        first, end = axis.bounds[axis.rank : axis.rank + 2]
        if end <= self.end:  # run again
            return
        if not self.held:
            shapes = ((*x.shape[:2], axis.bounds[-1], x.shape[3]) for x in part)
            self.held = tuple(x.new_empty(shape) for x, shape in zip(part, shapes, strict=True))
        for of_all, x in zip(self.held, part, strict=True):
            of_all[:, :, first:end] = x
        self.end = end

    def add(self, grads: Tensors) -> None:
        """Add gradients of the first tokens."""
        if not self.sums:  # the last slice comes first, and has read most
            self.sums = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in grads)
            return
        for total, x in zip(self.sums, grads, strict=True):
            total[:, :, : x.shape[2]] += x

    def taken(self, grads: Tensors, first: int, end: int) -> Tensors:
        """Gradients of a slice's keys and values: its own with those of later slices."""
        if not self.sums or first >= self.sums[0].shape[2]:
            return grads
        return tuple(
            (x + total[:, :, first:end]).to(x.dtype)
            for x, total in zip(grads, self.sums, strict=True)
        )


# attention's number in its block -> what it keeps; per block and micro-batch
Kept = dict[int, KeptTokens]


class SlicedAttention(nn.Module):
    """Causal attention [batch, heads, tokens, features] of a slice's tokens. `number` tells it
    apart within its block."""

    def __init__(self, axis: SliceAxis, number: int) -> None:
        super().__init__()
        self.axis, self.number = axis, number

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, kept: Kept
    ) -> torch.Tensor:
        tokens = kept.setdefault(self.number, KeptTokens())
        out: torch.Tensor = _SlicedAttention.apply(q, k, v, tokens, self.axis, scale)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        return f"slice {self.axis.rank} of {self.axis.size}"


class _SlicedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kept: KeptTokens,
        axis: SliceAxis,
        scale: float | None,
    ) -> torch.Tensor:
        kept.take((k, v), axis)
        first, end = axis.bounds[axis.rank : axis.rank + 2]
        total = attend(q, k, v, None, causal=True, scale=scale)
        if first:
            keys, values = (x[:, :, :first] for x in kept.held)
            before = attend(q, keys, values, None, causal=False, scale=scale)
            total = total.joined(before, slice(0, end - first))
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, out, total.log_sum)
        ctx.kept, ctx.bounds, ctx.scale = kept, (first, end), scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, out, log_sum = ctx.saved_tensors
        (gradient,), (first, end), total = gradients, ctx.bounds, Part(out, log_sum)
        kept: KeptTokens = ctx.kept

        def back(tokens: slice, *, causal: bool) -> Tensors:
            keys, values = (x[:, :, tokens] for x in kept.held)
            return attend_backward(
                gradient, q, keys, values, None, total, causal=causal, scale=ctx.scale
            )

        grad_q, *others = back(slice(first, end), causal=True)
        of_slice = kept.taken(tuple(others), first, end)
        if first:
            more, *earlier = back(slice(0, first), causal=False)
            grad_q = grad_q + more
            kept.add(tuple(earlier))
        return grad_q.to(q.dtype), *(x.to(q.dtype) for x in of_slice), None, None, None


# --- keys and values of earlier tokens ------------------------------------------------------------

# Generation: a forward of a few tokens reads the keys and values of all tokens before them.


class KeyValueCache:
    """Keys and values of every attention of a rank's stages, [..., tokens, features], in the order
    in which a forward runs them, which is always the same. `start` is the position of the first
    token of the forward that runs, None where it has them all, and fills the cache."""

    def __init__(self) -> None:
        self.start: int | None = None
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next = 0

    def begin(self, start: int | None) -> None:
        """A forward begins."""
        self.start, self._next = start, 0
        if start is None:
            self._held = []

    def with_earlier(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of all tokens, for the next attention of the forward."""
        if self.start is None:
            self._held.append((keys.clone(), values.clone()))
            return keys, values
        held, self._next = self._held[self._next], self._next + 1
        end = self.start + keys.shape[-2]
        for of_all, of_some in zip(held, (keys, values), strict=True):
            of_all[..., self.start : end, :] = of_some
        return held


class CachedAttention(nn.Module):
    """Attention without dropout that reads a cache: causal, or by a mask [..., queries, tokens]."""

    def __init__(self, cache: KeyValueCache, *, scale: float | None, groups: bool) -> None:
        super().__init__()
        self.cache, self.scale, self.groups = cache, scale, groups

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = self.cache.with_earlier(k, v)
        start, causal = self.cache.start, mask is None
        if start is not None and mask is None:
            end, causal = start + q.shape[-2], False
            keys, values = keys[..., :end, :], values[..., :end, :]
            position = torch.arange(end, device=q.device)
            mask = position[start:, None] >= position
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(
            q, keys, values, mask, is_causal=causal, scale=self.scale, enable_gqa=self.groups
        )
