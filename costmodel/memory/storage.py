"""Memory of tensors: which share an allocation, and in which order their elements lie.

A tensor is a window on an allocation: a shape and strides, counted in elements. What autograd saves
of it keeps the whole allocation, so whether a reshape is a view or a copy decides what a backward
costs. Three rules of torch's are enough to know:

    a reshape is a view where every run of dims that it joins or cuts lies evenly in memory
    an element-wise result is dense, its dims ordered as its operands' strides order them
    every other result that is no view is contiguous

Sizes are floats where a rank's share of the batch is no whole number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from meshwright.costmodel.graph import Op, argument
from meshwright.costmodel.rules import PERMUTATIONS, VIEWS, is_pointwise, permutation

if TYPE_CHECKING:
    import torch

Sizes = tuple[float, ...]
Origin = Literal["made", "input", "raw", "stored"]


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """One allocation, equal to itself alone.

    `origin`: made by an operator; input of a block, made by another; raw, made from the batch alone
    (masks, positions); stored with the model (parameters, buffers, constants).
    """

    nbytes: float
    origin: Origin = "made"


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A tensor on one rank before it is known where it lies; `grad`: a gradient flows into it."""

    shape: Sizes
    dtype: torch.dtype
    grad: bool = False

    @property
    def numel(self) -> float:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> float:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Local):
    """A tensor in memory; strides in elements."""

    storage: Storage
    strides: Sizes

    @property
    def contiguous(self) -> bool:
        return _dense(zip(reversed(self.strides), reversed(self.shape), strict=True))

    def seen_as(self, shape: Sizes, strides: Sizes, grad: bool | None = None) -> Held:
        """Another window on the same allocation."""
        grad = self.grad if grad is None else grad
        return replace(self, shape=shape, strides=strides, grad=grad)


def fresh(like: Local, strides: Sizes | None = None, origin: Origin = "made") -> Held:
    """A new allocation of exactly one tensor."""
    strides = row_major(like.shape) if strides is None else strides
    storage = Storage(like.nbytes, origin)
    return Held(
        shape=like.shape, dtype=like.dtype, grad=like.grad, storage=storage, strides=strides
    )


# --- strides --------------------------------------------------------------------------------------


def row_major(shape: Sizes) -> Sizes:
    return ordered(shape, range(len(shape)))


def ordered(shape: Sizes, order: Sequence[int]) -> Sizes:
    """Strides of a dense tensor whose dims lie in `order`, outermost first."""
    strides = [1.0] * len(shape)
    step = 1.0
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def _dense(dims: Iterable[tuple[float, float]]) -> bool:
    """Whether dims, (stride, size) from the innermost on, fill memory."""
    step = 1.0
    for stride, size in dims:
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def view_strides(shape: Sizes, strides: Sizes, wanted: Sizes) -> Sizes | None:
    """Strides under which the same memory has another shape; None where there are none. Each run of
    dims that lies evenly in memory must hold a run of the wanted dims."""
    view = [1.0] * len(wanted)
    at = len(wanted) - 1
    run, base = 1.0, strides[-1] if strides else 1.0
    for d in reversed(range(len(shape))):
        run *= shape[d]
        if d and (shape[d - 1] == 1 or strides[d - 1] == run * base):
            continue
        covered = 1.0
        while at >= 0 and (covered < run or wanted[at] == 1):
            view[at] = covered * base
            covered *= wanted[at]
            at -= 1
        if covered != run:
            return None
        if d:
            run, base = 1.0, strides[d - 1]
    return tuple(view)


