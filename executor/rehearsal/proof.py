"""Proof by the logs of ranks that the plan can't hang, and moves what it should.

Logs are those of one rank of each kind; `kind_of` gives for every rank of the world the rank that
stands for it (itself, where every rank was rehearsed). Four proofs:

    collectives   the members of a group issue the same sequence: operation, shapes, dtype, root
    messages      what a rank sends to another is what that one receives from it: as many, and in
                  order of equal shape and dtype, per group and tag
    replay        all streams are run with blocking semantics: a collective waits until all members
                  are at it, a wait until the messages before it were sent; sends don't wait. Where
                  nothing moves, what each rank stands at is reported
    streams       of a rank: no stream touches memory that another one, or a collective, has not
                  done with and that it did not wait for (`streams.py`, while the rank runs)

Ranks of a kind move in step, so that the replay of one of each hangs where that of all does.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest

from meshwright.executor.rehearsal.events import Event, Kind, RankLog

Logs = Mapping[int, RankLog]
Route = tuple[str, int]  # (description of the group, tag)
SHOWN = 8  # ranks of a standstill


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Something that doesn't match: which `ranks`, and what they do, where."""

    proof: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.proof}: ranks {list(self.ranks)}: {self.text}"


def mismatches(logs: Logs, kind_of: Mapping[int, int]) -> list[Mismatch]:
    """All that the logs don't agree on; the replay only where the rest matches."""
    faults = [*unlike_collectives(logs, kind_of), *unmet_messages(logs, kind_of)]
    faults += [
        Mismatch(proof="streams", ranks=(rank,), text=race)
        for rank in sorted(logs)
        for race in logs[rank].races[:SHOWN]
    ]
    return faults or standstill(logs, kind_of)


# --- collectives ----------------------------------------------------------------------------------


def unlike_collectives(logs: Logs, kind_of: Mapping[int, int]) -> list[Mismatch]:
    """Groups whose members issue different sequences."""
    first_faults: dict[tuple[int, int], Mismatch] = {}
    sequences = {rank: _by_group(log) for rank, log in logs.items()}
    for rank in sorted(logs):
        for group, events in sequences[rank].items():
            name, members = group
            if rank not in members:
                text = f"it uses the group {group}, of which it is no member"
                first_faults[rank, rank] = Mismatch(proof="collectives", ranks=(rank,), text=text)
                continue
            first = kind_of.get(members[0], members[0])
            others = members if rank == first else members[:1]
            for member in {kind_of.get(m, m): m for m in reversed(others)}.values():
                other = kind_of.get(member, member)
                theirs = sequences.get(other, {})
                same = [e for g, e in theirs.items() if _is_same(g, group, exact=other == member)]
                text = _difference(events, same[0] if same else [], kind_of)
                if text:
                    ends = min(rank, other), max(rank, other)
                    text = f"of the group {name!r} of ranks {list(members[:SHOWN])}: {text}"
                    first_faults[ends] = Mismatch(proof="collectives", ranks=ends, text=text)
    return list(first_faults.values())


def _is_same(
    one: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]], *, exact: bool
) -> bool:
    """Whether two groups are the same; if not `exact`, those of two ranks of a kind."""
    if exact:
        return one == other
    return (one[0], len(one[1])) == (other[0], len(other[1]))


def _by_group(log: RankLog) -> dict[tuple[str, tuple[int, ...]], list[Event]]:
    sequences: dict[tuple[str, tuple[int, ...]], list[Event]] = defaultdict(list)
    for event in log.events:
        if event.kind is Kind.COLLECTIVE:
            sequences[event.group].append(event)
    return sequences


