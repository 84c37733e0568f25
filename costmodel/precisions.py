"""Precisions by name: what is computed in, what the optimizer steps, and what is rounded to 8 bits
or 4.

A step of mixed precision computes with 16-bit weights that are copied from the optimizer's, in
fp32; so are gradients added up, and moments kept (Micikevicius et al., "Mixed precision training",
2018): 18 bytes a parameter with Adam. In pure bf16 all of them are in bf16, and there is one copy
of the weights: 8 bytes; a step that is less than a 512th of a weight is lost in its rounding.
fp32's weights, too, are one copy: 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from meshwright.costmodel.target import Target

if TYPE_CHECKING:
    import torch

TENSOR, ROW, BLOCK, FINE = "tensor", "row", "block", "fine"
SCALED_BY = MappingProxyType({"fp8": TENSOR, "fp8_rowwise": ROW, "mxfp8": BLOCK, "nvfp4": FINE})
IN_BLOCK = MappingProxyType({BLOCK: 32, FINE: 16})  # numbers of one scale, of which there is a byte
NARROW = MappingProxyType({"fp8": 8, "fp4": 4})  # bits of products' types
FP32 = 4
_TYPES = {"fp32": ("float32", FP32), "bf16": ("bfloat16", 2), "fp16": ("float16", 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """`wide`: the dtype of weights as they are computed with, and of all but layers' products in a
    `narrow` one; `kept`: that of the weights that the optimizer steps, of gradients as they are
    added up, and of moments."""

    wide: str
    kept: str = "fp32"
    narrow: str = ""

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
    **dict.fromkeys(("fp8", "fp8_rowwise", "mxfp8"), Precision(wide="bf16", narrow="fp8")),
    "nvfp4": Precision(wide="bf16", narrow="fp4"),
})  # fmt: skip


# --- products in 8 and 4 bits ---------------------------------------------------------------------

# Products in 8-bit floats: which there are, how operands are scaled, and what casting them moves.
#
# Precision "fp8" (one scale for each tensor), "fp8_rowwise" (one for each row of what is summed
# over) and "mxfp8" (one for each 32 numbers of such a row: OCP's MX format) is bf16 but for
# products with a parameter in layers, x·Wᵀ and those of experts: in blocks that are the same
# program as another one. The embedding and the head have no such twin, and stay. A tensor x is
# rounded to 8 bits by the largest number in it,
#
#     s = the least power of two with  max |x| <= s · M,    q = fp8(x / s),    x ≈ s q
#
# M = 448 for e4m3, in which operands are, and 57344 for e5m2, in which gradients are where scales
# are of tensors. A scale that is a power of two moves no element on the grid of a floating-point
# format but those below its least normal number: of the same tensor in parts, each with a scale of
# its own, every element is rounded as if the scale were of the whole, but for those below
#
#     2^-6 / 448 · max |x| = 3.5e-5 max |x|  (e4m3),    2^-14 / 57344 · max |x| = 1.1e-9 max |x|
#
# whose error is at most 2^-10 s < 4.4e-6 max |x| (e4m3). So ranks, and micro-batches, scale what
# they have by themselves, and nothing is sent.
#
# Precision "nvfp4" rounds such products' operands to 4 bits (e2m1: M = 6), with a scale in e4m3 for
# each 16 numbers of a row, all times one power of two for the tensor (NVIDIA, "Pretraining large
# language models with NVFP4", arXiv 2509.25149). All is rounded to the nearest: gradients are not
# rounded at random, nor rotated before a weight's gradient, and no layer is left out.
#
# The largest number, the quotient and the cast are three kernels in eager torch, two passes fused;
# a product whose operand lies the other way round (fp8 units take rows by columns) copies it in 8
# bits. With scales of earlier steps (`Target.delayed_scaling`: Transformer Engine's), a tensor is
# read once, for both ways, and a weight once a step, which is left out.


SIDE = 16  # fp8 units take products whose columns and depth are multiples of it
# kernels for each tensor cast: the largest, the scale in a few, the quotient, the cast
EAGER_CALLS, FUSED_CALLS = 11, 2
# bytes read for each element, of 2 bytes before
EAGER_CAST = 2.0 + 4.0 + 2.0
FUSED_CAST = 2.0 + 2.0
DELAYED_CAST = 2.0  # written both ways


class Cast(NamedTuple):
    """Bytes that casts move, and how many kernels they take."""

    nbytes: float
    calls: float


def casts_of(
    precision: str, target: Target, x: float, w: float, y: float
) -> tuple[Cast, Cast, Cast]:
    """Casts for a product of x and w, whose result's gradient is y, elements each: in the forward,
    for the gradient of x, and for that of w. With scales by rows or blocks each product casts its
    operands anew, along what it sums over; with one for each tensor y is cast once."""
    written = NARROW[PRECISIONS[precision].narrow] / 8
    if target.delayed_scaling:
        moved = DELAYED_CAST + 2 * written
        return Cast(moved * x, 0), Cast(moved * y, 0), Cast(0.0, 0)
    eager = target.fusion == "none"
    moved = (EAGER_CAST if eager else FUSED_CAST) + written
    turning = 2 * written * eager  # read and written
    calls = EAGER_CALLS if eager else FUSED_CALLS
    again = SCALED_BY[precision] != TENSOR
    return (
        Cast(moved * (x + w), 2 * calls),
        Cast(moved * (y + w) + turning * w, 2 * calls + eager),
        Cast(moved * (x + again * y) + turning * (x + y), (1 + again) * calls + 2 * eager),
    )


def cast_calls(target: Target) -> float:
    """Operators that the host issues for a forward's casts; twice that at most in a backward."""
    if target.delayed_scaling:
        return 0.0
    return 2 * (EAGER_CALLS if target.fusion == "none" else FUSED_CALLS)
