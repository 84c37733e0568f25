"""The order of work on streams: names, events, and what was done before what.

Work on one stream is done in order; work of two streams in none, unless one waits for the other. So
each stream s has a clock: of every stream r, how much of r's work is done before what s does next.
An event holds the clock of its stream when it was recorded, and waiting for it takes the larger of
each count. Collectives and messages run on a stream per group, as NCCL's do. Work may read memory
if its stream waited for the work that wrote it, and may write it if it waited for those that read
it, too: the rest are races, which torch's CUDA sanitizer looks for in real runs (source of the
rule: L. Lamport, Time, Clocks, and the Ordering of Events in a Distributed System, 1978). Memory
that is freed and given out again is not followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import torch

from meshwright.executor.devices import has_streams

Clocks = dict[int, int]  # stream -> its work so far that is done before
Operand = tuple[str, torch.Tensor, bool]  # its name, and whether it is written

_numbers = count(1)
ALLOCATE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class MixedDevicesError(RuntimeError):
    """A tensor that is not on the rank's device, where it has to be."""


class Stream:
    """A stream by name, with its clock."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = next(_numbers)
        self.clock: Clocks = {}

    def wait_event(self, event: Event) -> None:
        """Order the work that follows after what the event marks."""
        _take(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        """Order the work that follows after what the other stream was given so far."""
        _take(self.clock, stream.clock)

    def record_event(self, event: Event | None = None) -> Event:
        """An event that marks what the stream has been given so far."""
        event = Event() if event is None else event
        event.clock = dict(self.clock)
        return event

    def synchronize(self) -> None:
        """The host waits for the stream."""
        ORDER.wait_for(self)


class Event:
    """A mark in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clocks = {}

    def record(self, stream: Stream | None = None) -> Event:
        """Mark what a stream, by default the current one, has been given so far."""
        return (ORDER.current if stream is None else stream).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Have a stream wait for the mark."""
        (ORDER.current if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for the mark."""
        _take(ORDER.host, self.clock)

    def query(self) -> bool:
        """Whether the marked work is done: nothing here takes time."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds: none."""
        return 0.0


@dataclass(slots=True)
class _Touched:
    """Last writer of a piece of memory, and its readers since: (stream, its count)."""

    written: tuple[int, int] | None = None
    read: Clocks = field(default_factory=dict)


class Order:
    """Work on each stream since the last `begin`."""

    def __init__(self) -> None:
        self.followed = False  # while the stand-in runs a rank
        self.begin()

    def begin(self) -> None:
        """Forget all that was done; the current stream is the default one."""
        self.default = self.current = Stream()
        self.host: Clocks = {}
        self.touched: dict[int, _Touched] = {}  # by identity of the memory
        self.races: Counter[str] = Counter()
        self.names: dict[int, str] = {self.default.stream_id: ""}
        self.numbered = 0
        self.of_group: dict[Any, Stream] = {}
        self.works: dict[int, tuple[Any, Event]] = {}  # by identity, held so that none takes it

    @property
    def name(self) -> str:
        """The current stream; empty for the default one, the others are numbered by first use."""
        return self._named(self.current)

    def _named(self, stream: Stream) -> str:
        if stream.stream_id not in self.names:
            self.numbered += 1
            self.names[stream.stream_id] = f"stream {self.numbered}"
        return self.names[stream.stream_id]

    def wait_for(self, stream: Stream) -> None:
        """The host waits for a stream."""
        _take(self.host, stream.clock)

    def wait_for_all(self) -> None:
        """The host waits for all work."""
        for x in self.touched.values():
            _take(self.host, dict([x.written] if x.written else ()))
            _take(self.host, x.read)

    def queued(
        self,
        what: Callable[[], str],
        operands: Sequence[Operand],
        results: Sequence[torch.Tensor] = (),
        on: Stream | None = None,
    ) -> None:
        """Work was queued on a stream, by default the current one: what it reads and writes, and
        the tensors that it made, whose memory is new."""
        stream = self.current if on is None else on
        self._named(stream)
        _take(stream.clock, self.host)
        me = stream.stream_id
        now = stream.clock[me] = stream.clock.get(me, 0) + 1
        seen = set()
        for name, x, writes in operands:
            memory = x.untyped_storage()._cdata
            seen.add(memory)
            touched = self.touched.setdefault(memory, _Touched())
            before = [touched.written] if touched.written else []
            before += touched.read.items() if writes else []
            for other, number in before:
                if stream.clock.get(other, 0) < number:
                    did = "written" if (other, number) == touched.written else "read"
                    ends = f"on {self.said(me)} takes {name!r}, {did} on {self.said(other)}"
                    self.races[f"{what()} {ends} without waiting for it"] += 1
            if writes:
                touched.written, touched.read = (me, now), {}
            else:
                touched.read[me] = now
        for x in results:
            memory = x.untyped_storage()._cdata
            if memory not in seen:
                self.touched[memory] = _Touched((me, now))

    def transferred(
        self, what: Callable[[], str], operands: Sequence[Operand], group: Any, work: Any
    ) -> None:
        """A collective or message was started: on a stream of its group's own, which waits for the
        current one; who waits for the work waits for that."""
        stream = self.of_group.get(group)
        if stream is None:
            stream = self.of_group[group] = Stream()
            self.names[stream.stream_id] = f"the stream of group {group!r}"
        stream.wait_stream(self.current)
        self.queued(what, operands, on=stream)
        self.works[id(work)] = work, stream.record_event()

    def awaited(self, work: Any) -> None:
        """The current stream waits for a collective or message."""
        _, done = self.works.pop(id(work), (None, None))
        if done is not None:
            self.current.wait_event(done)

    def allocated(self, results: Sequence[torch.Tensor]) -> None:
        """Memory that nobody has written."""
        for x in results:
            self.touched.pop(x.untyped_storage()._cdata, None)

    def said(self, stream: int) -> str:
        """A stream's name in sentences."""
        return self.names.get(stream) or "the default stream"


ORDER = Order()  # of this process: it has one stand-in, and rehearses a rank at a time


def operands_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Operand] | None:
    """The operands of an operator on the device, with their names, and whether it writes them; None
    where it looks at memory otherwise."""
    if func.is_view:
        return None
    operands = []
    for k, (name, writes) in enumerate(_arguments(func)):
        argument = args[k] if k < len(args) else kwargs.get(name)
        for x in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(x, torch.Tensor) and has_streams(x.device):
                operands.append((name, x, writes))
    return operands


@cache
def _arguments(func: Any) -> tuple[tuple[str, bool], ...]:
    """The names of an operator's arguments, and whether it writes them."""
    return tuple(
        (x.name, x.alias_info is not None and x.alias_info.is_write) for x in func._schema.arguments
    )


def _take(clock: Clocks, other: Mapping[int, int]) -> None:
    for stream, done in other.items():
        if clock.get(stream, 0) < done:
            clock[stream] = done
