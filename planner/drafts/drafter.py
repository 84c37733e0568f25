"""Drafter: the plans of one problem under given overrides, and their price.

A search, its way out where nothing fits, and a report's alternatives all draw on one.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.stages import fits
from meshwright.planner.decisions import STEPPINGS
from meshwright.planner.drafts.candidates import (
    Candidate,
    PlanDraft,
    make_candidate,
    make_draft,
    price_candidate,
)
from meshwright.planner.drafts.combinations import StageDraft
from meshwright.planner.drafts.equal_stages import EqualStages
from meshwright.planner.drafts.space import Space
from meshwright.planner.drafts.unequal import UnequalStages
from meshwright.planner.overrides import OverrideError, Overrides, Restrictions, restrict
from meshwright.planner.plan import moved_parts, moved_sizes, resolve_shardings
from meshwright.planner.plan.offload import ROUNDING
from meshwright.planner.pricing import StageCoster
from meshwright.planner.stages import BlockPrograms


class Given(TypedDict, total=False):
    """Optional arguments of `Drafter`."""

    memory_margin: float
    programs: BlockPrograms | None


class Drafter:
    """Drafts of plans for a problem, a global batch and overrides: their `space`, and stages of
    `equal` and `unequal` meshes.

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
        graph, whole = problem.graph, problem.stepped.matrices is not None
        self.problem = problem
        self.global_batch_size = global_batch_size
        self.overrides = overrides
        self.memory_margin = memory_margin
        self.restrictions = restrict(
            overrides,
            graph,
            target=problem.target,
            allow=[name for name in problem.allow if not (whole and name in (*STEPPINGS, "stale"))],
            precision=problem.precision,
        )
        if whole:
            _check_stepped_whole(problem, self.restrictions)
        _check_host(problem, overrides, self.restrictions)
        forced = self.restrictions.shardings
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
        """A drafter with other arguments, in the same time; another problem shares no prices."""
        programs = None if "problem" in changes else self.programs
        drafter = type(self)(**{**self._arguments(), "programs": programs, **changes})
        drafter.programs.time = self.programs.time
        return drafter

    def _arguments(self) -> dict[str, Any]:
        """Its arguments, but for the programs."""
        return {
            "problem": self.problem,
            "global_batch_size": self.global_batch_size,
            "overrides": self.overrides,
            "memory_margin": self.memory_margin,
        }

    def on_nodes(self, num_nodes: int) -> Self:
        """A drafter on another number of nodes."""
        cluster = self.problem.cluster.on_nodes(num_nodes)
        return self.like(problem=replace(self.problem, cluster=cluster))

    def simulated(
        self, stages: Sequence[StageDraft], pipeline: Pipeline, free_bytes: float = 0.0
    ) -> PlanDraft:
        """Stages of a pipeline, simulated; so many bytes of each device are to stay free."""
        batch, room = self.global_batch_size, self.space.memory_bytes
        coster, sizes = self.programs.coster, self.space.slice_sizes
        return make_draft(coster, stages, pipeline, batch, room, free_bytes, sizes)

    def written(self, draft: PlanDraft) -> Candidate:
        """The plan of a draft, written out and priced from what is written, with as little off its
        devices as fits, but for what the user decided."""
        best = make_candidate(self.programs.coster, draft)
        sends = draft.stages[0].setup.relief.sends
        back = _Back(self.programs, self.space, draft.room_bytes)
        if sends and any(stage.host.activations for stage in best.plan.stages):
            best = back.less_sent(best, sends)
        held = any(stage.host.states for stage in best.plan.stages)
        may = best.fits and held and not self.space.reliefs[0].host.states
        return back.less_held(best) if may else best

    def forget(self) -> None:
        """Give back the memory of what was cut; prices stay."""
        self.equal.forget()


