"""The report of a plan: what was chosen, what it costs, what was assumed."""

from meshwright.planner.report.components import Components, breakdown, why_slower
from meshwright.planner.report.explain import Searched, explain, explain_plan, memory_summary
from meshwright.planner.report.indivisible import Excluded, excluded
from meshwright.planner.report.report import SCHEMA, Rehearsed, Report, sensitivity_lines

__all__ = [
    "SCHEMA", "Components", "Excluded", "Rehearsed", "Report", "Searched", "breakdown", "excluded",
    "explain", "explain_plan", "memory_summary", "sensitivity_lines", "why_slower",
]  # fmt: skip
