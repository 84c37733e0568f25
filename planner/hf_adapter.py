"""What transformers models need while they are traced, switched on by what the model is.

Two things only. `use_cache` is turned off in the (copied) config, because a key/value cache is no part
of training. And transformers, when it sees an exporter, always builds an explicit [batch, 1, s, s] mask,
which rules out the flash kernels; while tracing, it is told that no exporter is at work and that sequences
are not packed, so that it keeps `is_causal=True` as it does in ordinary training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import nn


@contextmanager
def adapted(model: nn.Module) -> Iterator[None]:
    """Trace `model` (a private copy) inside; everything touched in transformers is restored at the end."""
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or not any(hasattr(m, "config") for m in model.modules()):
        yield
        return
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
    patches = {
        "is_torchdynamo_exporting": lambda: False,
        "find_packed_sequence_indices": lambda position_ids: None,
    }
    with _patched(masking, patches):
        yield


@contextmanager
def _patched(module: object, values: dict[str, object]) -> Iterator[None]:
    present = {name: value for name, value in values.items() if hasattr(module, name)}
    with mock.patch.multiple(module, **present) if present else mock.patch("sys.path", sys.path):
        yield
