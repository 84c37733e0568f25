"""What a leaf costs: its kernels one after the other, none fused with another operator.

    forward     n launches + FLOPs / (peak · efficiency(FLOPs / n)) + bytes / bandwidth
    backward    twice that
    kept        what its forward saves besides the tensors it takes and gives

all of it in the proportion that this rank's part of the first result has to the whole one, but for
the bytes of tensors that it takes: they are in proportion to this rank's part of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.costmodel.graph import Op
from meshwright.costmodel.kernels.compute import stream_seconds
from meshwright.costmodel.memory.storage import Held, Storage
from meshwright.costmodel.rules.leaf import Work, leaf_of
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


def saved_by_leaf(op: Op, operands: Sequence[Held], results: Sequence[Held]) -> Iterator[Storage]:
    """Allocations that one call keeps for its backward."""
    work = leaf_of(op).work
    for i in work.saves:
        yield (operands[i] if i >= 0 else results[-1 - i]).storage
    if work.saved_bytes:
        yield Storage(work.saved_bytes * results[0].numel / work.numel)
