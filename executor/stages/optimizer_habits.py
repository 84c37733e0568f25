"""Habits of optimizers that step more than one element at a time, seen on small parameters.

looks_across    a parameter's step depends on another's gradient (line searches, dot products
                over all parameters): wrong where other ranks hold the others
looks_within    an element's step depends on others of its parameter (norms, roots of matrices,
                scales of parts)
indexes         it selects elements by a mask, which tensors cut into shards can't do
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.costmodel.memory import Sides, optimizer_named
from meshwright.executor.errors import OptimizerError
from meshwright.executor.parameters import (
    BY_NAME,
    StageParameter,
    WholeTensors,
    local_of,
    step_alone,
)
from meshwright.executor.ranks import launch

STEPS, SHAPE = 3, (4, 4)
APART = "_meshwright_apart"  # attribute of a parameter: other ranks hold others of its model
MASKED = frozenset(
    ("index_put_", "index_put", "index", "masked_select", "nonzero", "masked_scatter_")
)

_checked: WeakSet[torch.optim.Optimizer] = WeakSet()
_alone: WeakSet[torch.optim.Optimizer] = WeakSet()  # that step each parameter by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    looks_across: bool = False
    looks_within: bool = False
    indexes: bool = False


def check_habits(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that can't step what this rank holds of its parameters."""
    if optimizer in _checked or launch.rehearsed():  # on tensors without values
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    apart = any(p.is_meta or getattr(p, APART, False) for p in params)
    cut = any(isinstance(p, DTensor) and p.to_local().shape != p.shape for p in params)
    if apart or cut:
        found = habits(type(optimizer), optimizer.defaults)
        name = type(optimizer).__name__
        if apart and found.looks_across:
            raise OptimizerError(
                f": {name} steps a parameter by the gradients of others, too, which other stages "
                "of the pipeline hold",
                place="optimizer",
                legal="under a pipeline, optimizers that step each parameter by itself",
                way_out="plan without a pipeline: overrides=Overrides(pp=1)",
            )
        if cut and found.indexes:
            raise OptimizerError(
                f": {name} selects elements by masks, which parameters cut into shards don't have",
                place="optimizer",
                legal="optimizers of whole-tensor arithmetic",
                way_out=f"result.whole_tensor_optimizer({name}, ...), or plan without ZeRO and tp",
            )
    _checked.add(optimizer)


def check_steps_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer that can't step one parameter without the others."""
    if optimizer in _alone or launch.rehearsed():
        return
    kind = type(optimizer)
    if isinstance(optimizer, WholeTensors) or not _steps_alone(optimizer):
        raise OptimizerError(
            f": {kind.__name__} needs several parameters at once, counts steps outside of their "
            "states, or can't be tried on two small ones; and the plan steps each as its gradient "
            "is whole (optimizer_in_backward)",
            place="train_step: optimizer",
            legal="an optimizer that steps each parameter by itself",
            way_out="plan with Overrides(optimizer_in_backward=False)",
        )
    _alone.add(optimizer)


def stepped_whole(
    make: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    *,
    name: str | None,
    matrices: Mapping[str, Sides],
    held: Iterable[StageParameter],
    cut: bool,
    several: bool,
) -> set[str] | None:
    """FQNs of this rank's parameters that an optimizer should step whole, each on one rank: by the
    `name` that plans have for it its `matrices`, by value; else what ranks hold parts of, where
    the step of an element depends on others of its tensor. None where no rank of the plan has any:
    one of whose stages has parts of parameters (`cut`), or `several` ranks."""
    trained = [p for p in held if p.trainable]
    parts = {p.fqn for p in trained if local_of(p.api).shape != p.api.shape}
    if name and (record := optimizer_named(name).matrices):
        multiplies = bool(record.products(2, 2))
        if not (cut or (several and multiplies)):
            return None
        mine = {p.fqn for p in trained if p.value in matrices}
        return mine if multiplies else mine & parts
    if not cut:
        return None
    if name == "adamw8bit":  # which no small CPU tensors try
        return parts
    if name or make in BY_NAME.values():
        return None  # of elements, or by norms, which DTensors know
    kind = make.func if isinstance(make, partial) else make
    given = {**make.keywords, **options} if isinstance(make, partial) else options
    assert isinstance(kind, type)
    found = habits(kind, given)
    return parts if found.looks_within and not found.looks_across else None


def chosen_matrices(params: Iterable[Any], held: Iterable[StageParameter]) -> Mapping[str, Sides]:
    """Sides of the matrices that a user gives an optimizer of matrices, by value: all of groups
    that adapt."""
    values = {id(p.api): p.value for p in held}
    groups = [p if isinstance(p, Mapping) else {"params": [p]} for p in params]
    chosen = [p for group in groups if group.get("adapt", True) for p in group["params"]]
    sides = {values[id(p)]: Sides.of(p.shape) for p in chosen if id(p) in values}
    return {value: found for value, found in sides.items() if found}


def _steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether two small parameters that are stepped one by one end where they do together."""
    kind = type(optimizer)
    options = _taken(kind, optimizer.defaults)
    device = optimizer.param_groups[0]["params"][0].device
    ends = list[list[nn.Parameter]]()
    try:
        with torch.random.fork_rng(devices=[]):
            for alone in (False, True):
                torch.manual_seed(0)
                pair = [nn.Parameter(torch.randn(SHAPE).to(device)) for _ in range(2)]
                made = kind(pair, **options)
                for k in range(STEPS):
                    for p in pair:
                        p.grad = torch.randn(SHAPE).to(device) * (k + 1)
                    if not alone:
                        made.step()
                    for p in pair if alone else ():
                        step_alone(made, made.param_groups[0], p)
                ends.append(pair)
    except Exception:  # noqa: BLE001 - whatever it needs
        return False
    return all(map(torch.equal, *ends))


def habits(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Habits:
    """Habits of a kind of optimizer with these options; none of one that can't be tried."""
    options = _taken(kind, options)
    try:
        with torch.random.fork_rng(devices=[]), _Masks() as masks:
            alone, beside = (_stepped(kind, options, scale) for scale in (1.0, 3.0))
            within = _stepped(kind, options, 1.0, one_of=30.0)
    except Exception:  # noqa: BLE001 - whatever it needs, it is told by its own step
        return Habits()
    return Habits(
        looks_across=not torch.equal(alone, beside),
        looks_within=not torch.equal(alone.flatten()[1:], within.flatten()[1:]),
        indexes=masks.seen,
    )


def _taken(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a kind of optimizer is made with."""
    taken = inspect.signature(kind).parameters
    return {name: x for name, x in options.items() if name in taken}


def _stepped(
    kind: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    scale: float,
    one_of: float = 1.0,
) -> torch.Tensor:
    """A parameter after some steps, beside one whose gradient is so many times as large; its first
    element's, too (`one_of`)."""
    torch.manual_seed(0)
    first, second = (nn.Parameter(torch.randn(SHAPE)) for _ in range(2))
    slopes = torch.randn(STEPS, 2, *SHAPE)
    optimizer = kind([first, second], **options)
    for of_first, of_second in slopes:

        def closure() -> torch.Tensor:
            first.grad, second.grad = of_first.clone(), scale * of_second  # noqa: B023
            first.grad[0, 0] *= one_of
            return torch.ones(())

        closure()
        optimizer.step(closure)  # type: ignore[arg-type]  # a scalar tensor, as losses are
    return first.detach()


class _Masks(TorchDispatchMode):
    """Notes operators that select elements by masks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func.overloadpacket.__name__ in MASKED
        return func(*args, **(kwargs or {}))
