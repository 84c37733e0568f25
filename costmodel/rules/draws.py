"""Names of operators that draw random numbers, for the emitter (see `traits.py`)."""

from __future__ import annotations

from meshwright.costmodel.rules.traits import TRAITS, draws

__all__ = ["ATTENTION", "COUNTED", "draws"]

ATTENTION = "scaled_dot_product_attention"
COUNTED = frozenset(
    name
    for name, traits in TRAITS.items()
    if traits.draw is not None and traits.draw.kind not in ("stream", "unplanned")
)
