"""Programs of leaves: a module or a function called on a list of tensors.

The operands are the tensors among the call's arguments, then the module's parameters, then its
buffers; its other arguments are those of the trace. The module is the tracer's private copy,
without weights: whoever runs it lends it tensors for the time of the call, of any sizes that its
forward can take. Buffers that the forward writes to come out as results behind its own, so that a
call changes none of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.profiles.inputs import MeshwrightError


class UnseenWrite(MeshwrightError, RuntimeError):
    """A leaf writes to a buffer of which the trace knows nothing."""

    CODE = "MW308"
    PLACE = "a leaf"
    LEGAL = "writes to the buffers that it wrote to when it was traced"
    WAY_OUT = "keep what depends on data out of its buffers"


class LostGradientError(MeshwrightError, RuntimeError):
    """A leaf whose result has no gradient where the trace saw one."""

    CODE = "MW309"
    PLACE = "a leaf"
    LEGAL = "results that have gradients as when the model was traced"
    WAY_OUT = "give a kernel its backward by a torch.autograd.Function"


@dataclass(frozen=True, slots=True)
class Operand:
    """The place of a tensor in a call's arguments or results: its number among the operands."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One leaf's call. `leaves` and `spec` are its arguments, with `Operand`s for tensors; `state`
    the names of parameters and buffers that the other operands are, of which it writes `written`;
    `dense` tells operands that were contiguous as traced, and are made so; `gradients` tells
    results that carry gradients; `autocast` is the dtype of the region it stands in; `unseen`: its
    results were declared, so that nobody ran it while it was traced."""

    name: str
    function: Callable[..., Any]
    module: nn.Module | None
    leaves: tuple[Any, ...]
    spec: Any
    state: tuple[str, ...]
    dense: tuple[bool, ...]
    autocast: torch.dtype | None
    written: tuple[str, ...] = ()
    gradients: tuple[bool, ...] = ()
    unseen: bool = False

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results and new values of written buffers, as the trace found them."""
        layouts = zip(operands, self.dense, strict=True)
        tensors = [x.contiguous() if dense else x for x, dense in layouts]
        inputs = len(tensors) - len(self.state)
        state = dict(zip(self.state, tensors[inputs:], strict=True))
        state |= {name: state[name].clone() for name in self.written}
        versions = {name: x._version for name, x in state.items()}
        output, after = self.run(tensors[:inputs], state)
        changed = {n for n, x in state.items() if after[n] is not x or x._version != versions[n]}
        if more := changed - set(self.written):
            raise self._unseen_write(", ".join(sorted(more)))
        taken = {id(x) for x in (*tensors, *state.values())}
        outputs = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        results = [x for x in outputs if id(x) not in taken]
        if len(results) < len(self.gradients) == len(outputs):  # dropout in evaluation, say
            results = [x.view_as(x) for x in outputs]
        flowing = list(zip(results, self.gradients, strict=True))
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            for k, (x, gradient) in enumerate(flowing):
                if gradient and not x.requires_grad:
                    raise self._lost_gradient(k)
        return [
            *(x if gradient else x.detach() for x, gradient in flowing),
            *(after[n].detach() for n in self.written),
        ]

    def _unseen_write(self, buffers: str) -> UnseenWrite:
        why, way_out = (
            "it did not when it was traced",
            "keep what depends on data out of its buffers",
        )
        if self.unseen:
            why = "a trace can't see of a leaf with result=, because it does not run it"
            way_out = "return the new value and write it outside of the leaf, or leave result= out"
        return UnseenWrite(
            f" writes to {buffers}, which {why}", place=f"leaf {self.name}", way_out=way_out
        )

    def _lost_gradient(self, number: int) -> LostGradientError:
        return LostGradientError(
            f" gives result {number} without gradient where the trace expects one",
            place=f"leaf {self.name}",
            way_out="give a kernel its backward by a torch.autograd.Function, and add "
            "0 * x.sum() of an input x to what depends on none",
        )

    def run(
        self, tensors: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]
    ) -> tuple[Any, Mapping[str, torch.Tensor]]:
        """The forward's own output, and the state after it."""
        device = next(iter((*tensors, *state.values()))).device.type
        cast = torch.autocast(device, self.autocast) if self.autocast is not None else nullcontext()
        args, kwargs = self.arguments(tensors)
        if self.module is None:
            with cast:
                return self.function(*args, **kwargs), state
        with cast, lent(self.module, state) as held:
            return self.module(*args, **kwargs), held()

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the call."""
        leaves = [tensors[x.number] if isinstance(x, Operand) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@contextmanager
def lent(
    module: nn.Module, state: Mapping[str, torch.Tensor]
) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
    """A module with other tensors in place of its parameters and buffers, by all their names, tied
    ones by the first; yields the function that reads them back."""
    places: list[tuple[str, dict[str, Any], str, Any]] = []
    first: dict[int, str] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    fqn = first.setdefault(id(tensor), f"{path}.{name}" if path else name)
                    places.append((fqn, table, name, tensor))
    try:
        for fqn, table, name, _ in places:
            table[name] = state[fqn]
        yield lambda: {fqn: table[name] for fqn, table, name, _ in places}
    finally:
        for _, table, name, tensor in places:
            table[name] = tensor


def to_meta(module: nn.Module) -> None:
    """Put a module's tensors on the meta device: their shapes stay."""
    metas: dict[int, torch.Tensor] = {}
    for below in module.modules():
        tables: tuple[dict[str, Any], ...] = (below._parameters, below._buffers)
        for table in tables:
            for name, x in table.items():
                if x is not None and id(x) not in metas:
                    empty = torch.empty(x.shape, dtype=x.dtype, device="meta")
                    weight = isinstance(x, nn.Parameter)
                    metas[id(x)] = nn.Parameter(empty, x.requires_grad) if weight else empty
                table[name] = x if x is None else metas[id(x)]


@dataclass(frozen=True, slots=True)
class Applied:
    """Calls an autograd.Function."""

    function: type[torch.autograd.Function]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        apply: Callable[..., Any] = self.function.apply
        return apply(*args, **kwargs)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters, then its buffers, tied ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
