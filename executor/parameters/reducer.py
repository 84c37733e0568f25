"""Reduction of a step's gradients, in buckets, overlapped with the backward.

A hook takes each gradient off its leaf as the backward makes it. Those that are partial on some
axis are copied to buckets of the optimizer's dtype, in the order in which a backward makes them. A
bucket is reduced as soon as the last backward of the step has filled it and those before it: all
ranks of an axis run the same program, so they start the same collectives in the same order. Under
ZeRO-2 every micro-batch's backward scatters, and only this rank's shard is accumulated. The
collectives:

    tensor axis   all-reduce of parameters that every tensor rank reads for its own part of the
                  activations
    data axis     all-reduce; or, where ZeRO shards, reduce-scatter over the shard axis and,
                  once per step and after the backward, all-reduce over the replicate axis;
                  of matrices, where it is compressed, what stands for them (`compression.py`),
                  whose next collective starts with the next bucket's first

A gradient that is whole on every rank stays where autograd leaves it, or is added up in that dtype.
ZeRO-3's data axis is `fully_shard`'s (`zero3.py`). What lies in host memory goes there, and is
added up there, as soon as it is whole: in each backward where no collective sums it, or ZeRO-2's
does, else in the last. An optimizer that steps in the backward has each parameter then, and its
gradient is let go; that of a bucket when a few more are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshwright.costmodel.target import ALONE_BYTES, BUCKET_BYTES, SCATTERED_AT_ONCE, SENT_AT_ONCE
from meshwright.executor.devices import to_host
from meshwright.executor.host_memory import Aside
from meshwright.executor.parameters.compression import CompressedSum, Memory, compression_of
from meshwright.executor.parameters.optimizer_steps import StepInBackward
from meshwright.executor.parameters.parameters import StageParameter
from meshwright.executor.ranks import Place
from meshwright.executor.resharding import Axis, local_part, reduce_scatter_flat, split_parts

# ("all_reduce", "reduce_scatter" or "approximate", axis), in order
Collectives = tuple[tuple[str, Axis], ...]


@dataclass(slots=True, kw_only=True, eq=False)
class _BucketView:
    """A parameter's gradient in its bucket: columns [start, stop) of the flat buffer."""

    parameter: StageParameter
    start: int
    stop: int
    written: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """Gradients reduced together, in one buffer `flat` of (rows, columns).

    `rows` is the number of shards for a reduce-scatter, else 1. `shard` is the reduced result of
    (columns,), accumulated over micro-batches if `reduce_each_microbatch` (ZeRO-2), and at last
    reduced over `replicas`. `waiting` are
    the views (by number) that the current backward has not filled; `running` is the reduction under
    way. A bucket of one large gradient has no buffer of its own: autograd's is reduced.
    `approximate` sums it over the data axis where its collectives say so. `to_host`: the way there
    of results that are reduced no further.
    """

    views: list[_BucketView]
    rows: int
    collectives: Collectives
    replicas: Collectives
    reduce_each_microbatch: bool
    flat: torch.Tensor | None = None
    shard: torch.Tensor | None = None
    waiting: set[int] = field(default_factory=set)
    running: Iterator[None] | None = None
    approximate: CompressedSum | None = None
    to_host: GradientsToHost | None = None

    def add(self, view: _BucketView, gradient: torch.Tensor) -> torch.Tensor:
        """Add one backward's gradient of a parameter; returns the sum so far, (rows, columns)."""
        p = view.parameter
        stacked = split_parts(gradient, p.shard_placement, self.rows) if p.scattered else gradient
        stacked = stacked.reshape(self.rows, -1)
        if len(self.views) == 1 and not view.written and stacked.dtype == p.stored.dtype:
            self.flat, view.written = stacked, True
            return stacked
        if self.flat is None:
            columns = self.views[-1].stop
            self.flat = torch.empty(
                self.rows, columns, dtype=p.stored.dtype, device=gradient.device
            )
        into = self.flat[:, view.start : view.stop]
        if view.written:
            into.add_(stacked)
        else:
            into.copy_(stacked)
            view.written = True
        return into

    def start(self) -> None:
        """Start the first collective; gradients that no backward made count as zero."""
        self.wait()
        if self.flat is None:
            self.add(self.views[0], torch.zeros_like(self.views[0].parameter.leaf))
        assert self.flat is not None
        for view in self.views:
            if not view.written:
                self.flat[:, view.start : view.stop].zero_()
            view.written = False
        self.running, self.flat = self._reduce(self.flat), None
        next(self.running)

    def _reduce(self, x: torch.Tensor) -> Iterator[None]:
        """Run the collectives one after the other; yields while the first, or one of a compressed
        sum, is under way."""
        for k, (kind, axis) in enumerate(self.collectives):
            if kind == "approximate":
                assert self.approximate is not None
                yield from self.approximate.run(x, axis)
                continue
            if kind == "reduce_scatter":
                x, work = reduce_scatter_flat(x, axis)
            else:
                work = dist.all_reduce(x, group=axis.group, async_op=True)
            if k == 0:
                yield
            work.wait()
        x = x.view(-1)
        if self.to_host is not None:
            norm = torch.linalg.vector_norm(x, dtype=torch.float32)
            for view in self.views if self.reduce_each_microbatch else ():
                _count(view.parameter, norm)
            self.to_host.send(id(self), x)
            return
        self.shard = x if self.shard is None else self.shard.add_(x)

    def wait(self) -> None:
        """Complete the reduction under way, if any."""
        for _ in self.running or ():
            pass
        self.running = None

    def advance(self) -> None:
        """Go on to the next collective of a compressed sum."""
        if self.approximate is not None and self.running is not None:
            next(self.running, None)

    def give_gradients(self) -> None:
        """Make each parameter's `gradient` a view of the result, reduced among replicas."""
        assert self.shard is not None
        for _, axis in self.replicas:
            dist.all_reduce(self.shard, group=axis.group)
        for view in self.views:
            p = view.parameter
            shape = list(p.leaf.shape)
            if p.scattered:
                shape[p.shard_placement.dim] //= self.rows
            p.gradient = self.shard[view.start : view.stop].view(shape)
        self.shard = None

    def wait_for_all_views(self) -> None:
        """Before a backward: every view is still to be filled."""
        self.waiting = set(range(len(self.views)))


