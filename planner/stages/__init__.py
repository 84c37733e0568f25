"""Stages a search may choose: block programs solved and composed, recomputed as needed."""

from meshwright.planner.stages.chain import Chain, Kind, Runs, boundary_index
from meshwright.planner.stages.programs import MODES, BlockPrograms
from meshwright.planner.stages.recompute import (
    ChosenLevel,
    RecomputeLevels,
    choose_policies,
    freed_bytes,
    recompute_levels,
)
