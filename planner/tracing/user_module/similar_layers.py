"""Similar layers: equal but for their weights, so that one can be traced for all.

Two members of a `ModuleList` or `Sequential` are similar where nothing that their forward could
read tells them apart: the same tree of classes, equal plain attributes, the very same objects for
everything else (configs, functions, shared tensors), parameters and buffers of equal shape, dtype
and `requires_grad`, the same ties, and no hooks. One difference is allowed: identifiers, which are
integer attributes that hold every member's own position (`layer_idx`) and strings, in attributes
and in dicts, that hold its own name or one below it (`layers.3.mlp`); `stand_ins.py` notes whether
they are used.
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

from meshwright.planner.tracing.user_module.hooks import CALL_HOOKS

MIN_SIMILAR = 5  # members that a group needs for a short trace, in which three are traced
STATE = ("_parameters", "_buffers", "_modules")
UNSEEN = frozenset({  # attributes of every module that forward does not look at
    *STATE, *CALL_HOOKS, "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
})  # fmt: skip
PLAIN = (
    type(None), bool, int, float, complex, str, bytes,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip

Place = tuple[Any, ...]  # (path below the member, attribute, keys of dicts in it)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarLayers:
    """A group of similar members of one container: their FQNs in order, and the places of each
    member's position and names."""

    members: tuple[str, ...]
    identifiers: tuple[Place, ...]

    @property
    def traced(self) -> tuple[str, str, str]:
        """The members that are traced: the first, the second (which is copied) and the last."""
        return self.members[0], self.members[1], self.members[-1]

    @property
    def spared(self) -> tuple[str, ...]:
        """The members that are not traced, but copied from the second."""
        return self.members[2:-1]


def find_similar_layers(model: nn.Module, apart: Sequence[str] = ()) -> tuple[SimilarLayers, ...]:
    """The outermost groups of `MIN_SIMILAR` or more similar members, none of them in `apart`."""
    owners = Counter(
        id(owned)
        for module in model.modules()
        for table in STATE
        for owned in vars(module)[table].values()
        if owned is not None
    )
    return tuple(_groups(model, "", owners, apart))


def _groups(
    module: nn.Module, path: str, owners: Counter[int], apart: Sequence[str]
) -> Iterator[SimilarLayers]:
    children = {name: m for name, m in module._modules.items() if m is not None}
    grouped: set[str] = set()
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) >= MIN_SIMILAR:
        for group in _similar(children, path, owners, apart):
            grouped.update(group.members)
            yield group
    for name, child in children.items():
        if path + name not in grouped:
            yield from _groups(child, f"{path}{name}.", owners, apart)


def _similar(
    children: dict[str, nn.Module], path: str, owners: Counter[int], apart: Sequence[str]
) -> Iterator[SimilarLayers]:
    classes: dict[Hashable, list[tuple[int, str, _Description]]] = defaultdict(list)
    for position, (name, member) in enumerate(children.items()):
        description = _Description(member, owners, path + name)
        regular = description.regular and path + name not in apart
        if regular and owners[id(member)] == 1 and "forward" not in vars(member):
            classes[tuple(description.parts)].append((position, path + name, description))
    for members in classes.values():
        places, names = members[0][2].integers, members[0][2].names
        numbers = {p for p in places if all(d.integers[p] == at for at, _, d in members)}
        fixed = [p for p in places if p not in numbers]
        kinds: dict[Hashable, list[str]] = defaultdict(list)
        for _, fqn, description in members:
            kinds[tuple(description.integers[p] for p in fixed)].append(fqn)
        for same in kinds.values():
            if len(same) >= MIN_SIMILAR:
                identifiers = (*sorted(numbers), *names)
                yield SimilarLayers(members=tuple(same), identifiers=identifiers)


