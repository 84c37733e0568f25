"""Bytes of gradients while backwards make them, as `train_step` holds them (`executor/parameters`).

A backward makes gradients in the reverse order of the forward. What no collective sums stays where
autograd left it; the rest is copied to buckets of the dtype that is kept, one after the other for
the same collectives, large ones being buckets of their own, which the backward that fills them last
reduces. What is only summed stays in its bucket until the optimizer has read it. What ZeRO-1 and 2
scatter leaves a shard: two buckets are under way, and on a CPU hold what was received beside what
is sent. ZeRO-3's are `fully_shard`'s: those of one block, the copy that is scattered, and that of
the block before, if the same backward made it. What goes to host memory leaves with the backward
that makes it whole, two at a time on their way; but where shards are replicated it waits for the
step's end. Where the optimizer steps in the backward, nothing stays: a bucket is let go two behind,
what no collective sums at once, when the optimizer has made what it makes for one parameter at a
time. Of a parameter that several blocks read, autograd adds up what they give, and nothing is
taken of the sum before the first of them has given its part.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.target import SCATTERED_AT_ONCE, SENT_AT_ONCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A trained parameter: local elements, the ranks that hold them and sum their gradient, those
    among which ZeRO divides it, the first block (by number in its stage) that reads it, or -1 where
    ZeRO-3 gathers it with the stage, its `readers` with a gradient, and whether its states lie in
    host memory, and its weights, too (`away`); bytes of `moments`, not divided and divided,
    the elements of a whole matrix that one of its ranks steps for all (`owned`), and bytes of its
    compressed sum, while it is under way and for a moment at its start and end (`compressing`)."""

    numel: float
    holders: int
    shards: int
    block: int
    readers: int = 1
    host: bool = False
    away: bool = False
    moments: tuple[float, float] = (0.0, 0.0)
    owned: float = 0.0
    compressing: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """Reduction of a stage's gradients: its `sharing`, bytes of an element as autograd makes it and
    as it is added up, bytes of a bucket and of what travels alone, whether a scatter receives
    beside what it sends (`received`: on a CPU), and whether shards are `replicated`. An optimizer
    that steps in the backward makes so many bytes for so many elements of one parameter
    (`stepping`)."""

    sharing: Sharing
    weight_bytes: int
    kept_bytes: int
    bucket_bytes: int
    alone_bytes: int
    received: bool
    replicated: bool = False
    stepping: Callable[[float], float] | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Bucket:
    members: list[int]
    nbytes: float
    shard_bytes: float
    alone: bool
    host: bool  # leaves for host memory
    # of its compressed sum: while it is under way, and of one matrix at the start and the end
    sum_bytes: float
    start_bytes: float
    end_bytes: float
    made: bool = False
    waiting: int = 0

    @property
    def scattered(self) -> bool:
        """Whether its reduction leaves a shard."""
        return self.shard_bytes < self.nbytes


