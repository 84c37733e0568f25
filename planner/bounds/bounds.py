"""Bounds on the step of every plan of a space with equal stages, combination by combination.

A combination has the bound that it was found with, which knows the least seconds of its blocks and
nothing else. The least bounds are raised by relaxations of what is left (`Loads`,
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
from meshwright.costmodel.operators import DTYPE_BYTES, Setting
from meshwright.costmodel.recompute import segment_policy
from meshwright.costmodel.schedules import in_flight, least_in_flight
from meshwright.costmodel.stages import Floats, Sums, blocks_here, communicator_bytes, stage_costs
from meshwright.planner.bounds import pipelines
from meshwright.planner.drafts import Combination, EqualStages, MeshChoice, Space, StageSetup
from meshwright.planner.stages import Chain

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


# --- loads ----------------------------------------------------------------------------------------

# What a setup's blocks ask of their devices at least: seconds and bytes, linear in the blocks.
#
# `planner.pricing.stage_costs` prices a stage from sums over its blocks. A pass takes no less than
# the longer of device and host, and communication x beside compute c, with the slowdown s, at least
#
#     max(c + s min(c, x), x)  >=  max(c + s/(1+s) x, x)
#
# All of this is a maximum of linear functions (the right side is the convex envelope of the left),
# so that each of these, added up over the blocks of a stage, is no more than the stage's price, and
# added up over all blocks no more than that of all stages. Which one is taken decides the whole
# model, for which it is the largest. Left out where there are several stages: the part of a
# communication that nothing can hide, and what a recomputed block holds while its backward lasts.


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The blocks of a model on one device of their mesh, at least, by kind: all `count` of each
    kind together, (k,), under each recompute policy, none first, (k, q).

    Seconds per micro-batch of a forward and of a pass, in which the `late_s` of weight gradients
    may come any time; seconds `once_s` per step. A policy adds `again_s` to a pass and
    `again_step_s` to a step, and frees bytes per micro-batch in flight. `fixed_bytes` fill any
    device that has a stage.
    """

    count: Floats
    forward_s: Floats
    pass_s: Floats
    late_s: Floats
    once_s: Floats
    again_s: Floats
    again_step_s: Floats
    freed_bytes: Floats
    static_bytes: Floats
    active_bytes: Floats
    fixed_bytes: float

    @property
    def forward_each_s(self) -> Floats:
        """Forward seconds of each block, the shortest first."""
        each: Floats = np.sort(np.repeat(self.forward_s / self.count, self.count.astype(int)))
        return each


@dataclass(slots=True)
class _Pass:
    """A pass as a linear function of the blocks: `seconds` (k,), `again_s` (k, q) of recompute, and
    what it takes beside communication so far: (1 + `factor`) times these."""

    seconds: Floats
    again_s: Floats
    more_s: Floats
    factor: float = 0.0

    def beside(self, comm: Floats, setting: Setting, *, hidden: bool, edge: float) -> None:
        """Take communication into the pass."""
        more, factor = added(self, comm, setting, hidden=hidden, edge=edge)
        self.more_s, self.factor = self.more_s + more, self.factor + factor

    @property
    def taken_s(self) -> Floats:
        return np.maximum(self.seconds * (1 + self.factor) + self.more_s, 0.0)


def added(
    own: _Pass, comm: Floats, setting: Setting, *, hidden: bool, edge: float
) -> tuple[Floats, float]:
    """What communication adds to a pass: seconds (k,), and a factor of the pass itself."""
    device = setting.cluster.device
    if not hidden or device.kind == "cpu":
        return comm, 0.0
    slow = device.overlap_slowdown / (1 + device.overlap_slowdown)
    body, ends = comm * (1 - edge), comm * edge
    if body.sum() - own.seconds.sum() > slow * body.sum():
        return body + ends, -1.0
    return slow * body + ends, 0.0


