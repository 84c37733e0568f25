"""Structurally equal layers: traced a few times, copied for the rest."""

from meshwright.planner.tracing.similar.stand_ins import (
    MARKS,
    CopiedCalls,
    Irregular,
    StandIns,
    comparable,
    identifiers_of,
    overridden,
)
