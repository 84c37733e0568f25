"""The steps of a block under one assignment, and what they keep in memory on any mesh with the same
tensor axis, for any number of rows.

The size of an allocation is a constant and a part in proportion to the rows. So two walks over the
steps that differ in sizes alone say what a third would find. One row is always walked: a dim of one
element lies in memory wherever one likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from meshwright.costmodel.blocks.memory import BlockMemory, block_memory
from meshwright.costmodel.graph import Op
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
        made = zip(self.walked.made, self.growth, strict=True)
        return replace(self.walked, sizes={s: s.nbytes + each * more for s, each in made if each})


@dataclass(slots=True)
class KnownSteps:
    """The `steps` of a block, and the memory known so far."""

    steps: Sequence[Step]
    _ops: Sequence[Op] = field(init=False)
    _loss: bool = field(init=False)
    _statistics: bool = field(init=False)
    _walked: dict[Where, dict[float, BlockMemory]] = field(default_factory=dict)
    _lines: dict[Where, _Line] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ops = [step.op for step in self.steps if isinstance(step, Run)]
        self._loss = any(traits_of(op).loss for op in self._ops)
        self._statistics = any(traits_of(op).batch_statistics for op in self._ops)

    def memory(self, pricer: Pricer) -> BlockMemory:
        """As `block_memory`."""
        setting, where = pricer.setting, self._where(pricer)
        walked = self._walked.setdefault(where, {})
        if setting.batch.rows not in walked:
            if setting.batch.rows != 1 and where in self._lines:
                return self._lines[where].at(setting.batch.rows)
            found = block_memory(pricer, self.steps)
            if where not in self._lines and not self._squared(pricer):
                line = _line(walked, setting.batch.rows, found)
                if line is not None:
                    self._lines[where] = line
            walked[setting.batch.rows] = found
        return walked[setting.batch.rows]

    def _where(self, pricer: Pricer) -> Where:
        """What the memory depends on beside the rows: a loss and statistics on whether there are
        several ranks on the data axis, a loss on whether there are several micro-batches; copies of
        tokens on whether several ranks share experts out."""
        mesh, batch = pricer.step.mesh, pricer.step.batch
        dp = min(mesh.dp, 2) if self._loss or self._statistics else 1
        own = replace(pricer.setting.mesh, dp=dp, ep=min(mesh.ep, 2), spread=1)
        return own, Batch(rows=0.0, microbatches=min(batch.microbatches, 2) if self._loss else 1)

    def _squared(self, pricer: Pricer) -> bool:
        """Whether a size grows with the square of the rows."""
        dims, batch = pricer.table.dims, pricer.table.batch
        made = [value for op in self._ops for value in op.results]
        return any(sum(atoms.count(batch) for atoms in dims[value]) > 1 for value in made)


def _line(walked: Mapping[float, BlockMemory], rows: float, found: BlockMemory) -> _Line | None:
    """Through a walk and an earlier one that differs in sizes alone, if there is one."""
    for earlier, other in walked.items():
        if _structure(other) == _structure(found):
            sizes = zip(other.made, found.made, strict=True)
            growth = [(b.nbytes - a.nbytes) / (rows - earlier) for a, b in sizes]
            return _Line(rows=earlier, walked=other, growth=growth)
    return None


def _structure(memory: BlockMemory) -> tuple[object, ...]:
    """All but sizes, with allocations by number."""
    number = {storage: k for k, storage in reversed([*enumerate(memory.made)])}
    return (
        [number[storage] for storage in memory.made],
        {number[storage] for storage in memory.kept},
        {number[storage] for storage in memory.outside},
        {number[storage]: name for storage, name in memory.makers.items()},
        {number[storage]: number[whole] for storage, (_, whole) in memory.moved.items()},
        {name: [number[s] for s in read] for name, read in memory.reads.items()},
    )