@dataclass(slots=True)
class GradientBytes:
    """Gradients of one stage through the backwards of a step."""

    trained: Sequence[Trained]
    reduction: Reduction
    live: float = 0.0
    ending: float = 0.0  # the most bytes at once as the reductions of the step end
    _bucket: dict[int, _Bucket] = field(init=False)
    _reduces: bool = False
    _parts: Counter[int] = field(default_factory=Counter)  # by parameter, of how many readers
    # ZeRO-3: by block its parameters, those that wait for the rest; bytes that are scattered
    _members: Counter[int] = field(init=False)
    _units: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _scattered: float = 0.0
    _under_way: deque[_Bucket] = field(default_factory=deque)
    _shards: set[int] = field(default_factory=set)
    _compressing: _Bucket | None = None  # whose compressed sum is under way
    _sent: deque[float] = field(default_factory=deque)  # bytes on their way to host memory

    def __post_init__(self) -> None:
        self._bucket = {k: bucket for bucket in self._buckets() for k in bucket.members}
        self._members = Counter(p.block for p in self.trained if p.shards > 1 and p.readers)

    def begin(self, *, last: bool) -> None:
        """Before a backward, the `last` of the step or another."""
        self._parts.clear()
        sharing = self.reduction.sharing
        self._reduces = sharing.scatters_whole or (not sharing.gathers and last)
        for bucket in self._bucket.values():
            bucket.waiting = len(bucket.members)

    def end(self) -> None:
        """After a backward: ZeRO-3's scatter and copies to host memory are waited for."""
        self.live -= self._scattered + sum(self._sent)
        self._scattered = 0.0
        self._sent.clear()

    def given(self, k: int) -> float:
        """Bytes of a parameter's gradient as autograd makes it."""
        return self.reduction.weight_bytes * self.trained[k].numel

    def take(self, k: int) -> float:
        """Take a parameter's gradient, and reduce its bucket where it was the last: the most bytes
        at once; `live` are those that stay. Each of several readers gives a part."""
        self._parts[k] += 1
        nbytes, readers = self.given(k), self.trained[k].readers
        if readers == 1:
            return self._take_all(k)
        if self._parts[k] == 1:
            self.live += nbytes
            return self.live
        both = self.live + nbytes
        if self._parts[k] < readers:
            return both
        self.live -= nbytes
        return max(both, self._take_all(k))

    def _take_all(self, k: int) -> float:
        """Take a gradient of which all readers have given their part."""
        bucket, p = self._bucket[k], self.trained[k]
        if self.reduction.sharing.gathers and p.shards > 1:  # the rest of it is `fully_shard`'s
            return self._gathered(k)
        in_place = (
            bucket.alone
            and self.reduction.weight_bytes == self.reduction.kept_bytes
            and not bucket.made
        )
        self.live += 0.0 if bucket.made else bucket.nbytes
        highest = self.live + (0.0 if in_place else self.given(k))
        bucket.made = True
        bucket.waiting -= 1
        if bucket.host and p.holders == 1:
            bucket.made = False
            self._send(bucket.nbytes)
        elif self.reduction.stepping is not None and p.holders == 1:
            bucket.made = False
            highest = max(highest, self._step(bucket))
        elif self._reduces and not bucket.waiting and self._leaves(bucket):
            if bucket in self._under_way:  # its last reduction ends before it begins another
                self._under_way.remove(bucket)
                self._finish(bucket)
            self.live += self._beside(bucket)
            highest = max(highest, self.live)
            bucket.made = False
            self._under_way.append(bucket)
            while len(self._under_way) > SCATTERED_AT_ONCE:
                highest = max(highest, self._finish(self._under_way.popleft()))
        elif self._reduces and not bucket.waiting and bucket.sum_bytes:
            highest = max(highest, self._compress(bucket))
        return highest

    def _compress(self, bucket: _Bucket | None) -> float:
        """End the compressed sum that is under way, and start a bucket's: the most bytes at
        once."""
        highest, before = self.live, self._compressing
        if before is not None:
            highest += before.end_bytes
            self.live -= before.sum_bytes
        if bucket is not None:
            highest = max(highest, self.live + bucket.start_bytes)
            self.live += bucket.sum_bytes
        self._compressing = bucket
        return max(highest, self.live)

    def _leaves(self, bucket: _Bucket) -> bool:
        """Whether a bucket is let go when it is reduced."""
        return bucket.scattered or bucket.host or self.reduction.stepping is not None

    def _step(self, bucket: _Bucket) -> float:
        """Step the parameters of a bucket, and let their gradients go: the most bytes at once."""
        assert self.reduction.stepping is not None
        largest = max(self.trained[k].numel for k in bucket.members)
        highest = self.live + self.reduction.stepping(largest)
        self.live -= bucket.nbytes
        return highest

    def _gathered(self, k: int) -> float:
        """Take a gradient of a block under ZeRO-3: all wait for the last one, then the block
        before's are let go, and they are copied to be scattered, and let go for the shards."""
        p = self.trained[k]
        self._units[p.block].append(k)
        self.live += self.given(k)
        highest = self.live
        if len(self._units[p.block]) == self._members[p.block]:
            unit = self._units.pop(p.block)
            copy = self.reduction.kept_bytes * sum(self.trained[j].numel for j in unit)
            self.live += copy - self._scattered
            highest = max(highest, self.live)
            self.live += sum(map(self._new_shard, unit)) - sum(map(self.given, unit))
            highest = max(highest, self.live)
            self._scattered = copy
        return highest

    def _new_shard(self, k: int) -> float:
        """Bytes of a parameter's shard, the first time that there is one."""
        p, bucket = self.trained[k], self._bucket[k]
        new, bucket.made = not (bucket.made or p.host), True
        return self.reduction.kept_bytes * p.numel / p.shards if new else 0.0

    def _beside(self, bucket: _Bucket) -> float:
        """Bytes that a reduction makes: the shard, and what is received of it."""
        beside = bucket.shard_bytes + (bucket.nbytes if self.reduction.received else 0.0)
        return beside if bucket.scattered else 0.0  # in place

    def _send(self, nbytes: float) -> None:
        """Send bytes of the device on their way to host memory."""
        self._sent.append(nbytes)
        while len(self._sent) > SENT_AT_ONCE:
            self.live -= self._sent.popleft()

    def _finish(self, bucket: _Bucket) -> float:
        """End a reduction: the most bytes at once."""
        if self.reduction.stepping is not None:
            return self._step(bucket)
        highest = self.live
        self.live -= bucket.nbytes + self._beside(bucket) - bucket.shard_bytes
        if bucket.host:
            self._send(bucket.shard_bytes)
            return highest
        if id(bucket) in self._shards:  # added to what earlier micro-batches left
            self.live -= bucket.shard_bytes
        self._shards.add(id(bucket))
        return highest

    def finish(self) -> float:
        """End all reductions; returns what the optimizer reads."""
        while self._under_way:
            self._finish(self._under_way.popleft())
        self.ending = self._compress(None)
        self.end()
        return self.live

    def _buckets(self) -> Iterator[_Bucket]:
        """Buckets in the order of the backward, by their collectives."""
        reduction = self.reduction
        filling: dict[tuple[int, int, bool, bool], list[int]] = {}
        filled = defaultdict[tuple[int, int, bool, bool], float](float)  # elements
        for k, p in reversed([*enumerate(self.trained)]):
            nbytes, gathered = (
                reduction.kept_bytes * p.numel,
                reduction.sharing.gathers and p.shards > 1,
            )
            if nbytes >= reduction.alone_bytes or p.holders == 1 or gathered:
                yield self._new_bucket([k], alone=True)
                continue
            key = p.holders, p.shards, p.host, any(p.compressing)
            members = filling.setdefault(key, [])
            if members and reduction.kept_bytes * filled[key] + nbytes > reduction.bucket_bytes:
                yield self._new_bucket(members, alone=False)
                members.clear()
                filled[key] = 0
            members.append(k)
            filled[key] += p.numel
        for members in filling.values():
            yield self._new_bucket(members, alone=False)

    def _new_bucket(self, members: Sequence[int], *, alone: bool) -> _Bucket:
        kept_bytes = self.reduction.kept_bytes
        sizes = [(kept_bytes * self.trained[k].numel, self.trained[k].shards) for k in members]
        sharded = self.reduction.sharing.divides and not self.reduction.sharing.gathers
        return _Bucket(
            members=[*members],
            nbytes=sum(nbytes for nbytes, _ in sizes),
            shard_bytes=sum(nbytes / (n if sharded else 1) for nbytes, n in sizes),
            alone=alone,
            host=self.trained[members[0]].host and not self.reduction.replicated,
            sum_bytes=sum(self.trained[k].compressing[0] for k in members),
            start_bytes=max(self.trained[k].compressing[1] for k in members),
            end_bytes=max(self.trained[k].compressing[2] for k in members),
        )
