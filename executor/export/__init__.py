"""Weights as Hugging Face's libraries read them: written by all ranks, whole on one, converted."""

from meshwright.executor.export.convert import Converted, from_pretrained_files, to_pretrained_files
from meshwright.executor.export.held_tensors import full_state_dict
from meshwright.executor.export.pretrained import save_pretrained
