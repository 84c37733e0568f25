"""Bounds on the step of every plan of a space with equal stages, combination by combination.

A combination starts with a bound from the least seconds of its blocks. The least bounds are raised
by relaxations (`Loads`) until the least of all is one that was raised.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.costmodel.memo import Memo
from meshwright.costmodel.operators import Setting
from meshwright.costmodel.recompute import segment_policy
from meshwright.costmodel.schedules import in_flight, least_in_flight
from meshwright.costmodel.stages import Floats, Sums, blocks_here, communicator_bytes, stage_costs
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
        """Lower bound on the step of plans with equal stages on these meshes; those that take
        `below_s` are of no interest. The least bounds are raised, `MOST_RAISED` of them, or until
        it is `late`."""
        bounds: list[tuple[float, Combination | None]] = []
        for choice in choices:
            if self.equal.known(choice):
                bounds += [(one.bound_s, one) for one in self.equal.combinations(choice)]
                bounds += [(one.bound_s, None) for one in self.equal.waiting(choice)]
            else:
                bounds.append((choice.bound_s, None))
        heap = [(bound_s, number, one) for number, (bound_s, one) in enumerate(bounds)]
        heapq.heapify(heap)
        raised = 0
        while heap and heap[0][0] < below_s:
            bound_s, number, combination = heapq.heappop(heap)
            if combination is None or raised == MOST_RAISED or late():
                return bound_s
            raised += 1
            bound_s = max(bound_s, self.of_combination(combination, below_s))
            heapq.heappush(heap, (bound_s, number, None))
        return below_s

    def of_combination(self, one: Combination, below_s: float = math.inf) -> float:
        """Lower bound on the step of plans with this combination; `below_s` is enough."""
        setup, pipeline = one.setup, one.pipeline
        if setup.mesh.tp > 1:  # typical blocks are no bound there: stages may split otherwise
            return one.bound_s
        m, p, per_device = pipeline.shape
        policies, single = self.equal.policies(setup, pipeline), p * per_device == 1
        loads = self._loads.of(
            (setup.chain, setup.sharing, policies, single),
            lambda: loads_of(setup, policies, single=single),
        )
        room = self.space.room_bytes - loads.fixed_bytes
        if room <= 0:
            return math.inf
        step = _work(loads, loads.pass_s + loads.once_s / m, loads.again_step_s / m, room)
        # a device may hold none
        held = np.maximum(np.array(least_in_flight(pipeline), dtype=float), 1e-6)
        least, price = shared_s(step, float(held.min()), p)
        if p == 1 or m * least >= below_s:
            return m * least
        before = np.concatenate([[0.0], np.cumsum(_first(loads.forward_each_s, p - 1))])
        bound_s = m * least
        for nu in {0.0, price}:
            devices = devices_of(step, held, nu)
            bound_s = balanced_s(devices, m, before, bound_s)
        early = loads.pass_s - loads.late_s if pipeline.record.splits_backward else loads.pass_s
        # one micro-batch through all stages there and back, behind the others' forwards in the
        # stage where these take longest
        longest = max(
            float(loads.forward_s.sum()) / pipeline.num_stages, float(loads.forward_each_s[-1])
        )
        bound_s = max(bound_s, float(early.sum()) + (m - 1) * longest)
        if bound_s >= below_s:
            return bound_s
        return self._filled(one, loads, early, (held, price), bound_s)

    def _filled(
        self,
        one: Combination,
        loads: Loads,
        early: Floats,
        held: tuple[Floats, float],
        start_s: float,
    ) -> float:
        """Bound where no more than h of the m micro-batches, of all copies of the model, are under
        way at once, each through all stages there and back: m (Σ t + sends) <= h T; and where each
        device has one stage, which waits for those before it."""
        (m, p, per_device), bound_s = one.pipeline.shape, start_s
        first = in_flight(one.pipeline, 0) * one.pipeline.record.copies
        kinds: list[tuple[Floats, float, float]] = [(early, first / m, 2 * self._sent_s(one))]
        if per_device == 1:
            kinds.append((early, theta(m, p, 1.0), 0.0))
            part = float((loads.forward_s / np.maximum(loads.pass_s, 1e-30)).min())
            if one.pipeline.record.splits_backward and part > 0:
                kinds.append((loads.pass_s, theta(m, p, part), 0.0))
        room = self.space.room_bytes - loads.fixed_bytes
        for seconds, share, less_s in kinds:
            work = _work(loads, seconds, loads.again_s, room)
            for nu in {0.0, held[1]}:
                devices = devices_of(work, held[0], nu)
                bound_s = filled_s(devices, m, share, less_s, bound_s)
        return bound_s

    def _sent_s(self, one: Combination) -> float:
        """Seconds of one micro-batch's messages in one direction, at least: over each link at the
        cuts where they are shortest."""
        hops = self.equal.programs.coster.hops(one.setup.mesh, one.pipeline)
        cuts = self.equal.cuts[1:-1]
        return sum(
            float(_first(np.sort(one.setup.chain.sends_s(hop)[cuts]), count).sum())
            for hop, count in Counter(hops).items()
            if hop
        )


def _work(loads: Loads, seconds: Floats, again_s: Floats, room: float) -> Work:
    active = loads.active_bytes[:, None] - loads.freed_bytes
    return Work(
        cost_s=seconds[:, None] + again_s,
        static_bytes=np.broadcast_to(loads.static_bytes[:, None], active.shape),
        active_bytes=active,
        block_part=np.broadcast_to(1 / loads.count[:, None], active.shape),
        room=room,
    )


def _first(seconds: Floats, count: int) -> Floats:
    """The `count` least of the seconds of blocks; all, and zeros, where there are fewer."""
    return np.pad(seconds[:count], (0, max(0, count - len(seconds))))


# --- loads ----------------------------------------------------------------------------------------

# Least seconds and bytes of a setup's blocks, linear in the blocks.
#
# A pass takes no less than the longer of device and host, and communication x beside compute c,
# with the slowdown s, at least
#
#     max(c + s min(c, x), x)  >=  max(c + s/(1+s) x, x)
#
# All of this is a maximum of linear functions (the right side is the convex envelope of the left),
# so that any of these, added up over the blocks of a stage, is no more than the stage's price. The
# one that is largest for all blocks is taken. Left out where there are several stages: the part of
# a communication that nothing can hide, and bytes that a recomputed block holds in its backward.


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
        return np.sort(np.repeat(self.forward_s / self.count, self.count.astype(int)))


@dataclass(slots=True)
class _Pass:
    """A pass as a linear function of the blocks: `seconds` (k,), `again_s` (k, q) of recompute, and
    with the communication taken in so far (1 + `factor`) times these and `more_s`."""

    seconds: Floats
    again_s: Floats
    more_s: Floats
    factor: float = 0.0

    def beside(self, comm: Floats, setting: Setting, *, hidden: bool, edge: float) -> None:
        """Take communication into the pass."""
        more, factor = self.added(comm, setting, hidden=hidden, edge=edge)
        self.more_s, self.factor = self.more_s + more, self.factor + factor

    def added(
        self, comm: Floats, setting: Setting, *, hidden: bool, edge: float
    ) -> tuple[Floats, float]:
        """Seconds (k,) that communication adds to the pass, and a factor of the pass itself."""
        device = setting.cluster.device
        if not hidden or device.kind == "cpu":
            return comm, 0.0
        slow = device.overlap_slowdown / (1 + device.overlap_slowdown)
        body, ends = comm * (1 - edge), comm * edge
        if body.sum() - self.seconds.sum() > slow * body.sum():
            return body + ends, -1.0
        return slow * body + ends, 0.0

    @property
    def taken_s(self) -> Floats:
        return np.maximum(self.seconds * (1 + self.factor) + self.more_s, 0.0)


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
        once, forward_once = forward.added(sums.gather_s, setting, hidden=parameters, edge=edge)
        once = once + copied
        if sharing.scatters_whole:
            backward.beside(sums.scatter_s, setting, hidden=gradients, edge=edge)
        else:
            scattered = backward.added(sums.scatter_s, setting, hidden=gradients, edge=edge)
            once, backward_once = once + scattered[0], scattered[1]
    else:
        once, backward_once = backward.added(sums.reduce_s, setting, hidden=gradients, edge=edge)
        once = once + sums.compress_s
    if sharing.divides and not target.hides_replicas(sharing):
        once = once + (sums.zero3_replicate_s if sharing.gathers else sums.replicate_s)
    once = once + forward_once * forward.seconds + backward_once * backward.seconds
    once = once + (sums.shard_s if sharing.divides else sums.optimizer_s)
    passing = backward.again_s * (1 + backward.factor)
    m, on_device = setting.batch.microbatches, 1 - setting.host.activations
    return Loads(
        count=count,
        forward_s=np.maximum(forward.taken_s - more, 0.0),
        pass_s=np.maximum(forward.taken_s + backward.taken_s - more, 0.0),
        late_s=np.minimum(sums.weight_s, backward.taken_s),
        once_s=once,
        again_s=passing,
        again_step_s=m * passing + backward_once * backward.again_s,
        freed_bytes=on_device * sums.recompute_by(policies).freed_bytes.T,
        # in every backward that follows others of a step, or in all
        static_bytes=stage_costs(sums, setting, "none").kept_bytes - blocks_here(sums, setting),
        active_bytes=on_device * (sums.saved_bytes + sums.input_bytes),
        fixed_bytes=_fixed(
            setting, [total] if single else [kind.sums for kind in chain.kinds_typical()], policies
        ),
    )


def _by_kind(chain: Chain) -> tuple[Sums, Floats, Floats]:
    """Sums of all blocks of each kind (k,), their numbers, and the seconds above the least ones."""
    kinds = chain.kinds_typical()
    rows = {kind.number: kind.sums.times(kind.count).array for kind in kinds}
    for readers, copy, _ in chain.shared:
        reading = [chain.kinds[j] for j, reads in enumerate(readers) if reads]
        for number in reading[1:]:
            rows[number] = (Sums(rows[number]) - copy).array
    count = np.array([float(kind.count) for kind in kinds])
    more_s = count * np.array([kind.more_s for kind in kinds])
    return Sums(np.stack(list(rows.values()))), count, more_s


def _passes(sums: Sums, setting: Setting, policies: tuple[str, ...]) -> tuple[_Pass, _Pass]:
    """Both passes without the data axis' communication."""
    repeated = sums.recompute_by(policies)
    again, again_host = repeated.seconds.T, repeated.host_s.T

    def of(total: Floats, exchange: Floats, host: Floats, more: Floats, host_more: Floats) -> _Pass:
        seconds = total - setting.target.overlap_experts * exchange
        seconds = seconds if seconds.sum() >= exchange.sum() else exchange
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
    device, weight_bytes = setting.cluster.device, setting.weight_bytes
    in_place = not setting.sharing.gathers and weight_bytes == setting.kept_bytes
    if in_place or not setting.target.copies_weights:
        return np.zeros(len(sums))
    moved = 2 * weight_bytes * sums.moved_weights(setting.sharing)[0]
    efficiency = device.memory_efficiency(max(float(moved.sum()), 1.0))
    return np.asarray(moved / (device.memory_bandwidth * efficiency))


