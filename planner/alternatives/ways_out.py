"""Ways out where nothing fits: one change each, and a plan that is possible then, priced as a
chosen plan is. Overrides come first, by step time; then the batch, training, more nodes.

Plans are looked for on the meshes that need least memory, with every relief. Numbers of nodes are
tried in steps of up to a quarter until something fits, and the last step is halved; they start at

    k  >=  bytes of all weights, gradients and optimizer states / usable bytes of a node

below which no way to divide them helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter

from meshwright.costmodel.memo import Memo
from meshwright.costmodel.memory import fused, model_states, optimizer_named
from meshwright.costmodel.operators import Problem, mean_moments
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.planner.alternatives import what_if
from meshwright.planner.drafts import Candidate, MeshChoice
from meshwright.planner.overrides import OverrideError, each_dropped, without
from meshwright.planner.plan import (
    WAYS_OUT,
    InfeasibleError,
    Relaxation,
    describe,
    margin_beside,
    sized,
)
from meshwright.planner.search import (
    Search,
    least_memory,
    least_memory_choices,
    plan_that_fits,
    some_plan_fits,
)

MOST = 64  # times as many nodes, at most
MAX_MESHES = 8  # looked at for those on which training otherwise helps
LEANEST = 3  # of them
LOGITS = 0.3  # of the memory: logits that take more are called by name
TOGETHER = ("num_microbatches", "microbatch_size")  # both fix what a device holds of the batch
SMALLER = ("adamw_bf16", "adamw8bit", "sgd")  # optimizers to train with instead


def with_ways_out(search: Search, error: InfeasibleError) -> InfeasibleError:
    """The error of a search without a plan, with the ways out."""
    otherwise = _Otherwise.of(search)
    freed = sorted(_freed(search), key=attrgetter("step_time_s", "what"))
    ways = [*freed, *_batches(search), *otherwise.ways(), *_wider(search)]
    words = f"{WAYS_OUT}{'; or '.join(map(str, ways))}."
    if not ways:
        words = (
            f"Nothing was found with up to {MOST} times as many nodes, by dropping one override or "
            "by training otherwise: change the model."
        )
    text = " ".join(filter(None, [str(error), otherwise.logits(), words]))
    return InfeasibleError(text, error.shortfall_bytes, ways)


def _relaxed(
    what: str, search: Callable[[], Search], choices: Sequence[MeshChoice] = ()
) -> Relaxation | None:
    """A change with a plan that fits then; None where there is none, or the changed search
    contradicts itself, the cluster or the batch."""
    try:
        candidate = plan_that_fits(search(), choices)
    except OverrideError:
        return None
    return None if candidate is None else _relaxation(what, candidate)


def _relaxation(what: str, candidate: Candidate, more_nodes: int = 0) -> Relaxation:
    plan, step_s = describe(candidate.plan), candidate.step_time_s
    return Relaxation(what=what, more_nodes=more_nodes, plan=plan, step_time_s=step_s)


# --- overrides -----------------------------------------------------------------------------------


def _freed(search: Search) -> Iterator[Relaxation]:
    """Overrides dropped one at a time, and a smaller margin."""
    overrides = search.overrides
    freed = [(dropped.what, dropped.left) for dropped in each_dropped(overrides)]
    if all(getattr(overrides, name) is not None for name in TOGETHER):
        freed.append((f"leave {' and '.join(TOGETHER)} free", without(overrides, *TOGETHER)))
    for what, free in freed:
        if relaxation := _relaxed(what, partial(search.like, overrides=free)):
            yield relaxation
    if search.memory_margin and (best := plan_that_fits(search.like(memory_margin=0.0))):
        memory = search.problem.cluster.device.memory_bytes
        peak = best.evaluation.prediction.fullest_bytes
        what = (
            f"memory_margin={margin_beside(peak, memory):g} instead of {search.memory_margin:g} (a "
            f"plan takes {sized(peak)} of a device's {sized(memory)}, the margin leaves "
            f"{sized(search.space.memory_bytes)})"
        )
        yield _relaxation(what, best)


# --- batch, nodes --------------------------------------------------------------------------------


def _batches(search: Search) -> Iterator[Relaxation]:
    """The largest part of the batch, by halves, where its micro-batches are not free."""
    batch, fixed = search.global_batch_size, search.restrictions.num_microbatches
    halves = [batch >> k for k in range(1, batch.bit_length()) if batch % (1 << k) == 0]
    for rows in halves if search.problem.meetings or fixed else ():
        smaller = partial(search.like, global_batch_size=rows)
        if relaxation := _relaxed(f"a batch of {rows}", smaller):
            yield relaxation
            return


def _wider(search: Search) -> Iterator[Relaxation]:
    """The fewest nodes with which something fits."""
    here = search.problem.cluster.num_nodes

    @cache
    def fits(nodes: int) -> bool:
        try:
            return some_plan_fits(search.on_nodes(nodes))
        except OverrideError:
            return False

    start = max(here + 1, _least_nodes(search))
    tries = _counts(start, here * MOST)
    enough = next((n for n in tries if fits(n)), None)
    if enough is None:
        return
    low, high = max((n for n in tries if n < enough), default=start - 1), enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    if candidate := plan_that_fits(search.on_nodes(high)):
        yield _relaxation(f"{high} nodes", candidate, high - here)


def _counts(start: int, most: int) -> list[int]:
    """Numbers of nodes to try, rising by an eighth to a quarter: 4 to 7 times a power of two, of
    which more splits are even than of the numbers between them."""
    grid = {a << k for a in (1, 3, 5, 7) for k in range(most.bit_length())}
    return sorted(n for n in grid | {start, most} if start <= n <= most)


def _least_nodes(search: Search) -> int:
    """Nodes that the model's states alone fill, however they are divided."""
    problem = search.problem
    numel, cluster = problem.graph.num_parameters(), problem.cluster
    states = min(_states_bytes(problem, numel, s) for s in (UNSHARED, Sharing(zero=3)))
    return math.ceil(states / (cluster.device.usable_bytes * cluster.devices_per_node))


