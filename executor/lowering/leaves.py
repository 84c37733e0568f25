"""A leaf in a lowered graph: its own forward on this rank's tensors, in ordinary autograd.

Random numbers inside are drawn from a stream seeded by the step, the micro-batch and the leaf:
ranks that hold replicas draw the same, a rank with a part of the tensors its own. Running the leaf
again in the backward repeats the stream. The generators' seed is a number of the host, so that on a
GPU the host waits for the device once per such leaf and micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from meshwright.costmodel.graph import Op
from meshwright.costmodel.rules import draws, leaf_of
from meshwright.costmodel.sharding import Strategy
from meshwright.executor.lowering.reshard import Axis
from meshwright.planner.operators import Program

MIXER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads neighbouring numbers
SEEDS = 2**63


class LeafCall(nn.Module):
    """One leaf. `salt` tells it apart within its block, `part` is the number of this rank's part of
    its tensors. With a leaf that draws, the last argument is the pair (step seed, first row)."""

    def __init__(self, op: Op, device: torch.device, salt: int, part: int) -> None:
        super().__init__()
        program = leaf_of(op).program
        assert isinstance(program, Program)
        self.random = draws(op)
        self.salt, self.part, self.device = salt, part, device
        # in a tuple, so that the module, which has no weights of its own, is not registered
        self.held = (program, [(m, m.training) for m in _modules(program)])
        for module in _modules(program):
            plain = {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
            vars(module).update({name: x.to(device) for name, x in plain.items()})

    def forward(self, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
        program, modes = self.held
        for module, training in modes:
            module.training = training and self.training
        if not self.random:
            return program(operands)
        with self._stream(operands[-1]):
            return program(operands[:-1])

    @contextmanager
    def _stream(self, rng: torch.Tensor) -> Iterator[None]:
        seed = 0
        for number in (*rng.tolist(), self.salt, self.part):
            seed = (seed ^ number) * MIXER % SEEDS
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(seed)  # alone: torch.manual_seed seeds every GPU
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            yield


def part_number(axes: Sequence[tuple[Strategy, Axis]]) -> int:
    """The number of this rank's part of a leaf's tensors: the same on ranks with replicas."""
    part = 0
    for strategy, axis in axes:
        part = part * axis.size + (axis.rank if strategy.split_factor else 0)
    return part


def _modules(program: Program) -> list[nn.Module]:
    return [] if program.module is None else list(program.module.modules())