def _fixed(setting: Setting, held: Sequence[Sums], policies: Sequence[str]) -> float:
    """Least bytes in passing of a backward on any device that has a stage."""
    if any(segment_policy(policy)[1] > 1 for policy in policies):
        return float(communicator_bytes(setting))
    costs = (stage_costs(sums, setting, sums.recompute_by(policies)) for sums in held)
    return min(
        float(np.minimum(c.passing_bytes, c.half_bytes + c.communicator_bytes).min()) for c in costs
    )


# --- pipelines ------------------------------------------------------------------------------------

# Lower bounds on the step of a pipeline, whatever its cuts, from loads.
#
# Blocks are taken for divisible, among devices and among recompute policies. Device d of p holds
# h_d micro-batches of whatever it has. Let it have the part y_dkq of the blocks of kind k under
# option q (a recompute policy):
#
#     Σ_kq y_dkq cost_kq <= t_d,    Σ_kq y_dkq bytes_kq(h_d) <= room,    Σ_dq y_dkq = 1 for every k
#
# with t_d its seconds per micro-batch. For weights π_k, and any ν >= 0 (seconds per byte), no
# device has more of Σ π y than
#
#     cap_d(t)  =  min over ν of  α_dν (t + ν room)
#     α_dν      =  max over k of  π_k / min_q (cost_kq + ν bytes_kq(h_d))
#
# (the dual of its two constraints), and a step T is possible only if  Σ_d cap_d(t_d) >= Σ_k π_k.
# The schedule bounds the t_d: e_d + m t_d <= T, where e_d passes before the device's first compute;
# and where devices wait for the fraction φ of a pass of each device before them (`filled`),
#
#     m t_d + φ Σ_{i<d} t_i  <=  T          added up with weights so that every t_d counts alike:
#
#     Σ_d t_d  <=  θ T,     θ = (1 - (1 - φ/m)^p) / φ
#
# of which a part c is taken off:  Σ_k π_k  <=  c θ T + Σ_d max {cap_d(t) - c t : 0 <= t <= T/m}
# for every c >= 0. The right side rises nowhere faster than at the left, so that no step of
# Newton's method passes the least T, wherever it stops.


