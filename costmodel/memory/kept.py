"""Bytes that one operator call keeps for its backward, as torch runs it on a kind of device.

Most keep their own operands and results, which `rules/registry.py` lists. Here are the others:

    products     of batches of matrices flatten them; where that is no view, the copy is kept
    attention    keeps the logarithm of each row's normaliser; without a fused kernel it is products
                 and a softmax
    statistics   norms keep a mean and a reciprocal deviation per row or channel
    indices      max pooling keeps where each maximum was
    parts        a cross-entropy is a log-softmax and a look-up; an operator that the executor
                 replaces is its replacement

A new allocation has elements × bytes; that of a tensor that exists anyway is counted once however
often it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType

from meshwright.costmodel.graph import Op, argument
from meshwright.costmodel.memory import storage
from meshwright.costmodel.rules import LEAVES, LOSS_IN_PARTS, is_causal, leaf_of

INDEX = 8  # bytes of an index
CUDA_ROWS = 32  # the memory-efficient kernel's normalisers are padded to whole tiles of rows
SLICED = "slices"  # the implementation of attention over token slices
SINGLE = 4  # bytes of what kernels accumulate in single precision at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator call on one rank. `saves` as in `OpFactors`; `implementation` names what the
    executor runs in its place; `counted`: a loss divided by a number of rows of its own;
    `counter_dropout` as in `Target`."""

    op: Op
    operands: tuple[storage.Held, ...]
    results: tuple[storage.Local, ...]
    saves: tuple[int, ...]
    device: str
    implementation: str = ""
    counted: bool = False
    counter_dropout: bool = True


Results = Sequence[storage.Held]
Storages = Iterator[storage.Storage]
Saver = Callable[[Call, Results], Iterable[storage.Storage]]  # the allocations kept


def listed(call: Call, results: Results) -> Storages:
    """The operands and results that `saves` lists."""
    for i in call.saves:
        yield (call.operands[i] if i >= 0 else results[-1 - i]).storage


def new(numel: float, itemsize: int) -> storage.Storage:
    """An allocation of elements × bytes."""
    return storage.Storage(numel * itemsize)


