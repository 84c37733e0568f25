"""Rows of several documents that only positions tell apart are refused, others taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright import Cluster, MeshwrightError, ParallelModel, auto_parallelize
from tests.helpers.traced import ROWS, SEQUENCE, hugging_face

WHOLE = torch.arange(SEQUENCE).repeat(ROWS, 1)
PACKED = torch.stack([WHOLE[0], WHOLE[0] % 3, WHOLE[0]])


def model() -> nn.Module:
    torch.manual_seed(0)
    return hugging_face("llama", 1)[0]


def batch(positions: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**hugging_face("llama", 1)[1], "position_ids": positions, **more}


def planned(example: dict[str, torch.Tensor]) -> ParallelModel:
    cluster = Cluster.local(1, "cpu", measure=False)
    return auto_parallelize(model(), cluster, example_inputs=example, global_batch_size=ROWS)


def test_positions_that_begin_anew_are_refused() -> None:
    says = "begin anew in row 1, and there is no attention_mask"
    with pytest.raises(MeshwrightError, match=says):
        planned(batch(PACKED))
    result = planned(batch(WHOLE))
    for step in (result.train_step, result.eval_step):
        with pytest.raises(MeshwrightError, match=says):
            step(batch(PACKED))


def test_consecutive_positions_and_masks_train_as_the_model_does() -> None:
    mask = torch.ones(ROWS, SEQUENCE, dtype=torch.long)
    for given in (batch(WHOLE), batch(WHOLE + 3), batch(PACKED, attention_mask=mask)):
        expected = float(model()(**given).loss.detach())
        assert float(planned(given).eval_step(given)) == pytest.approx(expected, rel=1e-5)
