"""What a report is asked later: alternatives, the price of overrides, what flips it, advice."""

from meshwright.planner.alternatives.answers import Answers
from meshwright.planner.alternatives.explain import explain_search
from meshwright.planner.alternatives.lighter import with_advice

__all__ = ["Answers", "explain_search", "with_advice"]
