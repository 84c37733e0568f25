"""Bounds on the step of every plan of a space with equal stages, combination by combination.

A combination has the bound that it was found with, which knows the least seconds of its blocks and
nothing else. The least bounds are raised by relaxations of what is left (`loads.py`,
`pipelines.py`) until the least of all is one that was raised: no more work than the answer asks
for.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.costmodel.memo import Memo
from meshwright.costmodel.schedules import in_flight, least_in_flight
from meshwright.costmodel.stages import Floats
from meshwright.planner.bounds import pipelines
from meshwright.planner.bounds.loads import Loads, loads_of
from meshwright.planner.drafts import Combination, EqualStages, MeshChoice, Space, StageSetup

MOST_RAISED = 1000  # bounds, milliseconds each


@dataclass(slots=True, kw_only=True)
class Bounds:
    """Lower bounds on the steps of plans that fit, whatever their cuts and recompute."""

    space: Space
    equal: EqualStages
    _loads: Memo[Any, Loads] = field(default_factory=Memo)

    def of_equal(
        self, choices: Sequence[MeshChoice], below_s: float, late: Callable[[], bool]
    ) -> float:
        """No plan with equal stages on these meshes takes less; those that take `below_s` are of no
        interest. The least bounds are raised, `MOST_RAISED` of them, or until it is `late`."""
        order = itertools.count()
        waiting: list[tuple[float, int, Combination | None]] = []
        for choice in choices:
            if self.equal.known(choice):
                own = self.equal.combinations(choice)
                waiting += [(one.bound_s, next(order), one) for one in own]
                left = self.equal.waiting(choice)
                waiting += [(one.bound_s, next(order), None) for one in left]
            else:
                waiting.append((choice.bound_s, next(order), None))
        heapq.heapify(waiting)
        raised = 0
        while waiting and waiting[0][0] < below_s:
            bound, number, what = heapq.heappop(waiting)
            if what is None or raised == MOST_RAISED or late():
                return bound
            raised += 1
            heapq.heappush(waiting, (max(bound, self.of_combination(what, below_s)), number, None))
        return below_s

    def of_combination(self, one: Combination, below_s: float = math.inf) -> float:
        """No plan with this combination takes less; no better bound than `below_s` is looked
        for."""
        if one.setup.mesh.tp > 1:  # typical blocks are no bound there: stages may split otherwise
            return one.bound_s
        m, p, each = one.pipeline.shape
        policies = self.equal.policies(one.setup, one.pipeline)
        own = self._loads_of(one.setup, policies, single=p * each == 1)
        room = self.equal.room - own.fixed_bytes
        if room <= 0:
            return math.inf
        step = _work(own, own.pass_s + own.once_s / m, own.again_step_s / m, room)
        held = np.maximum(
            np.array(least_in_flight(one.pipeline), dtype=float), 1e-6
        )  # a device may hold none
        least, price = pipelines.shared_s(step, float(held.min()), p)
        if p == 1 or m * least >= below_s:
            return m * least
        before = np.concatenate([[0.0], np.cumsum(_first(own.forward_each_s, p - 1))])
        found = m * least
        for nu in {0.0, price}:
            found = pipelines.balanced_s(pipelines.devices_of(step, held, nu), m, before, found)
        early = own.pass_s
        if one.pipeline.record.splits_backward:
            early = own.pass_s - own.late_s
        found = max(found, self._once_through(one, own, early))
        return found if found >= below_s else self._filled(one, own, early, (held, price), found)

    def _once_through(self, one: Combination, own: Loads, early: Floats) -> float:
        """One micro-batch through all stages there and back, behind the other ones' forwards in
        the stage where these take longest."""
        longest = max(
            float(own.forward_s.sum()) / one.pipeline.num_stages, float(own.forward_each_s[-1])
        )
        return float(early.sum()) + (one.pipeline.num_microbatches - 1) * longest

    def _filled(
        self,
        one: Combination,
        own: Loads,
        early: Floats,
        held: tuple[Floats, float],
        start_s: float,
    ) -> float:
        """Where each device has one stage, it waits for those of the devices before it. And of the
        m micro-batches, each of which takes a way through all stages, there and back, no more than
        h are under way at once: m (Σ t + sends) <= h T."""
        (m, p, each), found = one.pipeline.shape, start_s
        first = in_flight(one.pipeline, 0)
        kinds: list[tuple[Floats, float, float]] = [(early, first / m, 2 * self._sent_s(one))]
        if each == 1:
            kinds.append((early, pipelines.theta(m, p, 1.0), 0.0))
            if one.pipeline.record.splits_backward:
                part = float((own.forward_s / np.maximum(own.pass_s, 1e-30)).min())
                if part > 0:
                    kinds.append((own.pass_s, pipelines.theta(m, p, part), 0.0))
        for seconds, share, less_s in kinds:
            work = _work(own, seconds, own.again_s, self.equal.room - own.fixed_bytes)
            for nu in {0.0, held[1]}:
                found = pipelines.filled_s(
                    pipelines.devices_of(work, held[0], nu), m, share, less_s, found
                )
        return found

    def _sent_s(self, one: Combination) -> float:
        """Seconds of one micro-batch's messages in one direction, at least: at the cuts where they
        are shortest, and where only every so many-th crosses a node, no more of them."""
        mesh, cluster = one.setup.mesh, self.space.cluster
        sends = sum(a != b for a, b in itertools.pairwise(one.pipeline.device_of))
        each = np.sort(one.setup.chain.send_s[self.equal.cuts[1:-1]])
        beside = mesh.spread if mesh.spread > 1 else cluster.devices_per_node // mesh.devices
        if cluster.num_nodes == 1 or beside <= 1:
            return float(_first(each, sends).sum())
        crossing = (
            max(0, math.ceil(one.pipeline.num_devices / beside) - 1) * one.pipeline.each * beside
        )
        return float(_first(each, 1).sum()) * min(sends, crossing)

    def _loads_of(self, setup: StageSetup, policies: tuple[str, ...], *, single: bool) -> Loads:
        key = setup.chain, setup.sharing, policies, single
        return self._loads.of(key, lambda: loads_of(setup, policies, single=single))


def _work(own: Loads, seconds: Floats, again_s: Floats, room: float) -> pipelines.Work:
    active = own.active_bytes[:, None] - own.freed_bytes
    return pipelines.Work(
        cost_s=seconds[:, None] + again_s,
        static_bytes=np.broadcast_to(own.static_bytes[:, None], active.shape),
        active_bytes=active,
        each=np.broadcast_to(1 / own.count[:, None], active.shape),
        room=room,
    )


def _first(each: Floats, count: int) -> Floats:
    """The `count` least of the seconds of blocks; all, and zeros, where there are fewer."""
    return np.pad(each[:count], (0, max(0, count - len(each))))
