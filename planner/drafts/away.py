"""What a plan has in host memory comes back to its devices as far as they have room.

A draft has as many activations away as its levels say, and all states and weights that its relief
allows, alike on all stages. Written out, each device group takes back the activations of as many
blocks, each stage as many of its states, or where weights lie there, too, of these, as fit; found
by halving, for the peak of a device depends on its own stages alone. One that does not fit as its
draft did sends more. Last, as few states as the hosts have no room for stay in files.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.costmodel.stages import fits
from meshwright.planner.drafts.candidates import Candidate, priced_fits
from meshwright.planner.drafts.space import Space
from meshwright.planner.plan import StagePlan, moved_parts, moved_sizes
from meshwright.planner.plan.offload import ROUNDING
from meshwright.planner.pricing import evaluate
from meshwright.planner.stages import BlockPrograms

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
