"""The callee of a leaf: a module or a function, with all that tells one from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.planner.operators import Applied, state_of
from meshwright.planner.tracing.similar import positions_of
from meshwright.planner.tracing.user_module import Declaration, declared, describe, hooks_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The callee of a leaf: the module `fqn`, or a function.

    `kind` is the module's class, or the function; equal `identity` (hashable) means equal but for
    weights. `state` are its tensors as traced, `weights` as the user has them. `positions`: an
    attribute holds its position in a stack of similar layers, and raises when it is used.
    """

    name: str
    fqn: str
    function: Callable[..., Any]
    module: nn.Module | None
    kind: Any
    identity: Any
    state: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    declaration: Declaration
    positions: bool

    @staticmethod
    def of_module(
        fqn: str, module: nn.Module, original: nn.Module, declaration: Declaration
    ) -> Subject:
        """The traced copy `module` of the user's module `original`."""
        parts, integers = describe(original)
        watched = positions_of(module)
        known = {path: n for path, n in integers.items() if path not in watched}
        return Subject(
            name=type(original).__name__,
            fqn=fqn,
            function=module,
            module=module,
            kind=type(original),
            identity=(tuple(parts), frozenset(known.items()), hooks_in(original)),
            state=state_of(module),
            weights=state_of(original),
            declaration=declaration,
            positions=bool(watched),
        )

    @staticmethod
    def of_function(target: Any) -> Subject:
        """A declared function, or an autograd.Function."""
        return Subject(
            name=target.__qualname__,
            fqn="",
            function=Applied(target) if isinstance(target, type) else target,
            module=None,
            kind=target,
            identity=("function", target),
            state={},
            weights={},
            declaration=declared(target) or Declaration(),
            positions=False,
        )
