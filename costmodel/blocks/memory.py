"""Activation memory of a block on one rank: its steps (`costmodel.sharding.moves`) run in mind.

A move makes a new tensor, except where only the gradient's state changes, or a part is a window on
the whole. Kept allocations are counted once each:

    saved bytes   made in the block and kept, except what leaves it
    inputs        held once per model, by whoever reads them (`PassPrice.input_bytes`)
    raw           made from the batch alone, held once per stage
    stored        parameters, buffers and constants, held anyway
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.costmodel import memory
from meshwright.costmodel.graph import Op
from meshwright.costmodel.operators import Pricer
from meshwright.costmodel.rules import divided, row_reduction
from meshwright.costmodel.sharding import (
    REPLICATE,
    Enter,
    Leave,
    Move,
    Placement,
    R,
    Role,
    Run,
    Step,
    Strategy,
    largest_part,
)

ALIASES = frozenset((("R", "Rp"), ("Rp", "R")))  # moves that change the gradient's state alone
ORIGINS: Mapping[Role, memory.Origin] = {
    "input": "input",
    "derived": "raw",
    "parameter": "stored",
    "buffer": "stored",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """Allocations kept for a block's backward, and the memory of the values that leave it.

    `outside` are the allocations of values that enter or leave. `makers` is the operator that made
    each allocation, `reads` the allocations of each operator's operands, `keeps` those that its
    backward needs; `moved` the re-shard that
    made an allocation, and what from. `made` are all in the order in which they were met, `sizes`
    what differs from their own bytes.
    """

    kept: frozenset[memory.Storage]
    leaving: Mapping[str, memory.Held]
    outside: frozenset[memory.Storage]
    makers: Mapping[memory.Storage, str]
    reads: Mapping[str, tuple[memory.Storage, ...]]
    made: Sequence[memory.Storage] = ()
    sizes: Mapping[memory.Storage, float] = field(default_factory=dict)
    moved: Mapping[memory.Storage, tuple[Move, memory.Storage]] = field(default_factory=dict)
    keeps: Mapping[str, tuple[memory.Storage, ...]] = field(default_factory=dict)

    @property
    def saved_bytes(self) -> float:
        """Bytes made in the block and kept, except what leaves it."""
        return self._nbytes(self.kept)

    def saved_bytes_repeating(self, operators: Collection[str], *, regather: bool = False) -> float:
        """The same if these operators run again in the backward, and what is gathered from
        tensor-parallel ranks is gathered again."""
        return self._nbytes(self.kept_repeating(operators, regather=regather))

    def kept_repeating(
        self, operators: Collection[str], *, regather: bool = False
    ) -> frozenset[memory.Storage]:
        """What is kept if these operators run again: not what they make, but what those read that
        must; and of what is gathered again the parts."""
        again, between = self.needed(operators, regather=regather)
        read = {storage for name in again for storage in self.reads[name]}
        read |= {self.moved[storage][1] for storage in between}
        kept = (self.kept | read) - (self.gathered if regather else frozenset())
        return frozenset(s for s in kept if self.makers.get(s) not in operators)

    @property
    def gathered(self) -> frozenset[memory.Storage]:
        """What re-shards make whole of tensor-parallel ranks' parts."""
        moves = ((made, move) for made, (move, _) in self.moved.items())
        return frozenset(s for s, m in moves if m.source.sharded and not m.target.sharded)

    def needed(
        self, operators: Collection[str] | None = None, *, regather: bool = False
    ) -> tuple[set[str], list[memory.Storage]]:
        """Of these operators, those that make what is kept, and all before them, with what is
        gathered between them if that is gathered again; of all operators there are (None) with what
        any re-shard makes, which is kept otherwise."""
        found: set[str] = set()
        between: list[memory.Storage] = []
        again = self.moved.keys() if operators is None else self.gathered if regather else ()
        seen: set[memory.Storage] = set()
        waiting = [storage for storage in self.kept if storage not in self.outside]
        while waiting:
            storage = waiting.pop()
            if storage in seen:
                continue
            seen.add(storage)
            maker = self.makers.get(storage)
            if storage in again:
                between.append(storage)
                waiting += (s for s in [self.moved[storage][1]] if s not in self.outside)
            elif maker and maker not in found and (operators is None or maker in operators):
                found.add(maker)
                waiting += (s for s in self.reads[maker] if s not in self.outside)
        return found, between

    def nbytes(self, storage: memory.Storage) -> float:
        """Bytes of one of its allocations."""
        return self.sizes.get(storage, storage.nbytes)

    def _nbytes(self, storages: Collection[memory.Storage]) -> float:
        return math.fsum(self.nbytes(s) for s in storages if s not in self.outside)


def block_memory(
    pricer: Pricer, steps: Sequence[Step], given: Mapping[str, memory.Held] | None = None
) -> BlockMemory:
    """Run the steps of one block in mind. `given` says where values from outside lie, which are
    contiguous tensors of their own where it doesn't."""
    return _Walk(pricer).run(steps, given or {})