class Reducer:
    """The gradient buckets of one stage, or of parameters that several stages of a rank share."""

    def __init__(self, parameters: Sequence[StageParameter], place: Place) -> None:
        """`parameters` in the order of the forward."""
        self.parameters = [p for p in reversed(parameters) if p.reached and not p.gathered]
        self.buckets: list[Bucket] = []
        self.hooks: dict[int, Callable[[torch.Tensor], None]] = {}  # by id of the leaf
        self.next_bucket = 0  # to be reduced
        self.last_backward = False  # of the step
        self.every_gradient = False  # the backward makes all of them, and is not the last
        self.under_way: deque[Bucket] = deque()  # whose gradients are let go at their end
        self.stepping: StepInBackward | None = None
        self.to_host = GradientsToHost(place.device)
        alike: dict[tuple[Collectives, bool, bool], list[StageParameter]] = {}
        for p in self.parameters:
            if collectives := _collectives(p, place):
                one_by_one = p.sharing.scatters_whole and p.scattered
                alike.setdefault((collectives, one_by_one, p.hosted), []).append(p)
            elif p.hosted:
                self._hook(p, partial(self._send_whole, p, place))
            else:
                self._hook(p, partial(self._keep_whole, p))
        for (collectives, one_by_one, hosted), members in alike.items():
            for group in _by_size(members):
                self.buckets.append(_bucket(group, collectives, one_by_one, place))
                if hosted and not self.buckets[-1].replicas:
                    self.buckets[-1].to_host = self.to_host
        order = {id(p): k for k, p in enumerate(self.parameters)}  # in which a backward fills them
        self.buckets.sort(key=lambda b: max(order[id(view.parameter)] for view in b.views))
        for bucket in self.buckets:
            for k, view in enumerate(bucket.views):
                self._hook(view.parameter, partial(self._fill, bucket, k))

    def _hook(self, p: StageParameter, hook: Callable[[torch.Tensor], None]) -> None:
        leaf: Any  # whose method is untyped
        for leaf in p.leaves:
            self.hooks[id(leaf)] = hook
            leaf.register_post_accumulate_grad_hook(hook)

    def begin(self, stepping: StepInBackward | None = None) -> None:
        """Before a step, of which an optimizer may be stepped in the backward."""
        self.stepping = stepping
        for bucket in self.buckets:
            bucket.wait_for_all_views()
        self.next_bucket = 0
        self.last_backward = False
        self.every_gradient = False

    def before_backward(self, *, last: bool, whole: bool) -> None:
        """Before a backward, or (not `whole`) its input or weight half; `last` of the step."""
        self.last_backward = last
        self.every_gradient = whole and not last

    def take_gradient(self, leaf: torch.Tensor) -> None:
        """Run the hook of a leaf whose gradient was not accumulated by autograd."""
        if hook := self.hooks.get(id(leaf)):
            hook(leaf)

    def _fill(self, bucket: Bucket, k: int, leaf: torch.Tensor) -> None:
        """Hook: move a gradient to its bucket. None where the weight gradient is deferred."""
        if leaf.grad is None:
            return
        view = bucket.views[k]
        summed = bucket.add(view, leaf.grad)
        leaf.grad = None
        if self.last_backward:
            if not bucket.reduce_each_microbatch:  # else earlier backwards' are not in it
                view.parameter.norm = torch.linalg.vector_norm(summed, dtype=torch.float32)
            bucket.waiting.discard(k)
            while self.next_bucket < len(self.buckets):
                if self.buckets[self.next_bucket].waiting:
                    break
                self._start_next()
        elif self.every_gradient and bucket.reduce_each_microbatch:
            bucket.waiting.discard(k)
            if not bucket.waiting:
                self._start(bucket)

    def _keep_whole(self, p: StageParameter, leaf: torch.Tensor) -> None:
        """Hook: accumulate in the optimizer's dtype a gradient that no collective sums; one that
        has it is left to autograd."""
        if leaf.grad is None:
            return
        summed = leaf.grad
        if leaf.grad.dtype != p.stored.dtype:
            so_far = p.gradient
            summed = summed.to(p.stored.dtype) if so_far is None else so_far.add_(summed)
            p.gradient, leaf.grad = summed, None
        if self.stepping is not None and self.stepping.takes(p):
            p.gradient, leaf.grad = summed, None
            del summed
            self.stepping.step(p)
        elif self.last_backward:
            p.norm = torch.linalg.vector_norm(summed, dtype=torch.float32)

    def _send_whole(self, p: StageParameter, place: Place, leaf: torch.Tensor) -> None:
        """Hook: send to the host what this rank's optimizer reads of a gradient."""
        if leaf.grad is None:
            return
        gradient, leaf.grad = leaf.grad, None
        _count(p, torch.linalg.vector_norm(gradient, dtype=torch.float32))
        if p.shard_placement.sharded:
            shard = place.holders(experts=p.experts).shard
            gradient = local_part(gradient, p.shard_placement, shard.size, shard.rank).contiguous()
        self.to_host.send(id(p), gradient.to(p.stored.dtype))

    def _start_next(self) -> None:
        self._start(self.buckets[self.next_bucket])
        self.next_bucket += 1

    def _start(self, bucket: Bucket) -> None:
        """Start a bucket's reduction. Of a scattered one the gradients are let go at its end, so
        that few are under way, as are those that go to the host or are stepped; the result of
        another lies in them."""
        for other in self.buckets[max(0, self.next_bucket - 2) : self.next_bucket]:
            other.advance()
        bucket.start()
        if bucket.rows > 1 or bucket.to_host is not None or self.stepping is not None:
            if bucket in self.under_way:  # of an earlier backward, and over
                self.under_way.remove(bucket)
            self.under_way.append(bucket)
            while len(self.under_way) > SCATTERED_AT_ONCE:
                self._end(self.under_way.popleft())

    def _end(self, bucket: Bucket) -> None:
        """Wait for a reduction, and step the parameters whose gradients it made whole."""
        bucket.wait()
        if self.stepping is not None:
            bucket.give_gradients()
            for p in (view.parameter for view in bucket.views):
                if self.stepping.takes(p):
                    self.stepping.step(p)

    def after_backward(self) -> None:
        """After a backward that is not the last: reduce what ZeRO-2 reduces every time."""
        self.to_host.settle()
        for bucket in self.buckets:
            if bucket.reduce_each_microbatch:
                if bucket.flat is not None:
                    self._start(bucket)
                bucket.wait_for_all_views()

    @property
    def memories(self) -> list[Memory]:
        """Memories of compressed sums, from step to step."""
        sums = (bucket.approximate for bucket in self.buckets)
        return [memory for one in sums if one is not None for memory in one.memories]

    def flush(self) -> None:
        """After the last backward of the step: start the buckets that did not fill."""
        while self.next_bucket < len(self.buckets):
            self._start_next()

    def finish(self) -> None:
        """Wait for the reductions and give every parameter its gradient."""
        while self.under_way:
            self._end(self.under_way.popleft())
        for bucket in self.buckets:
            bucket.wait()
        there = self.to_host.finish()
        for bucket in self.buckets if self.stepping is None else ():
            bucket.shard = there.get(id(bucket), bucket.shard)
            bucket.give_gradients()
        for p in self.parameters:
            if self.stepping is not None and p.value in self.stepping.stepped:
                continue
            p.gradient = there.get(id(p), p.gradient)
            if p.gradient is None:
                p.gradient = torch.zeros_like(p.leaf) if p.leaf.grad is None else p.leaf.grad
                p.gradient = p.gradient.to(p.stored.dtype)
            p.leaf.grad = None


