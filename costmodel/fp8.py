"""Products in 8-bit floats: which there are, how operands are scaled, and what casting them moves.

Precision "fp8" (one scale for each tensor), "fp8_rowwise" (one for each row of what is summed over)
and "mxfp8" (one for each 32 numbers of such a row: OCP's MX format) is bf16 but for products with a
parameter in layers, x·Wᵀ and those of experts: in blocks that are the same program as another one.
The embedding and the head have no such twin, and stay. A tensor x is rounded to 8 bits by the
largest number in it,

    s = the least power of two with  max |x| <= s · M,    q = fp8(x / s),    x ≈ s q

M = 448 for e4m3, in which operands are, and 57344 for e5m2, in which gradients are where scales are
of tensors. A scale that is a power of two moves no element on the grid of a floating-point format
but those below its least normal number: of the same tensor in parts, each with a scale of its own,
every element is rounded as if the scale were of the whole, but for those below

    2^-6 / 448 · max |x| = 3.5e-5 max |x|  (e4m3),    2^-14 / 57344 · max |x| = 1.1e-9 max |x|

whose error is at most 2^-10 s < 4.4e-6 max |x| (e4m3). So ranks, and micro-batches, scale what they
have by themselves, and nothing is sent.

The largest number, the quotient and the cast are three kernels in eager torch, two passes fused; a
product whose operand lies the other way round (fp8 units take rows by columns) copies it in 8 bits.
With scales of earlier steps (`Target.delayed_scaling`: Transformer Engine's), a tensor is read
once, for both ways, and a weight once a step, which is left out.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

from meshwright.costmodel.target import Target

TENSOR, ROW, BLOCK = "tensor", "row", "block"
SCALED_BY = MappingProxyType({"fp8": TENSOR, "fp8_rowwise": ROW, "mxfp8": BLOCK})
FP8 = tuple(SCALED_BY)
IN_BLOCK = 32  # numbers of one scale, of which there is a byte
SIDE = 16  # fp8 units take products whose columns and depth are multiples of it
# kernels for each tensor cast: the largest, the scale in a few, the quotient, the cast
EAGER_CALLS, FUSED_CALLS = 11, 2
# bytes moved for each element, of 2 bytes before
EAGER_CAST = 2.0 + 4.0 + 3.0
FUSED_CAST = 2.0 + 3.0
DELAYED_CAST = 4.0  # read, written both ways
TRANSPOSED = 2.0  # 8 bits, read and written


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
    if target.delayed_scaling:
        return Cast(DELAYED_CAST * x, 0), Cast(DELAYED_CAST * y, 0), Cast(0.0, 0)
    eager = target.fusion == "none"
    moved, turning = (EAGER_CAST, TRANSPOSED) if eager else (FUSED_CAST, 0.0)
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
