"""Meshwright decides how to train a PyTorch model on a cluster, says why, and runs the decision."""

from costmodel.add_rule import RuleError, rule
from executor.launch import distributed
from executor.reduced import Reduced
from meshwright.api import auto_parallelize
from meshwright.model import ParallelModel
from planner.leaf import leaf
from planner.overrides import OverrideError, Overrides
from planner.plan import Plan, PlanError
from planner.search import InfeasibleError
from planner.trace import TraceError
from profiles.cluster import Cluster

__all__ = [
    "Cluster",
    "InfeasibleError",
    "OverrideError",
    "Overrides",
    "ParallelModel",
    "Plan",
    "PlanError",
    "Reduced",
    "RuleError",
    "TraceError",
    "auto_parallelize",
    "distributed",
    "leaf",
    "rule",
]
