"""What a block keeps for its backward on one rank: its operators run in mind, as they will be run.

The walk mirrors the executor's emitter: a value waits in one state on the tensor axis, is moved
once per other state that a reader needs, and what was moved is shared. A move makes a new tensor,
except where only the gradient's state changes. Kept allocations are counted once each:

    saved bytes   made in the block and kept, except what leaves it
    inputs        held once per model, by whoever reads them (`BlockPrice.input_bytes`)
    raw           made from the batch alone, held once per stage
    stored        parameters, buffers and constants, held anyway
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from meshwright.costmodel.graph import Op, argument
from meshwright.costmodel.memory.kept import Call, keep
from meshwright.costmodel.memory.storage import (
    Held,
    Local,
    Origin,
    Storage,
    compact,
    fresh,
    permuted,
    reshaped,
)
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.rules.language import divided
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, default_state
from meshwright.costmodel.sharding.strategies import REPLICATE, Placement, R, Strategy, largest_part

ALIASES = frozenset((("R", "Rp"), ("Rp", "R")))  # moves that change the gradient's state alone
LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """Allocations that a block's backward needs, and where the values that leave it lie.

    `outside` are the allocations of values that enter or leave. `makers` says which operator made
    an allocation, `reads` which ones an operator's operands lie in.
    """

    kept: frozenset[Storage]
    leaving: Mapping[str, Held]
    outside: frozenset[Storage]
    makers: Mapping[Storage, str]
    reads: Mapping[str, tuple[Storage, ...]]

    @property
    def saved_bytes(self) -> float:
        """Bytes made in the block and kept, except what leaves it."""
        return self._nbytes(self.kept)

    def saved_bytes_repeating(self, operators: Collection[str]) -> float:
        """The same if these operators run again in the backward: what they make is not kept, what
        they read is."""
        read = {storage for name in operators for storage in self.reads[name]}
        return self._nbytes({s for s in self.kept | read if self.makers.get(s) not in operators})

    def _nbytes(self, storages: Collection[Storage]) -> float:
        return math.fsum(s.nbytes for s in storages if s not in self.outside)


def block_memory(
    pricer: Pricer,
    layouts: BlockLayouts,
    assignment: Assignment,
    inputs: Mapping[str, Placement],
    given: Mapping[str, Held] | None = None,
) -> BlockMemory:
    """Run one block in mind. `inputs` are the states of its input activations; `given` says where
    values from outside lie, which are contiguous tensors of their own where it doesn't."""
    return _Walk(pricer, layouts, assignment).run(inputs, given or {})


def local(pricer: Pricer, value: str, placement: Placement = R) -> Local:
    """A value's shape on one rank at the setting's rows and mesh."""
    setting, table, meta = pricer.setting, pricer.table, pricer.graph.values[value]
    shape: list[float] = list(meta.shape)
    for d, atoms in enumerate(table.dims[value]):
        if table.batch is not None and table.batch in atoms:
            shape[d] *= setting.rows / pricer.graph.batch_size
        if pricer.sequence is not None and pricer.sequence in atoms:
            shape[d] /= setting.cp
    if shape:
        shape[0] *= pricer.crowding(value)
    if placement.sharded:
        size = meta.shape[placement.dim]
        shape[placement.dim] *= largest_part(size, setting.tp) / size
    return Local(shape=tuple(shape), dtype=meta.dtype, grad=meta.requires_grad)


def _part(whole: Held, target: Placement, count: int) -> Held:
    """One of `count` parts of a tensor; of a dim that has parts itself, through their stack."""
    d, split, shape = target.dim, target.split, whole.shape
    if split == 1:
        return compact(
            whole.seen_as((*shape[:d], shape[d] / count, *shape[d + 1 :]), whole.strides)
        )
    inner = shape[d] / (split * count)
    parts = reshaped(whole, (*shape[:d], split, count, inner, *shape[d + 1 :]))
    stacked = permuted(parts, [d + 1, *(k for k in range(len(parts.shape)) if k != d + 1)])
    joined = reshaped(stacked, (count, *shape[:d], split * inner, *shape[d + 1 :]))
    return compact(joined.seen_as(joined.shape[1:], joined.strides[1:]))


