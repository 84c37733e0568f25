"""The user's model traced to a graph of operators."""

from meshwright.planner.tracing.trace import trace

__all__ = ["trace"]
