"""The terms of a plan's step and what they are made of: by how many seconds each component of it
could be corrected.

A plan is priced once. Then the entries of a component are made a little larger, and added up again
to the same sums, which hide as much of each other as they do and are simulated in the same
schedule: the difference is what the component adds to a term. Where nothing is hidden that is
exact, elsewhere it holds for corrections near 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.blocks import Repeats, priced_steps
from meshwright.costmodel.operators import COMPUTING, Cost, Entry, Problem, total
from meshwright.costmodel.sharding import Move, Placement, Run
from meshwright.costmodel.stages import StageCosts, of_one, stage_costs
from meshwright.planner.plan import Plan
from meshwright.planner.pricing.away import sent_of
from meshwright.planner.pricing.copies import with_exchanges
from meshwright.planner.pricing.evaluate import Evaluation, Evaluator, simulated
from meshwright.planner.pricing.priced_stage import PricedStage
from meshwright.planner.pricing.segments import stage_recompute
from meshwright.planner.pricing.stage_costs import Entered
from meshwright.profiles.profile import Profile
from meshwright.profiles.steps import COMPONENTS, HOST, NO_CORRECTIONS, STEP

MORE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedTerm:
    """Seconds of a term of a step without corrections, and each component's part of them."""

    seconds: float
    parts: Mapping[str, float]


def priced_terms(plan: Plan, problem: Problem, profile: Profile) -> dict[str, PricedTerm]:
    """The terms of a plan's step on a profile, whose corrections are left out. Raises `PlanError`
    as `check_plan` does."""
    uncorrected = replace(profile, corrections=NO_CORRECTIONS)
    own = replace(problem, profile=uncorrected)
    evaluation = Evaluator(own).price(plan)
    plain = terms_of(evaluation)
    parts: dict[str, dict[str, float]] = {term: {} for term in plain}
    for name in COMPONENTS:
        for term, seconds in _terms_with(_Larger(name), evaluation, own).items():
            if abs(seconds - plain[term]) > 1e-12 * plain[term]:
                parts[term][name] = (seconds - plain[term]) / MORE
    return {term: PricedTerm(seconds=plain[term], parts=parts[term]) for term in plain}


def terms_of(evaluation: Evaluation) -> dict[str, float]:
    """Seconds of a `train_step` by term: forward, backward and reduction are the sums over the
    device groups, the step (without the optimizer's) is the mean."""
    return _terms(evaluation.plan, evaluation.stages, evaluation.prediction.step_time_s)


def _terms(plan: Plan, stages: Sequence[StageCosts[float]], step_s: float) -> dict[str, float]:
    m, groups = plan.passes, len(plan.devices)

    def total_of(name: str) -> float:
        return float(sum(getattr(stage, name) for stage in stages))

    return {
        "forward": m * total_of("forward_s"),
        "backward": m * total_of("backward_s"),
        "reduction": total_of("reduce_s"),
        STEP: max(step_s - total_of("optimizer_s") / groups, 0.0),
    }


def _terms_with(larger: _Larger, evaluation: Evaluation, problem: Problem) -> dict[str, float]:
    """The terms where a component takes more."""
    plan = evaluation.plan
    exchanged = {k: larger.entry(entry) for k, entry in evaluation.exchanges.items()}
    stages = with_exchanges([larger.stage(own) for own in evaluation.priced], exchanged)
    sends = {edge: larger.entry(entry).seconds for edge, entry in evaluation.transfers.items()}
    return _terms(plan, stages, simulated(plan, problem, stages, sends)[1])


@dataclass(frozen=True, slots=True)
class _Larger:
    """The entries of a price, of which those of one component take `MORE`."""

    component: str

    def entry(self, own: Entry) -> Entry:
        """An entry; what it hides it hides still."""
        more = 1 + MORE * (own.component == self.component)
        seconds = own.seconds * more
        if own.axis == "context" and own.hidden_s:  # as long as all of the scores beside it
            behind = COMPUTING[own.column] == self.component
            seconds = max(0.0, seconds - MORE * own.hidden_s * behind)
        return own._replace(
            seconds=seconds,
            weight_s=own.weight_s * more,
            host_s=own.host_s * (1 + MORE * (self.component == HOST and own.kind != "wait")),
        )

    def step(self, own: PricedStage, step: Run | Move) -> Cost:
        """What a step of a block costs."""
        entries = own.pricer.step_entries(step)
        if isinstance(step, Move) and any(entry.hidden_s for entry in entries):
            alone = (e._replace(seconds=e.seconds + e.hidden_s, hidden_s=0.0) for e in entries)
            return Cost.of(own.pricer.exposed(step.value, self.entry(each)) for each in alone)
        return Cost.of(map(self.entry, entries))

    def parameters(self, own: PricedStage, stored: Iterable[tuple[str, Placement]]) -> Cost:
        """What parameters cost."""
        priced = (own.pricer.parameters.priced(*parameter)[0] for parameter in stored)
        return Cost.of(self.entry(entry) for entries in priced for entry in entries)

    def stage(self, own: PricedStage) -> StageCosts[float]:
        """The costs of a stage."""
        passes = [
            total(self.step(own, step) for step in priced_steps(each.steps)) for each in own.blocks
        ]
        blocks = [
            self._block(own, *each)
            for each in zip(own.blocks, own.stage.policies, passes, strict=True)
        ]
        stored = dict.fromkeys(p for each in own.blocks for p in each.parameters)
        sums = own.sums.costing(total([*passes, self.parameters(own, stored)]), {})
        own = replace(own, blocks=blocks)
        return of_one(stage_costs(sums, own.setting, stage_recompute(own), sent_of(own)))

    def _block(self, own: PricedStage, each: Entered, policy: str, passes: Cost) -> Entered:
        found = each.passes.repeats.get(policy)
        again = {}
        if found is not None:
            again[policy] = Repeats.of(
                found.steps, lambda step: self.step(own, step), found.freed_bytes, found.hiding
            )
        cost = total([passes, self.parameters(own, each.parameters)])
        return replace(each, sums=each.sums.costing(cost, again))