def _joined(stacked: Local, source: Placement) -> Held:
    """The parts of a dim, received one after the other, as one tensor."""
    d, split = source.dim, source.split
    count, *shape = stacked.shape
    inner = shape[d] / split
    parts = reshaped(fresh(stacked), (count, *shape[:d], split, inner, *shape[d + 1 :]))
    order = [*range(1, d + 2), 0, *range(d + 2, len(parts.shape))]
    return reshaped(permuted(parts, order), (*shape[:d], shape[d] * count, *shape[d + 1 :]))


class _Walk:
    """One block on one rank. `states` are where values wait; `held` their memory, per state."""

    def __init__(self, pricer: Pricer, layouts: BlockLayouts, assignment: Assignment) -> None:
        self.pricer, self.layouts, self.assignment = pricer, layouts, assignment
        self.graph, self.block = layouts.graph, layouts.block
        self.states: dict[str, Placement] = {}
        self.held: dict[tuple[str, Placement], Held] = {}
        self.entered: set[Storage] = set()
        self.kept: set[Storage] = set()
        self.makers: dict[Storage, str] = {}
        self.reads: dict[str, tuple[Storage, ...]] = {}

    def run(self, inputs: Mapping[str, Placement], given: Mapping[str, Held]) -> BlockMemory:
        block, chosen = self.block, self.assignment.strategies
        for value in block.inputs:
            self._enter(value, inputs.get(value, R), "input", given)
            self._settle(value)
        for value in block.derived:
            self._enter(value, R, "raw", given)
        for value in block.parameters:
            self._enter(value, self.assignment.states[value], "stored", given)
        for value in block.buffers:
            targets = self.layouts.targets(value, chosen)
            alone = len(targets) == 1 and targets[0].sharded
            self._enter(value, targets[0] if alone else R, "stored", given)
        for op in block.ops:
            self._op(op)
        leaving = {v: self._value(v, self.assignment.states.get(v, R)) for v in block.outputs}
        outside = self.entered.union(x.storage for x in leaving.values())
        return BlockMemory(
            kept=frozenset(self._written()),
            leaving=leaving,
            outside=frozenset(outside),
            makers=self.makers,
            reads=self.reads,
        )

    def _written(self) -> set[Storage]:
        """What is kept, where values inside a fused kernel are not: its operands are instead."""
        internal = self.pricer.fusion.internal
        inside = {held.storage for (v, _), held in self.held.items() if v in internal}
        if not inside:
            return self.kept
        found: set[Storage] = set()
        waiting = [*self.kept]
        while waiting:
            storage = waiting.pop()
            if storage in inside and storage in self.makers:
                waiting += self.reads[self.makers[storage]]
            else:
                found.add(storage)
        return found

    # --- values ---

    def _enter(
        self, value: str, state: Placement, origin: Origin, given: Mapping[str, Held]
    ) -> None:
        self.states[value] = state
        made = given.get(value) or fresh(local(self.pricer, value, state), origin=origin)
        self.held[value, state] = made
        self.entered.add(made.storage)

    def _settle(self, value: str) -> None:
        """Moved to the state in which its readers share it."""
        if self.layouts.fixed(value):
            return
        targets = self.layouts.targets(value, self.assignment.strategies)
        hub = default_state(self.states[value], targets, False)
        self._value(value, hub)
        self.states[value] = hub

    def _value(self, value: str, wanted: Placement) -> Held:
        if (value, wanted) not in self.held:
            source = self.states[value]
            self.held[value, wanted] = self._moved(value, source, wanted)
        return self.held[value, wanted]

    def _moved(self, value: str, source: Placement, target: Placement) -> Held:
        """What the executor's re-shard makes: a part is a window on the whole where that is
        contiguous; all else that changes values is new."""
        have, tp = self.held[value, source], self.pricer.setting.tp
        if (source.kind, target.kind) in ALIASES or source == target or tp == 1:
            return have
        part = local(self.pricer, value, target)
        if not source.sharded and not (source.kind == "R" and target.sharded):
            return fresh(part)
        shape = self.graph.values[value].shape
        if any(p.sharded and shape[p.dim] % tp for p in (source, target)):
            return fresh(part)  # cut out of what was filled up to equal parts
        if not source.sharded:
            return _part(have, target, tp)
        mine = local(self.pricer, value, source)
        if target.sharded and source.dim != target.dim:
            pieces = list(mine.shape)
            pieces[target.dim] /= tp
            return _joined(replace(mine, shape=(tp, *pieces)), source)
        whole = _joined(replace(mine, shape=(tp, *mine.shape)), source)
        return _part(whole, target, tp) if target.sharded else whole

    # --- operators ---

    def _op(self, op: Op) -> None:
        chosen = self.assignment.strategies[op.name]
        operands = [self._value(v, p) for v, p in zip(op.operands, chosen.operands, strict=True)]
        results = zip(op.results, chosen.results, strict=True)
        call = Call(
            op=self._counted_here(op, chosen),
            operands=tuple(operands),
            results=tuple(local(self.pricer, v, p) for v, p in results),
            saves=self.layouts.table.ops[op.name].saves,
            device=self.pricer.setting.cluster.device.kind,
            implementation=self._implementation(op),
            counted=self._counted(op),
            counter_dropout=self.pricer.setting.target.counter_dropout,
        )
        found = keep(call)
        self.kept.update(found.storages)
        self.reads[op.name] = read = tuple(x.storage for x in operands)
        for storage in (*found.storages, *(x.storage for x in found.results)):
            if storage not in read:
                self.makers.setdefault(storage, op.name)
        for value, state, held in zip(op.results, chosen.results, found.results, strict=True):
            self._bind(value, state, held)

    def _counted_here(self, op: Op, chosen: Strategy) -> Op:
        """The call as a rank makes it, with its own part of what arguments count (groups)."""
        made, split = self.layouts.table.ops[op.name], chosen.split_factor
        if split not in made.counts.values() or split not in made.sizes:
            return op
        part = largest_part(made.sizes[split], self.layouts.degree)
        args, kwargs = divided(op, made, op.args, op.kwargs, {split: part})
        return replace(op, args=tuple(args), kwargs=kwargs)

    def _bind(self, value: str, state: Placement, held: Held) -> None:
        """Each result moved to the state in which it waits for its readers."""
        self.states[value], self.held[value, state] = state, held
        hub = self.assignment.states[value]
        targets = self.layouts.targets(value, self.assignment.strategies)
        leaves = value in self.block.outputs
        direct = len(targets) == 1 and not leaves and hub in (state, targets[0])
        if hub != state and not direct:
            self._value(value, hub)
            self.states[value] = hub
        if leaves:
            self._settle(value)

    def _implementation(self, op: Op) -> str:
        """What stands in the operator's place, if the batch or the operator is split."""
        name = self.assignment.strategies[op.name].implementation
        made = self.layouts.table.ops[op.name]
        if name or self.pricer.setting.dp == 1 or "batch_norm" not in made.implementations.values():
            return name
        batch = self.layouts.table.letters[op.name].get("b", ())
        return "batch_norm" if self.layouts.table.batch in batch else ""

    def _counted(self, op: Op) -> bool:
        """Whether a loss is divided by a count over ranks and micro-batches."""
        if op.short not in LOSSES or argument(op, 3, "reduction", 1) == 0:
            return False
        setting = self.pricer.setting
        split = setting.dp > 1 or self.assignment.strategies[op.name].name != REPLICATE
        return (split or setting.num_microbatches > 1) and self.layouts.table.ops[op.name].known
