"""One name for operators that torch has under several."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch

ALIASES: Mapping[str, str] = MappingProxyType({
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "negative": "neg",
    "absolute": "abs", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "not_equal": "ne", "clip": "clamp", "concat": "cat", "concatenate": "cat", "arctan": "atan",
    "special_expit": "sigmoid", "special_log1p": "log1p", "special_expm1": "expm1",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax",
})  # fmt: skip


@functools.cache
def plain_name(target: str) -> str:
    """`aten.multiply.Tensor` -> `aten.mul.Tensor`, where that takes the same arguments."""
    namespace, name, overload = target.split(".")
    if namespace != "aten" or name not in ALIASES:
        return target
    packets = (getattr(torch.ops.aten, n) for n in (name, ALIASES[name]))
    found = [getattr(packet, overload, None) for packet in packets]
    takes = [[(a.name, str(a.type)) for a in f._schema.arguments] if f else None for f in found]
    return f"aten.{ALIASES[name]}.{overload}" if takes[0] == takes[1] else target
