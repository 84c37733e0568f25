"""Rows of several documents that only their positions tell apart.

transformers, given positions that begin anew within a row and no mask, keeps the documents of the
row apart. A plan is made of the graph without that (`adapter.py`), in which attention goes over the
whole row: such a batch would be trained on otherwise than by the model itself, and is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.planner.batch import input_leaves
from meshwright.profiles.inputs import MeshwrightError

POSITIONS, MASK = "position_ids", "attention_mask"


def check_positions(model: nn.Module, batch: Any) -> None:
    """Raise ValueError for a batch of a model of transformers whose positions begin anew within a
    row, without a mask."""
    if batch is None or not any(hasattr(m, "config") for m in model.modules()):
        return
    entries = {path.rpartition(".")[2]: x for path, x in input_leaves(batch)[0]}
    positions = entries.get(POSITIONS)
    if entries.get(MASK) is not None or not isinstance(positions, torch.Tensor):
        return
    if positions.dim() != 2 or positions.is_meta or not bool((positions.diff(dim=1) != 1).any()):
        return
    row = int((positions.diff(dim=1) != 1).any(1).nonzero()[0])
    raise MeshwrightError(
        f" begin anew in row {row}, and there is no {MASK}: documents packed to a row, which "
        "attention over the whole row would mix",
        place=f"batch: {POSITIONS}",
        legal=f"consecutive numbers in a row, or a batch with its {MASK}",
        way_out="meshwright.packed(length) packs documents with the mask that keeps them apart",
    )
