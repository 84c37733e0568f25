"""Recompute policies: which operators of a block run again in its backward, and whether they may.

"none" keeps all that the backward reads, "full" only a block's inputs; those between run some
operators again (`selective.py`).
"""

from __future__ import annotations

from meshwright.costmodel.graph import Block
from meshwright.costmodel.rules import draws_anew, updates_statistics

PARTIAL = ("selective", "alternate")
RECOMPUTE = ("none", *PARTIAL, "full")


def recomputable(block: Block, *, pure: bool = False) -> bool:
    """Whether running a block twice is harmless: not where a forward updates running statistics
    (unless it is `pure`, see `Target`), or draws what it would not draw again."""
    return not any((not pure and updates_statistics(op)) or draws_anew(op) for op in block.ops)
