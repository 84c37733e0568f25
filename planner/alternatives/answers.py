"""Answers of a report, searched when they are asked for: the best plan of each family, the cost of
each override, the change of the cluster that would flip the decision, advice.

All rest on what the search has priced. An override costs the seconds by which the plan is slower
than the best plan without it, all others kept; all together, against the free optimum. Under a time
limit the answers together take no more than the search was given; of two plans of which one was cut
short the difference says nothing, and is left out.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from meshwright.costmodel.intervals import SURE
from meshwright.costmodel.memo import Memo
from meshwright.planner.alternatives.alternatives import (
    WORTH,
    Alternative,
    Family,
    SmallerMargin,
    alternative,
    families,
    smaller_margin,
    with_margin,
    worth_s,
)
from meshwright.planner.alternatives.explained import alternative_row, plan_row
from meshwright.planner.alternatives.what_if import CHUNKS, logits_bytes, with_chunked_loss
from meshwright.planner.drafts import Candidate, PlanDraft
from meshwright.planner.overrides import OverrideError, Overrides, each_dropped
from meshwright.planner.plan import (
    InfeasibleError,
    Plan,
    describe,
    divisors,
    has_parts,
    seconds,
    sized,
    slower,
    with_loss_in,
)
from meshwright.planner.pricing import Evaluator, StageCoster, evaluate
from meshwright.planner.report import busiest, device_groups, excluded
from meshwright.planner.search import TIE, Search, SearchResult, axes_of
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.device import Link

T = TypeVar("T")

progress = logging.getLogger("meshwright.progress")  # heard where somebody watches

KNOWN_S = 1.5  # to search families for a short text
ALL_S = 30.0  # to search all families, or
TIMES = 8  # times as long as the search took
MAX_EACH = 6  # overrides that are priced one by one
MAX_RIVALS = 8  # plans that are priced again on changed clusters
EQUAL = 1e-9
CUT_SHORT = "cost not known: the time limit cut a search short"


@dataclass(kw_only=True, eq=False)
class Answers:
    """A search's account of itself (`report.DeferredAnswers`); every answer is searched once."""

    search: Search
    result: SearchResult
    _others: dict[str, Alternative | None] = field(default_factory=dict)
    _all: bool = False  # whether the families were searched in all the time that there is
    _rows: Memo[str, list[dict[str, Any]]] = field(default_factory=Memo)  # by answer
    _spent_s: float = 0.0

    def _remaining_s(self) -> float:
        """Seconds of the time limit that are not spent."""
        limit_s = self.search.time_limit_s
        return math.inf if limit_s is None else max(0.0, limit_s - self._spent_s)

    def _timed(self, name: str, work: Callable[[], T], most_s: float = math.inf) -> T:
        """Work within the time limit; no line is shown for work of a moment."""
        if most_s > KNOWN_S:
            progress.debug("report: %s", name)
        limit = self.search.programs.time
        started = limit.clock()
        try:
            with limit.until(limit.after(min(self._remaining_s(), most_s))):
                return work()
        finally:
            self._spent_s += limit.clock() - started

    # --- other plans ---

    def alternatives(self) -> list[dict[str, Any]]:
        """The best plan of each family."""
        return self._against_chosen(self.others)

    def known_alternatives(self) -> list[dict[str, Any]]:
        """The best plan of each family that takes a moment, the most promising first."""

        def search() -> None:
            for family in sorted(self.families, key=self._promised_s):
                self._others[family.name] = alternative(self.search, family)

        if not self._others:
            self._timed("families for a moment", search, KNOWN_S)
        return self._against_chosen(filter(None, self._others.values()))

    def runners_up(self) -> list[dict[str, Any]]:
        """The next best plans of other shapes that fit as they are written out."""
        return [plan_row(c.evaluation, self.result.best.evaluation) for c in self._next_best]

    @cached_property
    def _next_best(self) -> list[Candidate]:
        others, search = self.result.candidates[1:], self.search
        written = [c if isinstance(c, Candidate) else search.written(c) for c in others]
        return sorted((c for c in written if c.fits), key=attrgetter("step_time_s"))

    @cached_property
    def families(self) -> list[Family]:
        return families(self.search, self.result)

    @property
    def others(self) -> tuple[Alternative, ...]:
        """The alternative of each family, within the time limit, or several times the search's;
        those for which it was too short say so."""
        if not self._all:
            self._all = True
            most_s = max(ALL_S, TIMES * sum(self.result.phases_s.values()))
            self._timed("the best plan of each family", self._search_families, most_s)
        return tuple(filter(None, (self._others[f.name] for f in self.families)))

    def look_no_further(self) -> None:
        """Search no family, and no other margin, that was not searched yet."""
        self._all = True
        known = vars(self)
        known.setdefault("families", [])
        known.setdefault("margin", None)
        known.setdefault("_sure", {})

    def _search_families(self) -> None:
        search = self.search
        below_s = worth_s(self.result.best.step_time_s) if self.margin else None
        for family in self.families:
            other = self._others.get(family.name)
            if family.name not in self._others or (other and not other.searched):
                other = alternative(search, family)
            self._others[family.name] = other and with_margin(other, search, family, below_s)

    @cached_property
    def margin(self) -> SmallerMargin | None:
        """A smaller memory margin, with which some plan is faster than the chosen one."""
        return smaller_margin(self.search, worth_s(self.result.best.step_time_s))

    def _promised_s(self, family: Family) -> float:
        """The least step of a family's drafts: the search would not have drafted it if it were
        far."""
        return min(
            (d.step_time_s for d in self.result.drafts if d.fits and family.has(d.plan)),
            default=math.inf,
        )

    def _against_chosen(self, others: Iterable[Alternative]) -> list[dict[str, Any]]:
        return [alternative_row(other, self.result.best.evaluation) for other in others]

    # --- answers by name ---

    def overrides(self) -> list[dict[str, Any]]:
        """All given overrides together, then each of several."""
        return self._rows.of("overrides", self._priced)

    def sensitivity(self) -> list[dict[str, Any]]:
        """Flips of the decision, by property of the cluster."""

        def rows() -> list[dict[str, Any]]:
            compared = self._compared()
            flips = self._timed(
                "what would flip the decision", lambda: compared.flips(self._remaining_s())
            )
            return [
                {
                    "property": flip.knob,
                    "factor": flip.factor,
                    "plan": flip.rival and describe(flip.rival.plan),
                }
                for flip in flips
            ]

        return self._rows.of("sensitivity", rows)

    def advice(self) -> list[dict[str, Any]]:
        """Changes that the user may make for more rows per second, or less memory."""

        def rows() -> list[dict[str, Any]]:
            return advice(self.search, self.result, self.margin)

        return self._rows.of("advice", lambda: self._timed("advice", rows))

    def proof(self) -> dict[str, Any]:
        """Lower bound on the step of plans with equal stages, and the chosen one's gap to it."""
        return self._proof

    @cached_property
    def _proof(self) -> dict[str, Any]:
        bound_s = self._timed("a closer bound", lambda: self.search.equal_bound_s(self.result))
        if not bound_s:
            return {}
        gap = max(0.0, self.result.best.step_time_s / bound_s - 1.0)
        return {"equal_bound_s": bound_s, "equal_gap": gap}

    def surely_fits(self) -> dict[str, Any]:
        """The best plan that fits with `SURE`, where the chosen one may not; with the
        `memory_margin` that it takes."""
        return self._sure

    @cached_property
    def _sure(self) -> dict[str, Any]:
        best, cluster = self.result.best.evaluation, self.search.problem.cluster
        if best.prediction.memory_probability(cluster) >= SURE:
            return {}
        most = best.prediction.memory_error.high  # which so many stay below
        margin = math.ceil(1000 * max(0.0, 1 - 1 / most)) / 1000
        search = self.search.like(memory_margin=margin)
        try:
            result = self._timed("a plan that surely fits", search.run)
        except (InfeasibleError, OverrideError):
            return {"memory_margin": margin, "plan": None}
        sure = result.best.evaluation
        likely = sure.prediction.memory_probability(cluster)
        return {"memory_margin": margin, "memory_probability": likely, **plan_row(sure, best)}

    # --- overrides ---

    def _priced(self) -> list[dict[str, Any]]:
        overrides = self.search.overrides.given()
        if not overrides:
            return []
        free = self._best(Overrides()) if self._closed(self.result) else CUT_SHORT
        words = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
        rows = [self._row(words, free, "the free optimum")]
        if isinstance(free, str):
            return rows
        rows[0]["free_step_time_s"] = free.step_time_s
        dropped = list(each_dropped(self.search.overrides))
        if len(dropped) > MAX_EACH:
            rows[0]["effect"] += f" (with more than {MAX_EACH} overrides not priced one by one)"
        elif len(dropped) > 1:
            rows += [
                self._row(one.said, self._best(one.left), "the best with the rest kept")
                for one in dropped
            ]
        return rows

    def _row(self, text: str, without: Candidate | str, name: str) -> dict[str, Any]:
        """An override against the best plan without it, or why that is not known."""
        if isinstance(without, str):
            return {"override": text, "effect": without}
        ours, best = self.result.best.step_time_s, without.step_time_s
        cost_s = max(0.0, ours - best)
        effect = f"cost nothing: {name} is no faster"
        if ours < best * (1 - EQUAL):
            effect = (
                f"helped by {seconds(best - ours)} a step: without it the search stopped at "
                f"{seconds(best)}, within its gap"
            )
        if cost_s > best * EQUAL:
            effect = (
                f"cost {seconds(cost_s)} a step (+{cost_s / best:.1%}) against {name}, "
                f"{describe(without.plan)} at {seconds(best)}"
            )
        return {"override": text, "effect": effect, "cost_s": cost_s, "cost": cost_s / best}

    def _best(self, overrides: Overrides) -> Candidate | str:
        """The best plan of the same search under other overrides, within the time limit."""
        if self._remaining_s() == 0:
            return CUT_SHORT
        try:
            search = self._like(overrides)
            result = self._timed("a plan without an override", search.run)
        except (InfeasibleError, OverrideError):
            return CUT_SHORT if self._remaining_s() == 0 else "without it no plan was found"
        return result.best if self._closed(result) else CUT_SHORT

    def _like(self, overrides: Overrides) -> Search:
        """The search under other overrides: with its loss in one part again where that was asked
        for, and is no more."""
        asked = self.search.overrides.everywhere("chunked_loss")
        if asked is None or overrides.everywhere("chunked_loss") == asked:
            return self.search.like(overrides=overrides)
        whole = with_loss_in(self.search.problem, 1) or self.search.problem
        return self.search.like(overrides=overrides, problem=whole)

    def _closed(self, result: SearchResult) -> bool:
        """Whether no time limit cut a search short."""
        return result.complete or self.search.time_limit_s is None

    # --- sensitivity ---

    def _compared(self) -> Sensitivity:
        search, best = self.search, self.result.best
        known = {describe(best.plan)}
        rivals: list[Rival] = []
        bigger: list[Rival] = []
        others: list[Candidate | PlanDraft] = [o.best for o in self.others if o.best]
        others += self.result.drafts
        for other in sorted(others, key=attrgetter("step_time_s")):
            room = rivals if other.fits else bigger
            if describe(other.plan) in known or len(room) >= MAX_RIVALS:
                continue
            known.add(describe(other.plan))
            if other.fits:
                candidate = other if isinstance(other, Candidate) else search.written(other)
                rivals += [_rival(candidate)] * candidate.fits
            elif other.step_time_s < best.step_time_s:
                bigger.append(_rival(other))
        return Sensitivity(
            evaluator=Evaluator(replace(search.problem, profile=None)),
            chosen=_rival(best),
            rivals=rivals,
            bigger=bigger,
            tie=TIE if search.objective == "robust" else 0.0,
        )