def _check_stepped_whole(problem: Problem, over: Restrictions) -> None:
    """Raise `OverrideError` for what an optimizer of whole matrices does not do."""
    stepping = over.steppings[0]
    asked = {
        "offload={'optimizer': ...}": over.host_states or over.host_weights,
        **{f"{name}=True": stepping == way for name, way in STEPPINGS.items()},
        "staleness": stepping == "stale",
    }
    if said := [name for name, value in asked.items() if value]:
        raise OverrideError(
            f": {problem.optimizer} steps each matrix whole, on one of the ranks that hold it",
            place=f"override {said[0]} with optimizer={problem.optimizer!r}",
            legal="states on the devices, stepped at the end of a step",
            way_out="drop it, or plan with an optimizer of elements: optimizer='adamw'",
        )


def _check_host(problem: Problem, overrides: Overrides, over: Restrictions) -> None:
    """Raise `OverrideError` for parts in host memory, or on flash, that the cluster has none of."""
    host, flash = problem.cluster.host, "nvme_bytes, nvme_read_bandwidth and nvme_write_bandwidth"
    if (over.host_states or over.host_activations) and host is None:
        lacking, legal = "memory", "a cluster with a host"
    elif over.host_files and (host is None or not host.has_flash):
        lacking, legal = "flash", f"a cluster with {flash}"
    else:
        return
    asked = overrides.given().items()
    parts = ", ".join(f"{name}={value!r}" for name, value in asked if isinstance(value, dict))
    raise OverrideError(
        f"cluster {problem.cluster.name!r} says nothing of its hosts' {lacking}",
        place=f"override {parts}",
        legal=legal,
        way_out="give it one, in TOML as [host], or drop the override",
    )


# --- parts in host memory -------------------------------------------------------------------------

# A draft has as many activations away as its levels say, and all states and weights that its relief
# allows, the same part of all stages. Written out, each device group takes back the activations of
# as many blocks, each stage as many of its states, or weights where these are there, too, as fit;
# found by halving, for the peak of a device depends on its own stages alone. One that does not fit
# as its draft did sends more. Last, as few states as the hosts have no room for stay in files.


TIE = 1.01  # of steps, below which the plan with less off its devices is taken


