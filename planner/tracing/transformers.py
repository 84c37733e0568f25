"""Patches of transformers while one of its models is traced.

`use_cache` is turned off in the (copied) config, because a key/value cache is no part of training.
transformers, when it sees an exporter, always builds an explicit [batch, 1, s, s] mask, which rules
out the flash kernels; while tracing, it is told that no exporter is at work and that sequences are
not packed, so that it keeps `is_causal=True` as it does in ordinary training. Mixtures of experts
are written with our operators (`lookup`), whichever of its implementations the config names.
Hand-written backwards that only repeat what autograd does are left out. And a trace prints none of
its warnings, so that those printed once wait for the user's own forward.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

from meshwright.planner.batch import input_leaves
from meshwright.planner.errors import ExampleInputsError
from meshwright.planner.operators import combine, dispatch, grouped_linear

LOGGER = logging.getLogger("transformers")
HEAD = re.compile(r"(LMHeadModel|For[A-Z]\w*)$")  # of a class's name: `LlamaForCausalLM`
POSITIONS, MASK = "position_ids", "attention_mask"
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
            experts = getattr(sys.modules.get(PLACE), INTERFACE, None)
            if experts is not None:
                stack.enter_context(mock.patch.object(experts, LOOKUP, lookup(experts)))
            for place, name, plain in PLAIN_FORMS:
                source = sys.modules.get(place)
                if hasattr(source, name) and hasattr(source, plain):
                    direct = type(name, (), {"apply": staticmethod(getattr(source, plain))})
                    stack.enter_context(mock.patch.object(source, name, direct))
            stack.enter_context(_without_warnings())
        yield


def check_positions(model: nn.Module, batch: Any) -> None:
    """Raise ValueError for a batch of a model of transformers whose positions begin anew within a
    row, without a mask: transformers keeps the documents of such a row apart, the trace doesn't."""
    if batch is None or not any(hasattr(m, "config") for m in model.modules()):
        return
    entries = {path.rpartition(".")[2]: x for path, x in input_leaves(batch)[0]}
    positions = entries.get(POSITIONS)
    if entries.get(MASK) is not None or not isinstance(positions, Tensor):
        return
    if positions.dim() != 2 or positions.is_meta or not bool((positions.diff(dim=1) != 1).any()):
        return
    row = int((positions.diff(dim=1) != 1).any(1).nonzero()[0])
    raise ExampleInputsError(
        f" begin anew in row {row}, and there is no {MASK}: documents packed to a row, which "
        "attention over the whole row would mix",
        place=f"batch: {POSITIONS}",
        legal=f"consecutive numbers in a row, or a batch with its {MASK}",
        way_out="meshwright.packed(length) packs documents with the mask that keeps them apart",
    )


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


# --- experts --------------------------------------------------------------------------------------
#
# The experts of transformers, written with the operators of `planner/operators/moe.py`.
#
# A module whose class went through transformers' `use_experts_implementation` says by attributes
# how its experts are laid out, and looks its forward up by name at every call. With n tokens, k
# experts chosen for each and E of them, x [n, h], chosen [n, k] and weights [n, k], all of those
# forwards are
#
#     y_t = Σ_j  weights_tj · norm(down_e · gate(up_e x_t + a_e) + c_e),        e = chosen_tj
#
#     has_gate             up is `gate_up_proj`, gate `_apply_gate`; else `up_proj`, and `act_fn`
#     has_bias             a_e and c_e are `<projection>_bias` [E, o], else none
#     is_transposed        matrices are stored as [E, i, o], else as nn.Linear does, [E, o, i]
#     is_concatenated      how the halves of `gate_up_proj` lie: known to `_apply_gate`
#     has_post_expert_norm norm is `post_expert_norm`, else nothing
#
# The loop over experts that were chosen (`eager`) can't be exported, and the kernels that stand for
# it sort tokens of the whole batch, which rules out a split one.


PLACE, INTERFACE, LOOKUP = "transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS", "get_interface"
Forward = Callable[..., Tensor]


def lookup(interface: Mapping[str, Forward]) -> Callable[[str | None, Forward], Forward]:
    """`get_interface` of transformers' registry, with `experts_forward` for the module's own loop
    and for its equals that transformers brings; what a user registered there stays."""
    plain: Callable[[str | None, Forward], Forward] = getattr(interface, LOOKUP)

    def get_interface(name: str | None, default: Forward) -> Forward:
        chosen = plain(name, default)
        source = getattr(chosen, "__module__", "")
        replaced = chosen is default or source.startswith("transformers.")

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            # transformers' expert parallelism hands a rank other experts than the module says
            if not replaced or getattr(module, "_is_expert_parallel", False):
                return chosen(module, *args, **kwargs)
            return experts_forward(module, *args, **kwargs)

        return forward

    return get_interface


def experts_forward(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Tokens [n, h], their experts [n, k] and weights [n, k] -> [n, h], the sum above."""

    def product(rows: Tensor, name: str) -> Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        matrices = getattr(module, name)
        by_linear = not module.is_transposed
        y: Tensor = grouped_linear(rows.to(matrices.dtype), matrices, experts, bias, by_linear)
        return y

    experts = chosen.unsqueeze(1)  # [n, 1, k]: n tokens of sequences of one
    rows = dispatch(x.unsqueeze(1), experts)
    if module.has_gate:
        rows = module._apply_gate(product(rows, "gate_up_proj"))
    else:
        rows = module.act_fn(product(rows, "up_proj"))
    rows = product(rows, "down_proj")
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
        # a copy of no expert is zero before the norm, and need not be behind it
        weights = weights.masked_fill(chosen >= module.down_proj.shape[0], 0.0)
    combined: Tensor = combine(rows * weights.unsqueeze(1).unsqueeze(-1))
    return combined.squeeze(1).to(x.dtype)


def model_name(model: nn.Module) -> str:
    """The name of a model's checkpoint (`Meta-Llama-3-70B`), else its class without the head
    (`Llama`)."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):  # peft's
        inner = inner.get_base_model()
    checkpoint = getattr(getattr(inner, "config", None), "name_or_path", "")
    if isinstance(checkpoint, str) and (named := checkpoint.rstrip("/").rpartition("/")[2]):
        return named
    kind = type(inner).__name__
    return HEAD.sub("", kind) or kind