def local(
    pricer: Pricer, value: str, placement: Placement = R, tokens: Placement | None = None
) -> memory.Local:
    """A value's shape on one rank at the setting's rows and mesh, on the context axis in the state
    in which it is made, or in another (`tokens`)."""
    setting, table, meta = pricer.setting, pricer.table, pricer.graph.values[value]
    if pricer.context is not None:
        tokens = tokens or pricer.context.states[value]
    shape: list[float] = list(meta.shape)
    for d, atoms in enumerate(table.dims[value]):
        if table.batch is not None and table.batch in atoms:
            shape[d] *= setting.batch.rows / pricer.graph.batch_size
        if tokens is not None and tokens.sharded and tokens.dim == d:
            shape[d] /= setting.mesh.cp
    if shape:
        shape[0] *= pricer.crowding(value)
    if placement.sharded:
        size = meta.shape[placement.dim]
        shape[placement.dim] *= largest_part(size, setting.mesh.tp) / size
    return memory.Local(shape=tuple(shape), dtype=meta.dtype, grad=meta.requires_grad)


def _part(whole: memory.Held, target: Placement, count: int) -> memory.Held:
    """One of `count` parts of a tensor; of a dim that has parts itself, through their stack."""
    d, split, shape = target.dim, target.split, whole.shape
    if split == 1:
        return memory.compact(
            whole.seen_as((*shape[:d], shape[d] / count, *shape[d + 1 :]), whole.strides)
        )
    inner = shape[d] / (split * count)
    parts = memory.reshaped(whole, (*shape[:d], split, count, inner, *shape[d + 1 :]))
    stacked = memory.permuted(parts, [d + 1, *(k for k in range(len(parts.shape)) if k != d + 1)])
    joined = memory.reshaped(stacked, (count, *shape[:d], split * inner, *shape[d + 1 :]))
    return memory.compact(joined.seen_as(joined.shape[1:], joined.strides[1:]))


def _joined(stacked: memory.Local, source: Placement) -> memory.Held:
    """The parts of a dim, received one after the other, as one tensor."""
    d, split = source.dim, source.split
    count, *shape = stacked.shape
    inner = shape[d] / split
    parts = memory.reshaped(
        memory.fresh(stacked), (count, *shape[:d], split, inner, *shape[d + 1 :])
    )
    order = [*range(1, d + 2), 0, *range(d + 2, len(parts.shape))]
    return memory.reshaped(
        memory.permuted(parts, order), (*shape[:d], shape[d] * count, *shape[d + 1 :])
    )


