"""The sample batch in fake tensors: rows, dtypes, structure."""

from __future__ import annotations

import pytest
import torch

from meshwright.planner.tracing.batch import FakeBatch

SAMPLE = {"x": torch.rand(3, 5), "ids": torch.zeros(3, 7, dtype=torch.long), "scale": torch.rand(2)}


def test_tensors_have_the_rows_that_are_traced_and_are_not_rounded() -> None:
    sample = {**SAMPLE, "scale": SAMPLE["scale"].half(), "flag": True}
    batch = FakeBatch.of(sample, torch.bfloat16, 6)
    assert [(tuple(t.shape), t.dtype) for t in batch.tensors] == [
        ((6, 5), torch.float32),
        ((6, 7), torch.long),
        ((2,), torch.bfloat16),
    ]
    assert batch.inputs == (("x", True), ("ids", True), ("scale", False))
    assert (batch.rows, batch.scale) == (6, 2.0)


def test_the_users_structure_is_filled_in_order() -> None:
    batch = FakeBatch.of({**SAMPLE, "flag": True}, torch.float32, None)
    filled = batch.filled([torch.tensor(k) for k in range(3)])
    assert {name: int(x) for name, x in filled.items()} == {"x": 0, "ids": 1, "scale": 2, "flag": 1}
    assert filled["flag"] is True


def test_less_than_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=0; legal: an integer from 1"):
        FakeBatch.of(SAMPLE, torch.float32, 0)
