"""Checkpoints and weights: saved, loaded and initialised in parts."""

from meshwright.executor.checkpoint import checkpoint, weights
from meshwright.executor.checkpoint.checkpoint import Saving

__all__ = ["Saving", "checkpoint", "weights"]
