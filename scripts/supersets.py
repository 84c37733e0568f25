"""A superset never loses: free choices against forced plans, alternatives and searches cut short.

    python -m scripts.supersets [--cases 200] [--seed 0] [--first 0] [--record FILE]

Each case (`scripts/drawn/cases.py`) is planned freely by both objectives, and again under each of
its overrides; a case has a violation where

- `fastest` takes longer than a plan that was forced, or that its own report lists, by more than
  `TOLERANCE`, or than the choice of `robust` at all;
- `robust` has a larger number than one of these by more than its tie. Its number is the quantile of
  a step over the errors of its price, and the risk of running out of memory
  (`planner/search/taste.py`), found here from the plan alone, by prices that are corrected by so
  much;
- a search that was cut short by a time limit found a faster plan than the whole one;
- nothing fits, but a plan that was forced.

Plans of a report are judged as they are listed under `fastest`, written out under `robust`. With
`--record` cases are appended to a file of JSON lines; those that it has are not planned again, so
that a run that was stopped goes on. Exit status 1 where there is a violation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import transformers

from meshwright import Overrides, ParallelModel
from meshwright.costmodel.intervals import COMMUNICATION_ERROR, HOST_ERROR, compute_error
from meshwright.costmodel.operators import Problem
from meshwright.planner.plan import InfeasibleError, Plan, describe, seconds
from meshwright.planner.pricing import Evaluator
from meshwright.planner.search import TIE
from meshwright.planner.search.taste import QUANTILE, RISK
from meshwright.profiles.profile import no_profile
from meshwright.profiles.steps import Correction, Corrections
from meshwright.profiles.steps.timing import BACKWARD, COMPONENTS, DATA_AXIS, FORWARD, HOST
from scripts.drawn.cases import Drawn, drawn
from scripts.drawn.records import asked_for, resumed
from scripts.record_plans import planned

TOLERANCE = 0.005
EXACT = 1e-9  # for rounding
NEAR = 1.1  # times the step of a choice: of slower plans the quantile is taken to be larger, too
COMPUTING = (FORWARD, BACKWARD, HOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A choice and what it should not lose to, with what is compared of both, in seconds."""

    rule: str
    override: str
    ours: str
    ours_s: float
    other: str
    other_s: float

    @property
    def excess(self) -> float:
        return self.ours_s / self.other_s - 1


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A case: how many plans were compared or not, CPU seconds of all of it and of the plan that
    took longest, and its violations."""

    number: int
    name: str
    forced: int = 0
    refused: int = 0
    infeasible: int = 0
    listed: int = 0
    cpu_s: float = 0.0
    plan_cpu_s: float = 0.0
    violations: list[Violation] = field(default_factory=list)


def judged(case: Drawn) -> Outcome:
    """Plan a case freely and forced, and compare."""
    out = Outcome(number=case.number, name=case.name)
    began = time.process_time()
    free = {objective: _planned(case, out, objective) for objective in ("fastest", "robust")}
    fastest, robust = free["fastest"], free["robust"]
    if fastest and robust:
        compared = Comparison(fastest, robust, out, Quantiles(robust.report.details.problem))
        compared.choices()
        for over in case.overrides:
            compared.forced(over)
        compared.listed()
        compared.cut_short(case.limit_s)
    elif fastest or robust:
        one = next(name for name, found in free.items() if found)
        out.violations.append(_unfit(f"objective={one!r}", free[one]))
    else:
        for over in case.overrides:
            found = _planned(case, out, "fastest", over)
            if found:
                out.violations.append(_unfit(said(over), found))
    out.cpu_s = time.process_time() - began
    return out


def _planned(
    case: Drawn, out: Outcome, objective: str, over: Overrides | None = None
) -> ParallelModel | None:
    """The plan of a case; None where none fits or the overrides can't hold."""
    began = time.process_time()
    try:
        return planned(case.case, objective=objective, overrides=over)
    except InfeasibleError:
        out.infeasible += 1
    except ValueError:
        if over is None:
            raise
        out.refused += 1
    finally:
        out.plan_cpu_s = max(out.plan_cpu_s, time.process_time() - began)
    return None


