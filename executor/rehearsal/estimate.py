"""A second estimate of a step: the recorded streams of all ranks, replayed with times.

    operators     one after the other: of the device's seconds d and the host's h, issued(h, d) as
                  for the price (`costmodel/stages/stage.py`)
    collectives   begin when all members are at them and the group's collective before is done, and
                  take what the links' curves say. The rank goes on beside; it waits where its
                  stream did in the rehearsal. Ranks of the host wait at once
    messages      leave when they are sent, or the one before to that rank has; a rank that waits
                  for one waits until it is there

The input is what ran, as it ran: nothing of the plan's own price but the curves of device and links
is used. Left out: that compute is slower while a collective runs beside it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.executor.prices import Prices
from meshwright.executor.rehearsal.events import Event, Kind, RankLog
from meshwright.executor.rehearsal.proof import Replay

NEAR = 0.03  # part of the price: estimates that differ by more are explained


PHASES = ("forward", "backward", "optimizer", "beside")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of a step until the last rank is done, and of that rank by what they are: operators
    of each of `PHASES` ("beside": before and after the passes), and "communication", collectives
    and messages that it waited for while they ran. The rest it waited for other ranks."""

    step_s: float
    seconds: Mapping[str, float]

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they are, the waits for other ranks included."""
        return {**self.seconds, "waits": max(0.0, self.step_s - sum(self.seconds.values()))}

    def beside(self, price: Estimate) -> str:
        """Both step times and, where they are apart, the part that differs most, in words."""
        off = self.step_s / price.step_s - 1
        said = f"step {1e3 * self.step_s:.4g} ms by what ran, {1e3 * price.step_s:.4g} ms by price"
        if abs(off) <= NEAR:
            return f"{said} ({off:+.1%})"
        rehearsed, priced = self.parts, price.parts
        part = max(rehearsed, key=lambda name: abs(rehearsed[name] - priced.get(name, 0.0)))
        return (
            f"{said} ({off:+.1%}: most by {part}, {1e3 * rehearsed[part]:.4g} ms, "
            f"{1e3 * priced.get(part, 0.0):.4g} ms by price)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan's price beside its rehearsal: the peak bytes of tensors of each device group, and the
    step; `prices` for a second estimate. Each where there is one."""

    peak_bytes: Sequence[int] = ()
    step: Estimate | None = None
    prices: Prices | None = None


NO_PRICE = Priced()


def estimate(
    logs: Mapping[int, RankLog], kind_of: Mapping[int, int], prices: Prices, *, blocking: bool
) -> Estimate:
    """The second estimate; `blocking` if ranks wait for each collective at once. The logs match
    (`mismatches`)."""
    steps = {rank: replace(log, events=log.events[slice(*log.step)]) for rank, log in logs.items()}
    replay = _Timed(steps, kind_of, prices, blocking)
    moving = deque(sorted(steps))
    while moving:
        rank = moving.popleft()
        while replay.step(rank):
            pass
        if replay.next(rank) is not None:
            moving.append(rank)
    last = max(sorted(steps), key=lambda rank: replay.now[rank])
    return Estimate(
        step_s=replay.now[last],
        seconds={**replay.computed[last], "communication": replay.communicated[last]},
    )


class _Timed(Replay):
    """The replay, with the time of every rank."""

    def __init__(
        self,
        logs: Mapping[int, RankLog],
        kind_of: Mapping[int, int],
        prices: Prices,
        blocking: bool,
    ) -> None:
        super().__init__(logs, kind_of)
        self.prices, self.blocking = prices, blocking
        self.now = dict.fromkeys(logs, 0.0)
        self.computed = {rank: dict.fromkeys(PHASES, 0.0) for rank in logs}
        self.communicated = dict.fromkeys(logs, 0.0)
        # of each rank and group, (seconds, end) of its collectives so far
        self.ran: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        self.read: dict[tuple[int, int, str, int], int] = {}
        # of each route (seconds, arrival) of its messages so far
        self.arrivals: dict[tuple[int, int, str, int], list[tuple[float, float]]] = defaultdict(
            list
        )

    def step(self, rank: int) -> bool:
        event = self.next(rank)
        if event is None:
            return False
        waiting = self.waited_for(rank, event) if event.kind is Kind.WAIT else []
        moved = super().step(rank)
        if not moved:
            return False
        if event.kind is Kind.WORK:
            seconds = self.prices.issued_s(event.device_s, event.host_s)
            self.now[rank] += seconds
            self.computed[rank][_phase(event)] += seconds
        elif event.kind is Kind.AWAIT:
            ran = self.ran[rank, event.group[0]]
            if len(ran) > event.count:
                self._until(rank, *ran[len(ran) - 1 - event.count])
        elif event.kind is Kind.SEND:
            self._send(rank, event)
        for message in waiting:
            self._until(rank, *self._arrival(rank, message))
        return True

    def _collective(self, rank: int, event: Event) -> bool:
        if not super()._collective(rank, event):
            return False
        together = {self.kind_of[m] for m in event.group[1]}
        name, ranks = event.group
        seconds = self.prices.collective_s(event.operation, event.nbytes, ranks)
        before = [self.ran[other, name][-1][1] for other in together if self.ran[other, name]]
        end = max([*(self.now[other] for other in together), *before]) + seconds
        for other in together:
            self.ran[other, name].append((seconds, end))
            if self.blocking:
                self._until(other, seconds, end)
        return True

    def _send(self, rank: int, event: Event) -> None:
        assert event.peer is not None
        arrivals = self.arrivals[self._key(rank, event)]
        seconds = self.prices.message_s(event.nbytes, rank, event.peer)
        start = max([self.now[rank], *(end for _, end in arrivals[-1:])])
        arrivals.append((seconds, start + seconds))

    def _arrival(self, rank: int, event: Event) -> tuple[float, float]:
        """Seconds and arrival of the message that a posted receive takes, which were counted in
        `taken` together; of several ranks of a kind the last."""
        key = self._key(rank, event)
        self.read[key] = read = self.read.get(key, 0) + 1
        arrivals = self.arrivals[key]
        return arrivals[min(len(arrivals), max(1, round(read * self.per_receive[key]))) - 1]

    def _until(self, rank: int, seconds: float, end: float) -> None:
        """The rank waits until `end` for what took so many seconds."""
        waited = max(0.0, end - self.now[rank])
        self.communicated[rank] += min(waited, seconds)
        self.now[rank] += waited


def _phase(event: Event) -> str:
    """The phase that operators are of; the optimizer is the user's own code."""
    if event.where.startswith("user code"):
        return "optimizer"
    return next((name for name in PHASES[:2] if event.where.startswith(name)), "beside")
