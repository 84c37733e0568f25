"""The outer search over meshes, schedules, micro-batches and ZeRO."""

from meshwright.planner.search.candidates import Candidate, PlanDraft
from meshwright.planner.search.equal_stages import (
    Combination,
    EqualStages,
    MeshChoice,
    StageDraft,
    StageSetup,
)
from meshwright.planner.search.least_memory import (
    MemoryNeed,
    least_memory,
    least_memory_choices,
    shortfall_bytes,
)
from meshwright.planner.search.search import OPTIMISM, OVERSHOOT, Search, SearchResult
from meshwright.planner.search.taste import TIE

__all__ = [
    "OPTIMISM", "OVERSHOOT", "TIE", "Candidate", "Combination", "EqualStages", "MemoryNeed",
    "MeshChoice", "PlanDraft", "Search", "SearchResult", "StageDraft", "StageSetup",
    "least_memory", "least_memory_choices", "shortfall_bytes",
]  # fmt: skip
