"""Which values never reach memory, and which operators need no kernel of their own.

A fused kernel runs a chain of operators of one block: an operator joins the kernel of the operator
that makes one of its operands if both can be fused (`Target.fusion`). A value read only inside its
kernel is never written, is read back by nobody, and is recomputed from the kernel's inputs in the
backward instead of being saved. Views are transparent.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.auto_rules import is_pointwise
from costmodel.factors import FactorTable
from costmodel.graph import Graph, Op

ROWWISE = frozenset(
    (
        "softmax",
        "_softmax",
        "log_softmax",
        "layer_norm",
        "rms_norm",
        "native_layer_norm",
        "mean",
        "cross_entropy_loss",
    )
)
ROWWISE |= frozenset(("sum", "amax", "amin", "var", "rsqrt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """`internal` values stay in registers; `free_reads` are (operator, operand index) that come
    from the same kernel; `joined` operators are launched with another."""

    internal: frozenset[str] = frozenset()
    free_reads: frozenset[tuple[str, int]] = frozenset()
    joined: frozenset[str] = frozenset()


def is_free(table: FactorTable, op: Op) -> bool:
    """Whether an operator only renames memory."""
    made = table.ops[op.name]
    return made.view and not made.matmul and op.short not in ("cat", "stack")


def fuse(graph: Graph, table: FactorTable, level: str) -> Fusion:
    """Fusion of every block of a graph at a `Target.fusion` level; nothing at "none"."""
    if level == "none":
        return Fusion()
    internal: set[str] = set()
    free_reads: set[tuple[str, int]] = set()
    joined: set[str] = set()
    for block in graph.blocks:
        root: dict[str, str] = {}
        made_by: dict[str, Op] = {}
        readers: dict[str, list[Op]] = {}
        for op in block.ops:
            if is_free(table, op) and op.operands:
                source = root.get(op.operands[0], op.operands[0])
                root |= dict.fromkeys(op.results, source)
                continue
            for i, value in enumerate(op.operands):
                source = root.get(value, value)
                readers.setdefault(source, []).append(op)
                if source in made_by and _fusible(op, level):
                    free_reads.add((op.name, i))
                    joined.add(op.name)
            if _fusible(op, level):
                made_by |= dict.fromkeys(op.results, op)
        leaving = {root.get(value, value) for value in block.outputs}
        for value in made_by:
            found = readers.get(value, [])
            if found and value not in leaving and all(_fusible(op, level) for op in found):
                internal.add(value)
    return Fusion(
        internal=frozenset(internal), free_reads=frozenset(free_reads), joined=frozenset(joined)
    )


def _fusible(op: Op, level: str) -> bool:
    if op.short in ("softmax", "_softmax"):
        return True
    if op.short in ROWWISE or op.short in ("cat", "stack"):
        return level == "full"
    return is_pointwise(op)
