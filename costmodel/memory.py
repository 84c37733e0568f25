"""Bytes a device holds: model states by precision and ZeRO stage, and what autograd saves.

Model states with AdamW (field's notation, per parameter): fp32 training holds 4 weight + 4 gradient
+ 8 moments = 16 bytes. bf16/fp16 holds 2 weight + 4 gradient accumulated in fp32 + 4 master + 8
moments = 18. ZeRO-1 divides master, moments and the gradient shard handed to the optimizer by the
data-parallel degree.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# moments kept per parameter, bytes (fp32)
OPTIMIZER_BYTES: Mapping[str, int] = MappingProxyType(
    {"adamw": 8, "adam": 8, "sgd": 0, "momentum": 4, "lion": 4, "adagrad": 4}
)


def model_state_bytes(numel: float, *, precision: str, zero: int, dp: int, optimizer: str) -> float:
    """Bytes of weights, gradients and optimizer states of `numel` local (tensor-parallel)
    parameters."""
    moments = optimizer_bytes(optimizer)
    mixed = precision != "fp32"
    if zero == 0:
        return numel * ((2 + 4 + 4 + moments) if mixed else (4 + 4 + moments))
    compute = 2 if mixed else 4
    sharded = 4 + 4 + moments  # master, gradient shard, moments
    return numel * (compute + 4 + sharded / dp)


def optimizer_bytes(optimizer: str) -> int:
    """Moment bytes per parameter; ValueError for an optimizer whose states are unknown."""
    try:
        return OPTIMIZER_BYTES[optimizer]
    except KeyError:
        raise ValueError(
            f"optimizer={optimizer!r}: the planner knows the states of {sorted(OPTIMIZER_BYTES)}; "
            "name the one with as many moments as yours (the model is trained with any torch "
            "optimizer)"
        ) from None


def optimizer_step_bytes(numel: float, *, optimizer: str) -> float:
    """Bytes an optimizer step reads and writes for `numel` parameters, all in fp32."""
    return numel * (3 * 4 + 2 * optimizer_bytes(optimizer))
