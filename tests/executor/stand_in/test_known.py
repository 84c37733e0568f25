"""What is answered without torch's dispatcher is what torch answers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.executor.host_values import with_values
from meshwright.executor.stand_in import NOT_KNOWN, Key, KnownFakes

_CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "pointwise": lambda x: x * 2,
    "of two": lambda x: x + x.clone(),
    "view": lambda x: x[2:].t(),
    "in place": lambda x: x.clone().add_(1),
    "tuple": lambda x: x.max(dim=0),
    "dtype": lambda x: x.to(torch.bfloat16),
    "made": lambda x: torch.empty(x.shape[0], 3),
    "product": lambda x: x.t() @ x,
}


class _Answering(TorchDispatchMode):
    def __init__(self, fakes: KnownFakes) -> None:
        super().__init__()
        self.fakes = fakes
        self.known = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = self.fakes.key(func, args, kwargs or {})
        assert key is not None
        found = self.fakes.known(key, args)
        self.known += found is not NOT_KNOWN
        return self.fakes.worked_out(key, args, kwargs or {}) if found is NOT_KNOWN else found


def _looks(x: torch.Tensor, given: torch.Tensor) -> tuple[Any, ...]:
    own = x.untyped_storage()._cdata == given.untyped_storage()._cdata
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad, own


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES.keys())
def test_answers_as_torch_does(case: Callable[[torch.Tensor], Any]) -> None:
    entries: dict[Key, Any] = {}
    for _ in range(2):  # the entries serve another rank's mode
        with KnownFakes(entries) as fakes:
            x = torch.empty(4, 6)
            made = case(x)
            with _Answering(fakes) as answering:
                again = [case(x) for _ in range(3)][-1]
        tensors = zip(*(y if isinstance(y, tuple) else (y,) for y in (made, again)), strict=True)
        assert all(_looks(a, x) == _looks(b, x) for a, b in tensors)
        assert answering.known > 0


def test_the_gradient_of_a_known_view_reaches_its_base() -> None:
    with KnownFakes({}) as fakes, _Answering(fakes) as answering:
        for _ in range(3):
            x = torch.empty(4, 6, requires_grad=True)
            x[1:].sum().backward()
    assert answering.known > 0
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_values_are_never_known() -> None:
    with KnownFakes({}) as fakes:
        x = torch.tensor(3)  # a constant, whose value torch knows
        assert fakes.key(torch.ops.aten.add.Tensor, (x, 1), {}) is None
        assert fakes.key(torch.ops.aten.add.Tensor, (object(), 1), {}) is None


def test_what_is_made_while_the_mode_is_off_has_values() -> None:
    arange = torch.ops.aten.arange.default
    with KnownFakes({}) as fakes:
        assert fakes.key(arange, (4,), {}) is not None
        with with_values():
            assert fakes.key(arange, (4,), {}) is None


def test_keys_tell_the_same_tensor_twice_from_two_alike() -> None:
    add = torch.ops.aten.add.Tensor
    with KnownFakes({}) as fakes:
        x, y = torch.empty(4), torch.empty(4)
        assert fakes.key(add, (x, x), {}) != fakes.key(add, (x, y), {})
        assert fakes.key(add, (x, y), {}) == fakes.key(add, (y, x), {})
        assert fakes.key(add, (x, 1), {}) != fakes.key(add, (x, 1.0), {})