def _difference(ours: list[Event], theirs: list[Event], kind_of: Mapping[int, int]) -> str:
    """The first place in which two sequences differ; empty where they don't."""
    for k, (a, b) in enumerate(zip_longest(ours, theirs)):
        if a is None or b is None:
            one = a or b
            return f"collective {k} is issued by one of them alone: {one}"
        if (a.operation, a.payload) != (b.operation, b.payload):
            return f"collective {k} is {a}, and {b}"
        roots = [kind_of.get(e.root, e.root) if e.root is not None else None for e in (a, b)]
        if roots[0] != roots[1] or (a.group[1] == b.group[1] and a.root != b.root):
            return f"collective {k} comes from rank {a.root}, and from rank {b.root}: {a}"
    return ""


# --- messages -------------------------------------------------------------------------------------


def unmet_messages(logs: Logs, kind_of: Mapping[int, int]) -> list[Mismatch]:
    """Messages that are sent and not received, or otherwise, or of other shapes."""
    sent, received = _messages(logs, Kind.SEND), _messages(logs, Kind.RECEIVE)
    faults = []
    for source, target, reverse in _ends(sent, received):
        a = sent if not reverse else received
        b = received if not reverse else sent
        one, other = (source, target) if not reverse else (target, source)
        if one not in logs:
            continue
        mine = a[one].get(other, {})
        stands = kind_of.get(other)
        if stands is None:
            text = f"it has messages with rank {other}, which is not in the plan"
            faults.append(Mismatch(proof="messages", ranks=(one, other), text=text))
            continue
        choices = [b[stands].get(one, {})] if stands == other else []
        choices += [m for peer, m in b[stands].items() if kind_of.get(peer) == kind_of[one]]
        if not any(_same(mine, theirs) for theirs in choices):
            theirs = choices[0] if choices else {}
            text = _unmet(mine, theirs, sends=not reverse)
            faults.append(Mismatch(proof="messages", ranks=(one, other), text=text))
    return faults


Streams = Mapping[Route, list[Event]]


def _messages(logs: Logs, kind: Kind) -> dict[int, dict[int, dict[Route, list[Event]]]]:
    """Rank -> peer -> group and tag -> messages."""
    messages: dict[int, dict[int, dict[Route, list[Event]]]] = {}
    for rank, log in logs.items():
        by_peer: dict[int, dict[Route, list[Event]]] = defaultdict(lambda: defaultdict(list))
        for event in log.events:
            if event.kind is kind and event.peer is not None:
                by_peer[event.peer][event.group[0], event.tag].append(event)
        messages[rank] = by_peer
    return messages


def _ends(
    sent: Mapping[int, Mapping[int, Streams]], received: Mapping[int, Mapping[int, Streams]]
) -> list[tuple[int, int, bool]]:
    """(source, target, whether the target's log says it) of all messages; each pair once, where
    both logs say it."""
    said = [(rank, peer, False) for rank, peers in sent.items() for peer in list(peers)]
    pairs = {(source, target) for source, target, _ in said}
    others = [(peer, rank, True) for rank, peers in received.items() for peer in list(peers)]
    return said + [end for end in others if end[:2] not in pairs]


def _same(one: Streams, other: Streams) -> bool:
    return {r: [e.payload for e in m] for r, m in one.items() if m} == {
        r: [e.payload for e in m] for r, m in other.items() if m
    }


def _unmet(mine: Streams, theirs: Streams, *, sends: bool) -> str:
    """The first message that has no other end."""
    way, back = ("sends", "receives") if sends else ("receives", "sends")
    for route in sorted({*mine, *theirs}):
        for k, (a, b) in enumerate(zip_longest(mine.get(route, []), theirs.get(route, []))):
            if a is None:
                return f"the second {back} what the first never {way}: message {k}: {b}"
            if b is None:
                return f"the first {way} what the second never {back}: message {k}: {a}"
            if a.payload != b.payload:
                return f"message {k} differs: {a}, and {b}"
    return "their messages differ"


# --- replay ---------------------------------------------------------------------------------------


