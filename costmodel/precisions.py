"""Precisions by name: what is computed in, what the optimizer steps, and what is rounded to 8 bits.

A step of mixed precision computes with 16-bit weights that are copied from the optimizer's, in
fp32; so are gradients added up, and moments kept (Micikevicius et al., "Mixed precision training",
2018): 18 bytes a parameter with Adam. In pure bf16 all of them are in bf16, and there is one copy
of the weights: 8 bytes; a step that is less than a 512th of a weight is lost in its rounding.
fp32's weights, too, are one copy: 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from meshwright.costmodel.fp8 import SCALED_BY

if TYPE_CHECKING:
    import torch

FP32 = 4
_TYPES = {"fp32": ("float32", FP32), "bf16": ("bfloat16", 2), "fp16": ("float16", 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """`wide`: the dtype of weights as they are computed with, and of all but products in 8 bits;
    `kept`: that of the weights that the optimizer steps, of gradients as they are added up, and of
    moments."""

    wide: str
    kept: str = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights as they are computed with."""
        return _torch_dtype(self.wide)

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of it."""
        return _TYPES[self.wide][1]

    @property
    def kept_dtype(self) -> torch.dtype:
        """Type of weights that the optimizer steps."""
        return _torch_dtype(self.kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of an element of it."""
        return _TYPES[self.kept][1]


def _torch_dtype(name: str) -> torch.dtype:
    import torch  # names of precisions are asked for by commands that need no torch

    dtype: torch.dtype = getattr(torch, _TYPES[name][0])
    return dtype


PRECISIONS = MappingProxyType({
    "fp32": Precision(wide="fp32"),
    "bf16": Precision(wide="bf16"),
    "bf16_pure": Precision(wide="bf16", kept="bf16"),
    "fp16": Precision(wide="fp16"),
    **dict.fromkeys(SCALED_BY, Precision(wide="bf16")),
})  # fmt: skip
