"""Optimizers as plans name them (`costmodel/memory/optimizers.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from meshwright.costmodel.memory import FUSED
from meshwright.executor.parameters.own_optimizers import LAMB, LARS, Muon
from meshwright.executor.parameters.whole_tensors import WholeTensors

BY_NAME: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType({
    "adamw": torch.optim.AdamW,
    "adamw_fused": lambda params, **options: torch.optim.AdamW(params, **options, fused=True),
    "adam": torch.optim.Adam,
    "adam_fused": lambda params, **options: torch.optim.Adam(params, **options, fused=True),
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "lamb": LAMB,
    "lars": LARS,
    "muon": Muon,
    "sgd": lambda params, **options: torch.optim.SGD(params, **{"lr": 0.1, **options}),
    "momentum": lambda params, **options: torch.optim.SGD(
        params, **{"lr": 0.1, "momentum": 0.9, **options}
    ),
})  # fmt: skip
_WRITTEN = ("lamb", "lars", "lion", "muon", "adafactor", "shampoo")  # whoever wrote it


def name_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Name of an optimizer in plans; None for one that they don't know."""
    if isinstance(optimizer, WholeTensors):
        optimizer = optimizer.inner
    group, kind = optimizer.param_groups[0], type(optimizer)
    if named := named_kind(kind):
        return named
    if isinstance(optimizer, torch.optim.Adam):  # AdamW too
        plain = "adamw" if isinstance(optimizer, torch.optim.AdamW) else "adam"
        return plain + FUSED * bool(group.get("fused"))
    if isinstance(optimizer, torch.optim.SGD):
        return "momentum" if group["momentum"] else "sgd"
    return "adagrad" if isinstance(optimizer, torch.optim.Adagrad) else None


def named_kind(kind: Any) -> str | None:
    """Name in plans of a class that says it by its own name, whoever wrote it: a word of it, in
    capitals or begun with one."""
    said = getattr(kind, "__name__", "")
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", said)]
    if "8bit" in said.lower() and "adam" in words:
        return "adamw8bit"
    return next((name for name in _WRITTEN if name in words), None)
