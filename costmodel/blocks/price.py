"""What a block costs on one rank, recomputed from an assignment alone, as the executor will run it.

The planner's program (`intra_op.py`) and this are two roads to the same number: the cost of a plan
is the sum of its operators and re-shards. What a block costs per micro-batch does not depend on the
data axis (`price_pass`), what its parameters cost once per step does (`price_block`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.costmodel.blocks.memory import LOSSES, BlockMemory, block_memory
from meshwright.costmodel.blocks.policies import PARTIAL
from meshwright.costmodel.blocks.selective import repeated_ops
from meshwright.costmodel.graph import Block, Op
from meshwright.costmodel.operators.cost import Cost, Setting, total
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, default_state
from meshwright.costmodel.sharding.strategies import RP, Placement, R, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """What a recompute policy runs again, on the device and for the host, and no longer keeps."""

    seconds: float
    host_s: float
    freed_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPrice:
    """The part of a `BlockPrice` that is paid per micro-batch."""

    cost: Cost
    saved_bytes: float
    input_bytes: float
    transient_bytes: float
    repeats: Mapping[str, Repeats]


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
    pricer: Pricer,
    layouts: BlockLayouts,
    assignment: Assignment,
    inputs: Mapping[str, Placement],
    *,
    passes: PassPrice | None = None,
) -> BlockPrice:
    """Cost and memory of a block from its assignment alone, as the executor will run it; `passes`
    is its price per micro-batch, where it is known."""
    block, graph, states = layouts.block, layouts.graph, assignment.states
    passes = passes or price_pass(pricer, layouts, assignment, inputs)
    trained = [value for value in block.parameters if graph.values[value].requires_grad]
    numels = [pricer.numel(value, states[value]) for value in trained]
    shards = [pricer.parameters.shard_count(value, states[value]) for value in trained]
    return BlockPrice(
        cost=total([passes.cost, *(pricer.parameter_cost(v, states[v]) for v in trained)]),
        parameters=sum(numels),
        shard_parameters=sum(numel / count for numel, count in zip(numels, shards, strict=True)),
        frozen_bytes=sum(
            pricer.nbytes(value, states[value])
            for value in block.parameters
            if not graph.values[value].requires_grad
        ),
        saved_bytes=passes.saved_bytes,
        input_bytes=passes.input_bytes,
        transient_bytes=passes.transient_bytes,
        repeats=passes.repeats,
    )


def price_pass(
    pricer: Pricer,
    layouts: BlockLayouts,
    assignment: Assignment,
    inputs: Mapping[str, Placement],
    *,
    repeated: Mapping[str, frozenset[str]] | None = None,
) -> PassPrice:
    """What a block costs per micro-batch, with the re-shards of its parameters. `repeated` is its
    `repeated_by_policy`, where it is known."""
    block, chosen = layouts.block, assignment.strategies
    memory = block_memory(pricer, layouts, assignment, inputs)
    found = [*_activations(pricer, layouts, assignment, inputs)]
    for value in block.parameters:
        targets = layouts.targets(value, chosen)
        alone = all(t == RP for t in targets) or len(layouts.readers[value]) == 1
        price = pricer.reshard_parameter if alone else pricer.reshard
        found += [_legal(price(value, assignment.states[value], t), value) for t in targets]
    return PassPrice(
        cost=total(found),
        saved_bytes=memory.saved_bytes,
        input_bytes=sum(pricer.nbytes(v, inputs.get(v, R)) for v in block.inputs),
        transient_bytes=max(
            (_gradient_bytes(pricer, op, chosen[op.name]) for op in block.ops), default=0.0
        ),
        repeats={
            policy: _repeats(names, pricer, block, assignment, memory)
            for policy, names in (repeated or repeated_by_policy(pricer, block)).items()
        },
    )


def pass_depends_on(setting: Setting, block: Block) -> tuple[float, ...]:
    """What of a setting the price of a pass depends on, on one cluster and target: not on the data
    axis, except where statistics are summed over it or a loss is divided by a count over it."""
    names = {op.short for op in block.ops}
    found = (setting.tp, setting.cp, setting.ep, setting.rows, setting.spread)
    if "batch_norm" in names:
        return (*found, setting.dp, setting.num_microbatches > 1)
    if not names.isdisjoint(LOSSES):
        return (*found, setting.dp > 1, setting.num_microbatches > 1)
    return found


def _activations(
    pricer: Pricer, layouts: BlockLayouts, assignment: Assignment, inputs: Mapping[str, Placement]
) -> Iterator[Cost]:
    """Operators, and re-shards of what they make and read."""
    block, chosen = layouts.block, assignment.strategies
    for op in block.ops:
        yield pricer.op_cost(op, chosen[op.name])
        for value, placement in zip(op.results, chosen[op.name].results, strict=True):
            state, leaves = assignment.states[value], value in block.outputs
            targets = layouts.targets(value, chosen)
            if len(targets) == 1 and not leaves:
                yield from _moved(pricer, value, placement, targets[0], via=state)
                continue
            yield _legal(pricer.reshard(value, placement, state), value)
            yield from _read(pricer, value, state, targets, hub=leaves)
    for value in block.inputs:
        targets = layouts.targets(value, chosen)
        yield from _read(pricer, value, inputs.get(value, R), targets, hub=True)


def repeated_by_policy(pricer: Pricer, block: Block) -> dict[str, frozenset[str]]:
    """Operators of a block that each policy runs again, on the pricer's device and target."""
    return {
        policy: repeated_ops(
            policy, block, pricer.graph, pricer.table, device=pricer.setting.cluster.device.kind,
            counter_dropout=pricer.setting.target.counter_dropout,
        )
        for policy in PARTIAL
    }  # fmt: skip


def _repeats(
    again: frozenset[str], pricer: Pricer, block: Block, assignment: Assignment, memory: BlockMemory
) -> Repeats:
    if not again:
        return Repeats(seconds=0.0, host_s=0.0, freed_bytes=0.0)
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
) -> Iterator[Cost]:
    if via in (source, target):
        yield _legal(pricer.reshard(value, source, target), value)
        return
    yield _legal(pricer.reshard(value, source, via), value)
    yield _legal(pricer.reshard(value, via, target), value)


def _read(
    pricer: Pricer, value: str, state: Placement, targets: Sequence[Placement], *, hub: bool
) -> Iterator[Cost]:
    """Re-shards from a value's state to its readers; a boundary value goes through one more."""
    if hub:
        inner = default_state(state, targets, False)
        yield _legal(pricer.reshard(value, state, inner), value)
        state = inner
    for target in targets:
        yield _legal(pricer.reshard(value, state, target), value)
