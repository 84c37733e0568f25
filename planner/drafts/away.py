"""What a plan has in host memory comes back to its devices as far as they have room.

A draft is made with all that its relief allows: alike on all stages. Written out, each device group
takes back the activations of as many blocks, each stage as many of its states, or where weights lie
there, too, of these, as fit; found by halving, for the peak of a device depends on its own stages
alone. Each policy of recompute is tried anew with as many activations away as that takes. Last, as
few states as the hosts have no room for stay in files.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.costmodel.blocks import parts_of
from meshwright.costmodel.stages import fits
from meshwright.planner.drafts.candidates import Candidate, priced_fits
from meshwright.planner.drafts.segments import undecided
from meshwright.planner.drafts.space import Space
from meshwright.planner.plan import StagePlan
from meshwright.planner.plan.offload import parts, trained_sizes
from meshwright.planner.pricing import evaluate
from meshwright.planner.stages import BlockPrograms

LEAST = 1 / 8  # of a stage's blocks: what sends less frees little
TIE = 1.01  # of steps, below which the plan with less off its devices is taken


def brought_back(given: Candidate, programs: BlockPrograms, space: Space) -> Candidate:
    """The plan with as little off its devices as fits, but for what the user decided."""
    decided = space.reliefs[0].host
    if not given.fits or not any(stage.host for stage in given.plan.stages):
        return given
    back = _Back(programs, space)
    best = given
    if not decided.activations and any(s.host.activations for s in given.plan.stages):
        best = back.otherwise_repeated(back.less_sent(given))
    return best if decided.states else back.less_held(best)


@dataclass(frozen=True, slots=True)
class _Back:
    """How parts come back."""

    programs: BlockPrograms
    space: Space

    def less_sent(self, given: Candidate) -> Candidate:
        """The plan with as few activations in host memory as fit, by device group."""
        plan, room = given.plan, self.space.memory_bytes
        blocks = max(len(stage.blocks) for stage in plan.stages)
        sent = {s.ranks: round(s.host.activations * blocks) for s in plan.stages}

        def at(counts: Mapping[tuple[int, ...], int]) -> Candidate:
            own = {k: {"activations": counts[s.ranks] / blocks} for k, s in enumerate(plan.stages)}
            return self._at(given, own)

        low, high, best = dict.fromkeys(sent, -1), sent, given if given.fits else None
        while any(high[ranks] - low[ranks] > 1 for ranks in high):
            if self.programs.time.over():
                return best or given
            middle = {ranks: (max(low[ranks], 0) + high[ranks]) // 2 for ranks in high}
            priced = at(middle)
            peaks = priced.evaluation.prediction.peak_memory_bytes
            for ranks, peak in zip(plan.devices, peaks, strict=True):
                (high if fits(peak, room) else low)[ranks] = middle[ranks]
            if priced.fits and (best is None or priced.step_time_s <= best.step_time_s):
                best = priced
        found = at(high)
        if found.fits and (best is None or found.step_time_s <= TIE * best.step_time_s):
            return found
        return best or given

    def otherwise_repeated(self, given: Candidate) -> Candidate:
        """The plan, or a faster one all of whose blocks that run again do so by another policy,
        with as many activations in host memory as that takes."""
        plan, over = given.plan, self.space.restrictions
        free = undecided(over) and all(own is None for own in over.recompute)
        if not free or not any(stage.host.activations for stage in plan.stages):
            return given
        best, gathered = given, any(stage.tp > 1 for stage in plan.stages)
        for policy in self.space.policies(plan.schedule):
            if (parts_of(policy)[1] and not gathered) or self.programs.time.over():
                continue
            if self._repeating(given, policy, LEAST).step_time_s < best.step_time_s:
                found = self.less_sent(self._repeating(given, policy, 1.0))
                best = min(best, found, key=lambda own: (not own.fits, own.step_time_s))
        return best

    def less_held(self, given: Candidate) -> Candidate:
        """The plan with as few states in host memory as fit, stage by stage, or where weights lie
        there, too, with as few of these: they come in each pass. Then with as few states in files
        as the hosts have no room for: alike on all stages, and less on those with the most."""
        sizes = [trained_sizes(stage, self.space.problem.graph) for stage in given.plan.stages]
        best = given
        for k, stage in enumerate(given.plan.stages):
            kind = "weights" if stage.host.weights else "states"
            levels = [p for p in parts(sizes[k]) if p <= getattr(stage.host, kind)]
            best = self._least(best, levels, {k: kind})
        held = {k: float(costs.flash_bytes) for k, costs in enumerate(given.evaluation.stages)}
        filed = sorted((k for k in held if held[k]), key=held.__getitem__, reverse=True)
        for own in (*([filed] if len(filed) > 1 else []), *([k] for k in filed)):
            levels = sorted({p for k in own for p in parts(sizes[k])})
            most = max(best.plan.stages[k].host.files for k in own)
            count = bisect.bisect_right(levels, most) + 1  # whole blocks reach the next level
            best = self._least(best, levels[:count], dict.fromkeys(own, "files"))
        return best if best.step_time_s <= TIE * given.step_time_s else given

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
        return self._priced(best, stages)

    def _repeating(self, given: Candidate, policy: str, part: float) -> Candidate:
        """The plan whose blocks that run again do so by this policy, with a part of the activations
        in host memory."""
        return self._priced(given, [_repeating(s, policy, part) for s in given.plan.stages])

    def _priced(self, best: Candidate, stages: Sequence[StagePlan]) -> Candidate:
        """The plan with other stages, of the same shardings."""
        plan = dataclasses.replace(best.plan, stages=tuple(stages))
        priced = evaluate(plan, self.space.problem, best.assignments, self.programs.coster)
        fit = priced_fits(priced, self.space.problem.cluster, self.space.memory_bytes)
        return Candidate(evaluation=priced, assignments=best.assignments, fits=fit)


def _with(stage: StagePlan, own: Mapping[str, float]) -> StagePlan:
    there = dataclasses.replace(stage.host, **own)
    # files have a part of the states off the devices
    return stage.with_host(dataclasses.replace(there, files=min(there.files, there.states)))


def _repeating(stage: StagePlan, policy: str, part: float) -> StagePlan:
    """A stage whose blocks that run again do so by this policy, each by itself, with a part of its
    activations in host memory."""
    kept = policy if stage.segmented else "none"
    policies = [kept if own == "none" else policy for own in stage.policies]
    return _with(stage, {"activations": part}).repeating(policies)
