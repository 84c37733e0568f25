"""Drafter: the plans of one problem under given overrides, and their price.

A search, its way out where nothing fits, and a report's alternatives all draw on one.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.stages import fits
from meshwright.planner.drafts.candidates import (
    Candidate,
    PlanDraft,
    make_candidate,
    make_draft,
    priced_fits,
)
from meshwright.planner.drafts.combinations import StageDraft
from meshwright.planner.drafts.equal_stages import EqualStages
from meshwright.planner.drafts.space import Space
from meshwright.planner.drafts.unequal_stages import UnequalStages
from meshwright.planner.overrides import OverrideError, Overrides, Restrictions, restrict
from meshwright.planner.plan import StagePlan, moved_parts, moved_sizes, resolve_shardings
from meshwright.planner.plan.offload import ROUNDING
from meshwright.planner.pricing import StageCoster, evaluate
from meshwright.planner.stages import BlockPrograms


class Given(TypedDict, total=False):
    """What a drafter may be given beside the problem, as `Drafter` has it."""

    memory_margin: float
    programs: BlockPrograms | None


class Drafter:
    """Drafts plans for a problem, a global batch and overrides: its `space`, and stages of `equal`
    and `unequal` meshes.

    `memory_margin` is the part of a device's memory that stays free. `programs` are another
    drafter's of the same problem, to reuse what it priced. Raises `OverrideError` for overrides
    that contradict the model or each other.
    """

    def __init__(
        self,
        problem: Problem,
        global_batch_size: int,
        overrides: Overrides,
        *,
        memory_margin: float = 0.0,
        programs: BlockPrograms | None = None,
    ) -> None:
        graph = problem.graph
        self.problem = problem
        self.global_batch_size = global_batch_size
        self.overrides = overrides
        self.memory_margin = memory_margin
        self.restrictions = restrict(
            overrides,
            graph,
            target=problem.target,
            allow=problem.allow,
            precision=problem.precision,
        )
        _check_host(problem, overrides, self.restrictions)
        forced, entries = self.restrictions.shardings, {}
        if forced:
            entries = resolve_shardings(graph, graph.blocks, forced, "override shardings")
        self.space = Space(
            problem=problem,
            global_batch_size=global_batch_size,
            restrictions=self.restrictions,
            memory_margin=memory_margin,
        )
        at = self.space.cut_at
        if programs is None:
            self.programs = BlockPrograms(StageCoster(problem), entries, cut_at=at)
        else:
            self.programs = programs.deciding(entries, at)
        self.equal = EqualStages(self.space, self.programs)
        self.unequal = UnequalStages(self.space, self.equal)

    def like(self, **changes: Any) -> Self:
        """The same with other arguments, in the same time. What was priced is used again, for
        another problem nothing."""
        programs = None if "problem" in changes else self.programs
        made = type(self)(**{**self._arguments(), "programs": programs, **changes})
        made.programs.time = self.programs.time
        return made

    def _arguments(self) -> dict[str, Any]:
        """What it was made of, but for the programs."""
        return {
            "problem": self.problem,
            "global_batch_size": self.global_batch_size,
            "overrides": self.overrides,
            "memory_margin": self.memory_margin,
        }

    def on_nodes(self, num_nodes: int) -> Self:
        """The same on another number of nodes."""
        cluster = replace(self.problem.cluster, num_nodes=num_nodes)
        return self.like(problem=replace(self.problem, cluster=cluster))

    def simulated(
        self, stages: Sequence[StageDraft], pipeline: Pipeline, free_bytes: float = 0.0
    ) -> PlanDraft:
        """Stages of a pipeline, simulated; so many bytes of each device are to stay free."""
        batch, room = self.global_batch_size, self.space.memory_bytes
        return make_draft(self.programs.coster, stages, pipeline, batch, room, free_bytes)

    def written(self, draft: PlanDraft) -> Candidate:
        """The plan of a draft, written out and priced from what is written, with as little off its
        devices as fits."""
        found = make_candidate(self.programs.coster, draft)
        sends = draft.stages[0].setup.relief.sends
        return brought_back(found, self.programs, self.space, sends, draft.room_bytes)

    def forget(self) -> None:
        """Give back the memory of what was cut; prices stay."""
        self.equal.forget()


def _check_host(problem: Problem, overrides: Overrides, own: Restrictions) -> None:
    """Raise `OverrideError` for what is to lie in memory, or on flash, of which nothing is
    known."""
    host = problem.cluster.host
    given = overrides.given().items()
    parts = ", ".join(f"{name}={value!r}" for name, value in given if isinstance(value, dict))
    for wanted, known, what, legal in (
        (
            own.host_states or own.host_activations,
            host is not None,
            "memory",
            "a cluster with a host",
        ),
        (
            own.host_files,
            host is not None and host.has_flash,
            "flash",
            "a cluster with nvme_bytes, nvme_read_bandwidth and nvme_write_bandwidth",
        ),
    ):
        if wanted and not known:
            raise OverrideError(
                f"cluster {problem.cluster.name!r} says nothing of its hosts' {what}",
                place=f"override {parts}",
                legal=legal,
                way_out="give it one, in TOML as [host], or drop the override",
            )


# --- parts in host memory -------------------------------------------------------------------------

# What a plan has in host memory comes back to its devices as far as they have room.
#
# A draft has as many activations away as its levels say, and all states and weights that its relief
# allows, alike on all stages. Written out, each device group takes back the activations of as many
# blocks, each stage as many of its states, or where weights lie there, too, of these, as fit; found
# by halving, for the peak of a device depends on its own stages alone. One that does not fit as its
# draft did sends more. Last, as few states as the hosts have no room for stay in files.


TIE = 1.01  # of steps, below which the plan with less off its devices is taken


def brought_back(
    given: Candidate, programs: BlockPrograms, space: Space, sends: float, room_bytes: float
) -> Candidate:
    """The plan with as little off its devices as fits `room_bytes` of each, but for what the user
    decided; such a part of its blocks may send their activations at most."""
    decided, back, best = space.reliefs[0].host, _Back(programs, space, room_bytes), given
    if any(s.host.activations for s in given.plan.stages) and sends:
        best = back.less_sent(given, sends)
    held = any(stage.host.states for stage in best.plan.stages)
    return back.less_held(best) if best.fits and held and not decided.states else best


@dataclass(frozen=True, slots=True)
class _Back:
    """How parts come back."""

    programs: BlockPrograms
    space: Space
    room_bytes: float

    def less_sent(self, given: Candidate, sends: float) -> Candidate:
        """The plan with as few activations in host memory as fit, by device group."""
        plan = given.plan
        blocks = max(len(stage.blocks) for stage in plan.stages)
        sent = {s.ranks: round(s.host.activations * blocks) for s in plan.stages}
        if not given.fits:
            sent = dict.fromkeys(sent, math.ceil(sends * blocks))

        def at(counts: Mapping[tuple[int, ...], int]) -> Candidate:
            own = {k: {"activations": counts[s.ranks] / blocks} for k, s in enumerate(plan.stages)}
            return self._at(given, own)

        fewest, tried = self._fewest(sent, at)
        best = min([given] * given.fits + tried, key=lambda each: each.step_time_s, default=None)
        if self.programs.time.over():
            return best or given
        found = at(fewest)
        if found.fits and (best is None or found.step_time_s <= TIE * best.step_time_s):
            return found
        return best or given

    def less_held(self, given: Candidate) -> Candidate:
        """The plan with as few states in host memory as fit, stage by stage, or where weights lie
        there, too, with as few of these: they come in each pass. Then with as few states in files
        as the hosts have no room for: alike on all stages, and less on those with the most."""
        sizes = [moved_sizes(stage, self.space.problem.graph) for stage in given.plan.stages]
        best = given
        ranks = [stage.ranks for stage in given.plan.stages]
        turns = [ranks[:k].count(own) for k, own in enumerate(ranks)]
        for turn in range(max(turns) + 1):  # of each device's stages one
            best = self._less_on(best, {k: sizes[k] for k, own in enumerate(turns) if own == turn})
        held = {k: float(costs.flash_bytes) for k, costs in enumerate(given.evaluation.stages)}
        filed = sorted((k for k in held if held[k]), key=held.__getitem__, reverse=True)
        for own in (*([filed] if len(filed) > 1 else []), *([k] for k in filed)):
            levels = sorted({p for k in own for p in moved_parts(sizes[k])})
            most = max(best.plan.stages[k].host.files for k in own)
            best = self._least(best, _up_to(most, levels), dict.fromkeys(own, "files"))
        return best if best.step_time_s <= TIE * given.step_time_s else given

    def _less_on(self, given: Candidate, sizes: Mapping[int, Sequence[float]]) -> Candidate:
        """The plan with as few states, or weights, of some stages in host memory as fit, each on
        other devices; `sizes` are what their blocks move."""
        plan = given.plan
        kinds = {k: "weights" if plan.stages[k].host.weights else "states" for k in sizes}
        levels = {
            k: _up_to(getattr(plan.stages[k].host, kinds[k]), moved_parts(own))
            for k, own in sizes.items()
        }

        def at(counts: Mapping[tuple[int, ...], int]) -> Candidate:
            chosen = {k: counts[plan.stages[k].ranks] for k in sizes}
            own = {k: {kinds[k]: levels[k][n]} for k, n in chosen.items() if n < len(levels[k])}
            return self._at(given, own)

        most = {plan.stages[k].ranks: len(own) for k, own in levels.items()}
        found = at(self._fewest(most, at)[0])
        return found if found.fits else given

    def _fewest(
        self,
        most: Mapping[tuple[int, ...], int],
        at: Callable[[Mapping[tuple[int, ...], int]], Candidate],
    ) -> tuple[Mapping[tuple[int, ...], int], list[Candidate]]:
        """By device group the least count with which it fits, as it does with the `most`; and the
        plans that were tried on the way and fit. All groups are halved at once."""
        low, high, found = dict.fromkeys(most, -1), dict(most), list[Candidate]()
        while any(high[ranks] - low[ranks] > 1 for ranks in high):
            if self.programs.time.over():
                break
            middle = {ranks: (max(low[ranks], 0) + high[ranks]) // 2 for ranks in high}
            priced = at(middle)
            peaks = priced.evaluation.prediction.peak_memory_bytes
            for ranks, peak in zip(priced.plan.devices, peaks, strict=True):
                if ranks in middle:
                    (high if fits(peak, self.room_bytes) else low)[ranks] = middle[ranks]
            found += [priced] * priced.fits
        return high, found

    def _least(
        self, best: Candidate, levels: Sequence[float], kinds: Mapping[int, str]
    ) -> Candidate:
        """The plan with the least of the rising `levels` of each stage's kind that fits; the plan
        itself where none does."""
        low, high = 0, len(levels)  # from `high` on all fit, as what was found does
        while low < high and not self.programs.time.over():
            middle = (low + high) // 2
            other = self._at(best, {k: {kind: levels[middle]} for k, kind in kinds.items()})
            if other.fits:
                best, high = other, middle
            else:
                low = middle + 1
        return best

    def _at(self, best: Candidate, given: Mapping[int, Mapping[str, float]]) -> Candidate:
        """The plan with other parts of some stages off their devices, priced."""
        stages = list(best.plan.stages)
        for k, own in given.items():
            stages[k] = _with(stages[k], own)
        plan = dataclasses.replace(best.plan, stages=tuple(stages))
        priced = evaluate(plan, self.space.problem, best.assignments, self.programs.coster)
        fit = priced_fits(priced, self.space.problem.cluster, self.room_bytes)
        return Candidate(evaluation=priced, assignments=best.assignments, fits=fit)


def _up_to(most: float, levels: Sequence[float]) -> Sequence[float]:
    """The rising levels up to the first that has this part, as whole blocks do."""
    return levels[: bisect.bisect_left(levels, most * (1 - ROUNDING)) + 1]


def _with(stage: StagePlan, own: Mapping[str, float]) -> StagePlan:
    there = dataclasses.replace(stage.host, **own)
    # files have a part of the states off the devices
    return stage.with_host(dataclasses.replace(there, files=min(there.files, there.states)))