def _states_bytes(problem: Problem, numel: float, sharing: Sharing = UNSHARED) -> float:
    return model_states(
        float(numel),
        weight_bytes=problem.weight_bytes,
        sharing=sharing,
        dp=1,
        optimizer=problem.stepped,
        target=problem.target,
        moments=(numel * mean_moments(problem),) * 2,
    ).nbytes


# --- training ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A way to train with less memory; changes of one `kind` exclude each other. The seconds of a
    step are not known (`timed`) after a change of its work."""

    what: str
    kind: str
    apply: Callable[[Problem], Problem | None]
    timed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Otherwise:
    """Training otherwise on the meshes whose leanest plans lack least: `lacking` bytes."""

    search: Search
    choices: Sequence[MeshChoice]
    lacking: float
    _changed: Memo[tuple[Change, ...], Search | None] = field(default_factory=Memo)

    @staticmethod
    def of(search: Search) -> _Otherwise:
        choices = least_memory_choices(search.space)[:MAX_MESHES]
        needs = [need for choice in choices if (need := least_memory(search.equal, [choice]))]
        near = sorted(needs, key=attrgetter("excess_bytes"))[:LEANEST]
        lacking = near[0].excess_bytes if near else 0.0
        return _Otherwise(search=search, choices=[need.choice for need in near], lacking=lacking)

    def ways(self) -> Iterator[Relaxation]:
        """Changes that are enough by themselves, else the first that are together, those that save
        most first."""
        excess = {change: self._excess_bytes(change) for change in self._changes()}
        helps = [change for change in excess if excess[change] < self.lacking]
        alone = list(filter(None, map(self._enough, helps)))
        yield from alone
        taken: list[Change] = []
        for change in () if alone else sorted(helps, key=excess.__getitem__):
            if change.kind not in {before.kind for before in taken}:
                taken.append(change)
                if len(taken) > 1 and (relaxation := self._enough(*taken)):
                    yield relaxation
                    return

    def logits(self) -> str:
        """A sentence where the logits are too large to fit."""
        taken = (self.lacking - self._excess_bytes(_CHUNKED)) / (1 - 1 / what_if.CHUNKS)
        if taken < LOGITS * self.search.problem.cluster.device.usable_bytes:
            return ""
        return f"The logits and their gradients alone take {sized(taken)}."

    def _search(self, *changes: Change) -> Search | None:
        """The search of the changed problem; None where a change does not apply."""

        def search() -> Search | None:
            problem: Problem | None = self.search.problem
            for change in changes:
                problem = problem and change.apply(problem)
            return None if problem is None else self.search.like(problem=problem)

        return self._changed.of(changes, search)

    def _excess_bytes(self, change: Change) -> float:
        """Bytes that the leanest plan lacks after a change; inf where there is none."""
        search = self._search(change)
        need = search and least_memory(search.equal, self.choices)
        return need.excess_bytes if need else math.inf

    def _enough(self, *changes: Change) -> Relaxation | None:
        if (search := self._search(*changes)) is None:
            return None
        what = " and ".join(change.what for change in changes)
        relaxation = _relaxed(what, lambda: search, self.choices)
        timed = all(change.timed for change in changes)
        return relaxation if timed else relaxation and replace(relaxation, step_time_s=None)

    def _changes(self) -> Iterator[Change]:
        """Changes by how much they change the training, least first."""
        optimizer = self.search.problem.optimizer
        quick = fused(optimizer)
        if quick != optimizer:
            what = f"{optimizer} in one kernel (fused=True, planned as optimizer={quick!r})"
            yield Change(what=what, kind="optimizer", apply=partial(replace, optimizer=quick))
        yield _CHUNKED
        for name in SMALLER:
            if optimizer_named(name).moments < optimizer_named(optimizer).moments:
                smaller = partial(replace, optimizer=name)
                yield Change(what=f"optimizer={name!r}", kind="optimizer", apply=smaller)
        share = min((c.groups * c.mesh.tp for c in self.choices), default=1)
        yield Change(
            what=f"LoRA (matrices frozen, adapters of rank {what_if.RANK} trained)",
            kind="adapters",
            apply=partial(with_adapters, share=share),
        )
        half_long = what_if.with_half_sequences
        yield Change(what="sequences half as long", kind="sequence", apply=half_long, timed=False)


_CHUNKED = Change(
    what=f"a chunked or fused loss (logits in {what_if.CHUNKS} parts)",
    kind="loss",
    apply=what_if.with_chunked_loss,
)


def with_adapters(problem: Problem, share: int) -> Problem | None:
    """The problem with all frozen but adapters, whose states are reserved on each of the `share`
    devices that the model lies on."""
    frozen, device = what_if.with_adapters(problem), problem.cluster.device
    held = math.ceil(_states_bytes(problem, what_if.adapter_numel(problem)) / share)
    if frozen is None or held >= device.usable_bytes:
        return None
    device = replace(device, reserved_bytes=device.reserved_bytes + held)
    return replace(frozen, cluster=replace(problem.cluster, device=device))
