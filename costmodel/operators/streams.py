"""Seconds of operators that move memory, and of leaves.

    stream    forward reads operands and writes results; backward reads the results' gradients and
              what was saved, writes the operands' gradients
    leaf      its kernels one after the other, none fused with another operator:
              forward     n launches + FLOPs / (peak · efficiency(FLOPs / n)) + bytes / bandwidth
              backward    twice that

A leaf's FLOPs and bytes are in the proportion that this rank's part of the first result has to the
whole one, but for the bytes of tensors it takes: those are in proportion to this rank's part of
each.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel.graph import Op
from meshwright.costmodel.kernels import stream_seconds
from meshwright.costmodel.operators.fusion import Fusion
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.rules import Work, leaf_of, traits_of
from meshwright.costmodel.sharding import Strategy
from meshwright.profiles.cluster import Device

BACKWARD = 2.0  # gradients of what a leaf takes and of its weights


def stream(
    sizes: LocalSizes, fusion: Fusion, op: Op, strategy: Strategy
) -> tuple[float, float, float]:
    """Seconds of the forward, of the backward, and of weight gradients: none."""
    device, traits = sizes.setting.cluster.device, traits_of(op)
    launch = 0.0 if op.name in fusion.joined else device.launch_overhead_s
    placed = list(zip(op.operands, strategy.operands, strict=True))
    read = [each for i, each in enumerate(placed) if (op.name, i) not in fusion.free_reads]
    written = [
        (value, placement)
        for value, placement in zip(op.results, strategy.results, strict=True)
        if value not in fusion.internal
    ]
    out = sum(sizes.nbytes(v, p) for v, p in written)
    wanted = sum(sizes.nbytes(v, p) for v, p in read if sizes.graph.values[v].requires_grad)
    if traits.kernel == "lookup":  # the gradient of the rows' table is dense
        return (
            stream_seconds(device, 2 * out) + launch,
            stream_seconds(device, 2 * out + wanted) + launch,
            0.0,
        )
    forward = stream_seconds(device, sum(sizes.nbytes(v, p) for v, p in read) + out)
    if traits.experts:  # copies are sorted by expert on arrival, or back
        sorting = stream_seconds(device, 2 * max(out, *(sizes.nbytes(v, p) for v, p in read)))
        moving = forward + sorting + 2 * launch
        return moving, moving, 0.0
    saves = sizes.table.ops[op.name].saves
    if not saves and traits.kernel == "sum":
        # gradients pass through; where a value has several readers they are summed
        return forward + launch, stream_seconds(device, wanted), 0.0
    saved = sum(
        sizes.nbytes(*(placed[i] if i >= 0 else (op.results[-1 - i], strategy.results[-1 - i])))
        for i in saves
        if i < 0 or (op.name, i) not in fusion.free_reads
    )
    backward = stream_seconds(device, out + saved + wanted)
    return forward + launch, backward + launch, 0.0


def leaf(sizes: LocalSizes, op: Op, strategy: Strategy) -> tuple[float, float, float]:
    """Seconds of a leaf's forward and of its backward, in which none of it can wait."""
    work = leaf_of(op).work
    share = sizes.numel(op.results[0], strategy.results[0]) / work.numel
    taken = [
        sizes.numel(value, placement) / max(1, sizes.graph.values[value].numel)
        for value, placement in zip(op.operands, strategy.operands, strict=True)
    ]
    device = sizes.setting.cluster.device
    return *leaf_seconds(device, sizes.dtype(op), work, share, taken), 0.0


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
