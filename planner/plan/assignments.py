"""Assignments of a plan: the strategies and states of each block, completed from its shardings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Graph
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.ranges import PlanError
from meshwright.planner.plan.shardings import check_matched, resolve_block

Known = dict[Any, Any]  # what `check_plan` remembers of one graph, between plans


def stage_assignments(
    plan: Plan, k: int, graph: Graph, factors: sharding.FactorTable, known: Known
) -> dict[str, sharding.Assignment]:
    """The assignment of each block of stage `k`, by name; `known` as for `check_plan`.

    Raises `PlanError` for a sharding that matches nothing, or that no assignment has.
    """
    stage, place = plan.stages[k], f"plan: stage {k}"
    names = set(stage.blocks)
    blocks = [block for block in graph.blocks if block.name in names]
    read_elsewhere = {n for b in graph.blocks if b.name not in names for n in b.inputs}
    decisions = frozenset(stage.shardings.items())
    assignments: dict[str, sharding.Assignment] = {}
    matched: set[str] = set()
    states: dict[str, sharding.Placement] = {}
    for block in blocks:
        inputs = {name: states[name] for name in block.inputs if name in states}
        leaving = frozenset(read_elsewhere.intersection(block.outputs))
        key = (block.name, stage.tp, decisions, tuple(inputs.items()), leaving)
        if key not in known:
            entries, patterns = resolve_block(graph, block, stage.shardings, place)
            keyed = (*(op.name for op in block.ops), *block.parameters)
            by_class = (  # equal for blocks of one class
                block.class_id,
                stage.tp,
                tuple((i, entries[name]) for i, name in enumerate(keyed) if name in entries),
                tuple(inputs.get(name) for name in block.inputs),
                tuple(name in leaving for name in block.outputs),
            )
            if by_class not in known:
                layouts = sharding.BlockLayouts(graph, factors, block, stage.tp)
                try:
                    assignment = layouts.complete(entries, inputs, leaving)
                except ValueError as error:
                    raise PlanError.of(error, place) from None
                _check_states(layouts, assignment, inputs, place)
                known[by_class] = assignment, block
            assignment, example = known[by_class]
            known[key] = sharding.translate(assignment, example, block), patterns
        assignments[block.name], patterns = known[key]
        matched |= patterns
        states |= {name: assignments[block.name].states[name] for name in block.outputs}
    check_matched(graph, blocks, stage.shardings, matched, place)
    return assignments


def _check_states(
    layouts: sharding.BlockLayouts,
    assignment: sharding.Assignment,
    inputs: Mapping[str, sharding.Placement],
    place: str,
) -> None:
    """Raise `PlanError` unless each state is a layout that its tensor can have, with a transition
    from the operator that makes it and to those that read it."""
    graph, arriving = layouts.graph, {**inputs}
    keys: dict[str, str] = {}
    for op in layouts.block.ops:
        placements = assignment.strategies[op.name].results
        arriving |= dict(zip(op.results, placements, strict=True))
        keys |= dict.fromkeys(op.results, op.key)
    for value, state in {**inputs, **assignment.states}.items():
        name = graph.parameters.get(value) or keys.get(value, value)
        shape, parameter = graph.values[value].shape, value in graph.parameters
        shards = [sharding.Placement("S", d) for d in range(len(shape))]
        possible = [sharding.R, *(s for s in shards if _possible(layouts, value, s))]
        legal = ", ".join(map(str, possible))
        if not _possible(layouts, value, state) or (parameter and state.kind not in "RS"):
            raise PlanError(
                f"state {state} of {name}, shape {shape}: not possible with tp={layouts.degree}",
                place=place,
                legal=legal,
            )
        targets = layouts.targets(value, assignment.strategies)
        crosses = value in inputs or value in layouts.block.outputs
        inside = sharding.default_state(state, targets, False) if crosses else state
        transitions = [(state, inside), *((inside, target) for target in targets)]
        if value in arriving:
            transitions.append((arriving[value], state))
        for source, target in transitions:
            if sharding.transition(source, target) is None:
                raise PlanError(
                    f"state {state} of {name}: {source} can't become {target}",
                    place=place,
                    legal=f"{legal}, or leave it to follow",
                )


def _possible(layouts: sharding.BlockLayouts, value: str, state: sharding.Placement) -> bool:
    """Whether the value can have the state. Any split of the batch dim may be possible: its rows
    depend on the micro-batch."""
    factors = layouts.table
    dims = factors.dims[value]
    if state.sharded and state.dim < len(dims) and factors.batch in dims[state.dim]:
        return True
    return sharding.can_hold(layouts.graph, factors, value, state, layouts.degree)
