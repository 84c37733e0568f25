"""The outer search over meshes, schedules, micro-batches and ZeRO."""

from meshwright.planner.search.explore import Effort, Explorer, Queue
from meshwright.planner.search.least_memory import (
    MemoryNeed,
    least_memory,
    least_memory_choices,
    shortfall_bytes,
)
from meshwright.planner.search.relaxations import plan_that_fits, some_plan_fits
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.search import Search
from meshwright.planner.search.taste import TIE, looks_of, why_simpler

__all__ = [
    "TIE", "Effort", "Explorer", "MemoryNeed", "Queue", "Search", "SearchResult",
    "least_memory", "least_memory_choices", "looks_of", "plan_that_fits", "shortfall_bytes",
    "some_plan_fits", "why_simpler",
]  # fmt: skip
