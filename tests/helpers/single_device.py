"""Weights as one device makes them: independent references for deferred initialisation."""

import torch
from torch import nn


def initialised(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """All parameters and buffers, those outside the state dict too, of a real model that is
    overwritten and initialised again, by transformers' own walk or by `reset_parameters`."""
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(77)
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(seed)
    if hasattr(model, "initialize_weights"):
        model.initialize_weights()
    else:
        with torch.no_grad():
            model.apply(_reset)
    return named_tensors(model)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by every name they have."""
    pairs = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: x.detach() for name, x in pairs}


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            return