def _rival(other: PlanDraft | Candidate) -> Rival:
    peak = other.evaluation.prediction.fullest_bytes
    return Rival(plan=other.plan, step_time_s=other.step_time_s, peak_bytes=peak)


# --- sensitivity ----------------------------------------------------------------------------------

# Changes of the cluster that would flip the decision: one property at a time, 1/4 to 4 times.
#
# Nothing is searched again: the chosen plan and its rivals are priced on the scaled cluster. With
# t(f) the modelled step at factor f and T what was predicted, a plan is taken to need T·t(f)/t(1),
# so that what was measured keeps its weight. The factor nearest to 1 at which some rival takes
# less than the chosen plan comes from halving the interval of log f: the ends first, since only a
# rival that wins there is asked again. Where prices can't tell plans apart (`tie`, a part of a
# step), a rival has to take less by more than that, or, if it does so already, by as much again.
#
# A bandwidth or FLOP/s is scaled at every size: efficiency curves, fractions of a peak over the
# work, stay as they are. Of the memory only what tensors may use is scaled; then plans fit by a
# comparison of bytes.


ENDS = (1 / 4, 4.0)
HALVINGS = 5  # of log 4: factors are known to 4 %
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
    "inter-node bandwidth": lambda cluster, factor: replace(
        cluster, inter_link=scaled_link(cluster.inter_link, factor)
    ),
    "intra-node bandwidth": lambda cluster, factor: replace(
        cluster, intra_link=scaled_link(cluster.intra_link, factor)
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
    """The `factor` on the property from which on another plan is the better one; None for both
    where none is between the ends. Where the chosen plan stops fitting and no rival fits, only the
    plan is None."""

    knob: str
    factor: float | None = None
    rival: Rival | None = None


@dataclass(slots=True, kw_only=True)
class Sensitivity:
    """The chosen plan against its rivals; `bigger` would be faster, but don't fit. `tie` is the
    part of a step that a rival has to be faster by."""

    evaluator: Evaluator
    chosen: Rival
    rivals: Sequence[Rival]
    bigger: Sequence[Rival] = ()
    tie: float = 0.0
    _base_s: Memo[int, float] = field(default_factory=Memo)

    def flips(self, time_limit_s: float | None = None) -> tuple[Flip, ...]:
        """Flips below 1 and above, for every property that the cluster has; of its rates those
        within the time limit."""
        ends_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        cluster = self.evaluator.problem.cluster
        absent = {
            "inter-node bandwidth": cluster.num_nodes == 1,
            "intra-node bandwidth": cluster.devices_per_node == 1,
        }
        flips: list[Flip] = []
        for knob, scale in KNOBS.items():
            if not absent.get(knob, False) and time.monotonic() < ends_s:
                of_rate = (self._flip(knob, scale, end) for end in ENDS)
                flips += list(filter(None, of_rate)) or [Flip(knob=knob)]
        of_memory = filter(None, (self._less_memory(), self._more_memory()))
        return (*flips, *(list(of_memory) or [Flip(knob=MEMORY)]))

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
            for step_s, _, rival in sorted(steps, key=itemgetter(0, 1))
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

        base_s = self._base_s.of(id(rival), lambda: modelled_s(self.evaluator))
        return rival.step_time_s * (modelled_s(evaluator) / base_s)

    # --- memory ---

    def _factor(self, rival: Rival) -> float:
        """The factor on the memory for tensors by which a plan just fits."""
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


# --- advice ---------------------------------------------------------------------------------------

# Advice: changes beyond the plan, so that devices do more.
#
# Margins, batches and devices are searched again, without unequal meshes and for a short time, so
# that they fit as a chosen plan does. Sizes and logits are read off the plan.


MAX_BATCHES = 3  # searched
SEARCH_S = 0.5  # for one of them; no new one after twice as long
LOGITS = 0.25  # of the peak, from which on a loss in chunks is worth a line
SPARSE = 8  # times as many micro-batches as the next smaller number of them
BINDING = 0.1  # of the peak, from which on a plan is searched with one
FULL = 0.7  # of what a device may hold, from which on memory shapes a plan
KERNEL_MULTIPLE = 8  # elements of 16 bits in the 16 bytes that tensor cores load at once
PAD_TO = 64  # which also fills their tiles


def advice(
    search: Search, result: SearchResult, margin: SmallerMargin | None = None
) -> list[dict[str, Any]]:
    """Changes that are worth it, as rows with a sentence each (`advice`) and its numbers, a smaller
    `margin` first; when the time is over no further batch is searched."""
    return [
        *_margin(search, margin, result.best.step_time_s),
        *_faster(search, result),
        *_heads(search, result),
        *_words(search, result),
        *_logits(search, result),
    ]


# --- searched again ------------------------------------------------------------------------------


def _margin(
    search: Search, margin: SmallerMargin | None, ours_s: float
) -> Iterator[dict[str, Any]]:
    """The memory margin with which a plan fits that takes less."""
    if margin is not None:
        step_s, less = margin.best.step_time_s, margin.memory_margin
        yield {
            "kind": "margin",
            "memory_margin": less,
            "step_time_s": step_s,
            "advice": f"memory_margin={less:g} instead of {search.memory_margin:g}: "
            f"{seconds(step_s)} instead of {seconds(ours_s)} ({slower(step_s / ours_s - 1)}): "
            f"{describe(margin.best.plan)}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """Another batch or cluster: in words, as data, as a search, and the time for that."""

    kind: str
    what: str
    data: Mapping[str, int]
    search: Callable[..., Search]
    time_limit_s: float


def _faster(search: Search, result: SearchResult) -> Iterator[dict[str, Any]]:
    """Other batches and fewer devices that train more rows per second by what is worth a line, or
    more of them on fewer axes; most first."""

    def axes(candidate: Candidate) -> int:
        return axes_of(candidate.plan.stages, len(candidate.plan.devices))

    best, faster = result.best, list[tuple[float, _Try, Candidate]]()
    ours = search.global_batch_size / best.step_time_s
    for other in chain(_batches(search), _fewer(search, result)):
        candidate = _searched(search, other)
        if candidate is None:
            continue
        rate = candidate.plan.global_batch_size / candidate.step_time_s
        if rate > ours * (1.0 if axes(candidate) < axes(best) else 1 + WORTH):
            faster.append((rate, other, candidate))
    for rate, other, candidate in sorted(faster, key=lambda row: -row[0]):
        less = f", in {seconds(candidate.step_time_s)} instead of {seconds(best.step_time_s)}"
        yield {
            "kind": other.kind,
            **other.data,
            "rows_per_s": rate,
            "step_time_s": candidate.step_time_s,
            "advice": f"{other.what}: {rate:.4g} rows/s instead of {ours:.4g} "
            f"({rate / ours - 1:+.0%}){less}: {describe(candidate.plan)}",
        }


def _batches(search: Search) -> Iterator[_Try]:
    started = time.process_time()
    for batch in next_batches(search.global_batch_size, search.problem.cluster.num_devices):
        if time.process_time() - started > 2 * SEARCH_S:
            return
        yield _Try(
            kind="batch",
            what=f"batch {batch}",
            data={"global_batch_size": batch},
            search=partial(search.like, global_batch_size=batch),
            time_limit_s=SEARCH_S,
        )


def _fewer(search: Search, result: SearchResult) -> Iterator[_Try]:
    """Fewer nodes, and devices of each node left idle so that the batch shares out over more of the
    rest; those that would not compute longer than the chosen plan takes."""
    cluster, batch = search.problem.cluster, search.global_batch_size
    nodes, devices = cluster.num_nodes, cluster.devices_per_node
    shared = math.gcd(batch, cluster.num_devices)
    parts = [(cluster.on_nodes(n), f"{n} of {nodes} nodes") for n in divisors(nodes)[-2::-1]]
    better = [n for n in range(1, devices) if math.gcd(batch, n * nodes) > shared]
    parts += [
        (replace(cluster, devices_per_node=n), f"{n} of {devices} devices of each node")
        for n in better[-1:]
    ]
    computed_s = busiest(device_groups(result.best.evaluation)).compute_s
    for part, what in parts:
        if computed_s * cluster.num_devices < result.best.step_time_s * part.num_devices:
            yield _Try(
                kind="devices",
                what=what,
                data={"num_nodes": part.num_nodes, "devices_per_node": part.devices_per_node},
                search=partial(search.like, problem=replace(search.problem, cluster=part)),
                time_limit_s=max(SEARCH_S, sum(result.phases_s.values())),  # new prices
            )


def _searched(search: Search, other: _Try) -> Candidate | None:
    """The plan of a short search over equal meshes; None where there is none in time."""
    if search.programs.time.over():
        return None
    forbid = sorted({*search.overrides.forbid, "unequal_meshes"})
    try:
        overrides = replace(search.overrides, forbid=forbid)
        return other.search(overrides=overrides, time_limit_s=other.time_limit_s).run().best
    except (InfeasibleError, OverrideError):
        return None


def next_batches(batch: int, devices: int) -> list[int]:
    """Batches near one that share out over more of the devices, over most first, then the nearest;
    none where it shares out as well as any of its size."""
    most = max(d for d in divisors(devices) if d <= batch)
    common = math.gcd(batch, devices)
    if common >= most:
        return []
    steps = [most, most // 2] if most % 2 == 0 else [most]
    near = {step * k for step in steps for k in (batch // step, batch // step + 1)}
    better = [n for n in near if n > 0 and math.gcd(n, devices) > common]
    return sorted(better, key=lambda n: (-math.gcd(n, devices), abs(n - batch), n))[:MAX_BATCHES]


# --- sizes ---------------------------------------------------------------------------------------


def _heads(search: Search, result: SearchResult) -> Iterator[dict[str, Any]]:
    """Products that every tensor-parallel rank of the plan runs in full for a size that does not
    divide."""
    problem = search.problem
    degrees = {stage.tp for stage in result.best.plan.stages}
    for product in excluded(problem.graph, problem.factors, sorted(degrees)):
        for name, size in product.factors.items() if not product.instead else ():
            every = math.lcm(*product.degrees)
            near = [n for n in (size // every * every, -(-size // every) * every) if n]
            yield {
                "kind": "size",
                "factor": name,
                "size": size,
                "next_sizes": near,
                "advice": f"{name} = {size}: {product.operators} ({product.flops:.0%} of the "
                f"FLOPs) runs in full on tp {', '.join(map(str, product.degrees))}; "
                f"{' or '.join(map(str, near))} would be shared out",
            }


def _words(search: Search, result: SearchResult) -> Iterator[dict[str, Any]]:
    """Sizes of matrices that 16-bit kernels don't take in whole vectors; vocabularies mostly."""
    problem = search.problem
    graph, table = problem.graph, problem.factors
    if problem.precision == "fp32" or problem.cluster.device.kind != "cuda":
        return
    odd: dict[int, str] = {}
    for value in (v for op in graph.ops if table.ops[op.name].matmul for v in op.operands):
        shape = graph.values[value].shape
        for size in shape if value in graph.parameters and len(shape) == 2 else ():
            if size > PAD_TO and size % KERNEL_MULTIPLE:
                odd.setdefault(size, graph.parameters[value])
    unit = math.lcm(PAD_TO, *(stage.tp for stage in result.best.plan.stages))
    for size, name in odd.items():
        padded = -(-size // unit) * unit
        yield {
            "kind": "size",
            "factor": name,
            "size": size,
            "next_sizes": [padded],
            "advice": f"{size} of {name} is no multiple of {KERNEL_MULTIPLE}, which 16-bit kernels "
            f"are slow on (not in these prices): pad it to {padded}",
        }


# --- logits --------------------------------------------------------------------------------------


def _logits(search: Search, result: SearchResult) -> Iterator[dict[str, Any]]:
    """The fullest device's bytes without most of its logits, in the chosen plan."""
    taken, before, after = _logits_bytes(search, result)
    if taken > LOGITS * before:
        ours = f"chunked_loss={CHUNKS}" * has_parts(search.problem)
        theirs = f"a chunked or fused loss (in {CHUNKS} parts)"
        yield {
            "kind": "logits",
            "logits_bytes": taken,
            "peak_bytes_without": after,
            "advice": f"logits and their gradients take {sized(taken)} of the peak's "
            f"{sized(before)}: {ours or theirs} leaves {sized(after)}",
        }


def _logits_bytes(search: Search, result: SearchResult) -> tuple[float, float, float]:
    """Bytes of the fullest device that are logits, all, and those without most of its logits; 0
    logits where its loss has none, or is in parts."""
    before, after = result.best.evaluation.prediction.fullest_bytes, _without_logits(search, result)
    least = float(max(after, default=before))
    return (before - least) / (1 - 1 / CHUNKS), before, least


def _without_logits(search: Search, result: SearchResult) -> Sequence[int]:
    """Bytes of each device group of the chosen plan without most of its logits; none where its loss
    has none, or is in parts."""
    best = result.best
    lighter = with_chunked_loss(replace(search.problem, precision=best.plan.precision))
    if lighter is None:
        return ()
    priced = evaluate(best.plan, lighter, best.assignments, StageCoster(lighter))
    return priced.prediction.peak_memory_bytes


def logits_bind(search: Search, result: SearchResult) -> bool:
    """Whether a plan may gain by a loss in parts: a device group is full, of logits not least; or
    there are far fewer micro-batches than its, but none between, whose logits would fill a good
    part of the devices together."""
    space, best = search.space, result.best
    full, peaks = FULL * space.memory_bytes, best.evaluation.prediction.peak_memory_bytes
    after = _without_logits(search, result) if max(peaks) > full else ()
    bound = BINDING * (1 - 1 / CHUNKS)  # of what is left without most of them
    if any(b > full and b - a > bound * b for b, a in zip(peaks, after, strict=False)):
        return True
    m = best.plan.num_microbatches
    fewer = max((n for n in space.microbatch_counts() if n < m), default=m)
    rows = space.global_batch_size / fewer / space.cluster.num_devices
    return (
        m >= SPARSE * fewer and rows * logits_bytes(search.problem) > BINDING * space.memory_bytes
    )
