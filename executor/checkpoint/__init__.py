"""Checkpoints and weights: saved, loaded, initialised in parts, handed to another plan."""

from meshwright.executor.checkpoint import checkpoint, values, weights
from meshwright.executor.checkpoint.apart import load_apart, save_apart
from meshwright.executor.checkpoint.checkpoint import Saving, check_loaded
from meshwright.executor.checkpoint.collected import SavedTensor, model_tensors, planned_save
from meshwright.executor.checkpoint.handover import hand_over, take_over
from meshwright.executor.checkpoint.name_matching import Wanted, match_names
from meshwright.executor.checkpoint.notes import MODEL, first_notes
