"""Checkpoints and weights: saved, loaded, initialised in parts, handed to another plan."""

from meshwright.executor.checkpoint import checkpoint, weights
from meshwright.executor.checkpoint.checkpoint import Saving
from meshwright.executor.checkpoint.handover import hand_over, take_over

__all__ = ["Saving", "checkpoint", "hand_over", "take_over", "weights"]
