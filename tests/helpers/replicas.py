"""torch's own nn.DataParallel on devices that are not there: its code runs on meta tensors, and
what it asks to be copied between devices is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import comm, gather, replicate

Tensors = Sequence[torch.Tensor]


@dataclass(slots=True)
class Copies:
    """Bytes over the first device's links, of weights on one other device, and elements of the
    outputs that the first one gathers."""

    moved: int = 0
    replica: int = 0
    gathered: int = 0


def _nbytes(tensors: Tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def counted(of: Copies) -> Iterator[None]:
    """Copies between devices in place of `torch.nn.parallel.comm`'s."""

    def broadcast(tensors: Tensors, devices: Sequence[int], *_: object) -> list[list[torch.Tensor]]:
        of.replica = _nbytes(tensors)
        of.moved += (len(devices) - 1) * of.replica
        return [[t.detach().clone() for t in tensors] for _ in devices]

    def reduce(inputs: Sequence[Tensors], *_: object) -> tuple[torch.Tensor, ...]:
        of.moved += sum(_nbytes(gradients) for gradients in inputs[1:])
        return tuple(torch.stack(parts).sum(0) for parts in zip(*inputs, strict=True))

    def together(tensors: Tensors, dim: int, *_: object) -> torch.Tensor:
        of.gathered = sum(t.numel() for t in tensors)
        return torch.cat([*tensors], dim)

    def apart(whole: torch.Tensor, devices: Sequence[int], *sizes_dim: Any) -> Tensors:
        sizes, dim, *_ = sizes_dim
        return whole.split([*(sizes or [whole.shape[dim] // len(devices)] * len(devices))], dim)

    with (
        mock.patch.object(comm, "broadcast_coalesced", broadcast),
        mock.patch.object(comm, "reduce_add_coalesced", reduce),
        mock.patch.object(comm, "gather", together),
        mock.patch.object(comm, "scatter", apart),
    ):
        yield


def copies_of_a_step(
    module: nn.Module, inputs: torch.Tensor, *, devices: int, microbatches: int
) -> Copies:
    """A step of a module on meta, as `DataParallel.forward` has it: `inputs` are a device's."""
    of, ids = Copies(), [*range(devices)]
    with counted(of):
        for _ in range(microbatches):
            outputs = [replica(inputs) for replica in replicate(module, ids)]
            gather(outputs, ids[0]).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    return of
