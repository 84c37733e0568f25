"""Operators that move memory, and leaves: seconds, FLOPs, bytes moved.

    stream    forward reads operands and writes results; backward reads the results' gradients and
              what was saved, writes the operands' gradients
    leaf      its kernels one after the other, none fused with another operator:
              forward     n launches + FLOPs / (peak · efficiency(FLOPs / n)) + bytes / bandwidth
              backward    twice that

A leaf's FLOPs and bytes are in proportion to this rank's part of the first result, but for the
bytes of tensors it takes: those are in proportion to this rank's part of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.costmodel.graph import Op
from meshwright.costmodel.kernels import stream_seconds
from meshwright.costmodel.operators.cost import BACKWARD_S, FORWARD_S, PASS_COLUMNS, Entry
from meshwright.costmodel.operators.fusion import Fusion
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.rules import Work, leaf_of, traits_of
from meshwright.costmodel.sharding import Strategy
from meshwright.profiles.cluster import Device

BACKWARD = 2.0  # gradients of what a leaf takes and of its weights


class _Pass(NamedTuple):
    """Bytes of each kernel of a pass, one after the other, and the number of launches."""

    moved: Sequence[float]
    launches: int


def stream(sizes: LocalSizes, fusion: Fusion, op: Op, strategy: Strategy) -> list[Entry]:
    """The forward and the backward of an operator that moves memory."""
    device = sizes.setting.cluster.device
    launch = 0.0 if op.name in fusion.joined else device.launch_overhead_s
    passes = zip(PASS_COLUMNS, _passes(sizes, fusion, op, strategy), strict=True)
    return [
        Entry(
            column,
            "stream",
            sum(stream_seconds(device, nbytes) for nbytes in kernels.moved)
            + kernels.launches * launch,
            moved_bytes=sum(kernels.moved),
        )
        for column, kernels in passes
    ]


def _passes(sizes: LocalSizes, fusion: Fusion, op: Op, strategy: Strategy) -> tuple[_Pass, _Pass]:
    traits = traits_of(op)
    placed = list(zip(op.operands, strategy.operands, strict=True))
    read = [operand for i, operand in enumerate(placed) if (op.name, i) not in fusion.free_reads]
    written = [
        (value, placement)
        for value, placement in zip(op.results, strategy.results, strict=True)
        if value not in fusion.internal
    ]
    out = sum(sizes.nbytes(v, p) for v, p in written)
    wanted = sum(sizes.nbytes(v, p) for v, p in read if sizes.graph.values[v].requires_grad)
    if traits.kernel == "lookup":  # the gradient of the rows' table is dense
        forward = _Pass([2 * out], 1)
        return forward, _Pass([2 * out + wanted], 1)
    taken = sum(sizes.nbytes(v, p) for v, p in read) + out
    if traits.experts:  # copies are sorted by expert on arrival, or back
        sorting = 2 * max(out, *(sizes.nbytes(v, p) for v, p in read))
        both = _Pass([taken, sorting], 2)
        return both, both
    forward, saves = _Pass([taken], 1), sizes.table.ops[op.name].saves
    if not saves and traits.kernel == "sum":
        # gradients pass through; where a value has several readers they are summed
        return forward, _Pass([wanted], 0)
    saved = sum(
        sizes.nbytes(*(placed[i] if i >= 0 else (op.results[-1 - i], strategy.results[-1 - i])))
        for i in saves
        if i < 0 or (op.name, i) not in fusion.free_reads
    )
    return forward, _Pass([out + saved + wanted], 1)


def leaf(sizes: LocalSizes, op: Op, strategy: Strategy) -> list[Entry]:
    """A leaf's forward, and its backward, in which none of it can wait."""
    work = leaf_of(op).work
    share = sizes.numel(op.results[0], strategy.results[0]) / work.numel
    taken = [
        sizes.numel(value, placement) / max(1, sizes.graph.values[value].numel)
        for value, placement in zip(op.operands, strategy.operands, strict=True)
    ]
    passed = share * work.nbytes
    passed += sum(part * nbytes for part, nbytes in zip(taken, work.taken, strict=True))
    device = sizes.setting.cluster.device
    seconds = leaf_seconds(device, sizes.dtype(op), work, share, passed)
    forward = Entry(FORWARD_S, "leaf", seconds, flops=share * work.flops, moved_bytes=passed)
    return [forward, forward.times(BACKWARD)._replace(column=BACKWARD_S)]


def leaf_seconds(device: Device, dtype: str, work: Work, share: float, passed: float) -> float:
    """Device seconds of the forward of a `share` of a leaf, that moves the bytes `passed`."""
    flops, nbytes = share * work.flops / work.kernels, passed / work.kernels
    busy_s = flops / (device.flops(dtype) * device.matmul_efficiency(flops)) if flops else 0.0
    each_s = busy_s + stream_seconds(device, nbytes) + device.launch_overhead_s
    return work.kernels * each_s
