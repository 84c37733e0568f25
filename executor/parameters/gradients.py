"""Gradients of a step: off the leaves as the backward makes them, summed over axes while it runs.

Gradients that are partial on some axis go into buckets in fp32, in the order in which a backward
makes them. A bucket is reduced as soon as the last backward of the step has filled it, and those
before it: all ranks of an axis run the same program, so they start the same reductions in the same
order. Under ZeRO-2 every backward reduces, and only the part of this rank is added up. What is
summed over:

    tensor axis   parameters that every rank of it reads for its own part of the activations
    data axis     all-reduce; or, where ZeRO divides, reduce-scatter among those that share out and
                  all-reduce among those that hold the same part

Gradients that no axis sums stay where autograd leaves them, in fp32. Those of ZeRO-3 are
`fully_shard`'s business until they are whole on the data axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshwright.costmodel.sharding.strategies import Placement
from meshwright.costmodel.target import BUCKET_BYTES
from meshwright.executor.lowering.reshard import (
    Axis,
    all_gather,
    local_part,
    reduce_scatter_flat,
    split_parts,
)
from meshwright.executor.parameters.parameters import StageParameter, local_of, wrap_like
from meshwright.executor.ranks.meshes import Place

LARGE_BYTES = BUCKET_BYTES // 8  # to copy such a gradient costs more than to reduce it by itself


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """Where a parameter's gradient lies in its bucket: columns [start, stop) of the flat buffer."""

    parameter: StageParameter
    start: int
    stop: int
    written: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """Gradients reduced together, as [shards, columns] where they are scattered, else [1, columns].

    `steps` are the reductions, in order; `each` says that every backward reduces (ZeRO-2). One
    large gradient is a bucket of its own, reduced where autograd left it.
    """

    slots: list[_Slot]
    rows: int
    steps: tuple[tuple[str, Axis], ...]
    each: bool
    flat: torch.Tensor | None = None
    part: torch.Tensor | None = None  # what ZeRO-2 has added up
    waiting: set[int] = field(default_factory=set)
    running: Iterator[None] | None = None

    @property
    def alone(self) -> bool:
        return len(self.slots) == 1

    def add(self, slot: _Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Add one backward's gradient of a parameter; all of it so far."""
        p = slot.parameter
        parts = split_parts(gradient, p.zero, self.rows) if p.scattered else gradient
        parts = parts.reshape(self.rows, -1)
        if self.alone and not slot.written and parts.dtype == torch.float32:
            self.flat, slot.written = parts, True
            return parts
        if self.flat is None:
            columns = self.slots[-1].stop
            self.flat = torch.empty(self.rows, columns, dtype=torch.float32, device=gradient.device)
        into = self.flat[:, slot.start : slot.stop]
        if slot.written:
            into.add_(parts)
        else:
            into.copy_(parts)
            slot.written = True
        return into

    def start(self) -> None:
        """Start the first reduction; gradients that no backward made count as zero."""
        self.finish()
        if self.flat is None:
            self.add(self.slots[0], torch.zeros_like(self.slots[0].parameter.leaf))
        assert self.flat is not None
        for slot in self.slots:
            if not slot.written:
                self.flat[:, slot.start : slot.stop].zero_()
            slot.written = False
        self.running = self._reduce(self.flat)
        if self.each or self.rows == 1:  # the result lies in it, and is the user's
            self.flat = None
        next(self.running)

    def _reduce(self, x: torch.Tensor) -> Iterator[None]:
        """The reductions one after the other; pauses while the first is under way."""
        for k, (kind, axis) in enumerate(self.steps):
            if kind == "reduce_scatter":
                x, work = reduce_scatter_flat(x, axis)
            else:
                work = dist.all_reduce(x, group=axis.group, async_op=True)
            if k == 0:
                yield
            work.wait()
        x = x.view(-1)
        self.part = x if self.part is None else self.part.add_(x)

    def finish(self) -> None:
        if self.running is not None:
            next(self.running, None)
            self.running = None

    def hand_over(self) -> None:
        """Give every parameter its reduced gradient."""
        assert self.part is not None
        for slot in self.slots:
            p = slot.parameter
            shape = list(p.leaf.shape)
            if p.scattered:
                shape[p.zero.dim] //= self.rows
            p.gradient = self.part[slot.start : slot.stop].view(shape)
        self.part = None

    def expect(self) -> None:
        """All gradients are to come."""
        self.waiting = set(range(len(self.slots)))


class Reducer:
    """Takes the gradients of one stage (or of parameters that stages of one rank share) off their
    leaves, and reduces them."""

    def __init__(self, parameters: Sequence[StageParameter], place: Place) -> None:
        """`parameters` in the order of the forward."""
        self.parameters = [p for p in reversed(parameters) if p.reached and not p.gathered]
        self.buckets: list[Bucket] = []
        self.hooks: dict[int, Callable[[torch.Tensor], None]] = {}
        self.next = 0  # the bucket to be reduced next
        self.last = self.every = False
        summed: dict[Any, list[StageParameter]] = {}
        for p in self.parameters:
            steps = _steps(p, place)
            each = p.level == 2 and p.scattered
            if steps:
                summed.setdefault((steps, each), []).append(p)
            else:
                self._hook(p, partial(self._keep, p))
        for (steps, each), some in summed.items():
            rows = next((axis.size for kind, axis in steps if kind == "reduce_scatter"), 1)
            for group in _by_size(some):
                self.buckets.append(_bucket(group, rows, steps, each))
        self._order()
        for bucket in self.buckets:
            for k, slot in enumerate(bucket.slots):
                self._hook(slot.parameter, partial(self._arrive, bucket, k))

    def _hook(self, p: StageParameter, hook: Callable[[torch.Tensor], None]) -> None:
        self.hooks[id(p.leaf)] = hook
        p.leaf.register_post_accumulate_grad_hook(hook)

    def _order(self) -> None:
        """Buckets in the order in which a backward fills them."""
        at = {id(p): k for k, p in enumerate(self.parameters)}
        self.buckets.sort(key=lambda b: max(at[id(s.parameter)] for s in b.slots))

    def begin(self) -> None:
        """Before a step."""
        for bucket in self.buckets:
            bucket.expect()
        self.next, self.last, self.every = 0, False, False

    def before_backward(self, *, last: bool, whole: bool) -> None:
        """Before a backward, or (not `whole`) a part of one; `last` of the step."""
        self.last, self.every = last, whole and not last

    def made(self, leaf: torch.Tensor) -> None:
        """A leaf has a gradient that autograd has not accumulated itself."""
        if hook := self.hooks.get(id(leaf)):
            hook(leaf)

    def _arrive(self, bucket: Bucket, k: int, leaf: torch.Tensor) -> None:
        """A backward has made a gradient; or none, where it is put off."""
        if leaf.grad is None:
            return
        slot = bucket.slots[k]
        added = bucket.add(slot, leaf.grad)
        leaf.grad = None
        if self.last:
            if not bucket.each:  # else earlier backwards' gradients are not in it
                slot.parameter.norm = torch.linalg.vector_norm(added)
            bucket.waiting.discard(k)
            while self.next < len(self.buckets) and not self.buckets[self.next].waiting:
                self._start()
        elif self.every and bucket.each:
            bucket.waiting.discard(k)
            if not bucket.waiting:
                bucket.start()

    def _keep(self, p: StageParameter, leaf: torch.Tensor) -> None:
        """A gradient that no axis sums: fp32 is left to autograd, low precision is added up in
        fp32."""
        if leaf.grad is None:
            return
        added = leaf.grad
        if leaf.grad.dtype != torch.float32:
            added = leaf.grad.float() if p.gradient is None else p.gradient.add_(leaf.grad)
            p.gradient, leaf.grad = added, None
        if self.last:
            p.norm = torch.linalg.vector_norm(added)

    def _start(self) -> None:
        self.buckets[self.next].start()
        self.next += 1

    def after_backward(self) -> None:
        """After a backward that is not the last: reduce what is reduced every time."""
        for bucket in self.buckets:
            if bucket.each:
                if bucket.flat is not None:
                    bucket.start()
                bucket.expect()

    def close(self) -> None:
        """After the last backward of the step: start what has not filled."""
        while self.next < len(self.buckets):
            self._start()

    def finish(self) -> None:
        """Wait for the reductions and give every parameter its gradient."""
        for bucket in self.buckets:
            bucket.finish()
            bucket.hand_over()
        for p in self.parameters:
            if p.gradient is None:
                p.gradient = torch.zeros_like(p.leaf) if p.leaf.grad is None else p.leaf.grad
                p.gradient = p.gradient.float()
            p.leaf.grad = None


def _steps(p: StageParameter, place: Place) -> tuple[tuple[str, Axis], ...]:
    """The reductions that make a parameter's gradient whole."""
    steps, holders = [], place.holders(experts=p.experts)
    if p.sum_tensor:
        steps.append(("all_reduce", place.tensor))
    if p.scattered:
        steps += [("reduce_scatter", holders.shard), ("all_reduce", holders.replicate)]
    elif p.sum_data:
        steps.append(("all_reduce", holders.data))
    return tuple((kind, axis) for kind, axis in steps if axis.size > 1)


def _by_size(parameters: Iterable[StageParameter]) -> Iterator[list[StageParameter]]:
    """Buckets' worth of parameters, in order, and large ones alone."""
    bucket: list[StageParameter] = []
    filled = 0
    for p in parameters:
        nbytes = 4 * p.leaf.numel()
        if nbytes >= LARGE_BYTES:
            yield [p]
            continue
        if filled + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(p)
        filled += nbytes
    if bucket:
        yield bucket


def _bucket(
    parameters: Sequence[StageParameter], rows: int, steps: tuple[tuple[str, Axis], ...], each: bool
) -> Bucket:
    slots, at = [], 0
    for p in parameters:
        columns = p.leaf.numel() // rows
        slots.append(_Slot(parameter=p, start=at, stop=at + columns))
        at += columns
    return Bucket(slots=slots, rows=rows, steps=steps, each=each)


# --- tied parameters ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a stage holds a parameter's gradient: its placement on the tensor axis, and whether ZeRO
    may divide it."""

    placement: Placement
    divided: bool


def exchange_tied(
    parameters: Iterable[StageParameter], place: Place, layouts: Mapping[str, Mapping[int, Layout]]
) -> None:
    """Sum the gradients of parameters that stages on several ranks hold, in stage order, so that
    every copy gets the same bits. `layouts` gives per FQN its layout on each owning stage."""
    for p in sorted(parameters, key=lambda p: p.fqn):
        # stages of one rank share one copy, known by the first that holds it
        owners = sorted({_first_holder(k, p, place) for k in p.shared_stages})
        if len(owners) < 2 or p.gradient is None:
            continue
        mine = next(k for k in owners if k in place.stages)
        found = {(layouts[p.fqn][k].placement, place.meshes[k].tp) for k in owners}
        alike = len(found) == 1 and not any(layouts[p.fqn][k].divided for k in owners)
        held = p.gradient if alike else _whole(p, place)
        parts = _swap(held, mine, owners, place, place.owners[p.shared_stages])
        total = parts[owners[0]].clone()
        for stage in owners[1:]:
            total += parts[stage]
        p.gradient = total if alike else _own(total, p, place)


def _first_holder(stage: int, p: StageParameter, place: Place) -> int:
    """Of the stages that hold a parameter, the first on the ranks of `stage`."""
    ranks = place.meshes[stage].ranks
    return min(k for k in p.shared_stages if place.meshes[k].ranks == ranks)


def _whole(p: StageParameter, place: Place) -> torch.Tensor:
    x = p.gradient
    assert x is not None
    if p.scattered:
        x = all_gather(x, p.zero, place.shard)
    if not p.placement.sharded:
        return x
    return all_gather(x, p.placement, place.tensor, p.shape[p.placement.dim])


def _own(x: torch.Tensor, p: StageParameter, place: Place) -> torch.Tensor:
    if p.placement.sharded:
        x = local_part(x, p.placement, place.tensor.size, place.tensor.rank)
    if p.scattered:
        x = local_part(x, p.zero, place.shard.size, place.shard.rank)
    return x.contiguous()


def _swap(
    mine: torch.Tensor, stage: int, owners: Sequence[int], place: Place, group: Any
) -> dict[int, torch.Tensor]:
    """Every owner's copy of a tensor: each rank gets it from the rank at its own coordinates."""
    here = place.meshes[stage]
    parts = {stage: mine.contiguous()}
    works = []
    for other in owners:
        if other == stage:
            continue
        there = place.meshes[other]
        parts[other] = torch.empty_like(parts[stage])
        d, t = here.coordinate(place.rank)
        source = there.rank(d % there.dp, t % there.tp)
        for target in there.ranks:
            td, tt = there.coordinate(target)
            if here.rank(td % here.dp, tt % here.tp) == place.rank:
                works.append(dist.P2POp(dist.isend, parts[stage], target, group=group))
        works.append(dist.P2POp(dist.irecv, parts[other], source, group=group))
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return parts


# --- to the optimizer -----------------------------------------------------------------------------


def lay_out(parameters: Iterable[StageParameter], place: Place) -> None:
    """Bring whole gradients into the layout of what is stored."""
    for p in parameters:
        if p.gradient is not None and p.zero.sharded and not p.scattered:
            shard = place.holders(experts=p.experts).shard
            p.gradient = local_part(p.gradient, p.zero, shard.size, shard.rank).contiguous()


def deliver(parameters: Iterable[StageParameter]) -> None:
    """Add the step's gradients to `.grad` of the API parameters."""
    for p in parameters:
        local, p.gradient = p.gradient, None
        if local is None:
            continue
        if p.api.grad is None:
            p.api.grad = wrap_like(p, local)
        else:
            local_of(p.api.grad).add_(local)
