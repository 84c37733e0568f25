"""Values of a trace that the sample batch decides: sizes in a tensor, flags of padding.

Calls on tensors of the batch, and on what follows from them alone, run on the sample's values, too.
Code that asks for a value gets the sample's, and what it asked for is part of the graph, which
tells in each step whether the batch has the same (`Graph.known`). The graph has the last word: what
it makes of the sample is compared with what was given (`convert.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.planner.tracing.user_module import TRACE

_PLAIN = (
    bool, int, float, complex, str, slice, range, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type(None), type(Ellipsis), np.generic, np.ndarray,
)  # fmt: skip
_GET, _SET = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_SELECTS = (torch.masked_select, torch.Tensor.masked_select)
_REPEATS = (torch.repeat_interleave, torch.Tensor.repeat_interleave)
_FLAGS = (torch.bool, torch.uint8)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_UNKNOWN = object()


class Asked(NamedTuple):
    """A tensor whose value code asked for, a copy of it as it was then, and the value."""

    tensor: torch.Tensor
    copy: torch.Tensor
    value: torch.Tensor


class KnownValues(TorchFunctionMode):
    """Mode in which values that follow from the `sample` (tensors; None: unknown) are known. What
    code asked for is in `asked`, by the tensor's id and version. A mask that takes all selects
    nothing, unless `by_index`.

    Parameters, buffers and random draws have no values here, and what depends on them has none.
    """

    def __init__(self, sample: Sequence[torch.Tensor | None], *, by_index: bool = False) -> None:
        super().__init__()
        self.sample = sample
        self.by_index = by_index
        self.asked: dict[tuple[int, int], Asked] = {}
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps ids in use

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Start a forward on the tensors `inputs` of a trace."""
        self.asked.clear()
        self._values.clear()
        with _disable_current_modes():
            for tensor, value in zip(inputs, self.sample, strict=True):
                if value is not None:  # code may write to it
                    self._values[id(tensor)] = tensor, value.clone()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if TRACE.get() is None:
            return func(*args, **kwargs)
        if func in (_GET, _SET):
            args = args[0], self._with_bounds(args[1]), *args[2:]
        tensors = _tensors((args, kwargs))
        known = [x for x in tensors if id(x) in self._values]
        if tensors and not known:
            return func(*args, **kwargs)
        if known and _needs_values(func, args, kwargs):
            result = self._answer(func, args, kwargs)
            if result is not _UNKNOWN:
                return result
        versions = [x._version for x in known]
        result = func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        plain = all(isinstance(x, (torch.Tensor, *_PLAIN)) for x in leaves)
        alike = plain and len(known) == len(tensors)
        if not self._follow(result, self._computed(func, args, kwargs) if alike else _UNKNOWN):
            written = zip(known, versions, strict=True)
            self._forget([x for x, version in written if x._version != version])
        return result

    # --- values ---

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._values[id(tensor)][1]

    def _computed(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a call on values; `_UNKNOWN` where it draws random numbers, or fails."""
        operands = _tensors((args, kwargs))
        versions = [self._value(x)._version for x in operands]
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._value, (args, kwargs))
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            drawn = torch.get_rng_state()
            try:
                result = func(*args, **kwargs)
            except Exception:  # noqa: BLE001 - the trace's own call tells the user
                result = _UNKNOWN
            if not torch.equal(drawn, torch.get_rng_state()):
                torch.set_rng_state(drawn)
                result = _UNKNOWN
        if result is _UNKNOWN:
            pairs = zip(operands, versions, strict=True)
            self._forget([x for x, v in pairs if self._value(x)._version != v])
        return result

    def _follow(self, result: Any, value: Any) -> bool:
        """Remember the values of a call's results; whether there are any."""
        results, values = pytree.tree_leaves(result), pytree.tree_leaves(value)
        if value is _UNKNOWN or len(results) != len(values):
            return False
        for x, of_x in zip(results, values, strict=True):
            if not isinstance(x, torch.Tensor) or not isinstance(of_x, torch.Tensor):
                continue
            if (x.shape, x.dtype, x.device) != (of_x.shape, of_x.dtype, of_x.device):
                return False
            self._values[id(x)] = x, of_x
        return True

    def _forget(self, written: Sequence[torch.Tensor]) -> None:
        """Drop the values of tensors that a call wrote something unknown to, with their views."""
        memory = {
            self._value(x).untyped_storage().data_ptr() for x in written if id(x) in self._values
        }
        for key, (_, value) in [*self._values.items()]:
            if value.untyped_storage().data_ptr() in memory:
                del self._values[key]

    # --- calls whose results' shapes, or whose numbers, depend on values ---

    def _ask(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a tensor, which the trace has from now on."""
        value, key = self._value(tensor), (id(tensor), tensor._version)
        if key not in self.asked:
            copy = tensor.clone()
            with _disable_current_modes():
                self.asked[key] = Asked(tensor, copy, value.clone())
        return value

    def _answer(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of such a call; `_UNKNOWN` where a value is missing."""
        named = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
        if func is _GET:
            return self._selected(*args)
        if func in _SELECTS and not kwargs:
            return self._selected_by_mask(*args)
        if func in _REPEATS and len(named) > 1 and named.get("output_size") is None:
            return self._repeated(named)
        tensors = _tensors((args, kwargs))
        if any(id(x) not in self._values for x in tensors):
            return self._with_sizes(func, args, kwargs)
        versions = [self._value(x)._version for x in tensors]
        value = self._computed(func, args, kwargs)
        if value is _UNKNOWN:
            return value
        written = [x for x, v in zip(tensors, versions, strict=True) if self._value(x)._version > v]
        if written:  # which the trace would lack
            self._forget(written)
            return _UNKNOWN
        for x in tensors:
            self._ask(x)
        if isinstance(value, np.ndarray):
            value = value.copy()
            value.flags.writeable = False  # code that writes to it is told
        result = pytree.tree_map_only(torch.Tensor, self._constant, value)
        self._follow(result, value)
        return result

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tensor(value.tolist(), dtype=value.dtype).reshape(value.shape).clone()

    def _selected(self, x: torch.Tensor, index: Any) -> Any:
        """`x[index]` by integers in the place of flags and of single numbers, and of one mask that
        takes all by none."""
        parts = index if isinstance(index, tuple) else (index,)
        integers: list[Any] = []
        for part in parts:
            flags = isinstance(part, torch.Tensor) and part.dtype in _FLAGS
            if not isinstance(part, torch.Tensor) or (part.dim() and not flags):
                integers.append(part)
                continue
            if id(part) not in self._values:
                return _UNKNOWN
            value = self._ask(part)
            with _disable_current_modes():
                if not part.dim():
                    integers.append(int(value))
                    continue
                chosen, every = value.nonzero(as_tuple=True), bool(value.all())
            if every and len(parts) == 1 and not self.by_index:
                return self._followed(x.flatten(0, part.dim() - 1).clone(), _GET, (x, index))
            integers += map(self._constant, chosen)
        return self._followed(x[tuple(integers)], _GET, (x, index))

    def _followed(self, result: Any, func: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """A result that was made in another way, with its value if all operands have one."""
        if all(id(x) in self._values for x in _tensors(operands)):
            self._follow(result, self._computed(func, tuple(operands), {}))
        return result

    def _selected_by_mask(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        if id(mask) not in self._values:
            return _UNKNOWN
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        value = self._ask(mask)
        with _disable_current_modes():
            chosen = value.expand(shape).nonzero(as_tuple=True)
        selected = x.expand(shape)[tuple(map(self._constant, chosen))]
        return self._followed(selected, torch.masked_select, (x, mask))

    def _repeated(self, named: Mapping[str, Any]) -> Any:
        """The elements of a tensor, each as often as a known one says."""
        x, repeats, dim = named["input"], named["repeats"], named.get("dim")
        if id(repeats) not in self._values:
            return _UNKNOWN
        flat, along = (x.flatten(), 0) if dim is None else (x, dim)
        value = self._ask(repeats)
        with _disable_current_modes():
            counts = value.expand(flat.shape[along])
            places = torch.repeat_interleave(torch.arange(flat.shape[along]), counts)
        result = flat.index_select(along, self._constant(places))
        return self._followed(result, torch.repeat_interleave, (x, repeats, dim))

    def _with_sizes(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call on something unknown, with numbers in the place of single known integers
        (`x.view(height, width)`)."""
        sizes: list[int] = []

        def number(x: torch.Tensor) -> Any:
            if id(x) not in self._values or x.dim() or x.dtype not in _INTEGERS:
                return x
            value = self._ask(x)
            with _disable_current_modes():
                sizes.append(int(value))
            return sizes[-1]

        args, kwargs = pytree.tree_map_only(torch.Tensor, number, (args, kwargs))
        return func(*args, **kwargs) if sizes else _UNKNOWN

    def _with_bounds(self, index: Any) -> Any:
        """An index with numbers in the place of known tensors that bound its slices, and of single
        flags."""
        if isinstance(index, tuple):
            return tuple(map(self._with_bounds, index))
        single = isinstance(index, torch.Tensor) and not index.dim() and index.dtype in _FLAGS
        if single and id(index) in self._values:
            flag = self._ask(index)
            with _disable_current_modes():
                return bool(flag)
        if not isinstance(index, slice):
            return index
        bounds: list[Any] = [index.start, index.stop, index.step]
        for k, bound in enumerate(bounds):
            if isinstance(bound, torch.Tensor) and id(bound) in self._values:
                value = self._ask(bound)
                with _disable_current_modes():
                    bounds[k] = int(value)
        return slice(*bounds)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _needs_values(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call makes a number, or a shape, out of the values of tensors."""

    def bare(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype)

    with _disable_current_modes(), FakeTensorMode():
        args, kwargs = pytree.tree_map_only(torch.Tensor, bare, (args, kwargs))
        try:
            func(*args, **kwargs)
        except Exception:  # noqa: BLE001 - not only of values: torch.tensor([x]), x.numpy()
            return True
    return False
