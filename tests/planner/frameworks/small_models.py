"""Functions that return (model, example_inputs[, loss_fn]), as the command line takes them."""

from typing import Any

import torch
from torch import nn

from tests.helpers import tiny
from tests.user_code.small_transformers import VOCAB, built

LENGTH = 16


def net() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Any]:
    return tiny.net(), tiny.batch(tiny.ROWS), tiny.loss


def _of_transformers(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    ids = torch.randint(VOCAB, (tiny.ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return built(kind), {"input_ids": ids, "labels": ids}


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return _of_transformers("llama")


def gpt2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return _of_transformers("gpt2")
