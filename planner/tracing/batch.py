"""The sample batch of a trace, as fake tensors (shape and dtype, no memory)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from meshwright.planner.batch import batch_rows, input_leaves, split_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBatch:
    """A batch as fake tensors of `rows` rows, made under `mode`.

    `leaves` and `spec` are its pytree; `inputs` gives, for each tensor among the leaves, its path
    and whether dim 0 is the batch; `scale` is `rows` over the rows of the user's sample.
    """

    mode: FakeTensorMode
    leaves: tuple[Any, ...]
    spec: Any
    inputs: tuple[tuple[str, bool], ...]
    rows: int
    scale: float

    @staticmethod
    def of(example_inputs: Any, dtype: torch.dtype, batch_size: int | None) -> FakeBatch:
        """The user's sample with `batch_size` rows (None: its own), floating tensors in `dtype`.

        Raises ValueError where it holds no tensor with a batch dim, or for less than one row.
        """
        sample_rows = batch_rows(example_inputs)
        rows = sample_rows if batch_size is None else batch_size
        if rows < 1:
            raise ValueError(f"batch_size={batch_size!r}; legal: an integer from 1")
        mode = FakeTensorMode()
        named, spec = input_leaves(example_inputs)
        inputs: list[tuple[str, bool]] = []
        leaves: list[Any] = []
        for path, leaf in named:
            if not isinstance(leaf, torch.Tensor):
                leaves.append(leaf)
                continue
            batched = leaf.dim() > 0 and leaf.shape[0] == sample_rows
            shape = (rows, *leaf.shape[1:]) if batched else tuple(leaf.shape)
            inputs.append((path, batched))
            with mode:
                cast = dtype if leaf.is_floating_point() else leaf.dtype
                leaves.append(torch.empty(shape, dtype=cast))
        return FakeBatch(
            mode=mode,
            leaves=tuple(leaves),
            spec=spec,
            inputs=tuple(inputs),
            rows=rows,
            scale=rows / sample_rows,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The batch in the user's structure, with these in the place of its tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def check_call(model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> None:
    """Raise ValueError where a batch does not fit the signature of the model's forward."""
    args, kwargs, _ = split_batch(batch, loss_fn)
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = sorted(kwargs) if kwargs else f"{len(args)} positional"
        raise ValueError(
            f"example_inputs do not fit {type(model).__name__}.forward: {error}. Given: {given}; "
            f"its parameters are {list(signature.parameters)}. Name the entries of the dict after "
            "them, or pass a tuple in their order; targets go with a loss_fn of (output, targets)"
        ) from None
