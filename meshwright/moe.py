"""Mixtures of experts that Meshwright can plan and run: a layer, and the operators it is made of.

A module that calls the operators itself is planned alike; expert parallelism needs a parameter
[experts, in, out] as the weight of each `grouped_linear`, and what stands between `dispatch` and
`combine` to work on each copy alone.
"""

from meshwright.planner.operators import combine, dispatch, grouped_linear
from meshwright.planner.published import GroupedLinear, MoE

__all__ = ["GroupedLinear", "MoE", "combine", "dispatch", "grouped_linear"]
