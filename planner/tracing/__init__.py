"""The user's model traced to a graph of operators."""

from meshwright.planner.tracing.trace import trace
from meshwright.planner.tracing.user_module import CALL_HOOKS, OUTSIDE, TENSOR_HOOKS, Outside, held
