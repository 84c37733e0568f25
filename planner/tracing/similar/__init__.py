"""Structurally equal layers: traced a few times, copied for the rest."""

from meshwright.planner.tracing.similar.copied_calls import MARKS, CopiedCalls
from meshwright.planner.tracing.similar.stand_ins import (
    Irregular,
    StandIns,
    comparable,
    identifiers_of,
    overridden,
)