class _Walk:
    """One block on one rank; `held` is the memory of each value, per state."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer, self.graph, self.table = pricer, pricer.graph, pricer.table
        self.again = pricer.setting.target.gathers_again
        self.held: dict[tuple[str, Placement], memory.Held] = {}
        # on the context axis
        self.moved_tokens: dict[tuple[str, Placement, Placement], memory.Held] = {}
        self.kept: set[memory.Storage] = set()
        self.parts: dict[memory.Storage, memory.Storage] = {}  # of what is gathered again
        self.makers: dict[memory.Storage, str] = {}
        self.reads: dict[str, tuple[memory.Storage, ...]] = {}
        self.keeps: dict[str, tuple[memory.Storage, ...]] = {}
        self.made: list[memory.Storage] = []
        self.moved: dict[memory.Storage, tuple[Move, memory.Storage]] = {}

    def run(self, steps: Sequence[Step], given: Mapping[str, memory.Held]) -> BlockMemory:
        entered: set[memory.Storage] = set()
        leaving: dict[str, memory.Held] = {}
        for step in steps:
            match step:
                case Enter(value, state, role):
                    outside = memory.fresh(local(self.pricer, value, state), origin=ORIGINS[role])
                    self.held[value, state] = made = given.get(value, outside)
                    entered.add(made.storage)
                    self.made.append(made.storage)
                case Move(value, source, target) if not step.known:
                    self.held[value, target] = made = self._moved(value, source, target)
                    self.made.append(made.storage)
                    if (whole := self.held[value, source].storage) is not made.storage:
                        self.moved[made.storage] = step, whole
                    if source.sharded and not target.sharded and self.again:
                        self.parts[made.storage] = whole
                case Run(op, strategy):
                    self._run(op, strategy)
                case Leave(value, state):
                    leaving[value] = self.held[value, state]
        return BlockMemory(
            kept=frozenset(self.parts.get(s, s) for s in self._written()),
            leaving=leaving,
            outside=frozenset(entered.union(x.storage for x in leaving.values())),
            makers=self.makers,
            reads={
                name: tuple(self.parts.get(s, s) for s in read) for name, read in self.reads.items()
            },
            made=self.made,
            moved=self.moved,
            keeps=self.keeps,
        )

    def _written(self) -> set[memory.Storage]:
        """What is kept, where values inside a fused kernel are not: its operands are instead."""
        internal = self.pricer.fusion.internal
        inside = {held.storage for (v, _), held in self.held.items() if v in internal}
        if not inside:
            return self.kept
        found: set[memory.Storage] = set()
        waiting = [*self.kept]
        while waiting:
            storage = waiting.pop()
            if storage in inside and storage in self.makers:
                waiting += self.reads[self.makers[storage]]
            else:
                found.add(storage)
        return found

    def _moved(self, value: str, source: Placement, target: Placement) -> memory.Held:
        """What the executor's re-shard makes: a part is a window on the whole where that is
        contiguous; all else that changes values is new."""
        have, tp = self.held[value, source], self.pricer.setting.mesh.tp
        if (source.kind, target.kind) in ALIASES or source == target or tp == 1:
            return have
        part = local(self.pricer, value, target)
        if not source.sharded and not (source.kind == "R" and target.sharded):
            return memory.fresh(part)
        shape = self.graph.values[value].shape
        if any(p.sharded and shape[p.dim] % tp for p in (source, target)):
            return memory.fresh(part)  # cut out of what was filled up to equal parts
        if not source.sharded:
            return _part(have, target, tp)
        mine = local(self.pricer, value, source)
        if target.sharded and source.dim != target.dim:
            pieces = list(mine.shape)
            pieces[target.dim] /= tp
            return _joined(replace(mine, shape=(tp, *pieces)), source)
        whole = _joined(replace(mine, shape=(tp, *mine.shape)), source)
        return _part(whole, target, tp) if target.sharded else whole

    def _run(self, op: Op, strategy: Strategy) -> None:
        operands = tuple(self._operands(op, strategy))
        results = list(zip(op.results, strategy.results, strict=True))
        context = self.pricer.context
        tokens = context.strategies[op.name].results if context else (None,) * len(results)
        call = memory.Call(
            op=self._counted_here(op, strategy),
            operands=operands,
            results=tuple(
                local(self.pricer, *each, own) for each, own in zip(results, tokens, strict=True)
            ),
            saves=self.table.ops[op.name].saves,
            device=self.pricer.setting.cluster.device.kind,
            implementation=self._implementation(op, strategy),
            counted=self._counted(op, strategy),
            counter_dropout=self.pricer.setting.target.counter_dropout,
        )
        found = memory.keep(call)
        self.kept.update(found.storages)
        self.keeps[op.name] = found.storages
        self.reads[op.name] = read = tuple(x.storage for x in operands)
        for storage in (*found.storages, *(x.storage for x in found.results)):
            self.made.append(storage)
            if storage not in read:
                self.makers.setdefault(storage, op.name)
        for each, own, made in zip(results, tokens, found.results, strict=True):
            moved = context is not None and own != context.states[each[0]]
            self.held[each] = self._tokens_moved(each, made) if moved else made

    def _operands(self, op: Op, strategy: Strategy) -> Iterator[memory.Held]:
        """What an operator reads, as the context axis moves it there."""
        context = self.pricer.context
        states = (context.strategies[op.name] if context else strategy).operands
        for key in zip(op.operands, strategy.operands, states, strict=True):
            value, placement, target = key
            source = context.states[value] if context else target
            if source == target or not source.sharded:
                yield self.held[value, placement]
                continue
            if key not in self.moved_tokens:
                held = self.held[value, placement]
                self.moved_tokens[key] = self._tokens_moved((value, placement), held, target)
            yield self.moved_tokens[key]

    def _tokens_moved(
        self, each: tuple[str, Placement], source: memory.Held, target: Placement | None = None
    ) -> memory.Held:
        """A value that the context axis moves to where it is read, or (None) made."""
        made = memory.fresh(local(self.pricer, *each, target))
        self.made.append(made.storage)
        self.moved[made.storage] = Move(*each, each[1], ""), source.storage
        return made

    def _counted_here(self, op: Op, strategy: Strategy) -> Op:
        """The call as a rank makes it, with its own part of what arguments count (groups)."""
        made, split = self.table.ops[op.name], strategy.split_factor
        if split not in made.counts.values() or split not in made.sizes:
            return op
        part = largest_part(made.sizes[split], self.pricer.setting.mesh.tp)
        args, kwargs = divided(op, made, op.args, op.kwargs, {split: part})
        return replace(op, args=tuple(args), kwargs=kwargs)

    def _implementation(self, op: Op, strategy: Strategy) -> str:
        """What stands in the operator's place, if the batch or the operator is split."""
        name = strategy.implementation
        made = self.table.ops[op.name]
        if (
            name
            or self.pricer.step.mesh.dp == 1
            or "batch_norm" not in made.implementations.values()
        ):
            return name
        batch = self.table.letters[op.name].get("b", ())
        return "batch_norm" if self.table.batch in batch else ""

    def _counted(self, op: Op, strategy: Strategy) -> bool:
        """Whether a loss is divided by a count over ranks and micro-batches."""
        if not row_reduction(op):
            return False
        setting = self.pricer.step
        split = setting.mesh.dp > 1 or strategy.name != REPLICATE
        return (split or setting.batch.microbatches > 1) and self.table.ops[op.name].known
