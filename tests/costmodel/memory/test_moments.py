"""Bytes of an optimizer's moments, and of ZeRO-1's shard of gradients."""

from __future__ import annotations

import pytest

from meshwright.costmodel.memory.states import OPTIMIZER_BYTES, model_states
from meshwright.costmodel.target import Target


def test_moments_of_optimizers() -> None:
    """In single precision but where the name says less."""
    moments = {"adamw": 2, "adam": 2, "momentum": 1, "lion": 1, "adagrad": 1, "sgd": 0}
    less = {"adamw_bf16": 2 * 2, "adamw8bit": 2 * 1}
    assert dict(OPTIMIZER_BYTES) == {name: 4 * count for name, count in moments.items()} | less


@pytest.mark.parametrize(("copies", "gradient", "shard"), [(0, 4, 0), (2, 4, 4), (0, 2, 4)])
def test_zero_1_steps_what_is_reduced_in_place_or_a_copy_in_single_precision(
    copies: int, gradient: int, shard: int
) -> None:
    target = Target(name="", bucket_copies=copies, gradient_bytes=gradient)
    given = {"precision": "bf16", "zero": 1, "dp": 4, "optimizer": "adamw", "target": target}
    assert model_states(100.0, **given).optimizer == 100 / 4 * (4 + 8 + shard)
