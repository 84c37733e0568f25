"""Bytes that one operator call keeps for its backward, as torch runs it on a kind of device.

Most keep what `rules/saves.py` lists, their own operands and results. The others are here, products
and attention in `kept_products.py`:

    statistics   norms keep a mean and a reciprocal deviation per row or channel
    indices      max pooling keeps where each maximum was
    parts        a cross-entropy is a log-softmax and a look-up; an operator that the executor
                 replaces is its replacement

What is allocated is given in elements × bytes; what is kept of a tensor that exists anyway is its
allocation, counted once however often it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.costmodel.graph import argument
from meshwright.costmodel.memory.call import SINGLE, Call, Saver, listed, new, width
from meshwright.costmodel.memory.kept_products import PRODUCTS, attention_results
from meshwright.costmodel.memory.storage import Held, Storage, compact, placed
from meshwright.costmodel.rules import LEAVES, leaf_of

INDEX = 8  # bytes of an index


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Memory of the results of a call, and the allocations that its backward needs."""

    results: tuple[Held, ...]
    storages: tuple[Storage, ...]


def keep(call: Call) -> Kept:
    """The results and the kept allocations of one call that is not run."""
    place = PLACED.get(call.op.short)
    results = place(call) if place else placed(call.op, call.operands, call.results)
    if not any(y.grad for y in results):
        return Kept(results=results, storages=())
    saver = REPLACED.get(call.implementation) or SPECIAL.get(call.op.short, listed)
    return Kept(results=results, storages=tuple(dict.fromkeys(saver(call, results))))


def _dropout_results(call: Call) -> tuple[Held, ...]:
    """Its operand, where it drops nothing."""
    x = call.operands[0]
    if call.saves:
        return placed(call.op, call.operands, call.results)
    return (x.seen_as(x.shape, x.strides, call.results[0].grad),)


# --- norms, pooling, dropout ----------------------------------------------------------------------


def _statistics(call: Call) -> int:
    """Bytes of a norm's statistic: single precision on a GPU, on a CPU the parameters'."""
    widest = max(x.dtype.itemsize for x in call.operands)
    return max(SINGLE, widest) if call.device == "cuda" else widest


def _layer_norm(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    x = call.operands[0]
    rows = math.prod(x.shape[: len(x.shape) - len(call.op.args[1])])
    yield x.storage
    yield new(rows, _statistics(call))
    yield new(rows, _statistics(call))


def _rms_norm(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    """On a CPU a chain of operators in single precision at least."""
    x, trained = call.operands[0], any(w.grad for w in call.operands[1:])
    rows = math.prod(x.shape[: len(x.shape) - len(call.op.args[1])])
    yield new(rows, width(x))
    if call.device == "cuda":
        yield x.storage
        return
    yield x.storage if x.dtype.itemsize == width(x) else new(x.numel, width(x))
    if trained:
        yield new(x.numel, width(x))


def _group_norm(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    x = call.operands[0]
    groups = x.shape[0] * int(call.op.args[1])
    yield compact(x).storage
    yield new(groups, _statistics(call))
    yield new(groups, _statistics(call))


def _batch_norm(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    x = call.operands[0]
    yield x.storage
    if argument(call.op, 5, "training", True):
        yield new(x.shape[1], _statistics(call))
        yield new(x.shape[1], _statistics(call))


def _synchronised(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    """The executor's batch norm over ranks: centred values, their scale, and the normalised ones if
    there is a weight to train."""
    x = call.operands[0]
    yield new(x.numel, width(x))
    yield new(x.shape[1], width(x))
    if any(w.grad for w in call.operands[1:]):
        yield new(x.numel, width(x))


def _max_pool(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    yield call.operands[0].storage
    yield new(results[0].numel, INDEX)


def _dropout(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    """The mask, as numbers of the values' type; a GPU's own kernel keeps bytes."""
    if call.saves:
        own = call.device == "cuda" and not call.counter_dropout
        yield new(results[0].numel, 1 if own else results[0].dtype.itemsize)


def _log_sigmoid(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    x = call.operands[0]
    yield x.storage
    if call.device == "cpu":
        yield new(x.numel, x.dtype.itemsize)


# --- losses and look-ups --------------------------------------------------------------------------


def _cross_entropy(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
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


def _nll(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    logits = call.operands[0]
    yield (logits if len(logits.shape) in (1, 2, 4) else compact(logits)).storage
    yield from (x.storage for x in call.operands[1:])
    yield new(1, logits.dtype.itemsize)
    yield from _count(call, logits)


def _count(call: Call, logits: Held) -> Iterator[Storage]:
    """The number that a loss over ranks and micro-batches is divided by, in single precision at
    least, as the loss is."""
    if call.counted and argument(call.op, 3, "reduction", 1) == 1:
        yield new(1, width(logits))


def _vocabulary_parallel(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    """The executor's cross-entropy over split classes: probabilities in single precision at least;
    per row the local target, whether it is elsewhere, whether it counts."""
    logits, target = call.operands[:2]
    yield new(logits.numel, width(logits))
    yield new(target.numel, INDEX)
    yield new(target.numel, 1)
    yield new(target.numel, 1)
    yield from _count(call, logits)


def _parallel_embedding(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    """The executor's look-up in split rows: local ids, and which are elsewhere."""
    ids = call.operands[1]
    yield new(ids.numel, INDEX)
    yield new(ids.numel, 1)


def _l1_loss(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    yield new(call.operands[0].numel, call.operands[0].dtype.itemsize)


def _leaf(call: Call, results: Sequence[Held]) -> Iterator[Storage]:
    """The bytes of its `Work`, in proportion to this rank's part of the first result."""
    work = leaf_of(call.op).work
    for i in work.saves:
        yield (call.operands[i] if i >= 0 else results[-1 - i]).storage
    if work.saved_bytes:
        yield Storage(work.saved_bytes * results[0].numel / work.numel)


SPECIAL: Mapping[str, Saver] = MappingProxyType({
    **PRODUCTS,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), _max_pool),
    "dropout": _dropout,
    "log_sigmoid": _log_sigmoid,
    "cross_entropy_loss": _cross_entropy,
    "nll_loss": _nll,
    "nll_loss_nd": _nll,
    "l1_loss": _l1_loss,
    **dict.fromkeys(LEAVES, _leaf),
})  # fmt: skip
# by the name of the implementation that stands in an operator's place
REPLACED: Mapping[str, Saver] = MappingProxyType({
    "batch_norm": _synchronised,
    "cross_entropy": _vocabulary_parallel,
    "embedding": _parallel_embedding,
})  # fmt: skip
# where the results of an operator lie, if not as `storage.placed` says
PLACED: Mapping[str, Callable[[Call], tuple[Held, ...]]] = MappingProxyType({
    "dropout": _dropout_results,
    "scaled_dot_product_attention": attention_results,
})  # fmt: skip
