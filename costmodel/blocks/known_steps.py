"""The steps of a block under one assignment, and what they keep in memory on any mesh with the same
tensor axis, for any number of rows.

The size of an allocation is a constant and a part in proportion to the rows. So two walks over the
steps, with different rows, say what a third would find. One row stands apart: a dim of one element
lies in memory wherever one likes. Where two walks differ in more than sizes, each is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from meshwright.costmodel.blocks.memory import BlockMemory, block_memory
from meshwright.costmodel.operators import Pricer
from meshwright.costmodel.sharding import Run, Step

# cp, experts shared out, several ranks on the data axis, several micro-batches, one row
Where: TypeAlias = tuple[int, bool, bool, bool, bool]


@dataclass(slots=True)
class _Line:
    """Two walks that differ in rows and sizes alone; `between` the sizes' growth per row."""

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
    _walked: dict[Where, dict[float, BlockMemory]] = field(default_factory=dict)
    _lines: dict[Where, _Line | None] = field(default_factory=dict)

    def memory(self, pricer: Pricer) -> BlockMemory:
        """As `block_memory`."""
        setting = pricer.setting
        several, ranks = setting.num_microbatches > 1, setting.dp > 1
        where = setting.cp, setting.ep > 1, ranks, several, setting.rows == 1
        walked = self._walked.setdefault(where, {})
        if setting.rows in walked:
            return walked[setting.rows]
        line = self._lines.get(where)
        if line is not None:
            return line.at(setting.rows)
        walked[setting.rows] = found = block_memory(pricer, self.steps)
        if where not in self._lines and len(walked) > 1:
            self._lines[where] = None if self._squared(pricer) else _line(walked)
        return found

    def _squared(self, pricer: Pricer) -> bool:
        """Whether a size grows with the square of the rows."""
        dims, batch = pricer.table.dims, pricer.table.batch
        made = [v for step in self.steps if isinstance(step, Run) for v in step.op.results]
        return any(sum(atoms.count(batch) for atoms in dims[value]) > 1 for value in made)


def _line(walked: dict[float, BlockMemory]) -> _Line | None:
    (rows, one), (others, other) = walked.items()
    if _structure(one) != _structure(other):
        return None
    sizes = zip(one.made, other.made, strict=True)
    growth = [(b.nbytes - a.nbytes) / (others - rows) for a, b in sizes]
    return _Line(rows=rows, walked=one, growth=growth)


def _structure(memory: BlockMemory) -> tuple[object, ...]:
    """All but sizes, with allocations by number."""
    number = {storage: k for k, storage in reversed([*enumerate(memory.made)])}
    return (
        [number[storage] for storage in memory.made],
        {number[storage] for storage in memory.kept},
        {number[storage] for storage in memory.outside},
        {number[storage]: name for storage, name in memory.makers.items()},
        {name: [number[s] for s in read] for name, read in memory.reads.items()},
    )
