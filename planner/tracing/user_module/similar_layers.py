"""Layers that are built alike, so that one of them need be traced for all.

Two members of a `ModuleList` or `Sequential` are alike where nothing that their forward could look
at tells them apart: the same tree of classes, equal plain attributes, the very same objects for
everything else (configs, functions, shared tensors), parameters and buffers of equal shape, dtype
and `requires_grad`, the same ties, and no hooks. One difference is allowed: an integer attribute
that holds every member's own position (`layer_idx`); `stand_ins.py` notes whether it is used.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MIN_ALIKE = 5  # members that a stack needs for the shortcut: three are traced all the same
STATE = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
UNSEEN = frozenset({  # attributes of every module that forward does not look at
    *STATE, *HOOKS, "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
})  # fmt: skip
PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
)

Place = tuple[str, str]  # (path below the member, attribute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Members of one container that are built alike: their FQNs in order.

    `numbers` are the attributes that hold each member's position in the container, `positions`.
    """

    members: tuple[str, ...]
    positions: tuple[int, ...]
    numbers: tuple[Place, ...]

    @property
    def traced(self) -> tuple[str, str, str]:
        """The members to be traced in full: the first, the second (the one that is copied) and the
        last."""
        return self.members[0], self.members[1], self.members[-1]

    @property
    def spared(self) -> tuple[str, ...]:
        return self.members[2:-1]


def find_alike(model: nn.Module) -> tuple[Alike, ...]:
    """The outermost groups of `MIN_ALIKE` or more members that are built alike."""
    owners = Counter(
        id(held)
        for module in model.modules()
        for table in (module._parameters, module._buffers, module._modules)
        for held in table.values()
        if held is not None
    )
    return tuple(_groups(model, "", owners))


def _groups(module: nn.Module, path: str, owners: Counter[int]) -> Iterator[Alike]:
    children = {name: m for name, m in module._modules.items() if m is not None}
    grouped: set[str] = set()
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) >= MIN_ALIKE:
        for group in _alike(children, path, owners):
            grouped.update(group.members)
            yield group
    for name, child in children.items():
        if path + name not in grouped:
            yield from _groups(child, f"{path}{name}.", owners)


def _alike(children: dict[str, nn.Module], path: str, owners: Counter[int]) -> Iterator[Alike]:
    classes: dict[Hashable, list[tuple[int, str, dict[Place, int]]]] = defaultdict(list)
    for position, (name, member) in enumerate(children.items()):
        found = _Description(member, owners)
        if found.regular and owners[id(member)] == 1 and "forward" not in vars(member):
            classes[tuple(found.parts)].append((position, name, found.integers))
    for members in classes.values():
        places = members[0][2]
        numbers = {p for p in places if all(held[p] == at for at, _, held in members)}
        fixed = [p for p in places if p not in numbers]
        kinds: dict[Hashable, list[tuple[int, str]]] = defaultdict(list)
        for position, name, held in members:
            kinds[tuple(held[p] for p in fixed)].append((position, name))
        for same in kinds.values():
            if len(same) >= MIN_ALIKE:
                yield Alike(
                    members=tuple(path + name for _, name in same),
                    positions=tuple(position for position, _ in same),
                    numbers=tuple(sorted(numbers)),
                )


class _Description:
    """All that tells a module from another: hashable `parts`, and apart from them its `integers`.

    What several modules own is described by its identity, so that ties must be the same ones.
    """

    def __init__(self, member: nn.Module, owners: Counter[int]) -> None:
        self.owners = owners
        self.parts: list[Any] = []
        self.integers: dict[Place, int] = {}
        self.regular = True
        self.paths = {id(m): path for path, m in member.named_modules()}
        for path, module in member.named_modules():
            self._add(path, module)

    def _add(self, path: str, module: nn.Module) -> None:
        held = vars(module)
        counts = module.training and getattr(module, "running_mean", None) is not None
        if counts or any(held[name] for name in HOOKS):  # statistics are state kept between calls
            self.regular = False
        self.parts += [path, type(module)]
        for name, child in module._modules.items():
            self.parts += [name, None if child is None else self._shared(child)]
        for name, p in module._parameters.items():
            self.parts += [name, None if p is None else self._tensor(p)]
        for name, b in module._buffers.items():
            self.parts += [name, None if b is None else self._tensor(b)]
            if b is not None and self._shared(b) is not None:
                self.regular = False
        for name, value in held.items():
            if type(value) is int:
                self.parts.append(name)
                self.integers[path, name] = value
            elif name not in UNSEEN:
                self.parts += [name, self._frozen(value)]

    def _shared(self, value: Any) -> int | None:
        return id(value) if self.owners[id(value)] > 1 else None

    def _tensor(self, t: torch.Tensor) -> Hashable:
        layout = tuple(t.shape), t.dtype, t.requires_grad, t.device, t.layout
        return type(t), *layout, t.stride(), self._shared(t)

    def _frozen(self, value: Any) -> Hashable:
        """Equal where two members' forward sees the same in it; identity where in doubt."""
        kind = type(value)
        if kind is float:
            return kind, repr(value)
        if kind in PLAIN or isinstance(value, enum.Enum):
            return kind, value
        if kind in (tuple, list):
            return kind, tuple(self._frozen(x) for x in value)
        if kind in (set, frozenset):
            return kind, frozenset(self._frozen(x) for x in value)
        if isinstance(value, dict):
            items = ((self._frozen(k), self._frozen(v)) for k, v in value.items())
            return kind, tuple(items)
        if kind is functools.partial:
            parts = (value.func, value.args, value.keywords)
            return kind, tuple(self._frozen(x) for x in parts)
        if kind is types.MethodType and id(value.__self__) in self.paths:
            return kind, value.__func__, self.paths[id(value.__self__)]
        if isinstance(value, nn.Module) and id(value) in self.paths:
            return kind, self.paths[id(value)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            held = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
            return kind, tuple(self._frozen(x) for x in held)
        return "same", id(value)


def describe(member: nn.Module) -> tuple[list[Any], dict[Place, int]]:
    """What tells a module from another, but for its weights: parts, and apart from them integer
    attributes; a module whose hooks or statistics may tell more equals itself alone."""
    found = _Description(member, Counter())
    return found.parts if found.regular else [*found.parts, id(member)], found.integers


def snapshot(modules: Sequence[nn.Module]) -> list[Any]:
    """What assignments to attributes would change, also to items of lists, sets and dicts, and to
    attributes of other objects that they hold."""
    return [
        (name, _identity(value))
        for module in modules
        for name, value in vars(module).items()
        if name not in STATE
    ]


def held_state(modules: Sequence[nn.Module]) -> list[Any]:
    """What assignments to parameters, buffers and submodules would change."""
    return [_identity(vars(module)[table]) for module in modules for table in STATE]


def _identity(value: Any) -> Any:
    if isinstance(value, dict):
        return id(value), [(k, _identity(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return id(value), [_identity(x) for x in value]
    if isinstance(value, (nn.Module, torch.Tensor, type)) or not hasattr(value, "__dict__"):
        return id(value)
    return id(value), [(k, id(v)) for k, v in vars(value).items()]
