"""Activation memory of a block on one rank, from its steps (`costmodel.sharding.moves`).

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
from functools import partial

from meshwright.costmodel import memory
from meshwright.costmodel.graph import Op
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.operators import Pricer, reads_kept
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
    backward needs, `of_slices` what attention keeps for later slices; `moved` the re-shard that
    made an allocation, and from which. `made` are all in the order in which they were met, `sizes`
    those that differ from their own bytes.
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
    of_slices: Sequence[memory.Storage] = ()

    @property
    def unfreed_bytes(self) -> float:
        """Saved bytes that stay whatever runs again: what slices keep for later ones."""
        return self._nbytes(self.of_slices)

    @property
    def saved_bytes(self) -> float:
        """Bytes made in the block and kept, except what leaves it."""
        return self._nbytes(self.kept)

    def saved_bytes_repeating(self, operators: Collection[str], *, regather: bool = False) -> float:
        """Saved bytes if these operators run again, and gathers with `regather`."""
        return self._nbytes(self.kept_repeating(operators, regather=regather))

    def kept_repeating(
        self, operators: Collection[str], *, regather: bool = False
    ) -> frozenset[memory.Storage]:
        """Kept allocations if these operators run again: operands of those that must."""
        again, between = self.needed(operators, regather=regather)
        read = {storage for name in again for storage in self.reads[name]}
        read |= {self.moved[storage][1] for storage in between}
        storages = (self.kept | read) - (self.gathered if regather else frozenset())
        return frozenset(s for s in storages if self.makers.get(s) not in operators)

    @property
    def gathered(self) -> frozenset[memory.Storage]:
        """Allocations that re-shards gather from tensor-parallel ranks' parts."""
        moves = ((storage, move) for storage, (move, _) in self.moved.items())
        return frozenset(s for s, m in moves if m.source.sharded and not m.target.sharded)

    def needed(
        self, operators: Collection[str] | None = None, *, regather: bool = False
    ) -> tuple[set[str], list[memory.Storage]]:
        """Operators, of these (None: all), that make kept tensors, with the re-shards between."""
        names: set[str] = set()
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
            elif maker and maker not in names and (operators is None or maker in operators):
                names.add(maker)
                waiting += (s for s in self.reads[maker] if s not in self.outside)
        return names, between

    def nbytes(self, storage: memory.Storage) -> float:
        """Bytes of one of its allocations."""
        return self.sizes.get(storage, storage.nbytes)

    def _nbytes(self, storages: Collection[memory.Storage]) -> float:
        return math.fsum(self.nbytes(s) for s in storages if s not in self.outside)


def block_memory(
    pricer: Pricer, steps: Sequence[Step], entering: Mapping[str, memory.Held] | None = None
) -> BlockMemory:
    """Memory of one block's steps; values from outside lie as in `entering`, else contiguous."""
    return _Walk(pricer).run(steps, entering or {})


def local(
    pricer: Pricer, value: str, placement: Placement = R, tokens: Placement | None = None
) -> memory.Local:
    """Shape of a value on one rank, on the context axis as it is made, or as `tokens`."""
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


def _part(tensor: memory.Held, target: Placement, count: int) -> memory.Held:
    """One of `count` parts of a tensor; of a dim that has parts itself, through their stack."""
    d, split, shape = target.dim, target.split, tensor.shape
    if split == 1:
        cut = (*shape[:d], shape[d] / count, *shape[d + 1 :])
        return memory.compact(tensor.seen_as(cut, tensor.strides))
    inner = shape[d] / (split * count)
    parts = memory.reshaped(tensor, (*shape[:d], split, count, inner, *shape[d + 1 :]))
    stacked = memory.permuted(parts, [d + 1, *(k for k in range(len(parts.shape)) if k != d + 1)])
    joined = memory.reshaped(stacked, (count, *shape[:d], split * inner, *shape[d + 1 :]))
    return memory.compact(joined.seen_as(joined.shape[1:], joined.strides[1:]))


def _joined(stacked: memory.Local, source: Placement) -> memory.Held:
    """The parts of a dim, received one after the other, as one tensor."""
    d, split, (count, *shape) = source.dim, source.split, stacked.shape
    cut = (count, *shape[:d], split, shape[d] / split, *shape[d + 1 :])
    parts = memory.reshaped(memory.fresh(stacked), cut)
    parts = memory.permuted(parts, [*range(1, d + 2), 0, *range(d + 2, len(parts.shape))])
    return memory.reshaped(parts, (*shape[:d], shape[d] * count, *shape[d + 1 :]))


