"""Bounds on the step of every plan of a space: of combinations one by one, of different meshes for
each number of micro-batches.

A combination has the bound that it was found with, which knows the least seconds of its blocks and
nothing else. The least bounds are raised by relaxations of what is left (`loads.py`,
`pipelines.py`) until the least of all is one that was raised: no more work than the answer asks
for.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.costmodel.blocks import Floats
from meshwright.costmodel.memory import model_state_bytes
from meshwright.costmodel.schedules import SCHEDULES, in_flight, least_in_flight
from meshwright.planner.bounds.loads import Loads, loads_of
from meshwright.planner.bounds.pipelines import (
    Work,
    balanced_s,
    devices_of,
    filled_s,
    shared_s,
    theta,
)
from meshwright.planner.drafts import (
    Combination,
    EqualStages,
    Mesh,
    MeshChoice,
    Space,
    StageSetup,
    UnequalStages,
)


@dataclass(slots=True, kw_only=True)
class Bounds:
    """Lower bounds on the steps of plans that fit, whatever their cuts and recompute."""

    space: Space
    equal: EqualStages
    unequal: UnequalStages
    _loads: dict[Any, Loads] = field(default_factory=dict)

    # --- the whole space ---

    def least_s(
        self,
        choices: Iterable[MeshChoice],
        counts: Sequence[int],
        below_s: float,
        late: Callable[[], bool],
    ) -> float:
        """No plan on these meshes, or with different meshes for these numbers of micro-batches,
        takes less; those that take `below_s` are of no interest. When it is `late` nothing is
        raised further."""
        choices, order = list(choices), itertools.count()
        waiting: list[tuple[float, int, Combination | int | None]] = []
        for choice in choices:
            known = self.equal.known(choice)
            for one in self.equal.combinations(choice) if known else ():
                waiting.append((one.bound_s, next(order), one))
            if not known:
                waiting.append((choice.bound_s, next(order), None))
        for m in counts:
            bounds = self.unequal.bounds(m, self.unequal.meshes(m))
            if len(bounds):
                waiting.append((float(bounds.min()), next(order), m))
        heapq.heapify(waiting)
        priced = {
            (replace(choice.mesh, spread=1), choice.num_microbatches)
            for choice in choices
            if self.equal.known(choice) and self.equal.combinations(choice)
        }
        while waiting and waiting[0][0] < below_s:
            bound, number, what = heapq.heappop(waiting)
            if what is None or late():
                return bound
            raised = (
                self.of_different(what, priced, below_s)
                if isinstance(what, int)
                else self.of_combination(what)
            )
            heapq.heappush(waiting, (max(bound, raised), number, None))
        return below_s

    # --- equal meshes ---

    def of_combination(self, one: Combination) -> float:
        """No plan with this combination takes less."""
        m, p = one.num_microbatches, one.groups
        policies = self.space.policies(one.schedule)
        own = self._loads_of(one.setup, policies, single=one.num_stages == 1)
        room = self.equal.room - own.fixed_bytes
        if room <= 0:
            return math.inf
        step = _work(own, own.pass_s + own.once_s / m, own.again_step_s / m, room)
        held = np.array(_held(one), dtype=float)
        least, price = shared_s(step, float(held.min()), p)
        if p == 1 or math.isinf(least):
            return m * least
        before = np.concatenate([[0.0], np.cumsum(_first(own.forward_each_s, p - 1))])
        found = m * least
        for nu in {0.0, price}:
            found = balanced_s(devices_of(step, held, nu), m, before, found)
        early = own.pass_s
        if SCHEDULES[one.schedule].splits_backward:
            early = own.pass_s - own.late_s
        found = max(found, self._once_through(one, own, early))
        return self._filled(one, own, early, (held, price), found)

    def _once_through(self, one: Combination, own: Loads, early: Floats) -> float:
        """One micro-batch through all stages there and back, behind the other ones' forwards in
        the stage where these take longest."""
        longest = max(float(own.forward_s.sum()) / one.num_stages, float(own.forward_each_s[-1]))
        return float(early.sum()) + (one.num_microbatches - 1) * longest

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
        m, p, found = one.num_microbatches, one.groups, start_s
        first = in_flight(
            one.schedule, stage=0, num_stages=one.num_stages, num_microbatches=m, num_devices=p
        )
        kinds: list[tuple[Floats, float, float]] = [(early, first / m, 2 * self._sent_s(one))]
        if one.stages_per_group == 1:
            kinds.append((early, theta(m, p, 1.0), 0.0))
            if SCHEDULES[one.schedule].splits_backward:
                part = float((own.forward_s / np.maximum(own.pass_s, 1e-30)).min())
                if part > 0:
                    kinds.append((own.pass_s, theta(m, p, part), 0.0))
        for seconds, share, less_s in kinds:
            work = _work(own, seconds, own.again_s, self.equal.room - own.fixed_bytes)
            for nu in {0.0, held[1]}:
                found = filled_s(devices_of(work, held[0], nu), m, share, less_s, found)
        return found

    def _sent_s(self, one: Combination) -> float:
        """Seconds of one micro-batch's messages in one direction, at least: at the cuts where they
        are shortest, and where only every so many-th crosses a node, no more of them."""
        cuts = self.equal.cuts[1:-1]
        mesh, stages, cluster = one.setup.mesh, one.num_stages, self.space.cluster
        shortest = float(_first(np.sort(one.setup.chain.send_s[cuts]), stages - 1).sum())
        beside = mesh.spread if mesh.spread > 1 else cluster.devices_per_node // mesh.devices
        if cluster.num_nodes == 1 or beside <= 1:
            return shortest
        crossing = max(0, math.ceil(one.groups / beside) - 1)
        return shortest * min(1.0, crossing * one.stages_per_group * beside / (stages - 1))

    def _loads_of(self, setup: StageSetup, policies: tuple[str, ...], *, single: bool) -> Loads:
        key = setup.chain, setup.zero, policies, single
        if key not in self._loads:
            self._loads[key] = loads_of(setup, policies, single=single)
        return self._loads[key]

    # --- different meshes ---

    def of_different(self, m: int, priced: set[tuple[Mesh, int]], below_s: float) -> float:
        """No plan with m micro-batches and different meshes takes less.

        Where no stage has more than L of the D devices, a device with s L devices behind it holds
        s + 1 micro-batches or more, and waits as if all stages had L. Blocks are divisible among
        devices, each on the mesh where it takes least of these: n·t seconds and n·bytes.
        """
        meshes = self.unequal.meshes(m)
        within = self.unequal.bounds(m, meshes) < below_s
        options = [
            (mesh.devices, own)
            for mesh, may in zip(meshes, within, strict=True)
            if may
            for own in self._options(mesh, m, priced)
        ]
        devices, found = self.space.cluster.num_devices, below_s
        for largest in sorted(n for n in self.space.sizes() if n < devices):
            own = [option for n, option in options if n <= largest]
            if own and (n := max(n for n, _ in options if n <= largest)) == largest:
                found = min(found, self._with_largest(m, n, own))
        return found

    def _with_largest(self, m: int, largest: int, options: Sequence[_Options]) -> float:
        """The same where the largest stage has so many devices."""
        p = math.ceil(self.space.cluster.num_devices / largest)
        step, alone = (self._together(options, k, largest) for k in (0, 1))
        least, price = shared_s(step, 1.0, p)
        if math.isinf(least):
            return math.inf
        holds = np.minimum(2.0 ** np.floor(np.log2(np.arange(1, p + 1))), m)  # rounded down
        held, counts = np.unique(holds, return_counts=True)
        many = counts.astype(float)
        nothing, found = np.zeros(len(held)), m * least
        for nu in {0.0, price}:
            found = balanced_s(devices_of(step, held, nu, many), m, nothing, found)
            waiting = devices_of(alone, held, nu, many)
            found = filled_s(waiting, m, theta(m, p, 1.0), 0.0, found)
        return found

    def _together(self, options: Sequence[_Options], which: int, largest: int) -> Work:
        """All options of all meshes, in parts of `largest` devices."""
        return Work(
            cost_s=np.concatenate([own.cost_s[which] for own in options], axis=1) / largest,
            static_bytes=np.concatenate([own.static_bytes for own in options], axis=1) / largest,
            active_bytes=np.concatenate([own.active_bytes for own in options], axis=1) / largest,
            each=np.concatenate([own.each for own in options], axis=1) * largest,
            room=self.equal.room,
        )

    def _options(self, mesh: Mesh, m: int, priced: set[tuple[Mesh, int]]) -> Iterator[_Options]:
        """The blocks of each class on a mesh under each setup and policy; without a price by their
        least seconds alone."""
        names = self.equal.classes
        classes = {name: k for k, name in enumerate(dict.fromkeys(names))}
        of_block = np.array([classes[name] for name in names])
        count = np.bincount(of_block).astype(float)[:, None]
        n = mesh.devices

        def least(values: Floats) -> Floats:
            """(classes, q) of values (K, q): the least of each class, for all of its blocks."""
            found = np.full((len(classes), values.shape[1]), np.inf)
            np.minimum.at(found, of_block, values)
            of_all: Floats = found * count * n
            return of_all

        nothing = np.zeros((len(classes), 1))
        if not self.space.zeros(mesh):
            return
        if (mesh, m) not in priced:
            cost = least(self.equal.least(mesh, m)[:, None])
            static = least(self._states(mesh)[:, None])
            yield _Options((cost, cost), static, nothing, 1 / (count * n) + nothing)
            return
        for setup in self.equal.setups(mesh, m):
            own = self._loads_of(setup, self.space.restrictions.policies, single=False)
            place = np.array([own.kinds.index(kind) for kind in setup.chain.kinds])
            each = own.count[:, None]
            step = (own.pass_s + own.once_s / m)[:, None] + own.again_step_s / m
            alone = own.pass_s[:, None] + own.again_s
            net = own.active_bytes[:, None] - own.freed_bytes
            static = np.broadcast_to(own.static_bytes[:, None], net.shape)
            cost, alone, net, static = (
                least((x / each)[place]) for x in (step, alone, net, static)
            )
            yield _Options((cost, alone), static, net, np.broadcast_to(1 / (count * n), net.shape))

    def _states(self, mesh: Mesh) -> Floats:
        """(K,): bytes of each block's states on a device of a mesh, divided among all axes."""
        problem, graph = self.space.problem, self.space.graph
        trained = np.array([
            sum(
                math.prod(graph.values[v].shape)
                for v in block.parameters
                if graph.values[v].requires_grad and v not in self._shared
            )
            for block in graph.blocks
        ], dtype=float) / (mesh.tp * mesh.ep)  # fmt: skip
        found: Floats = np.min(
            [
                model_state_bytes(
                    trained,
                    precision=problem.precision,
                    zero=zero,
                    dp=shard or mesh.dp * mesh.cp,
                    optimizer=problem.optimizer,
                    target=problem.target,
                )
                for zero, shard in self.space.zeros(mesh)
            ],
            axis=0,
        )
        return found

    @property
    def _shared(self) -> set[str]:
        """Parameters that several blocks read."""
        reads = Counter(v for block in self.space.graph.blocks for v in block.parameters)
        return {value for value, count in reads.items() if count > 1}


@dataclass(frozen=True, slots=True)
class _Options:
    """Device-seconds and device-bytes of all blocks of each class, (k, q), as in `Work`; seconds
    with what comes once per step, and without."""

    cost_s: tuple[Floats, Floats]
    static_bytes: Floats
    active_bytes: Floats
    each: Floats


def _work(own: Loads, seconds: Floats, again_s: Floats, room: float) -> Work:
    active = own.active_bytes[:, None] - own.freed_bytes
    return Work(
        cost_s=seconds[:, None] + again_s,
        static_bytes=np.broadcast_to(own.static_bytes[:, None], active.shape),
        active_bytes=active,
        each=np.broadcast_to(1 / own.count[:, None], active.shape),
        room=room,
    )


def _held(one: Combination) -> tuple[int, ...]:
    """Per device, micro-batches in flight."""
    return least_in_flight(
        one.schedule,
        num_stages=one.num_stages,
        num_microbatches=one.num_microbatches,
        num_devices=one.groups,
    )


def _first(each: Floats, count: int) -> Floats:
    """The `count` least of the seconds of blocks; all, and zeros, where there are fewer."""
    return np.pad(each[:count], (0, max(0, count - len(each))))
