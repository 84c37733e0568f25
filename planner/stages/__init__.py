"""Stages a search may choose: block programs solved and composed, recomputed as needed."""

from meshwright.planner.stages.chain import Chain, Kind, Runs, boundary_index
from meshwright.planner.stages.programs import MODES, BlockPrograms
from meshwright.planner.stages.recompute import choose_policies, freed_bytes
from meshwright.planner.stages.recompute_levels import (
    ChosenLevel,
    RecomputeLevels,
    recompute_levels,
)

__all__ = [
    "MODES", "BlockPrograms", "Chain", "ChosenLevel", "Kind", "RecomputeLevels", "Runs",
    "boundary_index", "choose_policies", "freed_bytes", "recompute_levels",
]  # fmt: skip
