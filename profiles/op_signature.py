"""Signature of an operator call at local shapes: the cache key of its measured time.

Two calls with equal signatures take equal time. The text form is canonical JSON, so that a cache
file needs no code to be read, and a call can be rebuilt from its key alone:

    {"op": "aten.linear.default",
     "operands": [["float32", [4, 128, 256], 1], ["float32", [1024, 256], 1]],
     "args": [{"$operand": 0}, {"$operand": 1}], "kwargs": {}}

An operand is dtype, local shape, and whether a gradient flows into it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.profiles.inputs import ProfileError, parse_json, shown

if TYPE_CHECKING:
    import torch

Operand = tuple[str, tuple[int, ...], bool]  # dtype name, local shape, requires grad


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSignature:
    """One operator call: `target` (`aten.add.Tensor`), its tensor `operands`, and all of its
    `arguments` as canonical JSON."""

    target: str
    operands: tuple[Operand, ...]
    arguments: str

    @property
    def text(self) -> str:
        """The canonical text: equal calls have equal texts."""
        operands = [[dtype, list(shape), int(grad)] for dtype, shape, grad in self.operands]
        call = _canonical({"op": self.target, "operands": operands})
        return f"{self.arguments[:-1]},{call[1:]}"  # one object: its keys are in order

    def __str__(self) -> str:
        return self.text

    @property
    def short(self) -> str:
        """The operator's name: `add` for `aten.add.Tensor`."""
        return self.target.split(".")[1]

    @property
    def dtype(self) -> str:
        """The compute dtype: of the first floating operand, else of the first one."""
        names = [dtype for dtype, _, _ in self.operands]
        return next((n for n in names if is_floating(n)), names[0] if names else "none")

    @property
    def nbytes(self) -> int:
        """Bytes of all operands together."""
        import torch

        return sum(
            math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape, _ in self.operands
        )

    @property
    def differentiable(self) -> bool:
        """Whether a gradient flows into an operand."""
        return any(grad for _, _, grad in self.operands)

    @staticmethod
    def of_call(
        target: str, operands: Sequence[Operand], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> OpSignature:
        """The signature of a call whose tensors are written `OperandIndex` in `args`, `kwargs`.

        Raises ValueError for an argument that has no text form.
        """
        arguments = {"args": _encode(list(args), target), "kwargs": _encode(dict(kwargs), target)}
        return OpSignature(target=target, operands=tuple(operands), arguments=_canonical(arguments))

    @staticmethod
    def parse(text: str) -> OpSignature:
        """The inverse of `text`. Raises ValueError for a text that is not one."""
        try:
            data = parse_json(text, place="signature", error=ProfileError, infinite=True)
            target, operands = data.pop("op"), data.pop("operands")
            if not isinstance(target, str) or not all(target.partition(".")[::2]):
                raise ValueError(f"{shown(target)} is no operator, e.g. aten.linear.default")
            signature = OpSignature(
                target=target,
                operands=tuple(
                    (_dtype_name(dtype), tuple(map(int, shape)), bool(grad))
                    for dtype, shape, grad in operands
                ),
                arguments=_canonical({"args": data["args"], "kwargs": data["kwargs"]}),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ProfileError(
                f" is no operator signature: {error}",
                place=shown(text),
                legal="what `meshwright profile --export` writes",
                way_out="drop the row, or measure again",
            ) from error
        return signature

    def call_arguments(
        self, tensor: Callable[[int], Any], device: torch.device
    ) -> tuple[list[Any], dict[str, Any]]:
        """`args` and `kwargs` of the call on a device, with operand i as `tensor(i)`."""
        arguments = json.loads(self.arguments)
        args, kwargs = (_decode(arguments[key], tensor, device) for key in ("args", "kwargs"))
        return args, kwargs


@dataclass(frozen=True, slots=True)
class OperandIndex:
    """A reference to the i-th operand among a call's arguments."""

    index: int


def is_floating(dtype: str) -> bool:
    """Whether the dtype of that name is a floating-point one."""
    import torch

    return bool(getattr(torch, dtype).is_floating_point)


def _dtype_name(value: object) -> str:
    import torch

    if not isinstance(value, str) or not isinstance(getattr(torch, value, None), torch.dtype):
        raise ValueError(f"{value!r} is no dtype")
    return value


def _canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _encode(value: Any, target: str) -> Any:
    import torch

    if isinstance(value, OperandIndex):
        return {"$operand": value.index}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.device):
        return {"$device": "here"}  # a call is measured on the device that the profile is of
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return {"$torch": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {str(key): _encode(item, target) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_encode(item, target) for item in value]
    raise ProfileError(
        f"argument {value!r:.60} is a {type(value).__name__}",
        place=target,
        legal="tensors, numbers, texts, dtypes, devices and lists of them",
        way_out="give another argument",
    )


def _decode(value: Any, tensor: Callable[[int], Any], device: torch.device) -> Any:
    import torch

    if isinstance(value, list):
        return [_decode(item, tensor, device) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$operand"}:
        return tensor(value["$operand"])
    if value.keys() == {"$device"}:
        return device
    if value.keys() == {"$torch"}:
        return getattr(torch, value["$torch"])
    return {key: _decode(item, tensor, device) for key, item in value.items()}
