"""What transformers models need while they are traced, switched on by what the model is.

Two things only. `use_cache` is turned off in the (copied) config, because a key/value cache is no
part of training. And transformers, when it sees an exporter, always builds an explicit [batch, 1,
s, s] mask, which rules out the flash kernels; while tracing, it is told that no exporter is at work
and that sequences are not packed, so that it keeps `is_causal=True` as it does in ordinary
training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

PATCHES: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("is_torchdynamo_exporting", lambda: False),
    ("find_packed_sequence_indices", lambda position_ids: None),
)


@contextmanager
def adapted(model: nn.Module) -> Iterator[None]:
    """Trace `model` (a private copy) inside; what is touched in transformers is restored at the
    end."""
    masking = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        if masking is not None and any(hasattr(m, "config") for m in model.modules()):
            for module in model.modules():
                config: Any = getattr(module, "config", None)
                if getattr(config, "use_cache", False):
                    config.use_cache = False
            for name, value in PATCHES:
                if hasattr(masking, name):
                    stack.enter_context(mock.patch.object(masking, name, value))
        yield
