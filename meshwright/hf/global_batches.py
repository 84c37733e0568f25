"""Batches of a loader as global batches, and predictions of many batches as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.data.loader_arguments import DataError
from meshwright.planner.batch import batch_rows

PADDING = -100  # of labels and predictions of other lengths, as in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatches:
    """Batches of a `loader`, the same on every rank, joined to as many `rows` as a step has; the
    last of a pass may have fewer."""

    loader: Any
    rows: int

    def __iter__(self) -> Iterator[Any]:
        """Raises ValueError where batches don't add up to the rows, or can't be joined."""
        parts, count = list[Any](), 0
        for batch in self.loader:
            parts.append(dict(batch) if isinstance(batch, Mapping) else batch)
            count += batch_rows(parts[-1])
            if count > self.rows:
                raise DataError(
                    f": batches of the loader have {count} rows, where a step has {self.rows}",
                    place="Trainer.get_train_dataloader",
                    legal="batches of which some in a row have as many rows as a step",
                    way_out=f"give batches of {self.rows} rows, or of a divisor of it",
                )
            if count == self.rows:
                yield _joined(parts)
                parts, count = [], 0
        if parts:
            yield _joined(parts)


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    try:
        return pytree.tree_map(
            lambda *xs: torch.cat(xs) if isinstance(xs[0], torch.Tensor) else xs[0], *parts
        )
    except (RuntimeError, ValueError) as error:
        raise DataError(
            f": batches of the loader can't be joined to a step's: {error}",
            place="Trainer.get_train_dataloader",
            legal="batches of one structure and of tensors that differ in their rows alone",
            way_out="pad to one length, or give batches of a step's rows",
        ) from error


def predictions(outputs: Any, model: nn.Module) -> Any:
    """The outputs of a forward without its loss and caches: a tensor, or a tuple of them."""
    if isinstance(outputs, Mapping) and isinstance(outputs.get("outputs"), Mapping | tuple):
        outputs = outputs["outputs"]  # of an overridden compute_loss
    ignored = {"loss", *getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ())}
    if isinstance(outputs, Mapping):
        outputs = tuple(x for name, x in outputs.items() if name not in ignored)
    if isinstance(outputs, torch.Tensor):
        return outputs
    tensors = tuple(x for x in outputs or () if isinstance(x, torch.Tensor))
    return tensors[0] if len(tensors) == 1 else tensors


def numpy_of(batches: Sequence[Any]) -> Any:
    """The rows of all batches as arrays, those of other lengths padded as transformers pads."""
    if isinstance(batches[0], tuple):
        return tuple(numpy_of(xs) for xs in zip(*batches, strict=True))
    arrays = [x.detach().float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy()
              for x in batches]  # fmt: skip
    longest = [max(sizes) for sizes in zip(*(x.shape[1:] for x in arrays), strict=True)]
    padded = [
        np.pad(
            x,
            [(0, 0), *((0, most - n) for most, n in zip(longest, x.shape[1:], strict=True))],
            constant_values=PADDING,
        )
        for x in arrays
    ]
    return np.concatenate(padded)
