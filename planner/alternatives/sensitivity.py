"""Which change of the cluster would flip the decision: one property at a time, 1/4 to 4 times.

Nothing is searched again: the chosen plan and its rivals are priced on the scaled cluster. With
t(f) the modelled step at factor f and T what was predicted, a plan is taken to need T·t(f)/t(1), so
that what was measured keeps its weight. The factor nearest to 1 at which some rival takes less than
the chosen plan is found by halving the interval of log f: the ends first, since only a rival that
wins there is asked again. Where prices can't tell plans apart (`tie`, a part of a step), a rival
has to take less by more than that, or, if it does so already, by as much again.

A bandwidth or FLOP/s that is scaled is so at every size: efficiency curves, fractions of a peak
over the work, stay as they are. Of the memory only what tensors may use is scaled; who fits is then
a comparison of bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.plan import Plan
from meshwright.planner.pricing import Evaluator
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.device import Link

ENDS = (1 / 4, 4.0)
HALVINGS = 5  # of log 4: a factor is found to 4 %
MEMORY = "memory"
Scale = Callable[[Cluster, float], Cluster]


def scaled_link(link: Link, factor: float) -> Link:
    """A link that moves `factor` times as many bytes per second, whatever the message."""

    def times(value: float | None) -> float | None:
        return None if value is None else value * factor

    return replace(
        link,
        bandwidth=link.bandwidth * factor,
        per_rank_bandwidth=times(link.per_rank_bandwidth),
        switch_bandwidth=times(link.switch_bandwidth),
    )


def _flops(cluster: Cluster, factor: float) -> Cluster:
    rates = {dtype: rate * factor for dtype, rate in cluster.device.peak_flops.items()}
    return replace(cluster, device=replace(cluster.device, peak_flops=rates))


def _memory_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    bandwidth = cluster.device.memory_bandwidth * factor
    return replace(cluster, device=replace(cluster.device, memory_bandwidth=bandwidth))


KNOBS: Mapping[str, Scale] = {
    "inter-node bandwidth": lambda own, factor: replace(
        own, inter_link=scaled_link(own.inter_link, factor)
    ),
    "intra-node bandwidth": lambda own, factor: replace(
        own, intra_link=scaled_link(own.intra_link, factor)
    ),
    "FLOP/s": _flops,
    "memory bandwidth": _memory_bandwidth,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A plan with its predicted step and the bytes that its fullest device uses."""

    plan: Plan
    step_time_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """At `factor` times the property another plan is the better one; None for both where none is
    between the ends. Where the chosen plan stops fitting and no rival fits, only the plan is
    None."""

    knob: str
    factor: float | None
    rival: Rival | None


@dataclass(slots=True, kw_only=True)
class Sensitivity:
    """The chosen plan against its rivals; `bigger` would be faster, but don't fit. `tie` is the
    part of a step that a rival has to be faster by."""

    evaluator: Evaluator
    chosen: Rival
    rivals: Sequence[Rival]
    bigger: Sequence[Rival] = ()
    tie: float = 0.0
    _base_s: dict[int, float] = field(default_factory=dict)

    def flips(self, time_limit_s: float | None = None) -> tuple[Flip, ...]:
        """Below 1 and above, for every property that the cluster has; of its rates those looked at
        within the time limit."""
        ends_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        cluster = self.evaluator.problem.cluster
        absent = {
            "inter-node bandwidth": cluster.num_nodes == 1,
            "intra-node bandwidth": cluster.devices_per_node == 1,
        }
        found: list[Flip] = []
        for knob, scale in KNOBS.items():
            if not absent.get(knob, False) and time.monotonic() < ends_s:
                own = [self._flip(knob, scale, end) for end in ENDS]
                found += [flip for flip in own if flip] or [_none(knob)]
        memory = [flip for flip in (self._less_memory(), self._more_memory()) if flip]
        return (*found, *(memory or [_none(MEMORY)]))

    # --- rates ---

    def _flip(self, knob: str, scale: Scale, end: float) -> Flip | None:
        faster = self._faster(scale, end, self.rivals)
        if not faster:
            return None
        near, far, winner = 0.0, math.log(end), faster[0]
        for _ in range(HALVINGS):
            middle = (near + far) / 2
            still = self._faster(scale, math.exp(middle), faster)
            if still:
                far, winner = middle, still[0]
            else:
                near = middle
        return Flip(knob=knob, factor=math.exp(far), rival=winner)

    def _faster(self, scale: Scale, factor: float, rivals: Sequence[Rival]) -> list[Rival]:
        """Rivals that take clearly less than the chosen plan, the fastest first."""
        priced = self.evaluator.on(scale(self.evaluator.problem.cluster, factor))
        limit = self._seconds(self.chosen, priced)
        steps = [(self._seconds(rival, priced), k, rival) for k, rival in enumerate(rivals)]
        return [
            rival
            for step_s, _, rival in sorted(steps, key=lambda x: x[:2])
            if step_s < limit * self._needed(rival)
        ]

    def _needed(self, rival: Rival) -> float:
        """The part of the chosen plan's step that a rival must not take."""
        least = 1 / (1 + self.tie)
        now = rival.step_time_s / self.chosen.step_time_s
        return least if now >= least else now * least

    def _seconds(self, rival: Rival, evaluator: Evaluator) -> float:
        def modelled_s(on: Evaluator) -> float:
            return on.price(rival.plan).prediction.step_time_s

        if id(rival) not in self._base_s:
            self._base_s[id(rival)] = modelled_s(self.evaluator)
        return rival.step_time_s * (modelled_s(evaluator) / self._base_s[id(rival)])

    # --- memory ---

    def _factor(self, rival: Rival) -> float:
        """Of the memory for tensors, so that a plan just fits."""
        device = self.evaluator.problem.cluster.device
        return (rival.peak_bytes - device.reserved_bytes) / device.usable_bytes

    def _less_memory(self) -> Flip | None:
        factor = self._factor(self.chosen)
        if factor <= ENDS[0]:
            return None
        fitting = [rival for rival in self.rivals if self._factor(rival) < factor]
        winner = min(fitting, key=lambda rival: rival.step_time_s, default=None)
        return Flip(knob=MEMORY, factor=factor, rival=winner)

    def _more_memory(self) -> Flip | None:
        limit = self.chosen.step_time_s / (1 + self.tie)
        faster = [r for r in self.bigger if r.step_time_s < limit]
        first = min(faster, key=self._factor, default=None)
        if first is None or self._factor(first) > ENDS[1]:
            return None
        return Flip(knob=MEMORY, factor=self._factor(first), rival=first)


def _none(knob: str) -> Flip:
    return Flip(knob=knob, factor=None, rival=None)
