"""Values of Python as JSON, and back: states of optimizers, schedulers and loaders, without pickle.

None, booleans, text, finite numbers, lists and dicts of text are as JSON has them. Anything else is
`{"!": kind, "of": ...}`: `_KINDS`, and a tensor as its path in the value, under which it is stored
beside.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.executor.errors import SavedError

MAX_DEPTH = 100  # of what is nested
TAG, TENSOR = "!", "tensor"
Keep = Callable[[torch.Tensor, str], Mapping[str, Any]]  # of a tensor and its path
Plain = (type(None), bool, int, str)

# a type, its name, its JSON or what is encoded in its place, and the way back
_KINDS: Sequence[tuple[type, str, Callable[[Any], Any], Callable[[Any], Any]]] = (
    (float, "float", repr, float),  # infinite, or NaN
    (complex, "complex", lambda z: [z.real, z.imag], lambda of: complex(*of)),
    (bytes, "bytes", lambda b: base64.b64encode(b).decode(), base64.b64decode),
    (bytearray, "bytearray", lambda b: base64.b64encode(b).decode(),
     lambda of: bytearray(base64.b64decode(of))),
    (tuple, "tuple", list, tuple),
    (set, "set", list, set),
    (frozenset, "frozenset", list, frozenset),
    (torch.Size, "torch.Size", list, torch.Size),
    (torch.dtype, "torch.dtype", lambda x: str(x).removeprefix("torch."),
     lambda of: _dtype(of)),
    (torch.device, "torch.device", str, torch.device),
    (dict, "dict", lambda d: [list(entry) for entry in d.items()], dict),
    (OrderedDict, "OrderedDict", lambda d: [list(entry) for entry in d.items()], OrderedDict),
    (Counter, "Counter", lambda d: [list(entry) for entry in d.items()],
     lambda of: Counter(dict(of))),
)  # fmt: skip
_BY_TYPE = {kind: (name, encode) for kind, name, encode, _ in _KINDS}
_BY_NAME = {name: decode for _, name, _, decode in _KINDS}
LEGAL = (
    "tensors",
    "numbers",
    "text",
    "None",
    *(name for name in _BY_NAME if name != "float"),
    "lists",
)


def encoded(value: Any, keep: Keep, path: str, depth: int = 0) -> Any:
    """A value as JSON; its tensors go to `keep`, which may say more of them. Raises TypeError for a
    value of another kind."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise TypeError("values that are nested too deeply, or in themselves")
    if kind in Plain or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [encoded(x, keep, f"{path}/{k}", depth + 1) for k, x in enumerate(value)]
    if kind is dict and TAG not in value and all(type(key) is str for key in value):
        return {key: encoded(x, keep, f"{path}/{step(key)}", depth + 1) for key, x in value.items()}
    if kind in (torch.Tensor, nn.Parameter, DTensor):
        return {TAG: TENSOR, "of": path, **keep(value, path)}
    if kind not in _BY_TYPE:
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")
    name, encode = _BY_TYPE[kind]
    return {TAG: name, "of": encoded(encode(value), keep, path, depth + 1)}


def encode_state(name: str, state: Any, keep: Keep, path: str) -> Any:
    """`encoded`, with an error that names the object of the state."""
    try:
        return encoded(state, keep, path)
    except TypeError as error:
        raise SavedError(
            f"the state of {name!r} holds {error}",
            place="checkpoint",
            legal=LEGAL,
            way_out="have its state_dict() return such",
        ) from None


def step(key: str) -> str:
    """A key as a step of a path."""
    return key.replace("~", "~0").replace("/", "~1")


def decoded(tree: Any, tensor: Callable[[Mapping[str, Any]], torch.Tensor]) -> Any:
    """The value of a JSON tree, with `tensor` of each of its nodes for tensors. Raises ValueError,
    or what a constructor raises, for a tree that `encoded` did not make."""
    if isinstance(tree, list):
        return [decoded(x, tensor) for x in tree]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: decoded(x, tensor) for key, x in tree.items()}
    name = tree[TAG]
    if name == TENSOR:
        return tensor(tree)
    if name not in _BY_NAME:
        raise ValueError(f"{name!r} is no kind of value")
    return _BY_NAME[name](decoded(tree["of"], tensor))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
