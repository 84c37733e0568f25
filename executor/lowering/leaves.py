"""A leaf in a lowered graph: its own forward on this rank's tensors, in ordinary autograd.

Random numbers inside are drawn from a stream seeded by the step, the micro-batch and the leaf:
ranks that hold replicas draw the same, a rank with a part of the tensors its own. Running the leaf
again in the backward repeats the stream. The generators' seed is a number of the host, so that on a
GPU the host waits for the device once per such leaf and micro-batch.

A forward that can't run without values (a rehearsal) is replaced by what its trace knows of it:
results of these shapes, and what it keeps for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.costmodel.graph import Op
from meshwright.costmodel.rules import Leaf, draws, leaf_of
from meshwright.costmodel.sharding import Strategy
from meshwright.executor.devices import seeded
from meshwright.executor.host_values import has_values, note_unrun, read
from meshwright.executor.resharding import Axis
from meshwright.planner.operators import Program, UnseenWrite

MIXER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads neighbouring numbers
SEEDS = 2**63
ShapeAndDtype = tuple[Sequence[int], torch.dtype]


class LeafCall(nn.Module):
    """One leaf. `salt` tells it apart within its block, `part` is the number of this rank's part of
    its tensors, `results` are the shape and the dtype of each that it makes, as traced: autocast's
    lists differ by device. With a leaf that draws, the last argument is the pair (step seed, first
    row)."""

    def __init__(
        self, op: Op, device: torch.device, salt: int, part: int, results: Sequence[ShapeAndDtype]
    ) -> None:
        super().__init__()
        program, self.leaf, self.results = leaf_of(op).program, leaf_of(op), tuple(results)
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
            return self._run(program, operands)
        with self._stream(operands[-1]):
            return self._run(program, operands[:-1])

    def _run(self, program: Program, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        try:
            made = program(operands)
            return [x.to(dtype) for x, (_, dtype) in zip(made, self.results, strict=True)]
        except Exception as error:  # whatever a forward does with values it lacks
            if all(map(has_values, operands)) or isinstance(error, UnseenWrite):
                raise
            note_unrun(program.name, error)
        as_traced: Callable[..., Any] = _AsTraced.apply
        made = as_traced(self.leaf, self.results, *operands)
        flows = (*self.leaf.gradients, *[False] * len(made))
        return [x if flow else x.detach() for x, flow in zip(made, flows, strict=False)]

    @contextmanager
    def _stream(self, rng: torch.Tensor) -> Iterator[None]:
        seed = 0
        for number in (*read(rng, lambda: [0, 0]), self.salt, self.part):
            seed = (seed ^ number) * MIXER % SEEDS
        with seeded(self.device, seed):
            yield


class _AsTraced(torch.autograd.Function):
    """A leaf's results without values, and what it keeps: its work's `saves` and `saved_bytes`."""

    @staticmethod
    def forward(ctx: Any, leaf: Leaf, results: Sequence[ShapeAndDtype], *operands: Any) -> Any:
        device = operands[0].device
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in results]
        work, ctx.operands = leaf.work, [(x.shape, x.dtype) for x in operands]
        part = made[0].numel() / max(1, work.numel) if made else 1.0
        beside = torch.empty(int(work.saved_bytes * part), dtype=torch.uint8, device=device)
        saved = [operands[k] if k >= 0 else made[-1 - k] for k in work.saves]
        ctx.save_for_backward(*saved, beside)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _ = ctx.saved_tensors  # lets go of them
        device = gradients[0].device
        needed = zip(ctx.needs_input_grad[2:], ctx.operands, strict=True)
        made = [torch.zeros(x, dtype=d, device=device) if flow else None for flow, (x, d) in needed]
        return (None, None, *made)


def part_number(axes: Sequence[tuple[Strategy, Axis]]) -> int:
    """The number of this rank's part of a leaf's tensors: the same on ranks with replicas."""
    part = 0
    for strategy, axis in axes:
        part = part * axis.size + (axis.rank if strategy.split_factor else 0)
    return part


def _modules(program: Program) -> list[nn.Module]:
    return [] if program.module is None else list(program.module.modules())
