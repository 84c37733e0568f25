"""Kernel fusion: values that never reach memory, operators without a kernel of their own.

A fused kernel runs a chain of operators of one block: an operator joins the kernel of the operator
that makes one of its operands if both can be fused (`Target.fusion`) and nothing that has a kernel
of its own must run between them: what a residual connection carries round a matrix product is
written by one kernel and read by another. A value read only inside its kernel is never written, is
read back by nobody, and is recomputed from the kernel's inputs in the backward instead of being
saved. Views are transparent.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules import is_pointwise, traits_of
from meshwright.costmodel.sharding import FactorTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """`internal` values stay in registers; `free_reads` are (operator, operand index) that come
    from the same kernel; `joined` operators are launched with another."""

    internal: frozenset[str] = frozenset()
    free_reads: frozenset[tuple[str, int]] = frozenset()
    joined: frozenset[str] = frozenset()


def is_free(table: FactorTable, op: Op) -> bool:
    """Whether an operator only renames memory."""
    factors = table.ops[op.name]
    return factors.view and not factors.matmul and not traits_of(op).copies


def fuse(graph: Graph, table: FactorTable, level: str) -> Fusion:
    """Fusion of every block of a graph at a `Target.fusion` level; nothing at "none"."""
    if level == "none":
        return Fusion()
    internal: set[str] = set()
    free_reads: set[tuple[str, int]] = set()
    joined: set[str] = set()
    for block in graph.blocks:
        root: dict[str, str] = {}
        fused: set[str] = set()  # values that fusible operators make
        apart: set[str] = set()  # those of them that some reader takes from memory
        read: set[str] = set()
        above: dict[str, frozenset[str]] = {}  # what a value is made from, itself included
        before: dict[str, frozenset[str]] = {}  # what is made by kernels that must run before
        for op in block.ops:
            if is_free(table, op) and op.operands:
                source = root.get(op.operands[0], op.operands[0])
                root |= dict.fromkeys(op.results, source)
                continue
            sources = [root.get(value, value) for value in op.operands]
            earlier = ancestors = frozenset().union(*(above.get(v, {v}) for v in sources))
            least = traits_of(op).fused_at
            fusible = least in (level, "pointwise") if least else is_pointwise(op)
            if fusible:
                earlier = frozenset().union(*(before.get(v, ()) for v in sources))
            read.update(sources)
            for i, source in enumerate(sources):
                if fusible and source in fused and source not in earlier:
                    free_reads.add((op.name, i))
                    joined.add(op.name)
                else:
                    apart.add(source)
            if fusible:
                fused.update(op.results)
            above |= {value: ancestors | {value} for value in op.results}
            before |= dict.fromkeys(op.results, earlier)
        leaving = {root.get(value, value) for value in block.outputs}
        internal |= (fused & read) - apart - leaving
    return Fusion(
        internal=frozenset(internal), free_reads=frozenset(free_reads), joined=frozenset(joined)
    )
