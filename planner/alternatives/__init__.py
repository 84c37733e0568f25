"""What a report is asked later: alternatives, the price of overrides, what flips it."""

from meshwright.planner.alternatives.answers import Answers
from meshwright.planner.alternatives.explain import explain_search

__all__ = ["Answers", "explain_search"]
