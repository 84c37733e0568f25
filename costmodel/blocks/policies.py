"""Recompute policies: which operators of a block run again in its backward, and whether they may.

"none" keeps all that the backward reads, "full" only a block's inputs; those between run some
operators again (`selective.py`).
"""

from __future__ import annotations

from meshwright.costmodel.graph import Block, Op, Ref
from meshwright.costmodel.rules.draws import COUNTED, draws
from meshwright.costmodel.rules.leaf import LEAVES
from meshwright.costmodel.rules.registry import SIDE_EFFECTS

PARTIAL = ("selective", "alternate")
RECOMPUTE = ("none", *PARTIAL, "full")


def recomputable(block: Block) -> bool:
    """Whether running a block twice is harmless: not where a forward updates running statistics, or
    draws what it would not draw again."""
    return not any(keeps_statistics(op) or draws_anew(op) for op in block.ops)


def keeps_statistics(op: Op) -> bool:
    """Whether a norm takes the statistics of its batch, and adds them to running ones."""
    return op.short in SIDE_EFFECTS and bool(op.args[5]) and isinstance(op.args[3], Ref)


def draws_anew(op: Op) -> bool:
    """Whether a call draws other random numbers each time it is run in a step."""
    return draws(op) and op.short not in COUNTED | LEAVES