class _Walk:
    """One block on one rank; `held` is the memory of each value, per state."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer, self.graph, self.table = pricer, pricer.graph, pricer.table
        self.again = pricer.setting.target.gathers_again
        self.held: dict[tuple[str, Placement], memory.Held] = {}
        self.moved_tokens = Memo[tuple[str, Placement, Placement], memory.Held]()  # on cp
        self.kept: set[memory.Storage] = set()
        self.parts: dict[memory.Storage, memory.Storage] = {}  # of what is gathered again
        self.makers: dict[memory.Storage, str] = {}
        self.reads: dict[str, tuple[memory.Storage, ...]] = {}
        self.keeps: dict[str, tuple[memory.Storage, ...]] = {}
        self.made: list[memory.Storage] = []
        self.moved: dict[memory.Storage, tuple[Move, memory.Storage]] = {}
        self.of_slices: list[memory.Storage] = []

    def run(self, steps: Sequence[Step], entering: Mapping[str, memory.Held]) -> BlockMemory:
        entered: set[memory.Storage] = set()
        leaving: dict[str, memory.Held] = {}
        for step in steps:
            match step:
                case Enter(value, state, role):
                    outside = memory.fresh(local(self.pricer, value, state), origin=ORIGINS[role])
                    self.held[value, state] = held = entering.get(value, outside)
                    entered.add(held.storage)
                    self.made.append(held.storage)
                case Move(value, source, target) if not step.known:
                    self.held[value, target] = held = self._moved(value, source, target)
                    self.made.append(held.storage)
                    if (part := self.held[value, source].storage) is not held.storage:
                        self.moved[held.storage] = step, part
                    if source.sharded and not target.sharded and self.again:
                        self.parts[held.storage] = part
                case Run(op, strategy):
                    self._run(op, strategy)
                case Leave(value, state):
                    leaving[value] = self.held[value, state]
        self.made += self.of_slices
        kept = (self.parts.get(s, s) for s in self._written())
        return BlockMemory(
            kept=frozenset((*kept, *self.of_slices)),
            leaving=leaving,
            outside=frozenset(entered.union(x.storage for x in leaving.values())),
            makers=self.makers,
            reads={
                op: tuple(self.parts.get(s, s) for s in read) for op, read in self.reads.items()
            },
            made=self.made,
            moved=self.moved,
            keeps=self.keeps,
            of_slices=self.of_slices,
        )

    def _written(self) -> set[memory.Storage]:
        """Kept allocations; of a fused kernel its operands in place of values inside."""
        internal = self.pricer.fusion.internal
        inside = {held.storage for (v, _), held in self.held.items() if v in internal}
        if not inside:
            return self.kept
        written: set[memory.Storage] = set()
        waiting = [*self.kept]
        while waiting:
            storage = waiting.pop()
            if storage in inside and storage in self.makers:
                waiting += self.reads[self.makers[storage]]
            else:
                written.add(storage)
        return written

    def _moved(self, value: str, source: Placement, target: Placement) -> memory.Held:
        """Result of a re-shard: a window where a part lies contiguous, else a new tensor."""
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
        joined = _joined(replace(mine, shape=(tp, *mine.shape)), source)
        return _part(joined, target, tp) if target.sharded else joined

    def _run(self, op: Op, strategy: Strategy) -> None:
        operands = tuple(self._operands(op, strategy))
        results = list(zip(op.results, strategy.results, strict=True))
        context = self.pricer.context
        tokens = context.strategies[op.name].results if context else (None,) * len(results)
        call = memory.Call(
            op=self._counted_here(op, strategy),
            operands=operands,
            results=tuple(local(self.pricer, *r, t) for r, t in zip(results, tokens, strict=True)),
            saves=self.table.ops[op.name].saves,
            device=self.pricer.setting.cluster.device.kind,
            implementation=self._implementation(op, strategy),
            counted=self._counted(op, strategy),
            counter_dropout=self.pricer.setting.target.counter_dropout,
        )
        saved = memory.keep(call)
        self.kept.update(saved.storages)
        if reads_kept(self.pricer, op):  # whatever runs again
            self.of_slices += memory.kept_tokens(call)
        self.keeps[op.name] = saved.storages
        self.reads[op.name] = read = tuple(x.storage for x in operands)
        for storage in (*saved.storages, *(x.storage for x in saved.results)):
            self.made.append(storage)
            if storage not in read:
                self.makers.setdefault(storage, op.name)
        for where, state, held in zip(results, tokens, saved.results, strict=True):
            moved = context is not None and state != context.states[where[0]]
            self.held[where] = self._tokens_moved(where, held) if moved else held

    def _operands(self, op: Op, strategy: Strategy) -> Iterator[memory.Held]:
        """Operands as the context axis moves them to an operator."""
        context = self.pricer.context
        states = (context.strategies[op.name] if context else strategy).operands
        for key in zip(op.operands, strategy.operands, states, strict=True):
            value, placement, target = key
            source = context.states[value] if context else target
            where, held = (value, placement), self.held[value, placement]
            if source != target and source.sharded:
                move = partial(self._tokens_moved, where, held, target)
                held = self.moved_tokens.of(key, move)
            yield held

    def _tokens_moved(
        self, where: tuple[str, Placement], source: memory.Held, target: Placement | None = None
    ) -> memory.Held:
        """A value that the context axis moves to where it is read, or (None) made."""
        moved = memory.fresh(local(self.pricer, *where, target))
        self.made.append(moved.storage)
        self.moved[moved.storage] = Move(*where, where[1], ""), source.storage
        return moved

    def _counted_here(self, op: Op, strategy: Strategy) -> Op:
        """The call as a rank makes it, with its own part of what arguments count (groups)."""
        factors, split = self.table.ops[op.name], strategy.split_factor
        if split not in factors.counts.values() or split not in factors.sizes:
            return op
        part = largest_part(factors.sizes[split], self.pricer.setting.mesh.tp)
        args, kwargs = divided(op, factors, op.args, op.kwargs, {split: part})
        return replace(op, args=tuple(args), kwargs=kwargs)

    def _implementation(self, op: Op, strategy: Strategy) -> str:
        """Implementation in the operator's place, if the batch or the operator is split."""
        if reads_kept(self.pricer, op):
            return memory.SLICED
        normed = "batch_norm" in self.table.ops[op.name].implementations.values()
        if strategy.implementation or self.pricer.step.mesh.dp == 1 or not normed:
            return strategy.implementation
        batch = self.table.letters[op.name].get("b", ())
        return "batch_norm" if self.table.batch in batch else ""

    def _counted(self, op: Op, strategy: Strategy) -> bool:
        """Whether a loss is divided by a count over ranks and micro-batches."""
        if not row_reduction(op):
            return False
        setting = self.pricer.step
        split = setting.mesh.dp > 1 or strategy.name != REPLICATE
        return (split or setting.batch.microbatches > 1) and self.table.ops[op.name].known
