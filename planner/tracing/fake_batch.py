"""The sample batch of a trace, as fake tensors (shape and dtype, no memory)."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from meshwright.planner.batch import batch_rows, input_leaves, is_number, split_batch
from meshwright.planner.errors import ExampleInputsError, TraceError
from meshwright.planner.tracing.known import KnownValues


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBatch:
    """A batch as fake tensors of `rows` rows, made under `mode`.

    `leaves` and `spec` are its pytree, numbers that are carried being 0-dim tensors; `inputs` has
    the path of each tensor among the leaves and whether dim 0 is the batch, `numbers` the kind of
    numbers by path, `fixed` the other entries by path. `asked` collects the numbers whose value was
    needed. `scale` is `rows` over the rows of the user's sample. `known` follows what the values of
    the sample decide, where a trace is to have them.
    """

    mode: FakeTensorMode
    spec: Any
    rows: int
    scale: float
    leaves: list[Any] = field(default_factory=list)
    inputs: list[tuple[str, bool]] = field(default_factory=list)
    numbers: dict[str, type] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    known: KnownValues | None = None

    @staticmethod
    def of(
        example_inputs: Any, dtype: torch.dtype, batch_size: int | None, fix: Collection[str] = ()
    ) -> FakeBatch:
        """The user's sample with `batch_size` rows (None: its own). Its floating tensors are in
        float32, which no compute `dtype` rounds, or in `dtype` where they are in half precision;
        numbers are carried as inputs but for those at the paths `fix`. Raises ValueError for no
        tensor with a batch dim, a numpy array, or less than one row."""
        sample_rows = batch_rows(example_inputs)
        rows = sample_rows if batch_size is None else batch_size
        if rows < 1:
            raise ExampleInputsError.refused("batch_size", batch_size, legal="an integer from 1")
        named, spec = input_leaves(example_inputs)
        scale = rows / sample_rows
        batch = FakeBatch(mode=FakeTensorMode(), spec=spec, rows=rows, scale=scale)
        for path, leaf in named:
            if isinstance(leaf, np.ndarray):
                raise ExampleInputsError(
                    f"{path!r} is a numpy array, which would be fixed in the plan",
                    place="example_inputs",
                    legal="tensors",
                    way_out="pass torch.from_numpy of it",
                )
            with batch.mode:
                if is_number(leaf) and path not in fix:
                    kind = batch.numbers[path] = float if isinstance(leaf, float) else int
                    batch.inputs.append((path, False))
                    batch.leaves.append(torch.zeros((), dtype=DTYPES[kind]))
                elif isinstance(leaf, torch.Tensor):
                    batched = leaf.dim() > 0 and leaf.shape[0] == sample_rows
                    shape = (rows, *leaf.shape[1:]) if batched else tuple(leaf.shape)
                    traced_dtype = _traced_dtype(leaf.dtype, dtype)
                    batch.inputs.append((path, batched))
                    batch.leaves.append(torch.empty(shape, dtype=traced_dtype))
                else:
                    batch.fixed[path] = leaf
                    batch.leaves.append(leaf)
        return batch

    def with_values(self, example_inputs: Any, *, by_index: bool) -> FakeBatch:
        """The batch whose values are known, of more rows than the sample has by repeating them."""
        leaves = dict(input_leaves(example_inputs)[0])
        rows = torch.arange(self.rows) % batch_rows(example_inputs)
        values = [
            _sample_values(leaves[path], rows if batched else None, traced)
            for (path, batched), traced in zip(self.inputs, self.tensors, strict=True)
        ]
        return replace(self, known=KnownValues(values, by_index=by_index))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The batch in the user's structure, with these in the place of its tensors, and numbers
        that pass for Python's."""
        inputs = (
            Number(x, self.numbers[path], path, self.asked) if path in self.numbers else x
            for x, (path, _) in zip(tensors, self.inputs, strict=True)
        )
        leaves = [next(inputs) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def _sample_values(
    leaf: Any, rows: torch.Tensor | None, traced: torch.Tensor
) -> torch.Tensor | None:
    """These rows of a tensor of the sample (None: all of it), like the traced one; None of a
    number, and without values."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_meta or isinstance(leaf, FakeTensor):
        return None
    values = leaf.detach().to("cpu", traced.dtype)
    return values if rows is None else values[rows]


def _traced_dtype(dtype: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor of the batch is traced."""
    if not dtype.is_floating_point:
        return dtype
    return torch.float32 if dtype.itemsize >= torch.float32.itemsize else compute


def check_call(model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> None:
    """Raise ValueError where a batch does not fit the signature of the model's forward."""
    args, kwargs, _ = split_batch(batch, loss_fn)
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        entries = sorted(map(str, kwargs)) if kwargs else f"{len(args)} positional"
        raise ExampleInputsError(
            f" do not fit {type(model).__name__}.forward: {error}. Given: {entries}",
            place="example_inputs",
            legal=f"its parameters, {list(signature.parameters)}",
            way_out=(
                "Name the entries of the dict after them, or pass a tuple in their order; "
                "targets go with a loss_fn of (output, targets)"
            ),
        ) from None


# --- numbers: 0-dim tensors that pass for Python numbers ------------------------------------------


DTYPES = {int: torch.int64, float: torch.float32}


class NumberNeeded(TraceError):
    """Code asked for the value of the number at `path` of the batch."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the forward needs the value of the number {path!r} of the batch")
        self.path = path


class Number:
    """A number of `kind`, whose value is the 0-dim `tensor`; `path` is its place in the batch.

    To `isinstance` it is a number. In arithmetic with tensors and numbers, by torch's promotion
    rules, the graph reads it as an input. Whatever asks for its value (`range(n)`, `if beta > 0`,
    an argument that takes no tensor) raises `NumberNeeded`, also noted in `asked`, should the
    model's code catch it; the trace starts again with the number fixed.
    """

    def __init__(self, tensor: torch.Tensor, kind: type, path: str, asked: set[str]) -> None:
        self.tensor = tensor
        self.kind = kind
        self.path = path
        self.asked = asked

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.kind

    def __repr__(self) -> str:
        return f"<number {self.path}>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map(tensor_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def with_value(self, tensor: torch.Tensor) -> Number:
        """The number that arithmetic with plain numbers alone gives."""
        kind = float if tensor.is_floating_point() else int
        return Number(tensor, kind, self.path, self.asked)


def tensor_of(x: Any) -> Any:
    """The tensor of a `Number`; anything else as it is."""
    return x.tensor if type(x) is Number else x


def _calculate(name: str, *, reflected: bool) -> Callable[[Number, Any], Any]:
    function = getattr(operator, name)

    def calculate(self: Number, other: Any) -> Any:
        plain = type(other) is Number or isinstance(other, (bool, int, float))
        if not plain and not isinstance(other, torch.Tensor):
            return NotImplemented
        operands = self.tensor, tensor_of(other)
        tensor = function(*(reversed(operands) if reflected else operands))
        return self.with_value(tensor) if plain else tensor

    return calculate


def _change(name: str) -> Callable[[Number], Number]:
    function = getattr(operator, name)
    return lambda self: self.with_value(function(self.tensor))


def _ask(self: Number, *_: Any) -> NoReturn:
    self.asked.add(self.path)
    raise NumberNeeded(self.path)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _calculate(_name, reflected=False))
    setattr(Number, f"__r{_name}__", _calculate(_name, reflected=True))
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _change(_name))
_VALUE_METHODS = (
    "index", "int", "float", "bool", "hash", "eq", "ne", "lt", "le", "gt", "ge", "round", "trunc",
    "floor", "ceil", "divmod", "rdivmod",
)  # fmt: skip
for _name in _VALUE_METHODS:
    setattr(Number, f"__{_name}__", _ask)