class _Description:
    """A module's structure: hashable `parts`, and its integer attributes apart, in `integers`.
    Tensors and modules with several owners are described by their identity: ties must be the same
    ones. `names` are the places of strings that begin with the end of `fqn`, from the name of a
    container on. `regular` is False for modules with state between calls, or hooks."""

    def __init__(self, member: nn.Module, owners: Counter[int], fqn: str = "") -> None:
        self.owners = owners
        self.parts: list[Any] = []
        self.integers: dict[Place, int] = {}
        self.names: list[Place] = []
        path = fqn.split(".")
        self.suffixes = [".".join(path[k:]) for k in range(len(path) - 1)]
        self.regular = True
        self.paths = {id(m): path for path, m in member.named_modules()}
        for path, module in member.named_modules():
            self._add(path, module)

    def _add(self, path: str, module: nn.Module) -> None:
        # statistics are state kept between calls
        counts = module.training and getattr(module, "running_mean", None) is not None
        if counts or any(vars(module)[name] for name in CALL_HOOKS):
            self.regular = False
        self.parts += [path, type(module)]
        for name, child in module._modules.items():
            self.parts += [name, None if child is None else self._shared(child)]
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            self.parts += [name, None if tensor is None else self._tensor(tensor)]
        if any(b is not None and self._shared(b) for b in module._buffers.values()):
            self.regular = False
        for name, value in vars(module).items():
            if type(value) is int:
                self.parts.append(name)
                self.integers[path, name] = value
            elif name not in UNSEEN:
                self.parts += [name, self._frozen(value, (path, name))]

    def _shared(self, value: Any) -> int | None:
        return id(value) if self.owners[id(value)] > 1 else None

    def _tensor(self, t: torch.Tensor) -> Hashable:
        layout = tuple(t.shape), t.dtype, t.requires_grad, t.device, t.layout
        return type(t), *layout, t.stride(), self._shared(t)

    def _frozen(self, value: Any, at: Place = ()) -> Hashable:
        """A key of an attribute's value, equal for values that a forward can't tell apart; where in
        doubt, its identity. `at` is the place of a name, which can be replaced."""
        kind = type(value)
        for k, suffix in enumerate(self.suffixes if kind is str and at else ()):
            if f"{value}.".startswith(f"{suffix}."):
                self.names.append(at)
                return "name", k, value.removeprefix(suffix)
        if kind is float:
            return kind, repr(value)
        if kind in PLAIN or isinstance(value, enum.Enum):
            return kind, value
        if kind in (tuple, list):
            return kind, tuple(self._frozen(x) for x in value)
        if kind in (set, frozenset):
            return kind, frozenset(self._frozen(x) for x in value)
        if isinstance(value, dict):
            items = ((self._frozen(k), self._frozen(v, at and (*at, k))) for k, v in value.items())
            return kind, tuple(items)
        if kind is functools.partial:
            parts = (value.func, value.args, value.keywords)
            return kind, tuple(self._frozen(x) for x in parts)
        if kind is types.MethodType:
            return kind, value.__func__, self._frozen(value.__self__)
        if isinstance(value, nn.Module) and id(value) in self.paths:
            return kind, self.paths[id(value)]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            entries = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
            return kind, tuple(self._frozen(x) for x in entries)
        return "same", id(value)


def describe(member: nn.Module) -> tuple[list[Any], dict[Place, int]]:
    """A module's structure without its weights: (hashable parts, integer attributes). A module with
    hooks or running statistics equals itself alone."""
    description = _Description(member, Counter())
    parts = description.parts if description.regular else [*description.parts, id(member)]
    return parts, description.integers


def snapshot(modules: Sequence[nn.Module]) -> list[Any]:
    """Identities of the attributes of modules, of items of lists, sets and dicts in them, and of
    the attributes of other objects: an assignment changes them."""
    return [
        (name, _identity(value))
        for module in modules
        for name, value in vars(module).items()
        if name not in STATE
    ]


def held_state(modules: Sequence[nn.Module]) -> list[Any]:
    """Identities of the parameters, buffers and submodules of modules."""
    return [_identity(vars(module)[table]) for module in modules for table in STATE]


def _identity(value: Any) -> Any:
    if isinstance(value, dict):
        return id(value), [(k, _identity(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return id(value), [_identity(x) for x in value]
    if isinstance(value, (nn.Module, torch.Tensor, type)) or not hasattr(value, "__dict__"):
        return id(value)
    return id(value), [(k, id(v)) for k, v in vars(value).items()]