def _unfit(what: str, found: ParallelModel) -> Violation:
    other_s = found.prediction.step_time_s
    return Violation(
        rule="nothing fits",
        override=what,
        ours="none",
        ours_s=math.inf,
        other=describe(found.plan),
        other_s=other_s,
    )


def said(over: Overrides) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in over.given().items())


@dataclass(slots=True)
class Comparison:
    """Both free choices of a case, against everything else."""

    fastest: ParallelModel
    robust: ParallelModel
    out: Outcome
    quantiles: Quantiles

    def choices(self) -> None:
        self._fastest("fastest, robust", "", *_step(self.robust), tolerance=EXACT)

    def forced(self, over: Overrides) -> None:
        """Both objectives with a decision taken; either plan is one that both may choose."""
        for objective, free in (("fastest", self.fastest), ("robust", self.robust)):
            try:
                found = free.replan(over)
            except InfeasibleError:
                self.out.infeasible += 1
                continue
            except ValueError:  # it contradicts the model, the cluster or the batch
                self.out.refused += 1
                continue
            self.out.forced += 1
            override = f"{said(over)} ({objective})"
            self._fastest("fastest, forced", override, *_step(found))
            self._robust("robust, forced", override, found.plan, found.prediction.step_time_s)

    def listed(self) -> None:
        """The alternatives of both reports and their runners-up."""
        report = self.fastest.report
        for row in (*report.alternatives, *report.runners_up):
            if row["plan"]:
                self.out.listed += 1
                override = row.get("family", "runner-up")
                self._fastest("fastest, listed", override, row["plan"], row["step_time_s"])
        answers, limit_s = self.robust.report.deferred, NEAR * self.robust.prediction.step_time_s
        for other in answers.others:
            if other.best and other.best.step_time_s <= limit_s:
                self.out.listed += 1
                step_s = other.best.step_time_s
                self._robust("robust, listed", other.family, other.best.plan, step_s)

    def cut_short(self, limit_s: float) -> None:
        try:
            found = self.fastest.replan(time_limit_s=limit_s)
        except InfeasibleError:  # none was found by then
            return
        self._fastest("more time", f"{limit_s:g} s", *_step(found), tolerance=EXACT)

    def _fastest(
        self, rule: str, override: str, other: str, other_s: float, tolerance: float = TOLERANCE
    ) -> None:
        ours, ours_s = _step(self.fastest)
        self._add(rule, override, (ours, ours_s), (other, other_s), tolerance)

    def _robust(self, rule: str, override: str, plan: Plan, step_s: float) -> None:
        own = self.robust
        ours_s = self.quantiles.of(own.plan, own.prediction.step_time_s)
        other_s = self.quantiles.of(plan, step_s)
        self._add(rule, override, (describe(own.plan), ours_s), (describe(plan), other_s), TIE)

    def _add(
        self,
        rule: str,
        override: str,
        ours: tuple[str, float],
        other: tuple[str, float],
        tolerance: float,
    ) -> None:
        if ours[1] > other[1] * (1 + tolerance):
            names = {"ours": ours[0], "ours_s": ours[1], "other": other[0], "other_s": other[1]}
            self.out.violations.append(Violation(rule=rule, override=override, **names))


def _step(found: ParallelModel) -> tuple[str, float]:
    return describe(found.plan), found.prediction.step_time_s


# --- the number of robust -------------------------------------------------------------------------


