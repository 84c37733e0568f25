"""What a block costs on one rank, recomputed from an assignment alone, as the executor will run it.

The planner's program (`intra_op.py`) and this are two roads to the same number: the cost of a plan
is the sum of its operators and re-shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from costmodel.cost import Cost
from costmodel.graph import Block, Op
from costmodel.pricing import Pricer
from costmodel.strategies import RP, Placement, R, Strategy
from planner.layouts import Assignment, BlockLayouts, default_state
from planner.saved import BlockMemory, block_memory
from planner.selective import POLICIES, repeated_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """What a recompute policy runs again, on the device and for the host, and no longer keeps."""

    seconds: float
    host_s: float
    freed_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """What a block costs on one rank under an assignment, recomputed from the assignment alone.

    `cost` in seconds (see `Cost`); `parameters` local element count of trained parameters, of which
    `shard_parameters` where ZeRO divides them; `frozen_bytes` of the rest; `saved_bytes` kept for
    the backward per micro-batch without its inputs; `input_bytes` its inputs; `transient_bytes` the
    most that one operator's backward holds besides; `repeats` by recompute policy.
    """

    cost: Cost
    parameters: float
    shard_parameters: float
    frozen_bytes: float
    saved_bytes: float
    input_bytes: float
    transient_bytes: float = 0.0
    repeats: Mapping[str, Repeats] = field(default_factory=dict)


def price_block(
    pricer: Pricer, layouts: BlockLayouts, assignment: Assignment,
    inputs: Mapping[str, Placement], *, memory: BlockMemory | None = None,
    policies: Sequence[str] = POLICIES,
) -> BlockPrice:  # fmt: skip
    """Cost and memory of a block from its assignment alone, as the executor will run it; what
    repeats under which recompute `policies`. `memory` is the block's, where it is known."""
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
    memory = memory or block_memory(pricer, layouts, assignment, inputs)
    parameters = shard = frozen = 0.0
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
            shard += pricer.numel(value, state) / pricer.replicas(value, state).size
        else:
            frozen += pricer.nbytes(value, state)
    return BlockPrice(
        cost=cost,
        parameters=parameters,
        shard_parameters=shard,
        frozen_bytes=frozen,
        saved_bytes=memory.saved_bytes,
        input_bytes=sum(pricer.nbytes(v, inputs.get(v, R)) for v in block.inputs),
        transient_bytes=max(
            (_gradient_bytes(pricer, op, assignment.strategies[op.name]) for op in block.ops),
            default=0.0,
        ),
        repeats={name: _repeats(name, pricer, block, assignment, memory) for name in policies},
    )


def _repeats(
    policy: str, pricer: Pricer, block: Block, assignment: Assignment, memory: BlockMemory
) -> Repeats:
    again = repeated_ops(
        policy, block, pricer.graph, pricer.table, device=pricer.setting.cluster.device.kind,
        counter_dropout=pricer.setting.target.counter_dropout,
    )  # fmt: skip
    costs = [
        pricer.op_cost(op, assignment.strategies[op.name]) for op in block.ops if op.name in again
    ]
    return Repeats(
        seconds=sum(cost.forward_s for cost in costs),
        host_s=sum(cost.forward_host_s for cost in costs),
        freed_bytes=memory.saved_bytes - memory.saved_bytes_repeating(again),
    )


def _gradient_bytes(pricer: Pricer, op: Op, strategy: Strategy) -> float:
    """Gradients that one operator's backward reads and writes, of activations."""
    graph = pricer.graph
    placed = [
        *zip(op.results, strategy.results, strict=True),
        *zip(op.operands, strategy.operands, strict=True),
    ]
    return sum(
        pricer.nbytes(value, placement)
        for value, placement in placed
        if graph.values[value].requires_grad and value not in graph.parameters
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