STEPS = 12  # of Newton's method
FEW = 10  # options of a block whose prices are compared one by one
PARTS = (0.5, 0.8, 1.0)  # c, of what a device without need of memory takes a second
GRID = 2.0 ** np.arange(-5, 6)  # ν, of the seconds that all blocks take over the bytes there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All blocks of each kind under each option, (k, q): seconds per micro-batch, bytes, and bytes
    per micro-batch in flight, of which one block is `block_part`; `room` of a device."""

    cost_s: Floats
    static_bytes: Floats
    active_bytes: Floats
    block_part: Floats
    room: float

    def bytes_of(self, held: float) -> Floats:
        """(k, q): bytes with so many micro-batches in flight; inf where no block fits."""
        used = self.static_bytes + held * self.active_bytes
        return np.where(self.block_part * used <= self.room, used, np.inf)

    @property
    def least_s(self) -> Floats:
        """(k,): seconds of the fastest option."""
        return np.asarray(self.cost_s.min(axis=1))

    def prices(self, held: float) -> Floats:
        """Seconds per byte (n,) worth a try: of few options those at which one gives way to
        another, too."""
        tried = [np.zeros(1), GRID * float(self.least_s.sum()) / self.room]
        if self.cost_s.shape[1] <= FEW:
            freed = self.active_bytes[:, None, :] - self.active_bytes[:, :, None]
            more = self.cost_s[:, :, None] - self.cost_s[:, None, :]
            pays = (freed > 0) & (more > 0)
            tried.append(more[pays] / (held * freed[pays]))
        return np.unique(np.concatenate(tried))


def shared_s(work: Work, held: float, devices: int) -> tuple[float, float]:
    """Least seconds per micro-batch of so many devices that hold and compute the same, and the
    price of a byte that proves it; infinite where the blocks don't fit."""
    used = work.bytes_of(held)
    if used.min(axis=1).sum() > devices * work.room:
        return np.inf, 0.0
    prices = work.prices(held)
    bounds = _least(work, used, prices).sum(axis=1) / devices - prices * work.room
    best = int(bounds.argmax())
    return float(bounds[best]), float(prices[best])


