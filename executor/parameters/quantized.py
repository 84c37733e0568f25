"""`fully_shard`'s collectives in quantised blocks (ZeRO++'s qwZ and qgZ): `costmodel/quantized.py`
has the mathematics.

What is not finite stays so: its block's scale is infinite or NaN, and so is all that is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from meshwright.costmodel.quantized import BLOCK, GRADIENT_BITS, WEIGHT_BITS
from meshwright.executor.ranks import Place

# torch 2.13 renamed it, and warns at the old name
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
AT_ONCE = 8  # parts in which gathered blocks are turned back, each in fp32 meanwhile


def packed(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of numbers (r, n) as rows of bytes: the integers of all blocks, then their scales."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    scales = torch.linalg.vector_norm(blocks, math.inf, dim=2).div_(2 ** (bits - 1) - 1)
    least = torch.finfo(torch.float32).tiny  # of a block of zeros
    codes = (blocks / scales.clamp_min(least)[..., None]).round_().to(torch.int8)
    if bits == 4:
        codes = (codes[..., ::2] & 15) | (codes[..., 1::2] << 4)
    rows = codes.view(torch.uint8).flatten(1), scales.view(torch.uint8)
    return torch.cat(rows, dim=1)


def unpacked(rows: torch.Tensor, n: int, bits: int) -> torch.Tensor:
    """The numbers (r, n), in fp32, that `packed` rows stand for."""
    count = -(-n // BLOCK)
    stop = count * BLOCK * bits // 8
    codes = rows[:, :stop].reshape(len(rows), count, -1).view(torch.int8)
    scales = rows[:, stop:].clone().view(torch.float32)
    if bits == 4:
        codes = torch.stack(((codes << 4) >> 4, codes >> 4), dim=-1).flatten(2)
    return (codes * scales[..., None]).flatten(1)[:, :n]


def exchanged_sum(x: Sequence[torch.Tensor], group: Any, bits: int = GRADIENT_BITS) -> torch.Tensor:
    """The sum over the ranks of a group of what each of them has for this one; `x` has a tensor for
    each of them."""
    sent = torch.cat([packed(part.reshape(1, -1), bits) for part in x])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
    n = x[0].numel()
    total = unpacked(received[:1], n, bits)
    for row in received[1:]:
        total.add_(unpacked(row[None], n, bits))
    return total.view(-1)


class _Allocating:
    """Buffers as `fully_shard` makes them by itself."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedAllGather(_Allocating):
    """All-gather of weights in blocks of 8 bits; over the group named `exact` as they are."""

    def __init__(self, exact: str | None) -> None:
        self.exact = exact

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        if group.group_name == self.exact:
            return _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        own = packed(input_tensor.view(1, -1), WEIGHT_BITS)
        gathered = own.new_empty(group.size(), own.shape[1])
        _ALL_GATHER(gathered.view(-1), own.view(-1), group=group)
        n, into = input_tensor.numel(), output_tensor.view(len(gathered), -1)
        each = -(-len(gathered) // AT_ONCE)
        for rows, here in zip(gathered.split(each), into.split(each), strict=True):
            here.copy_(unpacked(rows, n, WEIGHT_BITS))
        return None


class QuantizedReduceScatter(_Allocating):
    """Sum of gradients in blocks of 4 bits, by all-to-alls over `hops`: all ranks at once, or those
    near and then those far."""

    def __init__(self, hops: Sequence[Any]) -> None:
        self.hops = hops

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        parts = input_tensor.view(group.size(), -1)
        if self.hops:
            near, far = self.hops
            by_node = parts.view(far.size(), near.size(), -1)
            x = exchanged_sum([by_node[:, i] for i in range(near.size())], near)
            output_tensor.copy_(exchanged_sum([*x.view(far.size(), -1)], far))
        else:
            output_tensor.copy_(exchanged_sum([*parts], group))
        return None


def quantize(module: FSDPModule, place: Place) -> None:
    """Let a module's weights and gradients travel as its stage decides."""
    near, far, sharing = place.secondary, place.far, place.here.sharing
    if sharing.quantizes_weights:
        exact = near.group.group_name if near is not None and near.size > 1 else None
        module.set_custom_all_gather(QuantizedAllGather(exact))  # type: ignore[arg-type]
    if sharing.quantizes_gradients:
        hops = (near.group, far.group) if near and far and near.size > 1 else ()
        module.set_custom_reduce_scatter(QuantizedReduceScatter(hops))  # type: ignore[arg-type]
