"""The user's batch: its rows, its tensors by path, and the split into inputs and targets."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.planner.errors import ExampleInputsError
from meshwright.profiles.inputs import shown
from meshwright.profiles.inputs.limits import MAX_DEPTH, MAX_ROWS


def batch_rows(example_inputs: Any) -> int:
    """The rows of a sample batch: the commonest dim 0 of its tensors. Raises ValueError where it
    holds no tensor with a dim."""
    _check_depth(example_inputs)
    leaves = [leaf for _, leaf in input_leaves(example_inputs)[0]]
    sizes = [t.shape[0] for t in leaves if isinstance(t, torch.Tensor) and t.dim()]
    if not sizes:
        raise ExampleInputsError(
            f"={shown(example_inputs)} holds no tensor with a batch dim",
            place="example_inputs",
            legal=(
                "a dict of keyword or a tuple of positional arguments of the model for one "
                "sample batch, batch dim first"
            ),
            way_out="pass one, e.g. example_inputs={'input_ids': ids, 'labels': ids}",
        )
    rows = Counter(sizes).most_common(1)[0][0]
    if not 1 <= rows <= MAX_ROWS:
        raise ExampleInputsError(
            f" has {rows} rows",
            place="example_inputs",
            legal=f"1 to {MAX_ROWS} rows",
            way_out="pass a sample batch of any other size; its values don't matter",
        )
    return rows


def with_rows(batch: Any, batched: Collection[str], rows: slice | list[int]) -> Any:
    """These rows of a batch, of its tensors that have rows (`batched`, by path)."""
    named, spec = input_leaves(batch)
    leaves = [x[rows] if path in batched else x for path, x in named]
    return pytree.tree_unflatten(leaves, spec)


def _check_depth(batch: Any) -> None:
    """Raise `MeshwrightError` for a batch nested too deeply, or in itself."""
    level = [batch]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for entry in level:
            if isinstance(entry, Mapping):
                inner += entry.values()
            elif isinstance(entry, list | tuple):
                inner += entry
        if not inner:
            return
        level = inner
    raise ExampleInputsError(
        " is nested too deeply, or in itself",
        place="the batch",
        legal=f"up to {MAX_DEPTH} levels",
        way_out="pass a dict or a tuple of tensors",
    )


def input_leaves(batch: Any) -> tuple[list[tuple[str, Any]], Any]:
    """A batch as (path, leaf) pairs and its structure; paths like `input_ids`, `0`, `0.mask`.
    Raises ValueError for a tensor whose rows can't be cut out."""
    # mappings that torch takes for leaves (a tokenizer's output) as dicts
    plain = dict(batch) if isinstance(batch, Mapping) else batch
    leaves, spec = pytree.tree_flatten_with_path(plain)
    named = [(path_of(path), leaf) for path, leaf in leaves]
    for path, leaf in named:
        if isinstance(leaf, torch.Tensor) and (kind := unusual_kind(leaf)):
            raise ExampleInputsError(
                f" is a {kind} tensor",
                place=f"the batch's entry {path!r}",
                legal="dense tensors, of which ranks take rows",
                way_out="pass it dense, or its indices, offsets and values as dense entries, and "
                "make it of them in the forward",
            )
    return named, spec


def unusual_kind(x: torch.Tensor) -> str | None:
    """Kind of a tensor that is not dense: sparse, nested, quantized; None for a dense one."""
    if x.is_quantized:
        return "quantized"
    if x.is_nested:
        return "nested"
    return None if x.layout == torch.strided else str(x.layout).removeprefix("torch.").lstrip("_")


def is_number(entry: Any) -> bool:
    """Whether an entry of a batch is a Python int or float (a bool is a flag)."""
    return isinstance(entry, (int, float)) and not isinstance(entry, bool)


def same_entry(planned: Any, entry: Any) -> bool:
    """Whether an entry that is no tensor is as planned."""
    if planned is entry:
        return True
    if type(planned) is not type(entry) and not (is_number(planned) and is_number(entry)):
        return False
    try:
        return bool(planned == entry)
    except (TypeError, ValueError, RuntimeError):  # they can't be compared
        return False


def path_of(keys: Iterable[Any]) -> str:
    """A path of torch's pytrees as a name: `input_ids`, `0.mask`; `0` for a single leaf."""
    names = (getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in keys)
    return ".".join(map(str, names)) or "0"


def split_batch(
    batch: Any, loss_fn: Callable[..., Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """(args, kwargs, targets) of a batch. With a `loss_fn` of two arguments the targets are the
    dict's `targets` entry or the tuple's last element, and do not go to the model. Raises
    ValueError where the batch has none."""
    wants_targets = loss_fn is not None and _arity(loss_fn) >= 2
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
        if not wants_targets:
            return (), kwargs, ()
        if "targets" not in kwargs:
            raise ExampleInputsError(
                f" has only {sorted(map(str, kwargs))}, and loss_fn takes (output, targets)",
                place="example_inputs",
                legal="a dict with the entry 'targets'",
                way_out="add it",
            )
        return (), kwargs, (kwargs.pop("targets"),)
    args = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    if not wants_targets:
        return args, {}, ()
    if len(args) < 2:
        raise ExampleInputsError(
            " has one entry, and loss_fn takes (output, targets)",
            place="example_inputs",
            legal="(inputs..., targets)",
            way_out="add the targets",
        )
    return args[:-1], {}, args[-1:]


def _arity(fn: Callable[..., Any]) -> int:
    """Number of positional arguments that a loss needs; 2 where it does not say."""
    target = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return 2
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return 2
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in positional for p in parameters)
