"""Rows of several documents that only positions tell apart are refused, others taken."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright import Cluster, MeshwrightError, ParallelModel, auto_parallelize

LENGTH = 8
WHOLE = torch.arange(LENGTH).repeat(2, 1)
PACKED = torch.tensor([[*range(LENGTH)], [0, 1, 2, 3, 0, 1, 2, 3]])


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def batch(positions: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(32, (2, LENGTH), generator=draw)
    return {"input_ids": ids, "labels": ids, "position_ids": positions, **more}


def planned(example: dict[str, torch.Tensor]) -> ParallelModel:
    cluster = Cluster.local(1, "cpu", measure=False)
    return auto_parallelize(model(), cluster, example_inputs=example, global_batch_size=2)


def test_positions_that_begin_anew_are_refused() -> None:
    says = "begin anew in row 1, and there is no attention_mask"
    with pytest.raises(MeshwrightError, match=says):
        planned(batch(PACKED))
    result = planned(batch(WHOLE))
    for step in (result.train_step, result.eval_step):
        with pytest.raises(MeshwrightError, match=says):
            step(batch(PACKED))


def test_consecutive_positions_and_masks_train_as_the_model_does() -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    for given in (batch(WHOLE), batch(WHOLE + 3), batch(PACKED, attention_mask=mask)):
        expected = float(model()(**given).loss.detach())
        assert float(planned(given).eval_step(given)) == pytest.approx(expected, rel=1e-5)
