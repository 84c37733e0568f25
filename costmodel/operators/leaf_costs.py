"""What a leaf costs: its kernels one after the other, none fused with another operator.

    forward     n launches + FLOPs / (peak · efficiency(FLOPs / n)) + bytes / bandwidth
    backward    twice that
    kept        what its forward saves besides the tensors it takes and gives

all of it in the proportion that this rank's part of the first result has to the whole one, but for
the bytes of tensors that it takes: they are in proportion to this rank's part of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel.kernels.compute import stream_seconds
from meshwright.costmodel.rules.leaf import Work
from meshwright.profiles.cluster import Device

BACKWARD = 2.0  # gradients of what it takes and of its weights


def leaf_seconds(
    device: Device, dtype: str, work: Work, share: float, taken: Sequence[float]
) -> tuple[float, float]:
    """Device seconds of the forward and of the backward of a `share` of a leaf, and of shares of
    the tensors `taken`."""
    flops = share * work.flops / work.kernels
    passed = share * work.nbytes
    passed += sum(part * nbytes for part, nbytes in zip(taken, work.taken, strict=True))
    nbytes = passed / work.kernels
    busy_s = flops / (device.flops(dtype) * device.matmul_efficiency(flops)) if flops else 0.0
    each_s = busy_s + stream_seconds(device, nbytes) + device.launch_overhead_s
    return work.kernels * each_s, BACKWARD * work.kernels * each_s
