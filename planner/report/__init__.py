"""The report of a plan: what was chosen, what it costs, what was assumed."""

from meshwright.planner.report.components import Components, breakdown, why_slower
from meshwright.planner.report.details import sequence_length
from meshwright.planner.report.explain import Searched, explain, explain_plan, memory_summary
from meshwright.planner.report.indivisible import Excluded, excluded
from meshwright.planner.report.report import SCHEMA, Rehearsed, Report
from meshwright.planner.report.text import sensitivity_lines, table

__all__ = [
    "SCHEMA", "Components", "Excluded", "Rehearsed", "Report", "Searched", "breakdown", "excluded",
    "explain", "explain_plan", "memory_summary", "sensitivity_lines", "sequence_length", "table",
    "why_slower",
]  # fmt: skip