def width(x: storage.Local) -> int:
    """Bytes of an element in single precision at least."""
    return max(SINGLE, x.dtype.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Memory of the results of a call, and the allocations that its backward needs."""

    results: tuple[storage.Held, ...]
    storages: tuple[storage.Storage, ...]


def keep(call: Call) -> Kept:
    """The results and the kept allocations of one call that is not run."""
    place = PLACED.get(call.op.short)
    results = place(call) if place else storage.placed(call.op, call.operands, call.results)
    if not any(y.grad for y in results):
        return Kept(results=results, storages=())
    saver = REPLACED.get(call.implementation) or SPECIAL.get(call.op.short, listed)
    return Kept(results=results, storages=tuple(dict.fromkeys(saver(call, results))))


def _dropout_results(call: Call) -> tuple[storage.Held, ...]:
    """The operand, where nothing is dropped."""
    if call.saves:
        return storage.placed(call.op, call.operands, call.results)
    x = call.operands[0]
    return (x.seen_as(x.shape, x.strides, call.results[0].grad),)


# --- products -------------------------------------------------------------------------------------


def flattened(x: storage.Held, lead: Sequence[float]) -> storage.Held:
    """The tensor as a batch of matrices: dims before the last two broadcast to `lead`, joined."""
    expanded = storage.expanded(x, (*lead, *x.shape[-2:]))
    return storage.reshaped(expanded, (math.prod(lead), *x.shape[-2:]))


def product(a: storage.Held, b: storage.Held) -> Storages:
    """Operands that `a @ b` keeps. A batch times one matrix is one product over all rows, if the
    matrix is trained or the rows lie evenly; else it is a batch of products."""
    if len(a.shape) >= 3 and len(b.shape) <= 2 and (b.grad or _even(a)):
        a = storage.reshaped(a, (math.prod(a.shape[:-1]), a.shape[-1]))
    elif len(a.shape) <= 2 and len(b.shape) >= 3 and a.grad:
        b = storage.permuted(b, [*range(len(b.shape) - 2), -1, -2])
        b = storage.reshaped(b, (math.prod(b.shape[:-1]), b.shape[-1]))
    elif len(a.shape) >= 3 or len(b.shape) >= 3:
        pairs = zip_longest(a.shape[-3::-1], b.shape[-3::-1], fillvalue=1.0)
        lead = [max(pair) for pair in pairs][::-1]
        a, b = flattened(a, lead), flattened(b, lead)
    if b.grad:
        yield a.storage
    if a.grad:
        yield b.storage


def _even(x: storage.Held) -> bool:
    pairs = zip(x.strides[:-2], x.strides[1:-1], x.shape[1:-1], strict=True)
    return all(outer == inner * size for outer, inner, size in pairs)


def _linear(call: Call, results: Results) -> Storages:
    x, weight = call.operands[:2]
    return product(x, storage.permuted(weight, [*range(len(weight.shape))][::-1]))


def _einsum(call: Call, results: Results) -> Storages:
    """Two operands become batches of matrices: labels of both, of one alone, summed ones."""
    inputs, _, out = str(call.op.args[0]).replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2 or not out or "." in inputs or any(len({*t}) != len(t) for t in terms):
        yield from listed(call, results)
        return
    batch = [c for c in out if c in terms[0] and c in terms[1]]
    alone = [[c for c in out if c in term and c not in batch] for term in terms]
    summed = [c for c in terms[0] if c in terms[1] and c not in out]
    orders = ([batch, alone[0], summed], [batch, summed, alone[1]])
    for k, (x, term, groups) in enumerate(zip(call.operands, terms, orders, strict=True)):
        size = dict(zip(term, x.shape, strict=True))
        moved = storage.permuted(x, [term.index(c) for group in groups for c in group])
        flat = storage.reshaped(moved, tuple(math.prod(size[c] for c in group) for group in groups))
        if call.operands[1 - k].grad:
            yield flat.storage


# --- attention ------------------------------------------------------------------------------------


def _kernel(call: Call) -> str:
    """The attention that runs: "fused" or "efficient" kernels, or "math", written out in operators.
    Source: torch's selection (sdp_utils) with its default priorities, without cuDNN's kernel."""
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


def _attention(call: Call, results: Results) -> Storages:
    import torch

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
    if mask is not None:  # booleans become numbers to be added
        flags = mask.dtype == torch.bool
        yield new(mask.numel, q.dtype.itemsize) if flags else mask.storage


def _sliced(call: Call, results: Results) -> Storages:
    """Queries, the output and the logarithm of its sum; keys and values are `kept_tokens`."""
    q = call.operands[0]
    yield from (q.storage, results[0].storage, new(math.prod(q.shape[:-1]), width(q)))


def kept_tokens(call: Call) -> Storages:
    """Memory in which attention keeps keys and values of a slice for later ones, and in which it
    sums their gradients."""
    for x in call.operands[1:3]:
        yield from (new(x.numel, x.dtype.itemsize), new(x.numel, width(x)))


def _heads(q: storage.Held, k: storage.Held, v: storage.Held) -> tuple[storage.Held, storage.Held]:
    """Keys and values repeated for every query head."""
    if q.shape[-3:-2] == k.shape[-3:-2]:
        return k, v

    def repeated(x: storage.Held) -> storage.Held:
        shape = (*x.shape[:-3], q.shape[-3], *x.shape[-2:])
        return storage.fresh(storage.Local(shape=shape, dtype=x.dtype, grad=x.grad))

    return repeated(k), repeated(v)


def _written_out(call: Call, q: storage.Held, k: storage.Held, v: storage.Held) -> Storages:
    """Scaled queries and keys, probabilities, values; in single precision at least."""
    import torch

    k, v = _heads(q, k, v)
    size, lead = width(q), q.shape[:-2]
    if k.grad:
        yield new(q.numel, size)
    if q.grad:
        yield new(k.numel, size)
    yield new(math.prod(lead) * q.shape[-2] * k.shape[-2], size)
    if q.grad or k.grad:
        wide = v if v.dtype.itemsize == size else storage.fresh(replace(v, dtype=torch.float32))
        yield flattened(wide, lead).storage


def _dropped(
    call: Call, q: storage.Held, k: storage.Held, v: storage.Held, mask: storage.Held | None
) -> Storages:
    """The executor's attention with dropout by counter: probabilities before and after it, its
    mask, operands as matrices, and the masks of what may be seen."""
    import torch

    k, v = _heads(q, k, v)
    rank, lead = len(k.shape), q.shape[:-2]
    scores = math.prod(lead) * q.shape[-2] * k.shape[-2]
    yield from product(q, storage.permuted(k, [*range(rank - 2), rank - 1, rank - 2]))
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


def attention_results(call: Call) -> tuple[storage.Held, ...]:
    """Results of attention, whose kernels lay them out as the queries."""
    if _kernel(call) == "math":
        return storage.placed(call.op, call.operands, call.results)
    y = call.results[0]
    return (storage.fresh(y, storage.elementwise_strides(y.shape, call.operands[:1])),)


# --- norms, pooling, dropout ----------------------------------------------------------------------


def _statistics(call: Call) -> int:
    """Bytes of a norm's statistic: single precision on a GPU, on a CPU the parameters'."""
    widest = max(x.dtype.itemsize for x in call.operands)
    return max(SINGLE, widest) if call.device == "cuda" else widest


def _normed(call: Call, x: storage.Held, rows: float) -> list[storage.Storage]:
    """A norm's operand, and two statistics of each row."""
    return [x.storage, new(rows, _statistics(call)), new(rows, _statistics(call))]


def _rows(call: Call) -> float:
    """Rows that a norm over the last dims has."""
    x = call.operands[0]
    return math.prod(x.shape[: len(x.shape) - len(call.op.args[1])])


def _rms_norm(call: Call, results: Results) -> Storages:
    """On a CPU a chain of operators in single precision at least."""
    x, trained = call.operands[0], any(w.grad for w in call.operands[1:])
    yield new(_rows(call), width(x))
    if call.device == "cuda":
        yield x.storage
        return
    yield x.storage if x.dtype.itemsize == width(x) else new(x.numel, width(x))
    if trained:
        yield new(x.numel, width(x))


def _group_norm(call: Call, results: Results) -> list[storage.Storage]:
    x = call.operands[0]
    return _normed(call, storage.compact(x), x.shape[0] * int(call.op.args[1]))


def _batch_norm(call: Call, results: Results) -> list[storage.Storage]:
    x = call.operands[0]
    kept = _normed(call, x, x.shape[1])
    return kept if argument(call.op, 5, "training", True) else kept[:1]


def _synchronised(call: Call, results: Results) -> Storages:
    """Batch norm over ranks: centred values, their scale, normalised ones if a weight is
    trained."""
    x = call.operands[0]
    yield new(x.numel, width(x))
    yield new(x.shape[1], width(x))
    if any(w.grad for w in call.operands[1:]):
        yield new(x.numel, width(x))


def _dropout(call: Call, results: Results) -> Storages:
    """The mask, as numbers of the values' type; a GPU's own kernel keeps bytes."""
    if call.saves:
        in_bytes = call.device == "cuda" and not call.counter_dropout
        yield new(results[0].numel, 1 if in_bytes else results[0].dtype.itemsize)


def _log_sigmoid(call: Call, results: Results) -> Storages:
    x = call.operands[0]
    yield x.storage
    if call.device == "cpu":
        yield new(x.numel, x.dtype.itemsize)


# --- losses and look-ups --------------------------------------------------------------------------


def _cross_entropy(call: Call, results: Results) -> Storages:
    """Log-softmax, targets, the total weight; with smoothing which rows are ignored."""
    logits, target = call.operands[:2]
    yield new(logits.numel, logits.dtype.itemsize)
    yield from (x.storage for x in call.operands[1:])
    if target.dtype.is_floating_point:
        return
    yield new(1, logits.dtype.itemsize)
    yield from _count(call, logits)
    if argument(call.op, 5, "label_smoothing", 0.0):
        yield new(target.numel, 1)
        if argument(call.op, 3, "reduction", 1) == 1 and not call.counted:
            yield new(1, INDEX)


def _nll(call: Call, results: Results) -> Storages:
    logits = call.operands[0]
    yield (logits if len(logits.shape) in (1, 2, 4) else storage.compact(logits)).storage
    yield from (x.storage for x in call.operands[1:])
    yield new(1, logits.dtype.itemsize)
    yield from _count(call, logits)


def _count(call: Call, logits: storage.Held) -> Storages:
    """Divisor of a loss over ranks and micro-batches, in single precision at least, as the loss."""
    if call.counted and argument(call.op, 3, "reduction", 1) == 1:
        yield new(1, width(logits))


def _vocabulary_parallel(call: Call, results: Results) -> Storages:
    """The executor's cross-entropy over split classes: probabilities in single precision at least;
    per row the local target, whether it is elsewhere, whether it counts."""
    logits, target = call.operands[:2]
    yield new(logits.numel, width(logits))
    yield new(target.numel, INDEX)
    yield new(target.numel, 1)
    yield new(target.numel, 1)
    yield from _count(call, logits)


def _chunked(call: Call, results: Results) -> Storages:
    """Operands, and of each row the logarithm of its Σ exponentials."""
    yield from (x.storage for x in call.operands)
    yield new(call.operands[1].numel, width(call.operands[0]))
    yield from _count(call, call.operands[0])


def _parallel_embedding(call: Call, results: Results) -> list[storage.Storage]:
    """The executor's look-up in split rows: local ids, and which are elsewhere."""
    ids = call.operands[1]
    return [new(ids.numel, INDEX), new(ids.numel, 1)]


def _leaf(call: Call, results: Results) -> Storages:
    """The bytes of its `Work`, in proportion to this rank's part of the first result."""
    work = leaf_of(call.op).work
    for i in work.saves:
        yield (call.operands[i] if i >= 0 else results[-1 - i]).storage
    if work.saved_bytes:
        yield storage.Storage(work.saved_bytes * results[0].numel / work.numel)


SPECIAL: Mapping[str, Saver] = MappingProxyType({
    "linear": _linear,
    "matmul": lambda call, results: product(*call.operands),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "layer_norm": lambda call, results: _normed(call, call.operands[0], _rows(call)),
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    **dict.fromkeys(
        ("max_pool1d", "max_pool2d", "max_pool3d"),
        lambda call, results: [call.operands[0].storage, new(results[0].numel, INDEX)],
    ),
    "dropout": _dropout,
    "log_sigmoid": _log_sigmoid,
    "cross_entropy_loss": _cross_entropy,
    LOSS_IN_PARTS: _chunked,
    "nll_loss": _nll,
    "nll_loss_nd": _nll,
    "l1_loss": lambda call, results: [storage.Storage(call.operands[0].nbytes)],
    **dict.fromkeys(LEAVES, _leaf),
})  # fmt: skip
# by the name of the implementation that stands in an operator's place
REPLACED: Mapping[str, Saver] = MappingProxyType({
    "batch_norm": _synchronised,
    "cross_entropy": _vocabulary_parallel,
    "embedding": _parallel_embedding,
    SLICED: _sliced,
})  # fmt: skip
# where the results of an operator lie, if not as `storage.placed` says
PLACED: Mapping[str, Callable[[Call], tuple[storage.Held, ...]]] = MappingProxyType({
    "dropout": _dropout_results,
    "scaled_dot_product_attention": attention_results,
})  # fmt: skip
