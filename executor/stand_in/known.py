"""Operators on fake tensors whose results torch has worked out before, without its dispatcher.

`FakeTensorMode` keeps what operators make of operands of given shapes, strides, dtypes and devices,
and finds it again by a key that takes most of the time of a rehearsal to make. Here the entries
that it has answered with are found by a key of the same content that is made faster, and answered
with alike. What torch doesn't keep (values, operators that look at data, views of unknown kind) it
works out each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Key = tuple[Any, ...]
NOT_KNOWN = object()
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_PLAIN = frozenset({
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
_LISTS = frozenset({list, tuple, torch.Size, torch.fx.immutable_collections.immutable_list})


class KnownFakes(FakeTensorMode):
    """Fake tensors of one rank. `entries` are torch's, by key: they may be those of ranks before,
    whose results are alike where the keys are."""

    def __init__(self, entries: dict[Key, Any]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.entries = entries
        self.answered: tuple[Any, Any, int] = (None, None, 0)  # operator, entry, result's id

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
        """All that a result depends on, and which operands are the same tensor; None where there is
        more, such as values."""
        into = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        seen: dict[int, int] = {}
        if not self._add(args, into, seen):
            return None
        for name, argument in kwargs.items():
            into.append(name)
            if not self._add((argument,), into, seen):
                return None
        if not seen and torch._C._get_dispatch_mode(_FAKE) is not self:
            return None  # what makes a tensor while the mode is off makes one with values
        return tuple(into)

    def _add(self, arguments: Iterable[Any], into: list[Any], seen: dict[int, int]) -> bool:
        for x in arguments:
            kind = type(x)
            if kind is FakeTensor:
                if x.constant is not None or x.fake_mode is not self or not _is_plain(x):
                    return False
                into += (
                    x.dtype, x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes(),
                    x.fake_device, x.requires_grad, seen.setdefault(id(x), len(seen)),
                )  # fmt: skip
            elif kind in _PLAIN:
                into += (kind, x)
            elif kind in _LISTS:
                into += (kind, len(x))
                if not self._add(x, into, seen):
                    return False
            else:
                return False
        return True

    def known(self, key: Key, args: Sequence[Any]) -> Any:
        """The result by an entry, or NOT_KNOWN."""
        entry = self.entries.get(key)
        if entry is None:
            return NOT_KNOWN
        outputs = [self._made(info, key[0], args) for info in entry.output_infos]
        return tuple(outputs) if entry.is_output_tuple else outputs[0]

    def _made(self, info: Any, func: Any, args: Sequence[Any]) -> Any:
        metadata = info.metadata
        if info.inplace_idx is not None:
            return args[info.inplace_idx]
        if metadata is None:
            return None if info.view_idx is not None else info.constant_value
        disabled = torch._C._DisableTorchDispatch()
        try:
            x = torch.empty_strided(
                metadata.shape, metadata.stride, dtype=metadata.dtype, device="meta"
            )
            if func.is_view:
                storage: Any = args[info.view_idx].untyped_storage()
                x.set_(storage, metadata.storage_offset, metadata.shape, metadata.stride)
        finally:
            del disabled
        return FakeTensor(self, x, metadata.device)

    def worked_out(self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result by torch, of whose entry, if it has one by now, note is taken."""
        self.answered = None, None, 0
        result = key[0](*args, **kwargs)
        func, entry, outputs = self._taken()
        if (
            func is key[0]
            and outputs == id(_first(result))
            and all(map(_is_known, entry.output_infos))
        ):
            self.entries[key] = entry
        return result

    def _taken(self) -> tuple[Any, Any, int]:
        return self.answered

    def _output_from_cache_entry(
        self, state: Any, entry: Any, key: Any, func: Any, args: Any
    ) -> Any:
        outputs = super()._output_from_cache_entry(state, entry, key, func, args)
        self.answered = func, entry, id(_first(outputs))
        return outputs


def _first(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs


def _is_plain(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not (x.is_conj() or x.is_neg())


def _is_known(info: Any) -> bool:
    of = info.metadata
    return of is None or not (of.requires_grad or of.is_conj or of.is_neg or of.is_sparse)
