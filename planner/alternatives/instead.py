"""Other ways to split an operator: their seconds, with the rest of its block at its best and the
states at the block's boundary as they are, and their collectives.

Each way is a program of the block (`planner/intra_op/program.py`) in which the operator has no
other choice, priced for the plan's mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.costmodel.graph import Block, Op
from meshwright.costmodel.operators import Pricer, Problem
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import Assignment, Move, Strategy, transition
from meshwright.planner.intra_op import BlockProgram
from meshwright.planner.plan import PlanError, glob
from meshwright.planner.pricing import Entered, Evaluation, StageCoster


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
