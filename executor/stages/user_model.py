"""The model that the user passed, as one rank of a plan holds it.

Where every rank holds the whole model, its parameters stay the user's own objects. Elsewhere a
parameter is replaced, under every name that it has, by the DTensor that the rank trains, and by one
on meta where other ranks train it; a buffer that other ranks write goes to meta, too. So
`model.parameters()` is what trains, and `model.state_dict()` what this rank holds.

An optimizer made over parameters that were replaced takes up the new ones at its next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from meshwright.costmodel.graph import Graph
from meshwright.executor.errors import OptimizerError, StateError
from meshwright.executor.host_values import share_memory
from meshwright.executor.parameters import StageParameter, load, local_of
from meshwright.executor.ranks import Place
from meshwright.executor.stages.optimizer_habits import APART, check_habits
from meshwright.profiles.inputs import shown

REPLACED_BY = "_meshwright_replaced_by"  # attribute of a parameter that left the model
REFUSES_CALLS = "_meshwright_refuses_calls"  # attribute of a hook on a model of parts
SHOWN = 3  # names in a message


class UserModel:
    """`module` is the user's model, `names` all FQNs of each of its tensors by the first, `on_meta`
    those that had no value when it was passed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names: dict[str, tuple[str, ...]] = {}
        self.originals: dict[str, torch.Tensor] = {}
        by_id: dict[int, list[str]] = {}
        tensors = [*module.named_parameters(remove_duplicate=False)]
        for name, x in (*tensors, *module.named_buffers(remove_duplicate=False)):
            by_id.setdefault(id(x), []).append(name)
            self.originals.setdefault(by_id[id(x)][0], x)
        self.names = {names[0]: tuple(names) for names in by_id.values()}
        self.first = {name: names[0] for names in self.names.values() for name in names}
        self.on_meta = frozenset(fqn for fqn, x in self.originals.items() if x.is_meta)
        self.whole = True  # until `hold` says otherwise
        self._at: dict[str, tuple[nn.Module, str]] = {}
        self._replaced: dict[str, torch.Tensor] = {}  # what is now in the place of an original
        self._handles: list[RemovableHandle] = []

    def tensor(self, fqn: str) -> torch.Tensor:
        """The tensor that is in a place now."""
        module, leaf = self._place(fqn)
        parameter = module._parameters.get(leaf)
        return getattr(module, leaf) if parameter is None else parameter

    def put(self, fqn: str, tensor: torch.Tensor) -> None:
        """Put a tensor in all places of the one that has this name."""
        for name in self.names.get(self.first.get(fqn, fqn), (fqn,)):
            module, leaf = self._place(name)
            setattr(module, leaf, tensor)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        if name not in self._at:
            parent, _, leaf = name.rpartition(".")
            self._at[name] = self.module.get_submodule(parent), leaf
        return self._at[name]

    def write(self, fqn: str, full: torch.Tensor) -> None:
        """Write into a tensor that this rank holds whole; a new one where it is on meta."""
        now = self.tensor(fqn)
        if not now.is_meta:
            with torch.no_grad():
                now.copy_(full)
        elif isinstance(now, nn.Parameter):
            self.replace(fqn, nn.Parameter(full.detach(), requires_grad=now.requires_grad))
        else:
            self.replace(fqn, full.detach())

    def replace(self, fqn: str, new: torch.Tensor) -> None:
        """Put `new` for good in the places of a tensor, which remembers it."""
        fqn = self.first.get(fqn, fqn)
        old = self.tensor(fqn)
        if old is new:
            return
        for name, value in vars(old).items():  # what users note on their parameters
            if name != REPLACED_BY:
                vars(new).setdefault(name, value)
        setattr(old, REPLACED_BY, new)
        vars(new).pop(REPLACED_BY, None)
        self._replaced[fqn] = new
        self.put(fqn, new)

    # --- held -----------------------------------------------------------------------------------

    def hold(
        self,
        graph: Graph,
        parameters: Iterable[StageParameter],
        buffers: Iterable[str],
        place: Place,
        *,
        whole: bool,
    ) -> None:
        """Put this rank's `parameters` in their places, and those of other ranks on meta, as well
        as the written buffers that are not among its `buffers`."""
        held = {p.fqn: p for p in parameters}
        for fqn in graph.buffers.values():  # tensors in plain attributes, carried like buffers
            self.originals.setdefault(fqn, self.tensor(fqn))
        away = set(graph.parameters.values()) - set(held)
        updated = {graph.buffers[value] for value in graph.updates if value in graph.buffers}
        elsewhere = {*updated, *self.on_meta.intersection(graph.buffers.values())} - set(buffers)
        for fqn, p in held.items():
            self.replace(fqn, p.api)
            setattr(p.api, APART, bool(away))
        for fqn in (*sorted(away), *sorted(elsewhere)):
            self.replace(fqn, _elsewhere(_on_meta(self.tensor(fqn))))
        self.whole = whole
        self._move_rest(place.device)
        if self._replaced:
            _follow_replaced()
        if whole:
            return
        for fqn in self._replaced:
            _empty(self.originals[fqn])
        self._handles += [
            self.module.register_forward_pre_hook(_refusal_of_calls(self)),
            self.module.register_load_state_dict_pre_hook(_loading(self, held, away, place)),
        ]

    def when_loaded(self, done: Callable[[], None]) -> None:
        """Call `done` when `load_state_dict` has given the model all of its tensors."""

        def loaded(module: nn.Module, incompatible: Any) -> None:
            if module is self.module and not incompatible.missing_keys:
                done()

        self._handles.append(self.module.register_load_state_dict_post_hook(loaded))

    def _move_rest(self, device: torch.device) -> None:
        """Move everything that was not replaced to the device, read or not."""
        for fqn, x in self.originals.items():
            if fqn not in self._replaced and x.device != device and not x.is_meta:
                x.data = x.data.to(device)

    def check_places(self, parameters: Iterable[StageParameter]) -> None:
        """Raise ValueError for a parameter that is another object since, or of another dtype or
        device; a parameter that was given other memory (`.data = ...`) is read from there,
        and has its own again."""
        for p in parameters:
            if self.tensor(p.fqn) is not p.api:
                raise StateError(
                    " was replaced after planning, which train_step can't see",
                    place=f"parameter {p.fqn!r}",
                    way_out="write into it in place, `with torch.no_grad(): p.copy_(...)`, or call "
                    "auto_parallelize again",
                )
            held = local_of(p.api.detach())
            if not share_memory(held, p.stored):
                now = held.detach()
                if (now.dtype, now.device, now.shape) != (
                    p.stored.dtype, p.stored.device, p.stored.shape,
                ):  # fmt: skip
                    raise StateError(
                        f" is {now.dtype} on {now.device} of shape "
                        f"{tuple(now.shape)}, was planned {p.stored.dtype} on {p.stored.device} "
                        f"of {tuple(p.stored.shape)}",
                        place=f"parameter {p.fqn!r}",
                        way_out="do not move or cast the model after planning (it trains fp32 "
                        "masters), or call auto_parallelize again",
                    )
                with torch.no_grad():
                    p.stored.copy_(now)
                    if isinstance(p.api, DTensor):
                        p.api._local_tensor.data = p.stored
                    else:
                        p.api.data = p.stored
                        p.stored = p.api.detach()

    # --- as it was ------------------------------------------------------------------------------

    @contextmanager
    def as_passed(self) -> Iterator[nn.Module]:
        """The model with meta tensors in place of those that were on meta or are not whole."""
        now = {fqn: self.tensor(fqn) for fqn in {*self.on_meta, *self._replaced}}
        try:
            for fqn, x in now.items():
                self.put(fqn, _on_meta(x))
            yield self.module
        finally:
            for fqn, x in now.items():
                self.put(fqn, x)

    def release(self, state: Mapping[str, torch.Tensor], *, loaded: bool) -> None:
        """Give the model back as it was passed, with the values of `state`; what was on meta and
        was never `loaded` is on meta again."""
        for handle in self._handles:
            handle.remove()
        for fqn, now in self._replaced.items():
            original = self.originals[fqn]
            if loaded or not original.is_meta:
                if self.whole:
                    continue
                original = self._original(fqn, state[fqn])
            vars(original).pop(REPLACED_BY, None)
            setattr(now, REPLACED_BY, original)
            self.put(fqn, original)

    def _original(self, fqn: str, full: torch.Tensor) -> torch.Tensor:
        """The user's own tensor with the values of `whole`; a new one for one on meta."""
        original = self.originals[fqn]
        if not original.is_meta:
            original.data = full
            return original
        if isinstance(original, nn.Parameter):
            return nn.Parameter(full, requires_grad=original.requires_grad)
        return full


