"""What a block costs on one rank, recomputed from an assignment alone, as the executor will run it.

The planner's program (`intra_op.py`) and this are two roads to the same number: the cost of a plan
is the sum of its operators and re-shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodel.pricing import Cost, Pricer
from costmodel.strategies import RP, P, Placement, R
from planner.layouts import Assignment, BlockLayouts, default_state


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """What a block costs on one rank under an assignment, recomputed from the assignment alone.

    `cost` in seconds (see `Cost`); `parameters` local element count of trained parameters,
    `frozen_bytes` of the rest; `saved_bytes` kept for the backward per micro-batch without its
    inputs; `input_bytes` its inputs.
    """

    cost: Cost
    parameters: float
    frozen_bytes: float
    saved_bytes: float
    input_bytes: float


def price_block(
    pricer: Pricer, layouts: BlockLayouts, assignment: Assignment, inputs: Mapping[str, Placement]
) -> BlockPrice:
    """Cost and memory of a block from its assignment alone, as the executor will run it."""
    block, graph = layouts.block, layouts.graph
    cost = Cost()
    for op in block.ops:
        cost = cost + pricer.op_cost(op, assignment.strategies[op.name])
        for value, placement in zip(
            op.results, assignment.strategies[op.name].results, strict=True
        ):
            state = assignment.states[value]
            targets = layouts.targets(value, assignment.strategies)
            if len(targets) == 1 and value not in block.outputs:
                cost = cost + _moved(pricer, value, placement, targets[0], via=state)
                continue
            cost = cost + _legal(pricer.reshard(value, placement, state), value)
            leaves = value in block.outputs
            cost = cost + _read(pricer, value, state, targets, hub=leaves)
    for value in block.inputs:
        targets = layouts.targets(value, assignment.strategies)
        cost = cost + _read(pricer, value, inputs.get(value, R), targets, hub=True)
    parameters = frozen = 0.0
    for value in block.parameters:
        state = assignment.states[value]
        targets = layouts.targets(value, assignment.strategies)
        alone = all(t == RP for t in targets) or len(layouts.readers[value]) == 1
        price = pricer.reshard_parameter if alone else pricer.reshard
        cost = cost + pricer.parameter_cost(value, state)
        for target in targets:
            cost = cost + _legal(price(value, state, target), value)
        if graph.values[value].requires_grad:
            parameters += pricer.numel(value, state)
        else:
            frozen += pricer.nbytes(value, state)
    return BlockPrice(
        cost=cost,
        parameters=parameters,
        frozen_bytes=frozen,
        saved_bytes=_saved_bytes(pricer, layouts, assignment),
        input_bytes=sum(pricer.nbytes(v, inputs.get(v, R)) for v in block.inputs),
    )


def _legal(cost: Cost | None, value: str) -> Cost:
    if cost is None:
        raise ValueError(f"value {value}: no re-shard exists between the states the plan gives it")
    return cost


def _moved(
    pricer: Pricer, value: str, source: Placement, target: Placement, via: Placement
) -> Cost:
    if via in (source, target):
        return _legal(pricer.reshard(value, source, target), value)
    return _legal(pricer.reshard(value, source, via), value) + _legal(
        pricer.reshard(value, via, target), value
    )


def _read(
    pricer: Pricer, value: str, state: Placement, targets: Sequence[Placement], *, hub: bool
) -> Cost:
    """Re-shards from a value's state to its readers; a boundary value goes through one more."""
    cost = Cost()
    if hub:
        inner = default_state(state, targets, False)
        cost, state = _legal(pricer.reshard(value, state, inner), value), inner
    for target in targets:
        cost = cost + _legal(pricer.reshard(value, state, target), value)
    return cost


def _saved_bytes(pricer: Pricer, layouts: BlockLayouts, assignment: Assignment) -> float:
    """What autograd keeps: per saved tensor once, views counted with what they view, block inputs
    and parameters left out (they are held anyway)."""
    graph, block, table = layouts.graph, layouts.block, layouts.table
    root: dict[str, str] = {}
    kept: dict[tuple[str, Placement], float] = {}
    for op in block.ops:
        made = table.ops[op.name]
        chosen = assignment.strategies[op.name]
        if made.view and op.operands and op.short not in ("cat", "stack"):
            for value in op.results:
                root[value] = root.get(op.operands[0], op.operands[0])
        if not any(graph.values[r].requires_grad for r in op.results):
            continue
        for i in made.saves:
            value = op.operands[i] if i >= 0 else op.results[-1 - i]
            placement = chosen.operands[i] if i >= 0 else chosen.results[-1 - i]
            base = root.get(value, value)
            if base in block.inputs or value in graph.parameters or layouts.fixed(value):
                continue
            kind = placement if placement.sharded else (P if placement == P else R)
            key = (base, Placement("S") if kind.sharded else kind)
            kept[key] = pricer.nbytes(value, placement)
    return sum(kept.values())
