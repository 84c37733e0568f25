"""Leaves, declared by the user: modules and functions that are one node of the graph.

A declaration lies on its subject: as an attribute of the module, of the class of modules or of
the `torch.autograd.Function`; a function is wrapped. Outside of a trace it changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.costmodel.rules import named_in
from meshwright.profiles.inputs import ArgumentError

ATTRIBUTE = "_meshwright_leaf"
Amount = float | Callable[..., float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The arguments of `leaf`, which has their meaning."""

    rule: str = ""
    flops: Amount | None = None
    saved_bytes: Amount | None = None
    result: Callable[..., Any] | None = None


class Recorder(Protocol):
    """The trace at work, as declared functions see it."""

    def function(self, subject: Any, args: Any, kwargs: Any) -> Any:
        """The results of a call of a wrapped function or of an autograd.Function."""


# thread-local: a thread in which a leaf is probed does not see the trace that started it
TRACE: ContextVar[Recorder | None] = ContextVar("TRACE", default=None)


def leaf(
    target: Any = None,
    *,
    rule: str = "",
    flops: Amount | None = None,
    saved_bytes: Amount | None = None,
    result: Callable[..., Any] | None = None,
) -> Any:
    """Keep a module, a class of modules, a `torch.autograd.Function` or a function as one node.

    Its forward is not looked into: it runs as it is written, in ordinary autograd, on this rank's
    parts of its tensors. For scans, custom kernels, and whatever branches on values. Returns
    `target` (a function: wrapped), and can be used as a decorator.

    `rule` says which dims may be split, in the language of `meshwright.rule`: one term for every
    tensor it takes (arguments in order of the call, then its parameters, then its buffers) and for
    every tensor it gives, as "b _ d, d n -> b _ n". A letter is a dim that may be split wherever it
    stands, and over which the results of parts are added up where none of them has it; `_` is one
    that may not (a scan's sequence); "*d -> *d" is pointwise. Terms at the end may be left out:
    those tensors stay whole. Without a rule it runs in full on every rank. The forward must take
    sizes from its tensors, not from attributes.

    The rule is tried when the model is traced: the forward and its backward run on small random
    tensors on the CPU, whole and in two parts per letter, and the parts must make up the whole; a
    rule that does not hold raises LeafError. What draws random numbers, or does not run so (large
    dims that stay whole, kernels for other devices), is taken on trust, which the notes of the
    graph say.

    `flops` (of one forward) and `saved_bytes` (kept for the backward besides the tensors it takes
    and gives) are numbers for one call on the sample batch, or functions of the shapes of the
    tensors it takes; left out, they are counted on fake tensors. `result` maps the arguments of a
    call to tensors like its results (`lambda x, w: torch.empty_like(x)`); it is needed where the
    forward can't run on fake tensors, as kernels that read addresses can't, and a run on random
    numbers won't do.

    A forward whose `result` is declared must not write to buffers.

    Raises ValueError for what is none of these, and RuleError for a rule that is no spec.
    """
    if rule:
        named_in(rule, "leaf: rule")
    declaration = Declaration(rule=rule, flops=flops, saved_bytes=saved_bytes, result=result)
    if target is None:
        return functools.partial(_declare, declaration=declaration)
    return _declare(target, declaration)


def _declare(target: Any, declaration: Declaration) -> Any:
    classes = (nn.Module, torch.autograd.Function)
    if isinstance(target, nn.Module) or (isinstance(target, type) and issubclass(target, classes)):
        setattr(target, ATTRIBUTE, declaration)
        return target
    if isinstance(getattr(target, "__self__", None), nn.Module):
        raise ArgumentError(
            f"{target!r} is a method, whose module's parameters would not be seen",
            place="leaf",
            legal="a module or a function",
            way_out="declare the module, or a function that takes the parameters as arguments",
        )
    if isinstance(target, type) or not callable(target):
        legal = "a module, a class of modules, an autograd.Function, a function"
        raise ArgumentError.refused("leaf: target", target, legal=legal)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        trace = TRACE.get()
        if trace is None:
            return target(*args, **kwargs)
        return trace.function(call, args, kwargs)

    setattr(call, ATTRIBUTE, declaration)
    return call


def declared(target: Any) -> Declaration | None:
    """The declaration on a module, its class, an autograd.Function or a function; None without."""
    declaration = getattr(target, ATTRIBUTE, None)
    return declaration if isinstance(declaration, Declaration) else None