def current(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter that is now in the place of one that left the model; others themselves."""
    while (new := getattr(parameter, REPLACED_BY, None)) is not None:
        parameter = new
    return parameter


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the parameters that replaced its own. Raises ValueError where it has states
    of them, and where it can't step what this rank holds of them."""
    for group in optimizer.param_groups:
        params = group["params"]
        for k, p in enumerate(params):
            new = current(p)
            if new is p:
                continue
            if optimizer.state.get(p):
                raise StateError(
                    f"{type(optimizer).__name__} has states of a parameter of shape "
                    f"{tuple(new.shape)} whose layout was changed by planning",
                    place="optimizer",
                    way_out="give the optimizer to `replan(optimizer=...)`, or make it anew over "
                    "model.parameters()",
                )
            params[k] = new
    check_habits(optimizer)


def check_trains(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> None:
    """Raise ValueError for an optimizer that has a parameter which is not the model's: of another
    one, a copy, or one of the user's own. Its values and states would be saved nowhere."""
    known = {id(p) for p in model.parameters()}
    if optimizer is not None and not isinstance(getattr(optimizer, "param_groups", None), list):
        raise OptimizerError(
            f" is a {type(optimizer).__name__}, {shown(optimizer)}", place="optimizer"
        )
    groups = [group["params"] for group in optimizer.param_groups] if optimizer is not None else []
    foreign = {
        k: unknown
        for k, params in enumerate(groups)
        if (unknown := [p for p in params if id(current(p)) not in known])
    }
    if not foreign:
        return
    number, group_sizes = sum(map(len, foreign.values())), sum(map(len, groups))
    of = f"of the {group_sizes} parameters of this {type(optimizer).__name__}"
    many = f"none {of} is" if number == group_sizes else f"{number} {of} are not"
    where = ", ".join(f"{len(unknown)} in group {k}" for k, unknown in foreign.items())
    example = tuple(next(iter(foreign.values()))[0].shape)
    raise OptimizerError(
        f"{many} the model's ({where}), e.g. one of shape {example}",
        place="optimizer",
        legal="an optimizer over the result's parameters(), the model's, or some of them",
        way_out="make it over those; give others an optimizer of their own, which extra={'name': "
        "it} saves",
    )


@cache
def _follow_replaced() -> None:
    """Have every optimizer of this process `follow` before its step."""
    register_optimizer_step_pre_hook(lambda o, args, kwargs: follow(o))


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
    if isinstance(x, nn.Parameter):
        return nn.Parameter(meta, requires_grad=x.requires_grad)
    return meta


class _Elsewhere(nn.Parameter):
    """A parameter that other pipeline stages hold: shape and dtype, without values here."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **(kwargs or {}))
                if type(result) is torch.Tensor and result.is_meta:  # detached, say
                    return result.as_subclass(cls)
                return result
            except (NotImplementedError, RuntimeError) as error:  # whose values were asked for
                if "meta" not in str(error):
                    raise
                asked = error
        raise StateError(
            f"one of shape {tuple(_first(args).shape)} is on other pipeline stages' ranks, and has "
            f"no values here ({func.__name__})",
            place="a parameter of the model",
            legal="result.named_parameters(), which are this rank's",
            way_out="for an average of the weights take meshwright.Ema(result); for whole weights "
            "result.full_state_dict(), on all ranks",
        ) from asked


def _first(args: Iterable[Any]) -> torch.Tensor:
    """The first parameter of other stages among arguments, and in lists there."""
    for x in args:
        if isinstance(x, _Elsewhere):
            return x
        if isinstance(x, list | tuple) and any(isinstance(t, _Elsewhere) for t in x):
            return _first(x)
    raise AssertionError("no such argument")


def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    """A tensor on meta, which says where its values are when they are asked for."""
    if isinstance(x, nn.Parameter):
        x.__class__ = _Elsewhere
    return x


def _empty(original: torch.Tensor) -> None:
    """Free the memory of a tensor that left the model, whoever refers to it."""
    if not original.is_meta:
        original.grad = None
        original.data = original.data.new_empty(0)


def _refusal_of_calls(user: UserModel) -> Callable[..., None]:
    def refuse(module: nn.Module, args: Any) -> None:
        if module is user.module:
            raise StateError(
                "the model is parallelized: this rank holds only its part of the weights",
                place="a call of the model",
                way_out="call result.forward(...) for its output and result.eval_step(batch) for "
                "its loss, on all ranks; or load result.full_state_dict() into a model of its own",
            )

    setattr(refuse, REFUSES_CALLS, True)
    return refuse


def _loading(
    user: UserModel, held: Mapping[str, StageParameter], away: Iterable[str], place: Place
) -> Callable[..., None]:
    """A hook of `model.load_state_dict` that takes this rank's parts from whole tensors."""
    elsewhere = {name for fqn in away for name in user.names[fqn]}
    parameters = {name: p for fqn, p in held.items() for name in user.names[fqn]}

    def take(module: nn.Module, state: dict[str, torch.Tensor], *_: Any) -> None:
        if module is not user.module:  # a copy
            return
        for name, x in state.items():
            if name in elsewhere:
                state[name] = user.tensor(name)
            elif name in parameters and type(x) in (torch.Tensor, nn.Parameter):
                p = parameters[name]
                if x.shape == p.api.shape:
                    load(p, x.to(place.device), place)
                    state[name] = p.api.detach()

    return take
