"""Answers that a report finds when asked: the best plan of each family, what each override costs,
which change of the cluster would flip the decision, what the user may change.

All rest on what the search has priced. An override costs the seconds by which the plan is slower
than the best plan without it, all others kept; all together, against the free optimum. Under a time
limit the answers together take no more than the search was given; of two plans of which one was cut
short the difference says nothing, and is left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeVar

from meshwright.planner.alternatives.advice import advice
from meshwright.planner.alternatives.alternatives import (
    Alternative,
    Family,
    SmallerMargin,
    alternative,
    families,
    smaller_margin,
    with_margin,
    worth_s,
)
from meshwright.planner.alternatives.explain import alternative_row, plan_row
from meshwright.planner.alternatives.sensitivity import Flip, Rival, Sensitivity
from meshwright.planner.drafts import Candidate, PlanDraft
from meshwright.planner.overrides import OverrideError, Overrides, each_dropped
from meshwright.planner.plan import InfeasibleError, describe, seconds
from meshwright.planner.pricing import Evaluator
from meshwright.planner.search import TIE, Search, SearchResult

T = TypeVar("T")

progress = logging.getLogger("meshwright.progress")  # heard where somebody watches

KNOWN_S = 1.5  # that families are searched for a short text
ALL_S = 30.0  # that they are all searched for, or
TIMES = 8  # as long as the search took
MAX_EACH = 6  # overrides that are priced one by one
MAX_RIVALS = 8  # plans that are priced again on changed clusters
EQUAL = 1e-9
CUT_SHORT = "cost not known: the time limit cut a search short"


@dataclass(slots=True, kw_only=True, eq=False)
class Answers:
    """A search's account of itself (`report.DeferredAnswers`); every answer is found once."""

    search: Search
    result: SearchResult
    _families: list[Family] | None = None
    _others: dict[str, Alternative | None] = field(default_factory=dict)
    _all: bool = False  # in all the time that there is
    _margin: list[SmallerMargin | None] = field(default_factory=list)
    _runners_up: list[Candidate] | None = None
    _overrides: list[dict[str, Any]] | None = None
    _sensitivity: list[dict[str, Any]] | None = None
    _advice: list[dict[str, Any]] | None = None
    _proof: dict[str, Any] | None = None
    _spent_s: float = 0.0

    def _left_s(self) -> float:
        """What is left of the time limit."""
        given_s = self.search.time_limit_s
        return math.inf if given_s is None else max(0.0, given_s - self._spent_s)

    def _timed(self, what: str, work: Callable[[], T], most_s: float = math.inf) -> T:
        """Work in the time that is left; no line is shown for what is done in a moment."""
        if most_s > KNOWN_S:
            progress.debug("report: %s", what)
        limit = self.search.programs.time
        started = limit.clock()
        try:
            with limit.until(limit.after(min(self._left_s(), most_s))):
                return work()
        finally:
            self._spent_s += limit.clock() - started

    # --- other plans ---

    def alternatives(self) -> list[dict[str, Any]]:
        """The best plan of each family."""
        return self._rows(self.others)

    def known_alternatives(self) -> list[dict[str, Any]]:
        """The best plan of each family that is found in a moment, the most promising first."""
        if not self._others:
            self._timed("families for a moment", self._look_around, KNOWN_S)
        return self._rows(tuple(filter(None, self._others.values())))

    def _look_around(self) -> None:
        for family in sorted(self.families, key=self._promised_s):
            self._others[family.name] = alternative(self.search, family)

    def runners_up(self) -> list[dict[str, Any]]:
        """The next best plans of other shapes that fit as they are written out."""
        if self._runners_up is None:
            others = self.result.candidates[1:]
            written = [c if isinstance(c, Candidate) else self.search.written(c) for c in others]
            self._runners_up = sorted((c for c in written if c.fits), key=attrgetter("step_time_s"))
        best = self.result.best.evaluation
        return [plan_row(c.evaluation, best) for c in self._runners_up]

    @property
    def families(self) -> list[Family]:
        if self._families is None:
            self._families = families(self.search, self.result)
        return self._families

    @property
    def others(self) -> tuple[Alternative, ...]:
        """What was found of each family, in the time that is left, or several times the search's:
        those that it leaves out say so."""
        if not self._all:
            self._all = True
            most_s = max(ALL_S, TIMES * sum(self.result.phases_s.values()))
            self._timed("the best plan of each family", self._look, most_s)
        return tuple(filter(None, (self._others[f.name] for f in self.families)))

    def look_no_further(self) -> None:
        """Search no family, and no other margin, that was not searched yet."""
        self._families, self._all = self._families or [], True
        self._margin = self._margin or [None]

    def _look(self) -> None:
        search = self.search
        below_s = worth_s(self.result.best.step_time_s) if self.margin else None
        for family in self.families:
            found = self._others.get(family.name)
            if family.name not in self._others or (found and not found.searched):
                found = alternative(search, family)
            self._others[family.name] = found and with_margin(found, search, family, below_s)

    @property
    def margin(self) -> SmallerMargin | None:
        """A smaller memory margin, with which some plan is faster than the chosen one."""
        if not self._margin:
            below_s = worth_s(self.result.best.step_time_s)
            self._margin.append(smaller_margin(self.search, below_s))
        return self._margin[0]

    def _promised_s(self, family: Family) -> float:
        """What the search drafted of a family, that it would not have looked at if it were far."""
        return min(
            (d.step_time_s for d in self.result.drafts if d.fits and family.has(d.plan)),
            default=math.inf,
        )

    def _rows(self, others: Sequence[Alternative]) -> list[dict[str, Any]]:
        return [alternative_row(other, self.result.best.evaluation) for other in others]

    # --- what is asked once ---

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
            self._advice = self._timed(
                "advice", lambda: advice(self.search, self.result, self.margin)
            )
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
        free = self._best(Overrides()) if self._whole(self.result) else CUT_SHORT
        rows = [self._row(_said(given), free, "the free optimum")]
        if isinstance(free, str):
            return rows
        rows[0]["free_step_time_s"] = free.step_time_s
        each = list(each_dropped(self.search.overrides))
        if len(each) > MAX_EACH:
            rows[0]["effect"] += f" (with more than {MAX_EACH} overrides not priced one by one)"
        elif len(each) > 1:
            rows += [
                self._row(one.said, self._best(one.left), "the best with the rest kept")
                for one in each
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
        """What the same search finds under other overrides, in the time that is left."""
        if self._left_s() == 0:
            return CUT_SHORT
        try:
            there = self.search.like(overrides=overrides)
            result = self._timed("a plan without an override", there.run)
        except (InfeasibleError, OverrideError):
            return CUT_SHORT if self._left_s() == 0 else "without it no plan was found"
        return result.best if self._whole(result) else CUT_SHORT

    def _whole(self, result: SearchResult) -> bool:
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
        for found in sorted(others, key=attrgetter("step_time_s")):
            room = rivals if found.fits else bigger
            if describe(found.plan) in known or len(room) >= MAX_RIVALS:
                continue
            known.add(describe(found.plan))
            if found.fits:
                own = found if isinstance(found, Candidate) else search.written(found)
                rivals += [_rival(own)] * own.fits
            elif found.step_time_s < best.step_time_s:
                bigger.append(_rival(found))
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
