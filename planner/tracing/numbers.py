"""Numbers of a batch while it is traced: 0-dim tensors that pass for Python numbers.

A `Number` takes part in arithmetic with tensors and numbers, by torch's promotion rules (a 0-dim
tensor changes no dtype of its own kind, as a Python number doesn't), so that the graph reads it as
an input. Where code needs the value itself (`range(n)`, `if beta > 0`, an argument that takes no
tensor), the number can't be carried: `NumberNeeded`, and the trace starts again with it fixed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from meshwright.planner.errors import TraceError

DTYPES = {int: torch.int64, float: torch.float32}


class NumberNeeded(TraceError):
    """Code asked for the value of the number at `path` of the batch."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the forward needs the value of the number {path!r} of the batch")
        self.path = path


class Number:
    """A number of `kind`, whose value is the 0-dim `tensor`; `path` is its place in the batch.

    To `isinstance` it is a number; whatever asks for its value raises `NumberNeeded`, which is also
    noted in `asked`, should the model's code catch it.
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
        """What arithmetic with plain numbers alone gives."""
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
        left, right = self.tensor, tensor_of(other)
        result = function(right, left) if reflected else function(left, right)
        return self.with_value(result) if plain else result

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
