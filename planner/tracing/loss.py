"""The module that is exported: model and loss as one function of flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.planner.batch import split_batch
from meshwright.planner.errors import TraceError
from meshwright.planner.tracing.batch import FakeBatch
from meshwright.planner.tracing.leaves import LeafRecorder
from meshwright.planner.tracing.similar import StandIns


class LossModule(nn.Module):
    """The tensors of a batch, in order -> scalar loss.

    `model` is a copy of the user's in fake tensors, in which `stand_ins` and `leaf_recorder` have
    replaced forwards; `loss_fn` None: the model's output has the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        batch: FakeBatch,
        stand_ins: StandIns,
        leaf_recorder: LeafRecorder,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.batch = batch
        self.stand_ins = stand_ins
        self.leaf_recorder = leaf_recorder

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        args, kwargs, targets = split_batch(self.batch.filled(tensors), self.loss_fn)
        with self.leaf_recorder.recording():
            with _buffers_in_place(self.model), self.stand_ins.watched():
                output = self.model(*args, **kwargs)
            loss = self.loss_fn(output, *targets) if self.loss_fn else _loss_in(output)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss
        maker = "loss_fn" if self.loss_fn else "the model"
        what = _described(output if loss is None and not self.loss_fn else loss)
        raise TraceError(
            f"{maker} gives {what} where a scalar loss is needed; pass loss_fn=, labels among the "
            "inputs so that the model computes its loss, or the sum of several losses"
        )


@contextmanager
def _buffers_in_place(model: nn.Module) -> Iterator[None]:
    """At the end, buffers that the forward assigned anew (`self.ema = ...`) are the old tensors
    again, with the new values written to them: export sees that, and not the assignment."""
    owned = [(m, name, b) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    yield
    for module, name, before in owned:
        after = getattr(module, name)
        if after is not before:
            with torch.no_grad():
                before.copy_(after)
            setattr(module, name, before)


def _loss_in(output: Any) -> Any:
    """The loss in a model's output: its `loss`, the first of a tuple, or the output itself."""
    if isinstance(output, Mapping):
        return output.get("loss")
    loss = getattr(output, "loss", output)
    return loss[0] if isinstance(loss, (tuple, list)) and loss else loss


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {list(output)}"
    return f"a {type(output).__name__}"
