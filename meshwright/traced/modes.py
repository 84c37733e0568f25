"""Whether a forward in evaluation mode runs the operators that were planned in training mode, but
for dropouts and running statistics, which follow the mode in which a plan runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, zip_longest
from typing import Any

from meshwright.costmodel.graph import Graph, Op, map_refs
from meshwright.costmodel.rules import runs_as_reshape, traits_of

# how a tensor lies in memory may depend on the mode by way of the kernels that are chosen
MEMORY = frozenset({"contiguous", "clone", "alias"})

ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
UNSET = (None, False)  # what an export leaves out

_Line = tuple[str, Any, Any]  # an operator's target, args and kwargs, values by number


def first_difference(trained: Graph, evaluated: Graph) -> str:
    """The first operator of the loss that one mode runs and the other does not, with its place;
    empty where both modes run the same."""
    pairs = zip_longest(_lines(trained), _lines(evaluated), fillvalue=None)
    for one, other in pairs:
        if one is None or other is None or one[1] != other[1]:
            found = one or other
            assert found is not None
            op = found[0]
            mode = "training" if one is not None else "evaluation"
            at = f" at {op.source}" if op.source else ""
            return f"{op.key} ({op.target}){at} in {mode} mode"
    return ""


def _lines(graph: Graph) -> Iterator[tuple[Op, _Line]]:
    """The operators behind the loss, without dropouts, in a form that compares."""
    numbers: dict[str, Any] = {}
    for names in (graph.inputs, graph.parameters, graph.buffers):
        numbers |= {name: (path,) for name, path in names.items()}
    numbers |= {name: (tuple(x.shape), str(x.dtype)) for name, x in graph.constants.items()}
    live, made = _behind_loss(graph), count()
    for op in (*graph.derived, *graph.ops):
        if live.isdisjoint(op.results):
            continue
        draw = traits_of(op).draw
        dropout = draw is not None and draw.kind in ("dropout", "channel dropout")
        if dropout or op.short in MEMORY:
            numbers[op.results[0]] = numbers[op.operands[0]]
            continue
        args, kwargs = map_refs(_without_mode(op), numbers.__getitem__)
        target = op.target
        if runs_as_reshape(op):
            target, args, kwargs = "reshape", (args[0], graph.values[op.results[0]].shape), {}
        numbers |= {result: next(made) for result in op.results}
        yield op, (target, args, kwargs)


def _without_mode(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, those that tell the mode as in evaluation."""
    args, kwargs, traits = list(op.args), dict(op.kwargs), traits_of(op)
    if traits.statistics is not None:
        args[traits.statistics.training] = False
    if traits.draw is not None and traits.draw.kind == "attention dropout":
        kwargs = dict(zip(ATTENTION, args, strict=False)) | kwargs
        args, kwargs = [], {n: x for n, x in kwargs.items() if n != "dropout_p" and x not in UNSET}
    return tuple(args), kwargs


def _behind_loss(graph: Graph) -> set[str]:
    found = {graph.loss}
    for op in reversed((*graph.derived, *graph.ops)):
        if not found.isdisjoint(op.results):
            found.update(op.operands)
    return found
