"""Lower bounds on steps: relaxations of what the search explores."""

from meshwright.planner.bounds.bounds import Bounds
