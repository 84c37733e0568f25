"""A plan that runs: its steps, and what it holds."""

from meshwright.running.planned import PlannedModel
from meshwright.running.state import State
from meshwright.running.steps import Steps, repeated

__all__ = ["PlannedModel", "State", "Steps", "repeated"]