def _count(p: StageParameter, norm: torch.Tensor) -> None:
    """Add the norm of a part of a gradient: the sum is finite if all of them are."""
    p.norm = norm if p.norm is None else p.norm + norm


def _collectives(p: StageParameter, place: Place) -> Collectives:
    """The collectives that make a parameter's partial gradient whole; none where it is whole."""
    collectives, holders = [], place.holders(experts=p.experts)
    if p.sum_tensor:
        collectives.append(("all_reduce", place.tensor))
    if p.scattered:
        collectives += [("reduce_scatter", holders.shard), ("all_reduce", holders.replicate)]
    elif p.sum_data:
        kind = "approximate" if compression_of(p, holders.data) else "all_reduce"
        collectives.append((kind, holders.data))
    return tuple((kind, axis) for kind, axis in collectives if axis.size > 1)


def _by_size(parameters: Iterable[StageParameter]) -> Iterator[list[StageParameter]]:
    """Parameters in order, up to `BUCKET_BYTES` of gradients each; large ones alone."""
    bucket: list[StageParameter] = []
    filled = 0
    for p in parameters:
        nbytes = p.stored.dtype.itemsize * p.leaf.numel()
        if nbytes >= ALONE_BYTES:
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
    parameters: Sequence[StageParameter], collectives: Collectives, one_by_one: bool, place: Place
) -> Bucket:
    rows, after = 1, len(collectives)
    for k, (kind, axis) in enumerate(collectives, start=1):
        if kind == "reduce_scatter":
            rows, after = axis.size, k
    views, offset = [], 0
    for p in parameters:
        columns = p.leaf.numel() // rows
        views.append(_BucketView(parameter=p, start=offset, stop=offset + columns))
        offset += columns
    approximate, how = None, parameters[0].sharing.compression
    if how is not None and collectives[-1][0] == "approximate":
        memories = [Memory.of(p.fqn, p.leaf.shape, how, place.device) for p in parameters]
        approximate = CompressedSum(how=how, memories=memories)
    return Bucket(
        approximate=approximate,
        views=views,
        rows=rows,
        collectives=collectives[:after],
        replicas=collectives[after:],
        reduce_each_microbatch=one_by_one,
    )


