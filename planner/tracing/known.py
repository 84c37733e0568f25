"""Values of a trace that the sample batch decides: sizes in a tensor, flags of padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.planner.tracing.user_module import TRACE

_PLAIN = (
    bool, int, float, complex, str, slice, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type(None), type(Ellipsis),
)  # fmt: skip
_SELECTS = (torch.Tensor.__getitem__,)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_REPEATS = (torch.repeat_interleave, torch.Tensor.repeat_interleave)


class KnownValues(TorchFunctionMode):
    """Mode in which calls on tensors of the batch, and on what follows from them alone, run on the
    `sample` values (None: unknown), too. Where code asks for a value (`lengths.tolist()`,
    `if flags.any()`, `x[flags]`), it gets the sample's, noted in `asked`.

    Parameters, buffers and random draws have no values here, and what depends on them has none.
    """

    def __init__(self, sample: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self.sample = sample
        self.asked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
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
        if TRACE.get() is not None and func in _INDEXED:
            args = args[0], self._with_bounds(args[1]), *args[2:]
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        known = [x for x in tensors if id(x) in self._values]
        plain = all(isinstance(x, (torch.Tensor, *_PLAIN)) for x in leaves)
        if TRACE.get() is None or not plain or (tensors and not known):
            return func(*args, **kwargs)
        whole = len(known) == len(tensors)
        if known and _needs_values(func, args, kwargs):
            result = self._with_known(func, args, kwargs)
            if result is not None:
                self._follow(result, self._computed(func, args, kwargs) if whole else None)
                return result
        versions = [x._version for x in known]
        result = func(*args, **kwargs)
        if whole:
            self._follow(result, self._computed(func, args, kwargs))
        else:
            written = zip(known, versions, strict=True)
            self._forget([x for x, version in written if x._version != version])
        return result

    # --- values ---

    def _computed(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a call on values; None where it draws random numbers, or fails."""

        def value(x: Any) -> Any:
            return self._values[id(x)][1] if isinstance(x, torch.Tensor) else x

        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            drawn = torch.get_rng_state()
            try:
                result = func(*pytree.tree_map(value, args), **pytree.tree_map(value, kwargs))
            except Exception:  # noqa: BLE001 - the trace's own call tells the user
                return None
            if torch.equal(drawn, torch.get_rng_state()):
                return result
            torch.set_rng_state(drawn)
            return None

    def _follow(self, result: Any, value: Any) -> None:
        """Remember the values of a call's results."""
        results, values = pytree.tree_leaves(result), pytree.tree_leaves(value)
        if len(results) != len(values):
            return
        for x, of_x in zip(results, values, strict=True):
            if not isinstance(x, torch.Tensor) or not isinstance(of_x, torch.Tensor):
                continue
            if (x.shape, x.dtype, x.device) == (of_x.shape, of_x.dtype, of_x.device):
                self._values[id(x)] = x, of_x

    def _forget(self, written: Sequence[torch.Tensor]) -> None:
        """Drop what a call wrote something unknown to, with its views."""
        memory = {self._values[id(x)][1].untyped_storage().data_ptr() for x in written}
        for key, (_, value) in [*self._values.items()]:
            if value.untyped_storage().data_ptr() in memory:
                del self._values[key]

    # --- calls whose results' shapes, or whose numbers, depend on values ---

    def _asked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The value of a tensor, which the trace has from now on."""
        value = self._values[id(tensor)][1]
        if id(tensor) not in self.asked:
            then = tensor.clone()
            with _disable_current_modes():
                self.asked[id(tensor)] = then, value.clone()
        return value

    def _with_known(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of such a call; None where a value is missing."""
        if func in _SELECTS:
            return self._selected(*args, **kwargs)
        if func in _REPEATS:
            named = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
            if len(args) + len(kwargs) > 1 and named.get("output_size") is None:
                return self._repeated(named["input"], named["repeats"], named.get("dim"))
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(id(x) not in self._values for x in tensors):
            return self._with_sizes(func, args, kwargs)
        result = self._computed(func, args, kwargs)
        for x in tensors if result is not None else ():
            self._asked(x)
        return pytree.tree_map_only(torch.Tensor, self._constant, result)

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tensor(value.tolist(), dtype=value.dtype).reshape(value.shape)

    def _selected(self, x: torch.Tensor, index: Any) -> torch.Tensor | None:
        """`x[index]` by integers in the place of flags and of single numbers, and of one mask that
        takes all by none; None where one of them has no values."""
        parts = index if isinstance(index, tuple) else (index,)
        integers: list[Any] = []
        for part in parts:
            tensor = isinstance(part, torch.Tensor)
            if not tensor or (part.dtype != torch.bool and part.dim()):
                integers.append(part)
                continue
            if id(part) not in self._values:
                return None
            value = self._asked(part)
            with _disable_current_modes():
                if not part.dim():
                    integers.append(value.item())
                    continue
                chosen, every = value.nonzero(as_tuple=True), bool(value.all())
            if every and len(parts) == 1 and part.dim():
                return x.flatten(0, part.dim() - 1).clone()
            integers += map(self._constant, chosen)
        return x[tuple(integers)]

    def _with_sizes(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call on something unknown, with numbers in the place of single known integers
        (`x.view(height, width)`); None without."""
        sizes: list[int] = []

        def number(x: torch.Tensor) -> Any:
            if id(x) not in self._values or x.dim() or x.dtype not in _INTEGERS:
                return x
            value = self._asked(x)
            with _disable_current_modes():
                sizes.append(int(value))
            return sizes[-1]

        args, kwargs = pytree.tree_map_only(torch.Tensor, number, (args, kwargs))
        return func(*args, **kwargs) if sizes else None

    def _with_bounds(self, index: Any) -> Any:
        """An index with numbers in the place of known tensors that bound its slices."""
        if isinstance(index, tuple):
            return tuple(map(self._with_bounds, index))
        if not isinstance(index, slice):
            return index
        bounds: list[Any] = [index.start, index.stop, index.step]
        for k, bound in enumerate(bounds):
            if isinstance(bound, torch.Tensor) and id(bound) in self._values:
                value = self._asked(bound)
                with _disable_current_modes():
                    bounds[k] = value.item()
        return slice(*bounds)

    def _repeated(self, x: torch.Tensor, repeats: Any, dim: int | None) -> torch.Tensor | None:
        """The elements of `x`, each as often as `repeats` says; None where that has no values."""
        if id(repeats) not in self._values:
            return None
        x, dim = (x.flatten(), 0) if dim is None else (x, dim)
        with _disable_current_modes():
            counts = self._values[id(repeats)][1].expand(x.shape[dim])
            places = torch.repeat_interleave(torch.arange(x.shape[dim]), counts)
        self._asked(repeats)
        return x.index_select(dim, self._constant(places))


def _needs_values(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call makes a number, or a shape, out of the values of tensors."""

    def bare(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x

    with _disable_current_modes(), FakeTensorMode():
        try:
            func(*pytree.tree_map(bare, args), **pytree.tree_map(bare, kwargs))
        except Exception:  # noqa: BLE001 - not OF_VALUES alone: torch.tensor([x]), x.numpy()
            return True
    return False
