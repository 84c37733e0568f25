"""The report of a plan as one HTML file: a look at `Report.to_dict()`, and at nothing else."""

from meshwright.planner.page.page import SCHEMA, framed_page, render_page