def elementwise_strides(shape: Sizes, operands: Sequence[Held]) -> Sizes:
    """Strides of the dense result of an element-wise operator, dims ordered as its operands': the
    first operand that broadcasts neither of two dims orders them by its strides."""
    if all(x.shape == shape for x in operands):
        if all(x.contiguous for x in operands):
            return row_major(shape)
        first = operands[0].strides
        same = all(x.strides == first for x in operands)
        if same and _dense(sorted(zip(first, shape, strict=True))):
            return first
    aligned = [_broadcast(x, shape) for x in operands]

    def after(a: int, b: int) -> int:
        """1 if dim a lies outside of dim b, -1 if inside, 0 if no operand says."""
        for strides in aligned:
            if 0 in (strides[a], strides[b]):
                continue
            if strides[a] != strides[b]:
                return 1 if strides[a] > strides[b] else -1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = [*reversed(range(len(shape)))]  # innermost first; insertion sort, as not all is ordered
    for i in range(1, len(order)):
        moving = i
        for k in reversed(range(i)):
            sign = after(order[k], order[moving])
            if sign < 0:
                break
            if sign > 0:
                order[k], order[moving] = order[moving], order[k]
                moving = k
    return ordered(shape, order[::-1])


def _broadcast(x: Held, shape: Sizes) -> Sizes:
    added = len(shape) - len(x.shape)
    return (0.0,) * added + tuple(
        0.0 if size == 1 and shape[d + added] != 1 else stride
        for d, (size, stride) in enumerate(zip(x.shape, x.strides, strict=True))
    )


# --- views ----------------------------------------------------------------------------------------


def reshaped(x: Held, shape: Sizes) -> Held:
    """A view where there is one, else a contiguous copy."""
    strides = view_strides(x.shape, x.strides, shape)
    if strides is None:
        return fresh(Local(shape=shape, dtype=x.dtype, grad=x.grad))
    return x.seen_as(shape, strides)


def permuted(x: Held, order: Sequence[int]) -> Held:
    return x.seen_as(tuple(x.shape[d] for d in order), tuple(x.strides[d] for d in order))


def expanded(x: Held, shape: Sizes) -> Held:
    """Dims of one element repeated, and dims added in front, without memory of their own."""
    return x.seen_as(shape, _broadcast(x, shape))


def compact(x: Held) -> Held:
    """The tensor itself where it is contiguous, else a contiguous copy."""
    return x if x.contiguous else fresh(x)


# --- results of operators -------------------------------------------------------------------------

Place = Callable[[Op, Held, Local], Held]


def _slice(op: Op, x: Held, y: Local) -> Held:
    strides = list(x.strides)
    strides[int(argument(op, 1, "dim", 0))] *= float(argument(op, 4, "step", 1))
    return x.seen_as(y.shape, tuple(strides))


def _dropped(op: Op, x: Held, y: Local) -> Held:
    dim = int(argument(op, 1, "dim", 0)) % len(x.shape)
    return x.seen_as(y.shape, x.strides[:dim] + x.strides[dim + 1 :])


def _converted(op: Op, x: Held, y: Local) -> Held:
    if x.dtype == y.dtype:
        return x
    return fresh(y, elementwise_strides(y.shape, [x]))


PLACES: Mapping[str, Place] = MappingProxyType({
    **dict.fromkeys(VIEWS, lambda op, x, y: reshaped(x, y.shape)),
    **dict.fromkeys(PERMUTATIONS, lambda op, x, y: permuted(x, permutation(op, len(x.shape)))),
    **dict.fromkeys(("expand", "expand_as"), lambda op, x, y: expanded(x, y.shape)),
    "slice": _slice,
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk"), lambda op, x, y: x.seen_as(y.shape, x.strides)
    ),
    **dict.fromkeys(("select", "unbind"), _dropped),
    **dict.fromkeys(("alias", "detach"), lambda op, x, y: x),
    **dict.fromkeys(("to", "type_as", "float", "half", "bfloat16"), _converted),
    "contiguous": lambda op, x, y: compact(x),
})  # fmt: skip


def placed(op: Op, operands: Sequence[Held], results: Sequence[Local]) -> tuple[Held, ...]:
    """Memory of the results of an operator: views, or tensors of their own."""
    place = PLACES.get(op.short)
    if place and operands:
        views = [place(op, operands[0], y) for y in results]
        return tuple(
            x if x.grad == y.grad else x.seen_as(x.shape, x.strides, y.grad)
            for x, y in zip(views, results, strict=True)
        )
    strides = None
    if any(not x.contiguous for x in operands) and is_pointwise(op):
        strides = elementwise_strides(results[0].shape, operands)
    return tuple(fresh(y, strides) for y in results)
