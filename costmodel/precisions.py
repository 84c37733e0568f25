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

import torch

from meshwright.costmodel.fp8 import SCALED_BY

FP32 = 4
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """`wide`: the dtype of weights as they are computed with, and of all but products in 8 bits;
    `kept`: that of the weights that the optimizer steps, of gradients as they are added up, and of
    moments."""

    wide: str
    kept: str = "fp32"

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return _DTYPES[self.wide]

    @property
    def kept_dtype(self) -> torch.dtype:
        """What the optimizer steps."""
        return _DTYPES[self.kept]


PRECISIONS = MappingProxyType({
    "fp32": Precision(wide="fp32"),
    "bf16": Precision(wide="bf16"),
    "bf16_pure": Precision(wide="bf16", kept="bf16"),
    "fp16": Precision(wide="fp16"),
    **dict.fromkeys(SCALED_BY, Precision(wide="bf16")),
})  # fmt: skip