# --- gradients in host memory ---------------------------------------------------------------------

# Gradients of what lies in host memory, on their way there as a backward makes them.
#
# Each is copied on a stream of its own into pinned memory. The first of a step stays
# where it arrives; those of later micro-batches are added to it on the host, which waits for them.
# At most `UNDER_WAY` are on the device because of that: what one more would hold waits for the
# oldest.


class GradientsToHost:
    """Adds up, by key, what it is given in one step."""

    def __init__(self, device: torch.device) -> None:
        self.aside = Aside(device)
        self.under_way: deque[tuple[int, torch.Tensor, torch.Tensor, Any]] = deque()
        self.there: dict[int, torch.Tensor] = {}

    def send(self, key: int, gradient: torch.Tensor) -> None:
        """Start the way of a gradient, which nobody writes to any more."""
        with torch.no_grad(), self.aside.entered(waits=False):
            arriving = to_host(gradient)
        self.under_way.append((key, gradient, arriving, self.aside.mark()))
        while len(self.under_way) > SENT_AT_ONCE:
            self._arrive()

    def _arrive(self) -> None:
        """Let the oldest go: the device takes its memory again when it has been read."""
        key, _gradient, arrived, mark = self.under_way.popleft()
        self.aside.wait(mark)
        if key not in self.there:
            self.there[key] = arrived
            return
        if mark is not None:
            mark.synchronize()
        with torch.no_grad():
            self.there[key].add_(arrived)

    def settle(self) -> None:
        """After a backward: wait for what is under way, which would lie on the device until the
        next one."""
        last = self.under_way[-1][3] if self.under_way else None
        while self.under_way:
            self._arrive()
        if last is not None:
            last.synchronize()

    def finish(self) -> dict[int, torch.Tensor]:
        """All gradients that arrived, for the host to read."""
        self.settle()
        there, self.there = self.there, {}
        return there