@dataclass(slots=True)
class Quantiles:
    """The numbers by which `robust` compares plans of one problem, in seconds."""

    problem: Problem
    _off: dict[int, tuple[Evaluator, ...]] = field(default_factory=dict)

    def of(self, plan: Plan, step_s: float) -> float:
        """The quantile of a plan with a step of so many seconds, with the risk of its memory."""
        node = self.problem.cluster.devices_per_node
        nodes = max(len({rank // node for rank in stage.ranks}) for stage in plan.stages)
        if nodes not in self._off:
            self._off[nodes] = self._prices(nodes)
        away = any(any(own.offload.values()) for own in plan.stages)
        found = [own.price(plan).prediction for own in self._off[nodes][: 2 + away]]
        risk = RISK * (1 - found[0].memory_probability(self.problem.cluster))
        more = (own.step_time_s - step_s for own in found)
        return (1 + risk) * (step_s + QUANTILE * math.hypot(*more))

    def _prices(self, nodes: int) -> tuple[Evaluator, ...]:
        """Prices where computing takes longer by its error, where communication does, of plans
        whose data axis spans so many nodes, and where links to host memory do."""
        computing = 1 + compute_error(self.problem.cluster.device.name)
        across = 1 + COMMUNICATION_ERROR * (1 + math.log2(nodes) / 2)
        sent = {
            name: across if name.startswith(DATA_AXIS) else 1 + COMMUNICATION_ERROR
            for name in COMPONENTS
            if name not in COMPUTING
        }
        factors = dict.fromkeys(COMPUTING, computing), sent
        cluster = self.problem.cluster
        host = cluster.host and cluster.host.slower(1 + HOST_ERROR)
        slower = replace(self.problem, cluster=replace(cluster, host=host))
        return (
            _corrected(self.problem, factors[0]),
            _corrected(self.problem, factors[1]),
            Evaluator(slower),
        )


def _corrected(problem: Problem, factors: Mapping[str, float]) -> Evaluator:
    found = {name: Correction(factor=f, plans=0, samples=0) for name, f in factors.items()}
    profile = replace(no_profile(problem.cluster), corrections=Corrections(by_component=found))
    return Evaluator(replace(problem, profile=profile))


# --- command --------------------------------------------------------------------------------------


def read(data: Mapping[str, Any]) -> Outcome:
    """A case of a record."""
    return Outcome(**{**data, "violations": [Violation(**own) for own in data["violations"]]})


def table(found: Iterable[Outcome]) -> str:
    """Violations, the largest of each rule first."""
    rows = [(v.rule, -v.excess, out, v) for out in found for v in out.violations]
    lines = ["| rule | case | override | chosen | s | other | s | loses |", "|" + "---|" * 8]
    for rule, _, out, v in sorted(rows, key=lambda row: row[:2]):
        steps = [seconds(v.ours_s) if math.isfinite(v.ours_s) else "–", seconds(v.other_s)]
        cells = [rule, f"{out.number}: {out.name}", v.override, v.ours, steps[0], v.other, steps[1]]
        told = [cell.replace("|", "/") for cell in (*cells, f"{v.excess:.2%}")]
        lines.append(f"| {' | '.join(told)} |")
    return "\n".join(lines)


def summary(found: list[Outcome]) -> str:
    counts: dict[str, Any] = {}
    for out in found:
        for v in out.violations:
            counts.setdefault(v.rule, set()).add(out.number)
    total = {
        name: sum(getattr(out, name) for out in found)
        for name in ("forced", "refused", "infeasible", "listed", "cpu_s")
    }
    rules = ", ".join(f"{rule}: {len(own)}" for rule, own in sorted(counts.items()))
    worst = max((out.plan_cpu_s for out in found), default=0.0)
    return (
        f"{len(found)} cases, {total['forced']} forced plans ({total['refused']} refused, "
        f"{total['infeasible']} do not fit), {total['listed']} listed; {total['cpu_s']:.0f} CPU-s, "
        f"{worst:.1f} for one plan; cases with a violation, by rule: {rules or 'none'}"
    )


def main() -> int:
    args = asked_for(__doc__, cases=200).parse_args()
    transformers.logging.set_verbosity_error()
    numbers, found = range(args.first, args.first + args.cases), []
    for out in resumed(numbers, args.record, read, lambda n: judged(drawn(args.seed, n))):
        found.append(out)
        print(
            f"{out.number}: {out.name}: {out.cpu_s:.1f} CPU-s, {len(out.violations)} violations",
            flush=True,
        )
    print(table(found), summary(found), sep="\n\n")
    return 1 if any(out.violations for out in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