@dataclass(frozen=True, slots=True)
class _Back:
    """Plans with less off their devices, of which each may fill `room_bytes`."""

    programs: BlockPrograms
    space: Space
    room_bytes: float

    def less_sent(self, candidate: Candidate, sends: float) -> Candidate:
        """The plan with as few activations in host memory as fit, by device group."""
        stages = candidate.plan.stages
        blocks = max(len(stage.blocks) for stage in stages)
        sent = {s.ranks: round(s.host.activations * blocks) for s in stages}
        if not candidate.fits:
            sent = dict.fromkeys(sent, math.ceil(sends * blocks))

        def at(counts: Mapping[tuple[int, ...], int]) -> Candidate:
            parts = {k: {"activations": counts[s.ranks] / blocks} for k, s in enumerate(stages)}
            return self._at(candidate, parts)

        fewest, tried = self._fewest(sent, at)
        fitting = [candidate] * candidate.fits + tried
        best = min(fitting, key=lambda plan: plan.step_time_s, default=None)
        if not self.programs.time.over():
            least = at(fewest)
            if least.fits and (best is None or least.step_time_s <= TIE * best.step_time_s):
                return least
        return best or candidate

    def less_held(self, candidate: Candidate) -> Candidate:
        """The plan with as few states in host memory as fit, stage by stage, or where weights lie
        there, too, with as few of these: they come in each pass. Then with as few states in files
        as the hosts have no room for: the same part on every stage, then less on those with the
        most."""
        best, stages = candidate, candidate.plan.stages
        sizes = [moved_sizes(stage, self.space.problem.graph) for stage in stages]
        ranks = [stage.ranks for stage in stages]
        turns = [ranks[:k].count(group) for k, group in enumerate(ranks)]
        for turn in range(max(turns) + 1):  # of each device's stages one
            best = self._less_on(best, {k: sizes[k] for k, at in enumerate(turns) if at == turn})
        held = {k: float(costs.flash_bytes) for k, costs in enumerate(candidate.evaluation.stages)}
        filed = sorted((k for k in held if held[k]), key=held.__getitem__, reverse=True)
        for some in (*([filed] if len(filed) > 1 else []), *([k] for k in filed)):
            levels = sorted({p for k in some for p in moved_parts(sizes[k])})
            most = max(best.plan.stages[k].host.files for k in some)
            best = self._least(best, _up_to(most, levels), some)
        return best if best.step_time_s <= TIE * candidate.step_time_s else candidate

    def _less_on(self, candidate: Candidate, sizes: Mapping[int, Sequence[float]]) -> Candidate:
        """The plan with as few states, or weights, of stages on different devices as fit."""
        stages = {k: candidate.plan.stages[k] for k in sizes}
        kinds = {k: "weights" if stage.host.weights else "states" for k, stage in stages.items()}
        levels = {
            k: _up_to(getattr(stage.host, kinds[k]), moved_parts(sizes[k]))
            for k, stage in stages.items()
        }

        def at(counts: Mapping[tuple[int, ...], int]) -> Candidate:
            chosen = {k: counts[stage.ranks] for k, stage in stages.items()}
            parts = {k: {kinds[k]: levels[k][n]} for k, n in chosen.items() if n < len(levels[k])}
            return self._at(candidate, parts)

        most = {stage.ranks: len(levels[k]) for k, stage in stages.items()}
        least = at(self._fewest(most, at)[0])
        return least if least.fits else candidate

    def _fewest(
        self,
        most: Mapping[tuple[int, ...], int],
        at: Callable[[Mapping[tuple[int, ...], int]], Candidate],
    ) -> tuple[Mapping[tuple[int, ...], int], list[Candidate]]:
        """The least count with which each device group fits; plans tried on the way that fit."""
        low, high, fitting = dict.fromkeys(most, -1), dict(most), list[Candidate]()
        while any(high[ranks] - low[ranks] > 1 for ranks in high):
            if self.programs.time.over():
                break
            middle = {ranks: (max(low[ranks], 0) + high[ranks]) // 2 for ranks in high}
            priced = at(middle)
            peaks = priced.evaluation.prediction.peak_memory_bytes
            for ranks, peak in zip(priced.plan.devices, peaks, strict=True):
                if ranks in middle:
                    (high if fits(peak, self.room_bytes) else low)[ranks] = middle[ranks]
            fitting += [priced] * priced.fits
        return high, fitting

    def _least(self, best: Candidate, levels: Sequence[float], stages: Sequence[int]) -> Candidate:
        """The plan with the least of the rising `levels` of these stages in files that fits."""
        low, high = 0, len(levels)  # from `high` on all fit, as the plan itself does
        while low < high and not self.programs.time.over():
            middle = (low + high) // 2
            other = self._at(best, {k: {"files": levels[middle]} for k in stages})
            if other.fits:
                best, high = other, middle
            else:
                low = middle + 1
        return best

    def _at(self, candidate: Candidate, parts: Mapping[int, Mapping[str, float]]) -> Candidate:
        """The plan with other parts of some stages off their devices, priced."""
        stages = list(candidate.plan.stages)
        for k, changes in parts.items():
            host = replace(stages[k].host, **changes)
            # files have a part of the states off the devices
            stages[k] = stages[k].with_host(replace(host, files=min(host.files, host.states)))
        plan = replace(candidate.plan, stages=tuple(stages))
        coster, room_bytes = self.programs.coster, self.room_bytes
        return price_candidate(plan, candidate.assignments, coster, room_bytes)


def _up_to(most: float, levels: Sequence[float]) -> Sequence[float]:
    """The rising levels up to the first that has this part, as whole blocks do."""
    return levels[: bisect.bisect_left(levels, most * (1 - ROUNDING)) + 1]
