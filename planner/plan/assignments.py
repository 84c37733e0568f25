"""Assignments of a plan: the strategies and states of each block, completed from its shardings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Block, Graph
from meshwright.planner.plan.flow import crossings, pipelines, sent_in_parts
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.ranges import PlanError
from meshwright.planner.plan.shardings import check_matched, resolve_block

Known = dict[Any, Any]  # what `check_plan` remembers of one graph, between plans


def plan_assignments(
    plan: Plan, graph: Graph, factors: sharding.FactorTable, known: Known
) -> list[dict[str, sharding.Assignment]]:
    """For each stage the assignments of its blocks, by name; `known` as for `check_plan`. Raises
    `PlanError` for a sharding that matches nothing, or that no assignment has."""
    in_parts = sent_in_parts(plan, graph)
    found: dict[int, dict[str, sharding.Assignment]] = {}
    for stages in pipelines(plan):
        arriving: dict[str, sharding.Placement] = {}
        for k in stages:
            found[k] = _stage_assignments(plan, k, graph, factors, known, arriving, in_parts)
            arriving |= {
                value: assignment.states[value]
                for assignment in found[k].values()
                for value in in_parts & assignment.states.keys()
            }
    return [found[k] for k in range(len(plan.stages))]


def arriving_states(
    plan: Plan, graph: Graph, assignments: Sequence[Mapping[str, sharding.Assignment]]
) -> list[dict[str, sharding.Placement]]:
    """For each stage the states of the activations that other stages send in parts."""
    in_parts = sent_in_parts(plan, graph)
    arriving: list[dict[str, sharding.Placement]] = [{} for _ in plan.stages]
    for (source, target), values in crossings(plan, graph).items():
        states = {v: s for a in assignments[source].values() for v, s in a.states.items()}
        arriving[target] |= {v: states[v] for v in values if v in in_parts and states[v].sharded}
    return arriving


def _stage_assignments(
    plan: Plan,
    k: int,
    graph: Graph,
    factors: sharding.FactorTable,
    known: Known,
    arriving: Mapping[str, sharding.Placement],
    in_parts: Collection[str],
) -> dict[str, sharding.Assignment]:
    """Assignments of stage `k`, at which activations are `arriving` in these states; what leaves is
    whole, or as an entry splits it where stages send it `in_parts`."""
    stage, place = plan.stages[k], f"plan: stage {k}"
    names = set(stage.blocks)
    blocks = [block for block in graph.blocks if block.name in names]
    read_elsewhere = {n for b in graph.blocks if b.name not in names for n in b.inputs}
    decisions = frozenset(stage.shardings.items())
    assignments: dict[str, sharding.Assignment] = {}
    matched: set[str] = set()
    states = dict(arriving)
    for block in blocks:
        inputs = {name: states[name] for name in block.inputs if name in states}
        sent = read_elsewhere.intersection(block.outputs)
        whole, parts = frozenset(sent.difference(in_parts)), frozenset(sent.intersection(in_parts))
        key = (block.name, stage.tp, decisions, tuple(inputs.items()), whole, parts)
        if key not in known:
            entries, patterns = resolve_block(graph, block, stage.shardings, place)
            entries = _without_sums(block, entries, parts)
            keyed = (*(op.name for op in block.ops), *block.parameters)
            by_class = (  # equal for blocks of one class
                block.class_id,
                stage.tp,
                tuple((i, entries[name]) for i, name in enumerate(keyed) if name in entries),
                tuple(inputs.get(name) for name in block.inputs),
                tuple(name in whole for name in block.outputs),
            )
            if by_class not in known:
                layouts = sharding.BlockLayouts(graph, factors, block, stage.tp)
                try:
                    assignment = layouts.complete(entries, inputs, whole)
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


def _without_sums(
    block: Block, entries: Mapping[str, sharding.Entry], sent: Collection[str]
) -> dict[str, sharding.Entry]:
    """The entries, those apart that leave partial what is sent: ranks send no terms of a sum."""
    senders = {op.name for op in block.ops if op.results[0] in sent}
    return {
        name: replace(entry, state=None)
        if name in senders and entry.state and not entry.state.sharded
        else entry
        for name, entry in entries.items()
    }


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
