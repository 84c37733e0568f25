"""Steps of a block under one assignment, and their memory on any mesh with the same tensor axis,
for any number of rows.

The size of an allocation is a constant and a part in proportion to the rows: two walks over the
steps that differ in sizes alone tell those of a third. One row is always walked: a dim of one
element lies in memory wherever one likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from meshwright.costmodel.blocks.block_memory import BlockMemory, block_memory
from meshwright.costmodel.graph import Op
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import Pricer
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import Run, Step

Where: TypeAlias = tuple[Mesh, Batch]


@dataclass(slots=True)
class _Line:
    """A walk at some `rows`, and the growth of each size per row."""

    rows: float
    walked: BlockMemory
    growth: Sequence[float]

    def at(self, rows: float) -> BlockMemory:
        more = rows - self.rows
        growth = zip(self.walked.made, self.growth, strict=True)
        return replace(self.walked, sizes={s: s.nbytes + g * more for s, g in growth if g})


@dataclass(slots=True)
class KnownSteps:
    """The `steps` of a block, and the memory known so far."""

    steps: Sequence[Step]
    _ops: Sequence[Op] = field(init=False)
    _loss: bool = field(init=False)
    _statistics: bool = field(init=False)
    _walked: Memo[Where, dict[float, BlockMemory]] = field(default_factory=Memo)
    _lines: dict[Where, _Line] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ops = [step.op for step in self.steps if isinstance(step, Run)]
        self._loss = any(traits_of(op).loss for op in self._ops)
        self._statistics = any(traits_of(op).batch_statistics for op in self._ops)

    def memory(self, pricer: Pricer) -> BlockMemory:
        """Memory as of `block_memory`."""
        rows, where = pricer.setting.batch.rows, self._where(pricer)
        walked = self._walked.of(where, dict)
        if rows not in walked:
            if rows != 1 and where in self._lines:
                return self._lines[where].at(rows)
            memory = block_memory(pricer, self.steps)
            known = where in self._lines or self._squared(pricer)
            if not known and (line := _line(walked, rows, memory)):
                self._lines[where] = line
            walked[rows] = memory
        return walked[rows]

    def _where(self, pricer: Pricer) -> Where:
        """Dependences of the memory beside the rows: a loss and statistics on whether there are
        several ranks on the data axis, a loss on whether there are several micro-batches, attention
        on whether these are sliced; copies of tokens on whether several ranks share experts
        out."""
        step = pricer.step
        dp = min(step.mesh.dp, 2) if self._loss or self._statistics else 1
        mesh = replace(pricer.setting.mesh, dp=dp, ep=min(step.mesh.ep, 2), spread=1)
        several = min(step.batch.microbatches, 2) if self._loss else 1
        return mesh, Batch(rows=0.0, microbatches=several, slices=min(step.batch.slices, 2))

    def _squared(self, pricer: Pricer) -> bool:
        """Whether a size grows with the square of the rows."""
        dims, batch = pricer.table.dims, pricer.table.batch
        results = [value for op in self._ops for value in op.results]
        return any(sum(atoms.count(batch) for atoms in dims[value]) > 1 for value in results)


def _line(walked: Mapping[float, BlockMemory], rows: float, memory: BlockMemory) -> _Line | None:
    """Line through a walk and an earlier one that differs in sizes alone, if there is one."""
    for earlier, other in walked.items():
        if _structure(other) == _structure(memory):
            sizes = zip(other.made, memory.made, strict=True)
            growth = [(b.nbytes - a.nbytes) / (rows - earlier) for a, b in sizes]
            return _Line(rows=earlier, walked=other, growth=growth)
    return None


def _structure(memory: BlockMemory) -> tuple[object, ...]:
    """A walk without sizes, allocations by number."""
    number = {storage: k for k, storage in reversed([*enumerate(memory.made)])}
    return (
        [number[storage] for storage in memory.made],
        {number[storage] for storage in memory.kept},
        {number[storage] for storage in memory.outside},
        {number[storage]: name for storage, name in memory.makers.items()},
        {number[storage]: number[source] for storage, (_, source) in memory.moved.items()},
        {name: [number[s] for s in read] for name, read in memory.reads.items()},
    )
