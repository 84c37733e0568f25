"""Log of a rank's events, in order: what it does to other ranks and to its memory.

Plain data, so that logs are compared, altered and replayed anywhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from meshwright.costmodel.kernels import bytes_sent
from meshwright.executor.checkpoint import SavedTensor
from meshwright.executor.prices import collective_of


class Kind(StrEnum):
    """Kinds of events: a collective of a group; the start of a send; a receive that is posted; the
    wait for posted receives, oldest first. For an estimate of the step, also the operators that run
    between two others; and the wait for all but the last collectives of a group."""

    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"
    WAIT = "wait"
    WORK = "work"
    AWAIT = "await"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a rank.

    `operation` is torch's, e.g. "allreduce_"; `group` the description of the process group and its
    global ranks; `shapes` and `dtype` are those of what is sent, or received into; `root` is the
    global rank that a broadcast comes from, `peer` the other end of a message, with its `tag`.
    `count` of a wait: the receives that it ends, behind the `older` ones, which wait on, or the
    collectives that it leaves under way.
    `device_s` and `host_s` are seconds of operators, by the prices of `executor/prices`. `stream`
    names the one that it is queued on, empty for the default one, and on the host, which has none.
    `where` names instruction, stage and micro-batch, `block` the block whose forward or backward it
    is of.
    """

    kind: Kind
    operation: str = ""
    group: tuple[str, tuple[int, ...]] = ("", ())
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    nbytes: int = 0
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    count: int = 0
    older: int = 0
    device_s: float = 0.0
    host_s: float = 0.0
    stream: str = ""
    where: str = ""
    block: str = ""

    @property
    def payload(self) -> tuple[tuple[tuple[int, ...], ...], str]:
        """The part of a message that both ends have in common."""
        return self.shapes, self.dtype

    def __str__(self) -> str:
        what = f"{self.operation} of {list(map(list, self.shapes))} {self.dtype}"
        if self.peer is not None:
            way = "to" if self.kind is Kind.SEND else "from"
            what += f" {way} rank {self.peer} (tag {self.tag})"
        place = ", ".join(x for x in (self.where, f"block {self.block}" if self.block else "") if x)
        return f"{what} in {self.group[0]!r} [{place}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """All of a rank's rehearsal: its events; what work on one of its streams does with memory that
    another has not done with; bytes at the peak of a step, all of them, by kind, and those of saved
    activations by block; floating-point operations of a step by operator, and which of the events
    are a step's (from, to); what it holds of a checkpoint's tensors, and would write of them;
    leaves that could not run, and why."""

    rank: int
    events: tuple[Event, ...]
    races: tuple[str, ...] = ()
    peak_bytes: int = 0
    peak_by_kind: Mapping[str, int] = field(default_factory=dict)
    saved_by_block: Mapping[str, int] = field(default_factory=dict)
    flops: Mapping[str, int] = field(default_factory=dict)
    step: tuple[int, int] = (0, 0)
    saved: tuple[SavedTensor, ...] = ()
    unrun: Mapping[str, str] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Payload bytes of what the rank sends or gives to collectives, by description of the
        group."""
        by_link: Counter[str] = Counter()
        for event in self.events:
            if event.kind in (Kind.SEND, Kind.COLLECTIVE):
                by_link[event.group[0]] += event.nbytes
        return dict(by_link)


# --- bytes on links -------------------------------------------------------------------------------

# Bytes that a rank's log gives to links in a step.


def link_bytes(log: RankLog) -> dict[str, float]:
    """Bytes that the rank gives to links in a step, by description of the group: its messages, and
    its part of collectives round a ring, or to each member."""
    by_link: defaultdict[str, float] = defaultdict(float)
    for event in log.events[slice(*log.step)]:
        name, ranks = event.group
        if event.kind is Kind.SEND:
            by_link[name] += event.nbytes
        elif event.kind is Kind.COLLECTIVE:
            said = collective_of(event.operation, event.nbytes, len(ranks))
            by_link[name] += bytes_sent(*said, len(ranks))
    return dict(by_link)