def _least(work: Work, used: Floats, prices: Floats) -> Floats:
    """(n, k): least seconds with bytes at each price."""
    fits = np.isfinite(used)
    costs = work.cost_s + prices[:, None, None] * np.where(fits, used, 0.0)
    return np.asarray(np.where(fits, costs, np.inf).min(axis=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The lines α t + β of the caps of devices, (d, n), and the sum that all devices must have,
    Σ π; `usual` is α without need of memory."""

    alpha: Floats
    beta: Floats
    wanted: float
    usual: float


def devices_of(work: Work, held: Floats, price: float) -> Devices:
    """The caps of devices that hold so many micro-batches (d,), with π at one price of bytes."""
    middle = _least(work, work.bytes_of(float(held.mean())), np.array([price]))[0]
    pi = np.where(np.isfinite(middle), middle, work.least_s)
    alpha, beta = {}, {}
    for h in set(held.tolist()):
        prices = work.prices(h)
        least = _least(work, work.bytes_of(h), prices)
        alpha[h] = (pi / np.maximum(least, 1e-30)).max(axis=1)
        beta[h] = alpha[h] * prices * work.room
    at = np.arange(max(map(len, alpha.values())))

    def rows(of: dict[float, Floats]) -> Floats:  # the last line fills up
        return np.stack([of[h][np.minimum(at, len(of[h]) - 1)] for h in held.tolist()])

    usual = float(pi.sum() / work.least_s.sum())
    return Devices(alpha=rows(alpha), beta=rows(beta), wanted=float(pi.sum()), usual=usual)


def balanced_s(devices: Devices, m: int, before_s: Floats, start_s: float) -> float:
    """Least T with e_d + m t_d <= T, from `start_s` on."""
    return _newton(devices, m, (0.0, 0.0, 0.0), before_s, start_s)


def filled_s(devices: Devices, m: int, theta: float, less_s: float, start_s: float) -> float:
    """Least T where also Σ t_d <= θT - `less_s`."""
    nothing, step = np.zeros(len(devices.alpha)), start_s
    for part in PARTS:
        step = _newton(devices, m, (part * devices.usual, theta, less_s), nothing, step)
    return step


def theta(m: int, devices: int, phi: float) -> float:
    """θ of devices that wait for the part φ of a pass of each one before them."""
    return (1 - (1 - phi / m) ** devices) / phi


def _newton(
    devices: Devices, m: int, together: tuple[float, float, float], before_s: Floats, start_s: float
) -> float:
    """Least T from `start_s` on that the devices can do; `together` are c, θ and seconds off θT."""
    c, theta, less_s = together
    slopes, starts = devices.alpha - c, devices.beta
    step, highest = start_s, _highest(slopes, starts)
    rows = np.arange(len(slopes))
    for _ in range(STEPS):
        most = np.maximum(step - before_s, 0.0) / m
        lines = slopes * most[:, None] + starts
        pick = lines.argmin(axis=1)
        rising = slopes[rows, pick] > 0
        had = np.where(rising, np.minimum(lines[rows, pick], highest), highest)
        got = c * (theta * step - less_s) + float(had.sum())
        if got >= devices.wanted * (1 - 1e-9):
            return step
        # no less than the slope anywhere further right: those that can't start yet are taken in
        slope = c * theta + float(slopes[rows, pick][rising].sum()) / m
        if slope <= 0:
            return np.inf
        step += (devices.wanted - got) / slope
    return step


def _highest(slopes: Floats, starts: Floats) -> Floats:
    """(d,): the highest point of the least of each device's lines; inf where all rise."""
    a1, a2 = slopes[:, :, None], slopes[:, None, :]
    b1, b2 = starts[:, :, None], starts[:, None, :]
    crossing = (a1 >= 0) & (a2 < 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        at = np.maximum((b2 - b1) / (a1 - a2), 0.0)
        value = np.where(at > 0, a1 * at + b1, np.minimum(b1, b2))
    highest: Floats = np.where(crossing, value, np.inf).min(axis=(1, 2))
    # all fall: highest at 0
    return np.where((slopes < 0).all(axis=1), starts.min(axis=1), highest)
