"""Patches of transformers while one of its models is traced.

Five things only. `use_cache` is turned off in the (copied) config, because a key/value cache is no
part of training. transformers, when it sees an exporter, always builds an explicit [batch, 1, s, s]
mask, which rules out the flash kernels; while tracing, it is told that no exporter is at work and
that sequences are not packed, so that it keeps `is_causal=True` as it does in ordinary training.
Mixtures of experts are written with our operators (`experts.py`), whichever of its own
implementations the config names. Hand-written backwards that only repeat what autograd does are
left out. And its warnings wait for the user's own forward: a trace prints none of them, and those
that are printed once are not used up.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from meshwright.planner.tracing.transformers import experts as hf_experts

LOGGER = logging.getLogger("transformers")
MASKING = "transformers.masking_utils"
PATCHES: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("is_torchdynamo_exporting", lambda: False),
    ("find_packed_sequence_indices", lambda position_ids: None),
)
# (module, autograd.Function, the same as plain operators)
PLAIN_FORMS: tuple[tuple[str, str, str], ...] = (
    ("transformers.models.bloom.modeling_bloom", "GeLUFunction", "bloom_gelu_forward"),
)


@contextmanager
def adapted(model: nn.Module) -> Iterator[None]:
    """Context in which transformers is patched to trace `model`, a private copy."""
    with ExitStack() as stack:
        if any(hasattr(m, "config") for m in model.modules()):
            for module in model.modules():
                config: Any = getattr(module, "config", None)
                if getattr(config, "use_cache", False):
                    config.use_cache = False
            masking = sys.modules.get(MASKING)
            for name, value in PATCHES:
                if hasattr(masking, name):
                    stack.enter_context(mock.patch.object(masking, name, value))
            experts = getattr(sys.modules.get(hf_experts.PLACE), hf_experts.INTERFACE, None)
            if experts is not None:
                lookup = hf_experts.lookup(experts)
                stack.enter_context(mock.patch.object(experts, hf_experts.LOOKUP, lookup))
            for place, name, plain in PLAIN_FORMS:
                source = sys.modules.get(place)
                if hasattr(source, name) and hasattr(source, plain):
                    direct = type(name, (), {"apply": staticmethod(getattr(source, plain))})
                    stack.enter_context(mock.patch.object(source, name, direct))
            stack.enter_context(_without_warnings())
        yield


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Context in which transformers logs errors alone."""
    level = LOGGER.level
    with ExitStack() as stack:
        for name in ("warning_once", "info_once"):  # cached by what they print
            once: Any = getattr(logging.Logger, name, None)
            if hasattr(once, "__wrapped__"):
                stack.enter_context(mock.patch.object(logging.Logger, name, once.__wrapped__))
        LOGGER.setLevel(max(level, logging.ERROR))
        try:
            yield
        finally:
            LOGGER.setLevel(level)
