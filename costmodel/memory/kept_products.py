"""Bytes that products and attention keep for their backward.

A product of batches of matrices flattens them; where that is no view, the copy is what is saved.
Attention keeps the logarithm of each row's normaliser; without a fused kernel it is products and a
softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType

import torch

from meshwright.costmodel.graph import argument
from meshwright.costmodel.memory.call import Call, Saver, listed, new, width
from meshwright.costmodel.memory.storage import (
    Held,
    Local,
    Storage,
    elementwise_strides,
    expanded,
    fresh,
    permuted,
    placed,
    reshaped,
)
from meshwright.costmodel.rules import is_causal

CUDA_ROWS = 32  # the memory-efficient kernel's normalisers are padded to whole tiles of rows


# --- products -------------------------------------------------------------------------------------


def flattened(x: Held, lead: Sequence[float]) -> Held:
    """The tensor as a batch of matrices: the dims before the last two broadcast to `lead` and
    joined."""
    whole = expanded(x, (*lead, *x.shape[-2:]))
    return reshaped(whole, (math.prod(lead), *x.shape[-2:]))


def product(a: Held, b: Held) -> Iterator[Storage]:
    """Operands that `a @ b` keeps. A batch times one matrix is one product over all rows, if the
    matrix is trained or the rows lie evenly; else it is a batch of products."""
    if len(a.shape) >= 3 and len(b.shape) <= 2 and (b.grad or _even(a)):
        a = reshaped(a, (math.prod(a.shape[:-1]), a.shape[-1]))
    elif len(a.shape) <= 2 and len(b.shape) >= 3 and a.grad:
        b = permuted(b, [*range(len(b.shape) - 2), -1, -2])
        b = reshaped(b, (math.prod(b.shape[:-1]), b.shape[-1]))
    elif len(a.shape) >= 3 or len(b.shape) >= 3:
        pairs = zip_longest(a.shape[-3::-1], b.shape[-3::-1], fillvalue=1.0)
        lead = [max(pair) for pair in pairs][::-1]
        a, b = flattened(a, lead), flattened(b, lead)
    if b.grad:
        yield a.storage
    if a.grad:
        yield b.storage


def _even(x: Held) -> bool:
    pairs = zip(x.strides[:-2], x.strides[1:-1], x.shape[1:-1], strict=True)
    return all(outer == inner * size for outer, inner, size in pairs)


def _linear(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    x, weight = call.operands[:2]
    return product(x, permuted(weight, [*range(len(weight.shape))][::-1]))


def _matmul(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    return product(*call.operands)


def _einsum(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    """Two operands become batches of matrices: common and kept labels, each operand's own, summed
    ones."""
    left, _, out = str(call.op.args[0]).replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or not out or "." in left or any(len({*t}) != len(t) for t in terms):
        yield from listed(call, results)
        return
    batch = [c for c in out if c in terms[0] and c in terms[1]]
    own = [[c for c in out if c in term and c not in batch] for term in terms]
    summed = [c for c in terms[0] if c in terms[1] and c not in out]
    orders = ([batch, own[0], summed], [batch, summed, own[1]])
    for k, (x, term, groups) in enumerate(zip(call.operands, terms, orders, strict=True)):
        size = dict(zip(term, x.shape, strict=True))
        moved = permuted(x, [term.index(c) for group in groups for c in group])
        flat = reshaped(moved, tuple(math.prod(size[c] for c in group) for group in groups))
        if call.operands[1 - k].grad:
            yield flat.storage


# --- attention ------------------------------------------------------------------------------------


def _kernel(call: Call) -> str:
    """The attention that runs: "fused" or "efficient" kernels, or "math", written out in operators.

    Source: torch's selection (sdp_utils) with its default priorities, without cuDNN's kernel.
    """
    q, k, v = call.operands[:3]
    mask = call.operands[3] if len(call.operands) > 3 else None
    drops = argument(call.op, 4, "dropout_p", 0.0)
    if len(q.shape) != 4 or (drops and (call.counter_dropout or call.device == "cpu")):
        return "math"
    if mask is not None and (mask.grad or len(mask.shape) == 3):
        return "math"
    plain = all(x.strides[-1] == 1 for x in (q, k, v))
    if call.device == "cpu":
        return "fused" if plain and q.shape[-1] == v.shape[-1] else "math"
    if mask is None and q.dtype.itemsize == 2 and q.shape[-1] == v.shape[-1] <= 256:
        return "fused"
    return "efficient" if q.shape[-3] == k.shape[-3] else "math"


def _attention(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    q, k, v = call.operands[:3]
    mask = call.operands[3] if len(call.operands) > 3 else None
    kernel = _kernel(call)
    if kernel == "math":
        drops = bool(argument(call.op, 4, "dropout_p", 0.0))
        yield from _dropped(call, q, k, v, mask) if drops else _written_out(call, q, k, v)
        return
    yield from (x.storage for x in (q, k, v, results[0]))
    rows = q.shape[-2]
    if kernel == "efficient":
        rows = math.ceil(rows / CUDA_ROWS) * CUDA_ROWS
    yield new(math.prod(q.shape[:-2]) * rows, width(q))
    if mask is not None:  # a mask of booleans is made one of numbers to be added
        made = mask.dtype == torch.bool
        yield new(mask.numel, q.dtype.itemsize) if made else mask.storage


def _heads(q: Held, k: Held, v: Held) -> tuple[Held, Held]:
    """Keys and values repeated for every query head."""
    if q.shape[-3:-2] == k.shape[-3:-2]:
        return k, v
    shapes = ((*x.shape[:-3], q.shape[-3], *x.shape[-2:]) for x in (k, v))
    k, v = (
        fresh(Local(shape=shape, dtype=x.dtype, grad=x.grad))
        for x, shape in zip((k, v), shapes, strict=True)
    )
    return k, v


def _written_out(call: Call, q: Held, k: Held, v: Held) -> Iterator[Storage]:
    """Scaled queries and keys, probabilities, values; in single precision at least."""
    k, v = _heads(q, k, v)
    size, lead = width(q), q.shape[:-2]
    if k.grad:
        yield new(q.numel, size)
    if q.grad:
        yield new(k.numel, size)
    yield new(math.prod(lead) * q.shape[-2] * k.shape[-2], size)
    if q.grad or k.grad:
        wide = v if v.dtype.itemsize == size else fresh(replace(v, dtype=torch.float32))
        yield flattened(wide, lead).storage


def _dropped(call: Call, q: Held, k: Held, v: Held, mask: Held | None) -> Iterator[Storage]:
    """The executor's attention with dropout by counter: probabilities before and after, and the
    mask between them, besides the operands as matrices and the masks of what may be seen."""
    k, v = _heads(q, k, v)
    rank, lead = len(k.shape), q.shape[:-2]
    scores = math.prod(lead) * q.shape[-2] * k.shape[-2]
    yield from product(q, permuted(k, [*range(rank - 2), rank - 1, rank - 2]))
    if is_causal(call.op):
        yield new(q.shape[-2] * k.shape[-2], 1)
    if mask is not None and mask.dtype == torch.bool:
        yield new(mask.numel, 1)
    if v.grad:
        yield new(scores, q.dtype.itemsize)
    if q.grad or k.grad:
        yield new(scores, q.dtype.itemsize)
        yield new(scores, q.dtype.itemsize)
        yield flattened(v, lead).storage


def attention_results(call: Call) -> tuple[Held, ...]:
    """Kernels write what is laid out as the queries are."""
    if _kernel(call) == "math":
        return placed(call.op, call.operands, call.results)
    y = call.results[0]
    return (fresh(y, elementwise_strides(y.shape, call.operands[:1])),)


PRODUCTS: Mapping[str, Saver] = MappingProxyType({
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
})  # fmt: skip
