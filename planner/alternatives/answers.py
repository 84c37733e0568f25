"""Answers that a report finds when asked: the best plan of each family, what each override costs,
which change of the cluster would flip the decision, what the user may change.

All rest on what the search has priced. An override costs the seconds by which the plan is slower
than the best plan without it, all others kept; all together, against the free optimum. Under a time
limit the answers together take no more than the search was given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from meshwright.planner.alternatives.advice import advice
from meshwright.planner.alternatives.alternatives import (
    Alternative,
    alternatives,
    known_alternatives,
)
from meshwright.planner.alternatives.explain import alternative_row
from meshwright.planner.alternatives.sensitivity import Flip, Rival, Sensitivity
from meshwright.planner.drafts import Candidate, PlanDraft
from meshwright.planner.overrides import OverrideError, Overrides, each_dropped
from meshwright.planner.plan import InfeasibleError, describe, seconds
from meshwright.planner.pricing import Evaluator
from meshwright.planner.search import TIE, Search, SearchResult

T = TypeVar("T")

progress = logging.getLogger("meshwright.progress")  # heard where somebody watches

MAX_EACH = 6  # overrides that are priced one by one
MAX_RIVALS = 8  # plans that are priced again on changed clusters
EQUAL = 1e-9


@dataclass(slots=True, kw_only=True, eq=False)
class Answers:
    """A search's account of itself (`report.DeferredAnswers`); every answer is found once."""

    search: Search
    result: SearchResult
    _others: tuple[Alternative, ...] | None = None
    _overrides: list[dict[str, Any]] | None = None
    _sensitivity: list[dict[str, Any]] | None = None
    _advice: list[dict[str, Any]] | None = None
    _proof: dict[str, Any] | None = None
    _spent_s: float = 0.0

    def _left_s(self) -> float | None:
        """What is left of the time limit; None without one."""
        given_s = self.search.time_limit_s
        return None if given_s is None else max(0.0, given_s - self._spent_s)

    def _timed(self, what: str, work: Callable[[], T]) -> T:
        progress.debug("report: %s", what)
        limit = self.search.programs.time
        started = limit.clock()
        try:
            with limit.until(limit.after(self._left_s())):
                return work()
        finally:
            self._spent_s += limit.clock() - started

    @property
    def others(self) -> tuple[Alternative, ...]:
        if self._others is None:
            self._others = self._timed(
                "the best plan of each family", lambda: alternatives(self.search, self.result)
            )
        return self._others

    def alternatives(self) -> list[dict[str, Any]]:
        """The best plan of each family."""
        return [alternative_row(other, self.result.best.evaluation) for other in self.others]

    def known_alternatives(self) -> list[dict[str, Any]]:
        """The best plan of each family that is known without looking for more."""
        known = self._others
        if known is None:
            known = known_alternatives(self.search, self.result)
        return [alternative_row(other, self.result.best.evaluation) for other in known]

    def overrides(self) -> list[dict[str, Any]]:
        """All given overrides together, then each of several."""
        if self._overrides is None:
            self._overrides = self._priced()
        return self._overrides

    def sensitivity(self) -> list[dict[str, Any]]:
        """Flips of the decision, by property of the cluster."""
        if self._sensitivity is None:
            compared = self._compared()
            flips = self._timed(
                "what would flip the decision", lambda: compared.flips(self._left_s())
            )
            self._sensitivity = [_flip_row(flip) for flip in flips]
        return self._sensitivity

    def advice(self) -> list[dict[str, Any]]:
        """What the user may change for more rows per second, or less memory."""
        if self._advice is None:
            self._advice = self._timed("advice", lambda: advice(self.search, self.result))
        return self._advice

    def proof(self) -> dict[str, Any]:
        """Lower bound on the step of plans with equal stages, and the chosen one's gap to it."""
        if self._proof is None:
            bound_s = self._timed("a closer bound", lambda: self.search.equal_bound_s(self.result))
            step_s, self._proof = self.result.best.step_time_s, {}
            if bound_s:
                gap = max(0.0, step_s / bound_s - 1.0)
                self._proof = {"equal_bound_s": bound_s, "equal_gap": gap}
        return self._proof

    # --- overrides ---

    def _priced(self) -> list[dict[str, Any]]:
        given = self.search.overrides.given()
        if not given:
            return []
        if self._left_s() == 0:
            return [{"override": _said(given), "effect": "not priced in the time given"}]
        free = self._best(Overrides())
        rows = [self._row(_said(given), free, "the free optimum")]
        if free is not None:
            rows[0]["free_step_time_s"] = free.step_time_s
        each = list(each_dropped(self.search.overrides))
        if len(each) > MAX_EACH:
            rows[0]["effect"] += f" (with more than {MAX_EACH} overrides not priced one by one)"
        elif len(each) > 1:
            for one in each:
                if self._left_s() == 0:
                    rows[0]["effect"] += " (not all of them priced in the time given)"
                    break
                best = self._best(one.left)
                rows.append(self._row(one.said, best, "the best with the rest kept"))
        return rows

    def _row(self, text: str, without: Candidate | None, name: str) -> dict[str, Any]:
        if without is None:
            return {"override": text, "effect": "without it no plan was found"}
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

    def _best(self, overrides: Overrides) -> Candidate | None:
        """The same search under other overrides, in the time that is left."""
        search = self.search.like(overrides=overrides, time_limit_s=self._left_s())
        try:
            return self._timed("a plan without an override", search.run).best
        except (InfeasibleError, OverrideError):
            return None

    # --- sensitivity ---

    def _compared(self) -> Sensitivity:
        search, best = self.search, self.result.best
        known = {describe(best.plan)}
        rivals: list[Rival] = []
        bigger: list[Rival] = []
        drafts = [a.draft for a in self.others if a.draft] + [*self.result.drafts]
        for draft in sorted(drafts, key=lambda d: d.step_time_s):
            room = rivals if draft.fits else bigger
            if describe(draft.plan) in known or len(room) >= MAX_RIVALS:
                continue
            known.add(describe(draft.plan))
            if draft.fits:
                rivals.append(_rival(search.written(draft)))
            elif draft.step_time_s < best.step_time_s:
                bigger.append(_rival(draft))
        evaluator = Evaluator(replace(search.problem, profile=None))
        return Sensitivity(
            evaluator=evaluator,
            chosen=_rival(best),
            rivals=rivals,
            bigger=bigger,
            tie=TIE if search.objective == "robust" else 0.0,
        )


def _said(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _rival(found: PlanDraft | Candidate) -> Rival:
    peak = found.evaluation.prediction.fullest_bytes
    return Rival(plan=found.plan, step_time_s=found.step_time_s, peak_bytes=peak)


def _flip_row(flip: Flip) -> dict[str, Any]:
    return {
        "property": flip.knob,
        "factor": flip.factor,
        "plan": flip.rival and describe(flip.rival.plan),
    }
