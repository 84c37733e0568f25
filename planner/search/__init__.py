"""The outer search over meshes, schedules, micro-batches and ZeRO."""

from meshwright.planner.search.least_memory import (
    least_memory,
    least_memory_choices,
    plan_that_fits,
    some_plan_fits,
)
from meshwright.planner.search.search import Search, SearchResult
from meshwright.planner.search.taste import TIE, axes_of, looks_of, why_simpler
