"""The report of a plan: what was chosen, what it costs, what was assumed."""

from meshwright.planner.report.components import Components, busiest, device_groups, why_slower
from meshwright.planner.report.details import sequence_length
from meshwright.planner.report.explain import Searched, explain, explain_plan, memory_summary
from meshwright.planner.report.report import Rehearsed, Report, sensitivity_parts
from meshwright.planner.report.tensor_axis import Excluded, excluded