class Replay:
    """The streams of all logs, each at its next event."""

    def __init__(self, logs: Logs, kind_of: Mapping[int, int]) -> None:
        self.logs, self.kind_of = logs, kind_of
        self.at = dict.fromkeys(logs, 0)
        self.sent: Counter[tuple[int, int, str, int]] = Counter()  # kinds and route
        self.taken: Counter[tuple[int, int, str, int]] = Counter()
        self.posted: dict[int, deque[Event]] = {rank: deque() for rank in logs}
        sends, receives = Counter[tuple[int, int, str, int]](), Counter[tuple[int, int, str, int]]()
        for rank, log in logs.items():
            for event in log.events:
                if event.kind is Kind.SEND:
                    sends[self._key(rank, event)] += 1
                elif event.kind is Kind.RECEIVE:
                    receives[self._key(rank, event)] += 1
        self.per_receive = {key: sends[key] / n for key, n in receives.items()}

    def _key(self, rank: int, event: Event) -> tuple[int, int, str, int]:
        assert event.peer is not None
        ends = (rank, self.kind_of[event.peer])
        source, target = ends if event.kind is Kind.SEND else ends[::-1]
        return source, target, event.group[0], event.tag

    def next(self, rank: int) -> Event | None:
        events = self.logs[rank].events
        return events[self.at[rank]] if self.at[rank] < len(events) else None

    def step(self, rank: int) -> bool:
        """Advance one rank by one event, with all members of its group in a collective."""
        event = self.next(rank)
        if event is None:
            return False
        if event.kind is Kind.COLLECTIVE:
            return self._collective(rank, event)
        if event.kind is Kind.SEND:
            self.sent[self._key(rank, event)] += 1
        elif event.kind is Kind.RECEIVE:
            self.posted[rank].append(event)
        elif event.kind is Kind.WAIT and not self._arrived(rank, event):
            return False
        self.at[rank] += 1
        return True

    def _collective(self, rank: int, event: Event) -> bool:
        name, members = event.group
        together = {self.kind_of[m] for m in members}
        for other in together:
            theirs = self.next(other)
            if theirs is None or theirs.kind is not Kind.COLLECTIVE:
                return False
            if (theirs.group[0], len(theirs.group[1])) != (name, len(members)):
                return False
        for other in together:
            self.at[other] += 1
        return True

    def waited_for(self, rank: int, wait: Event) -> list[Event]:
        """The posted receives that a wait ends."""
        return [*islice(self.posted[rank], wait.older, wait.older + wait.count)]

    def _arrived(self, rank: int, wait: Event) -> bool:
        """Whether the posted receives of a wait have arrived; they are taken then."""
        waiting = self.waited_for(rank, wait)
        taken = self.taken.copy()
        for event in waiting:
            key = self._key(rank, event)
            taken[key] += 1
            if self.sent[key] < taken[key] * self.per_receive[key]:
                return False
        self.taken = taken
        for _ in waiting:
            del self.posted[rank][wait.older]
        return True


def standstill(logs: Logs, kind_of: Mapping[int, int]) -> list[Mismatch]:
    """The ranks that wait for each other for ever, with what they stand at."""
    replay = Replay(logs, kind_of)
    moving = deque(sorted(logs))
    stopped = 0
    while moving and stopped <= len(moving):
        rank = moving.popleft()
        moved = False
        while replay.step(rank):
            moved = True
        if moved:
            stopped = 0
        if replay.next(rank) is not None:  # one that is done keeps nobody waiting
            moving.append(rank)
            stopped += not moved
    stuck = [(rank, event) for rank in sorted(logs) if (event := replay.next(rank)) is not None]
    if not stuck:
        return []
    shown = "; ".join(f"rank {rank} at {_said(event)}" for rank, event in stuck[:SHOWN])
    ranks = tuple(rank for rank, _ in stuck)
    return [Mismatch(proof="replay", ranks=ranks, text=f"they wait for each other: {shown}")]


def _said(event: Event) -> str:
    return f"the wait in {event.where}" if event.kind is Kind.WAIT else str(event)
