"""The report of a plan as one HTML file: a look at `Report.to_dict()`, and at nothing else."""

from meshwright.planner.page.front import launch_line
from meshwright.planner.page.page import SCHEMA, check_installed, framed_page, render_page
