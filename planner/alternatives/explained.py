"""The report of a search: its plan and the proofs, and other plans as rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.costmodel.graph import Block, Op
from meshwright.costmodel.operators import Pricer, Problem
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import Assignment, Move, Strategy, transition
from meshwright.planner import report
from meshwright.planner.alternatives.alternatives import Alternative
from meshwright.planner.intra_op import BlockProgram
from meshwright.planner.plan import PlanError, describe, glob, seconds, sized, slower
from meshwright.planner.pricing import Entered, Evaluation, StageCoster
from meshwright.planner.search import TIE, SearchResult, looks_of, why_simpler


def explain_search(
    result: SearchResult, problem: Problem, phases_s: Mapping[str, float]
) -> report.Report:
    """The report of a search; its deferred answers are not in it yet."""
    best = result.best.evaluation
    proofs = [
        {
            "block": name,
            "objective_s": proof.objective,
            "gap": proof.gap,
            "time_s": proof.time_s,
            "solver": proof.solver,
            "integral_relaxation": proof.integral_relaxation,
        }
        for name, proof in result.certificates.items()
    ]
    bound = {"bound_s": result.bound_s, "gap": result.gap} if result.bound_s else {}
    return report.explain(
        best,
        problem,
        phases_s={**phases_s, **result.phases_s},
        notes=(*_ties(result, problem.cluster.device.memory_bytes), *result.notes),
        searched=report.Searched(solver=proofs, bound={"complete": result.complete, **bound}),
    )


def _ties(result: SearchResult, memory_bytes: float) -> list[str]:
    """The cost of simplicity, where a plan that is less simple is predicted to be faster."""
    best = result.best
    fastest = min(result.candidates, key=lambda c: c.step_time_s)
    if fastest.step_time_s >= best.step_time_s:
        return []
    looks = (
        looks_of(c.plan, c.evaluation.prediction.fullest_bytes, memory_bytes)
        for c in (best, fastest)
    )
    simpler = why_simpler(*looks)
    less = fastest.step_time_s / best.step_time_s - 1
    why = (
        f"so the simpler plan was chosen: it {simpler}"
        if simpler
        else "and with what prices are off by this one takes no longer"
    )
    resolved = f"less than prices resolve ({TIE:.0%})" if -less <= TIE else "within their errors"
    return [
        f"tie with {describe(fastest.plan)}: {less:+.1%}, {resolved}, {why}; "
        "objective='fastest' takes the other"
    ]


def alternative_row(other: Alternative, best: Evaluation) -> dict[str, Any]:
    """An alternative as data, against the chosen plan; `asks` are the overrides that find it."""
    row: dict[str, Any] = {"family": other.family, "plan": None, "asks": dict(other.asks)}
    row |= {"excluded": [*map(str, other.excluded)]} if other.excluded else {}
    if other.best is not None:
        row |= plan_row(other.best.evaluation, best)
    elif other.shortfall_bytes is not None:
        lacks = f": the closest lacks {sized(other.shortfall_bytes)} a device"
        row |= {"shortfall_bytes": other.shortfall_bytes}
        row |= {"why": f"no plan was found to fit{lacks if other.shortfall_bytes else ''}"}
    else:
        least = f"at least {seconds(other.bound_s)}; " if other.bound_s else ""
        why = f"{least}not searched to the end in the time given"
        row |= {"bound_s": other.bound_s, "why": why}
    if (smaller := other.smaller) is not None:
        plan, margin = plan_row(smaller.best.evaluation, best), smaller.memory_margin
        row["smaller_margin"] = {"memory_margin": margin, **plan}
        row["why"] += f"; {slower(plan['slower'])} with memory_margin={margin:g}: {plan['plan']}"
    return row


def plan_row(other: Evaluation, best: Evaluation) -> dict[str, Any]:
    """Another plan as data, against the chosen one; `components_s` are its seconds less ours."""
    prediction = other.prediction
    step_s, chosen_s = prediction.step_time_s, best.prediction.step_time_s
    more = step_s / chosen_s - 1
    chosen, parts = (report.busiest(report.device_groups(e)) for e in (best, other))
    ours, theirs = chosen.as_dict(), parts.as_dict()
    return {
        "plan": describe(other.plan),
        "step_time_s": step_s,
        "slower": more,
        "tie": abs(more) <= TIE,  # prices can't tell the two apart
        "step_interval_s": list(prediction.step_interval_s),
        "peak_memory_bytes": prediction.fullest_bytes,
        "memory_interval_bytes": list(prediction.memory_interval_bytes),
        "components_s": {name: theirs[name] - ours[name] for name in ours},
        "why": report.why_slower(chosen, parts),
    }


# --- other ways to split --------------------------------------------------------------------------

# Other ways to split an operator: their seconds, with the rest of its block at its best and the
# states at the block's boundary as they are, and their collectives.
#
# Each way is a program of the block (`planner/intra_op/program.py`) in which the operator has no
# other choice, priced for the plan's mesh.


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A strategy of an operator, the `states` of its operands and results, the seconds of its block
    on a rank in a step (None where it can't run so) and re-shards: collective -> (calls, bytes)."""

    strategy: str
    states: str
    seconds: float | None
    collectives: Mapping[str, tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """An operator of a stage, its place (`operator`, of a `block`, the first of `blocks` alike),
    the way chosen and the others, fastest first."""

    operator: str
    block: str
    blocks: int
    stage: int
    tp: int
    chosen: Way
    others: tuple[Way, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def instead(evaluation: Evaluation, problem: Problem, pattern: str) -> list[Explained]:
    """The operators of a priced plan that a pattern names (as `Plan.shardings` does: modules,
    operators by their key, parameters by their readers), the same operator of equal blocks once.
    Raises `PlanError` where nothing is named."""
    coster = StageCoster(replace(problem, precision=evaluation.plan.precision))
    explained: dict[Any, Explained] = {}
    named = False
    for k, priced in enumerate(evaluation.priced):
        tp = priced.stage.tp
        for entered in priced.blocks:
            block, choices = entered.block, entered.assignment.choices
            for place, op in _named(problem, block, pattern):
                named = True
                if tp == 1:
                    continue
                key = (k, block.class_id, choices, tuple(entered.inputs.values()), place)
                if key in explained:
                    explained[key] = replace(explained[key], blocks=explained[key].blocks + 1)
                    continue
                ways = _Ways(coster, priced.pricer, entered)
                strategy = entered.assignment.strategies[op.name]
                explained[key] = Explained(
                    operator=op.key,
                    block=block.name,
                    blocks=1,
                    stage=k,
                    tp=tp,
                    chosen=ways.of(op, strategy),
                    others=ways.others(op, strategy),
                )
    if not named:
        raise PlanError(
            " names no module with a matrix product, no operator and no parameter",
            place=f"explain: {pattern!r}",
            legal="a glob over them, e.g. 'layers.0.mlp.*', '**:softmax'",
        )
    return list(explained.values())


def _named(problem: Problem, block: Block, pattern: str) -> Iterator[tuple[int, Op]]:
    """The operators of a block that a pattern names, with their places."""
    regex, exact = glob(pattern), ":" in pattern
    parameters = problem.graph.parameters
    for place, op in enumerate(block.ops):
        names = [op.key] if exact else [parameters[v] for v in op.operands if v in parameters]
        if not exact and traits_of(op).main:
            names.append(op.module)
        if any(map(regex.match, names)):
            yield place, op


@dataclass(frozen=True, slots=True)
class _Ways:
    """Prices of a block's ways, in a setting."""

    coster: StageCoster
    pricer: Pricer
    entered: Entered

    def others(self, op: Op, chosen: Strategy) -> tuple[Way, ...]:
        options = self.coster.layouts(self.entered.block, self.pricer.setting.mesh.tp).options(op)
        ways = [self.of(op, option) for option in options if option.name != chosen.name]
        return tuple(sorted(ways, key=lambda way: (way.seconds is None, way.seconds or 0.0)))

    def of(self, op: Op, strategy: Strategy) -> Way:
        """The best block with this strategy."""
        ends = strategy.operands, strategy.results
        states = " -> ".join(", ".join(map(str, end)) for end in ends)
        setting, entered = self.pricer.step, self.entered
        block, chosen = entered.block, entered.assignment
        program = BlockProgram(
            self.pricer,
            self.coster.layouts(block, setting.mesh.tp),
            inputs={value: [state] for value, state in entered.inputs.items()},
            outputs={value: [chosen.states[value]] for value in block.outputs},
            allowed=lambda name, state: (
                not isinstance(state, Strategy) or name != op.name or state.name == strategy.name
            ),
        )
        table = program.solve(self.pricer)
        if table is None or () not in table.choices:
            return Way(strategy=strategy.name, states=states, seconds=None, collectives={})
        assignment = program.assignment(table, ())
        return Way(
            strategy=strategy.name,
            states=states,
            seconds=float(table.costs[()]) * setting.batch.microbatches,
            collectives=self._collectives(assignment),
        )

    def _collectives(self, assignment: Assignment) -> dict[str, tuple[int, float]]:
        """Re-shards of a step on a rank."""
        calls, sizes = Counter[str](), Counter[str]()
        entered, tp = self.entered, self.pricer.setting.mesh.tp
        for step in self.coster.steps(entered.block, assignment, entered.inputs, tp):
            if not isinstance(step, Move) or step.known:
                continue
            times = 1 if step.once else self.pricer.step.batch.microbatches
            for kind in transition(step.source, step.target) or ():
                if kind:
                    calls[kind] += times
                    sizes[kind] += round(times * self.pricer.nbytes(step.value))
        return {kind: (calls[kind], sizes[kind]) for kind in sorted(calls)}
