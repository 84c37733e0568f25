"""AMPNet's order: groups take what lies in their queues, backwards first, and step at once.

A closed queue: q micro-batches are under way, and the next enters as one leaves. A group steps its
weights after every u-th backward, so that what a micro-batch meets in its backward is younger than
what its forward had.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from scripts.drawing.pipelines import FILLS, LANE, LEFT, TOP, UNIT
from scripts.drawing.svg import Picture

GROUPS, SHOWN_S = 4, 33.0
BUSY = range(20, 40)  # micro-batches of which all groups are busy
FORWARD_S, BACKWARD_S = 1.0, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward or backward of a micro-batch on a group; `updates` of the weights since its
    forward."""

    group: int
    microbatch: int
    backward: bool
    start_s: float
    end_s: float
    updates: int


@dataclass(slots=True, kw_only=True)
class Queues:
    """Groups with the seconds of their forward and backward, `under_way` micro-batches at a time, a
    step after every `every` backwards; `run` gives the passes in the order of their ends."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    under_way: int
    every: int = 1
    _forwards: list[deque[int]] = field(init=False)
    _backwards: list[deque[int]] = field(init=False)

    def run(self, microbatches: int) -> list[Pass]:
        """Passes of so many micro-batches."""
        groups = len(self.forward_s)
        self._forwards, self._backwards = ([deque[int]() for _ in range(groups)] for _ in "FB")
        gradients, seen, passes = [0] * groups, dict[tuple[int, int], int](), list[Pass]()
        entering, events, order = (
            iter(range(microbatches)),
            list[tuple[float, int, Pass]](),
            count(),
        )
        idle = {*range(groups)}
        self._forwards[0].extend(k for k, _ in zip(entering, range(self.under_way), strict=False))
        now_s = 0.0
        while True:
            for group in sorted(idle):
                if not (queue := self._backwards[group] or self._forwards[group]):
                    continue
                backward = queue is self._backwards[group]
                took_s = (self.backward_s if backward else self.forward_s)[group]
                microbatch, steps = queue.popleft(), gradients[group] // self.every
                since = seen.setdefault((group, microbatch), steps)
                started = Pass(
                    group=group, microbatch=microbatch, backward=backward,
                    start_s=now_s, end_s=now_s + took_s, updates=steps - since,
                )  # fmt: skip
                idle.remove(group)
                heapq.heappush(events, (started.end_s, next(order), started))
            if not events:
                return passes
            now_s, _, ended = heapq.heappop(events)
            passes.append(ended)
            idle.add(ended.group)
            gradients[ended.group] += ended.backward
            self._send(ended, entering)

    def _send(self, ended: Pass, entering: Iterator[int]) -> None:
        group, last = ended.group, len(self.forward_s) - 1
        if not ended.backward:
            queue = self._backwards[last] if group == last else self._forwards[group + 1]
            queue.append(ended.microbatch)
        elif group:
            self._backwards[group - 1].append(ended.microbatch)
        elif (following := next(entering, None)) is not None:
            self._forwards[0].append(following)


def in_order_of_arrival() -> str:
    """The first passes of four groups, with the updates that lie between a forward and its
    backward once all groups are busy."""
    under_way = GROUPS
    passes = Queues(
        forward_s=[FORWARD_S] * GROUPS, backward_s=[BACKWARD_S] * GROUPS, under_way=under_way
    ).run(BUSY.stop + GROUPS)
    title = f"AMPNet: {under_way} micro-batches under way, a step after every backward"
    picture = Picture(LEFT + SHOWN_S * UNIT + 120, TOP + GROUPS * LANE + 12, title)
    picture.text(LEFT, 20, title)
    after = LEFT + SHOWN_S * UNIT + 8
    picture.text(after, 20, "updates between", class_="dim", font_size=10)
    for group in range(GROUPS):
        y, own = TOP + group * LANE, [each for each in passes if each.group == group]
        picture.text(8, y + 14, f"device {group}")
        picture.box(LEFT, y, SHOWN_S * UNIT, LANE - 3, class_="idle")
        late = max(each.updates for each in own if each.microbatch in BUSY)
        picture.text(after, y + 14, str(late))
        for each in own:
            if each.end_s > SHOWN_S:
                continue
            x, width = LEFT + each.start_s * UNIT, (each.end_s - each.start_s) * UNIT
            fill = FILLS["B" if each.backward else "F"][0]
            picture.box(x, y, width - 0.6, LANE - 3, fill=fill)
            number, size = str(each.microbatch), 10 if width > 12 else 8
            picture.text(
                x + width / 2, y + 13, number, anchor="middle", class_="on", font_size=size
            )
    return picture.svg()
