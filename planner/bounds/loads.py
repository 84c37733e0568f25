"""What a setup's blocks ask of their devices at least: seconds and bytes, linear in the blocks.

`costmodel.blocks.stage_costs` prices a stage from sums over its blocks. A pass takes no less than
the longer of device and host, and communication x beside compute c, with the slowdown s, at least

    max(c + s min(c, x), x)  >=  max(c + s/(1+s) x, x)

All of this is a maximum of linear functions (the right side is the convex envelope of the left),
so that each of these, added up over the blocks of a stage, is no more than the stage's price, and
added up over all blocks no more than that of all stages. Which one is taken decides the whole
model, for which it is the largest. Left out where there are several stages: the part of a
communication that nothing can hide, and what a recomputed block holds while its backward lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.operators import DTYPE_BYTES, Setting
from meshwright.costmodel.recompute import segment_policy
from meshwright.costmodel.stages import Floats, Sums, blocks_here, communicator_bytes, stage_costs
from meshwright.planner.drafts import StageSetup
from meshwright.planner.stages import Chain


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