def loads_of(setup: StageSetup, policies: tuple[str, ...], *, single: bool) -> Loads:
    """The loads of a setup under recompute policies; `single` where one stage has all blocks."""
    chain, setting = setup.chain, setup.setting
    sums, count, more = _by_kind(chain)
    total = chain.whole() if single else chain.typical()
    weights, largest = map(float, total.moved_weights(setup.sharing))
    edge = largest / max(weights, 1.0) if single else 0.0
    forward, backward = _passes(sums, setting, policies)
    target, sharing = setting.target, setup.sharing
    gradients, parameters = target.overlap_gradients, target.overlap_parameters
    copied = _copied_s(sums, setting)
    once, forward_once, backward_once = np.zeros(len(count)), 0.0, 0.0
    if sharing.gathers:
        forward.beside(sums.zero3_gather_s, setting, hidden=parameters, edge=edge)
        again = sums.zero3_secondary_s if setting.keeps_secondary else sums.zero3_again_s
        moved = again + sums.zero3_scatter_s
        backward.beside(moved, setting, hidden=parameters, edge=edge)
        forward.more_s, backward.more_s = forward.more_s + copied, backward.more_s + copied
    elif sharing.divides:
        once, forward_once = added(forward, sums.gather_s, setting, hidden=parameters, edge=edge)
        once = once + copied
        if sharing.scatters_whole:
            backward.beside(sums.scatter_s, setting, hidden=gradients, edge=edge)
        else:
            more_s, backward_once = added(
                backward, sums.scatter_s, setting, hidden=gradients, edge=edge
            )
            once = once + more_s
    else:
        once, backward_once = added(backward, sums.reduce_s, setting, hidden=gradients, edge=edge)
    if sharing.divides and not target.hides_replicas(sharing):
        once = once + (sums.zero3_replicate_s if sharing.gathers else sums.replicate_s)
    once = once + forward_once * forward.seconds + backward_once * backward.seconds
    once = once + (sums.shard_s if sharing.divides else sums.optimizer_s)
    passing = backward.again_s * (1 + backward.factor)
    m, kept = setting.batch.microbatches, 1 - setting.host.activations  # on devices
    return Loads(
        count=count,
        forward_s=np.maximum(forward.taken_s - more, 0.0),
        pass_s=np.maximum(forward.taken_s + backward.taken_s - more, 0.0),
        late_s=np.minimum(sums.weight_s, backward.taken_s),
        once_s=once,
        again_s=passing,
        again_step_s=m * passing + backward_once * backward.again_s,
        freed_bytes=kept * sums.recompute_by(policies).freed_bytes.T,
        # in every backward that follows others of a step, or in all
        static_bytes=stage_costs(sums, setting, "none").kept_bytes - blocks_here(sums, setting),
        active_bytes=kept * (sums.saved_bytes + sums.input_bytes),
        fixed_bytes=_fixed(
            setting, [total] if single else [kind.sums for kind in chain.kinds_typical()], policies
        ),
    )


def _by_kind(chain: Chain) -> tuple[Sums, Floats, Floats]:
    """Sums of all blocks of each kind (k,), how many those are, and seconds per micro-batch by
    which these sums may exceed the least ones. What blocks share counts once."""
    kinds = chain.kinds_typical()
    rows = {kind.number: kind.sums.times(kind.count).array for kind in kinds}
    for readers, copy, _ in chain.shared:
        reading = [chain.kinds[j] for j, reads in enumerate(readers) if reads]
        for number in reading[1:]:
            rows[number] = (Sums(rows[number]) - copy).array
    sums = Sums(np.stack(list(rows.values())))
    count = np.array([float(kind.count) for kind in kinds])
    return sums, count, count * np.array([kind.more_s for kind in kinds])


def _passes(sums: Sums, setting: Setting, policies: tuple[str, ...]) -> tuple[_Pass, _Pass]:
    """Both passes without the data axis' communication."""
    overlap = setting.target.overlap_experts
    repeated = sums.recompute_by(policies)
    again, again_host = repeated.seconds.T, repeated.host_s.T

    def device(whole: Floats, exchange: Floats) -> Floats:
        left = whole - overlap * exchange
        return left if left.sum() >= exchange.sum() else exchange

    def of(whole: Floats, exchange: Floats, host: Floats, more: Floats, host_more: Floats) -> _Pass:
        seconds = device(whole, exchange)
        if setting.cluster.device.kind != "cuda":
            seconds, more = seconds + host, more + host_more
        elif host.sum() > seconds.sum():
            seconds, more = host, host_more
        return _Pass(seconds, more, np.zeros(len(sums)))

    nothing = np.zeros_like(again)
    return (
        of(sums.forward_s, sums.forward_exchange_s, sums.forward_host_s, nothing, nothing),
        of(sums.backward_s, sums.backward_exchange_s, sums.backward_host_s, again, again_host),
    )


def _copied_s(sums: Sums, setting: Setting) -> Floats:
    """Seconds to copy gathered weights, at the rate at which all are copied at once."""
    device, weight_bytes = setting.cluster.device, DTYPE_BYTES[setting.precision]
    in_place = not setting.sharing.gathers and weight_bytes == 4
    if in_place or not setting.target.copies_weights:
        return np.zeros(len(sums))
    moved = 2 * weight_bytes * sums.moved_weights(setting.sharing)[0]
    efficiency = device.memory_efficiency(max(float(moved.sum()), 1.0))
    seconds: Floats = moved / (device.memory_bandwidth * efficiency)
    return seconds


def _fixed(setting: Setting, held: Sequence[Sums], policies: Sequence[str]) -> float:
    """Bytes of what some block's backward holds besides on any device that has a stage: no less
    than that of a last one."""
    if any(segment_policy(policy)[1] > 1 for policy in policies):
        return float(communicator_bytes(setting))
    costs = [stage_costs(own, setting, own.recompute_by(policies)) for own in held]
    return min(
        float(np.minimum(own.passing_bytes, own.half_bytes + own.communicator_bytes).min())
        for own in costs
    )
