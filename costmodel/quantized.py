"""Collectives of ZeRO-3 in quantised blocks (ZeRO++): bytes sent, and moved by the codec.

Blocks of b = 256 elements travel as whole numbers of B bits beside one fp32 scale,

    s = max |x| / (2^(B-1) - 1),    q = round(x / s),    |x - s q| <= s / 2

so that n elements are n (B/8 + 4/b) bytes. Weights are gathered in 8 bits (qwZ): each rank
quantises its shard, and all ranks compute with the same rounded weights; the optimizer's stay
exact. Gradients are summed in 4 bits (qgZ) by an all-to-all of parts, which are added up in fp32
where they arrive, in place of a reduce-scatter: of fp32's bytes an eighth, and a bit. Where a stage
keeps secondary shards, it goes in two hops, within the k ranks that do and then between the n/k of
them, for which it is quantised again: of M bytes each rank sends M (k-1)/k near and M/k
(n/k-1)/(n/k) far.

The codec is a dozen eager operators: per element so many bytes of memory traffic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

A = TypeVar("A", float, "NDArray[np.float64]")

QUANTIZED = ("none", "weights", "gradients", "both")
BLOCK = 256
WEIGHT_BITS, GRADIENT_BITS = 8, 4
SCALE_BYTES = 4
# of fp32 (of bf16 a cast more): the largest of each block, the quotient, its rounding, its integer;
# of 4 bits two are joined
QUANTIZE_BYTES = {8: 25.0, 4: 28.0}
CAST_BYTES = 6.0
# an integer times its scale, written or added where it belongs; of 4 bits two are parted first
DEQUANTIZE_BYTES = {8: 15.0, 4: 20.0}


def wire_bytes(numel: float, bits: int) -> float:
    """Bytes of so many elements in quantised blocks."""
    return numel * (bits / 8 + SCALE_BYTES / BLOCK)


def buffer_bytes(elements: A, *, weights: bool, gradients: bool) -> A:
    """Bytes beside those of exact collectives while a quantised unit of so many elements travels:
    what was sent or received, and an eighth of it in fp32."""
    gathered = weights * wire_bytes(1.0, WEIGHT_BITS)
    most = max(gathered, gradients * 2 * wire_bytes(1.0, GRADIENT_BITS))
    return elements * (most + 0.5 if most else 0.0)
