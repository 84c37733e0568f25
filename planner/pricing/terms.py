"""Terms of a plan's step, and the seconds by which each component of them could be corrected.

A plan is priced once. Then the entries of a component are made a little larger, added up again and
simulated: the difference is the component's part of a term, exactly where nothing is hidden, and
elsewhere for corrections near 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from meshwright.costmodel.blocks import Repeats, priced_steps
from meshwright.costmodel.operators import COMPUTING, Cost, Entry, Pricer, Problem, total
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
    problem = replace(problem, profile=replace(profile, corrections=NO_CORRECTIONS))
    evaluation = Evaluator(problem).price(plan)
    plain = terms_of(evaluation)
    parts: dict[str, dict[str, float]] = {term: {} for term in plain}
    for name in COMPONENTS:
        for term, seconds in _terms_with(_Larger(name), evaluation, problem).items():
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
    stages = with_exchanges([larger.stage(priced) for priced in evaluation.priced], exchanged)
    sends = {edge: larger.entry(entry).seconds for edge, entry in evaluation.transfers.items()}
    return _terms(plan, stages, simulated(plan, problem, stages, sends)[1])


@dataclass(frozen=True, slots=True)
class _Larger:
    """The entries of a price, of which those of one component take `MORE`."""

    component: str

    def entry(self, entry: Entry) -> Entry:
        """An entry, which hides as much as before."""
        more = 1 + MORE * (entry.component == self.component)
        seconds = entry.seconds * more
        if entry.axis == "context" and entry.hidden_s:  # as long as all of the scores beside it
            behind = COMPUTING[entry.column] == self.component
            seconds = max(0.0, seconds - MORE * entry.hidden_s * behind)
        return entry._replace(
            seconds=seconds,
            weight_s=entry.weight_s * more,
            host_s=entry.host_s * (1 + MORE * (self.component == HOST and entry.kind != "wait")),
        )

    def step(self, pricer: Pricer, step: Run | Move) -> Cost:
        """The cost of a step of a block."""
        entries = pricer.step_entries(step)
        if isinstance(step, Move) and any(entry.hidden_s for entry in entries):
            alone = (e._replace(seconds=e.seconds + e.hidden_s, hidden_s=0.0) for e in entries)
            return Cost.of(pricer.exposed(step.value, self.entry(entry)) for entry in alone)
        return Cost.of(map(self.entry, entries))

    def parameters(self, pricer: Pricer, stored: Iterable[tuple[str, Placement]]) -> Cost:
        """The cost of parameters."""
        priced = (pricer.parameters.priced(*parameter)[0] for parameter in stored)
        return Cost.of(self.entry(entry) for entries in priced for entry in entries)

    def stage(self, priced: PricedStage) -> StageCosts[float]:
        """The costs of a stage."""
        pricer, policies = priced.pricer, priced.stage.policies
        passes = [
            total(self.step(pricer, step) for step in priced_steps(block.steps))
            for block in priced.blocks
        ]
        blocks = [
            self._block(pricer, *block)
            for block in zip(priced.blocks, policies, passes, strict=True)
        ]
        stored = dict.fromkeys(p for block in priced.blocks for p in block.parameters)
        sums = priced.sums.costing(total([*passes, self.parameters(pricer, stored)]), {})
        priced = replace(priced, blocks=blocks)
        return of_one(stage_costs(sums, priced.setting, stage_recompute(priced), sent_of(priced)))

    def _block(self, pricer: Pricer, block: Entered, policy: str, passes: Cost) -> Entered:
        again = {}
        if (repeats := block.passes.repeats.get(policy)) is not None:
            again[policy] = Repeats.of(
                repeats.steps, partial(self.step, pricer), repeats.freed_bytes, repeats.hiding
            )
        cost = total([passes, self.parameters(pricer, block.parameters)])
        return replace(block, sums=block.sums.costing(cost, again))
