"""Names of operators that draw random numbers, for the emitter (see `traits.py`)."""

from __future__ import annotations

from meshwright.costmodel.rules.traits import TRAITS, draws

__all__ = ["ATTENTION", "COUNTED", "draws"]

ATTENTION = "scaled_dot_product_attention"
COUNTED = frozenset(name for name, each in TRAITS.items() if each.draw and each.draw.by_counter)
