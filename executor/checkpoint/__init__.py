"""Checkpoints and weights: saved, loaded, initialised in parts, handed to another plan."""

from meshwright.executor.checkpoint import checkpoint, weights
from meshwright.executor.checkpoint.checkpoint import Saving
from meshwright.executor.checkpoint.collected import SavedTensor, planned_save
from meshwright.executor.checkpoint.handover import hand_over, take_over

__all__ = [
    "SavedTensor", "Saving", "checkpoint", "hand_over", "planned_save", "take_over", "weights",
]  # fmt: skip
