"""Recompute policies: which operators of a block run again in its backward, and whether they may.

By what they keep, from all to nothing but a block's inputs:

    none        all that the backward reads
    selective   not the cores of attention that is written out (`repeated.py`)
    pointwise   nor what norms, activations, casts and the like make again cheaply
    widening    nor what products make that is larger than what they read
    products    nor what any other product makes, if it pays
    full        the inputs of the block

and beside them "alternate", what torchtitan keeps: fused attention and every second product.
"""

from __future__ import annotations

from meshwright.costmodel.graph import Block
from meshwright.costmodel.rules import draws_anew, updates_statistics

PARTIAL = ("selective", "pointwise", "widening", "alternate", "products")
RECOMPUTE = ("none", *PARTIAL, "full")


def recomputable(block: Block, *, pure: bool = False) -> bool:
    """Whether running a block twice is harmless: not where a forward updates running statistics
    (unless it is `pure`, see `Target`), or draws what it would not draw again."""
    return not any((not pure and updates_statistics(op)) or draws_anew(op) for op in block.ops)
