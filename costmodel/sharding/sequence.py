"""The sequence: the factor that the context axis (cp) splits, found from what the operators read.

It is dim 1 of the values [batch, sequence] (of integers: real numbers are features) and [batch,
sequence, features] that operators read from outside: tokens, or what is made of raw inputs alone
(masks, labels shifted to their predictions), which every rank has whole; images and masks of scores
have more dims. A *shift* moves activations by one token or drops one at an end (logits without the
last, a token's predecessor beside it): its result has the sequence, too. Where another rank's token
comes in, that is a halo of one token, exchanged between neighbours; elsewhere nothing is.

An operator that needs whole sequences (a recurrence, a convolution over time) rules the axis out.
Attention does not: it gathers keys and values, or passes them around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from meshwright.costmodel.graph import Graph, Op, argument
from meshwright.costmodel.rules import OpFactors, traits_of

if TYPE_CHECKING:
    import torch

AtomDims = tuple[tuple[int, ...], ...]

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFactor:
    """The atom that cp splits, None where it can't: then `why`. `shifted` are the atoms of the
    same tokens moved by one, or without one at an end."""

    atom: int | None
    shifted: frozenset[int] = frozenset()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Shift:
    """Dim of an operator's first operand along which its result is moved by one token, or lacks
    one. A result of as many tokens is moved `by` 1 or -1, and `fill` comes in at the end, or the
    token at the other end where it `wraps`; else `by` is 0."""

    dim: int
    by: int = 0
    wraps: bool = False
    fill: float = 0.0


def sequence_factor(
    graph: Graph,
    dims: Mapping[str, AtomDims],
    ops: Mapping[str, OpFactors],
    letters: Mapping[str, Mapping[str, tuple[int, ...]]],
    batch: int | None,
) -> SequenceFactor:
    """The sequence of a graph, from the atoms of its values' dims and its operators' factors."""
    read = (v for v in _read(graph) if _has_tokens(dims[v], batch, graph.values[v].dtype))
    values = {dims[value][1]: value for value in read}
    values.pop((), None)
    if not values:
        return SequenceFactor(atom=None, why="no input has a sequence dim beside the batch")
    if len(values) > 1 or len(next(iter(values))) > 1:
        sizes = (f"{graph.inputs.get(v, v)} {list(graph.values[v].shape)}" for v in values.values())
        why = (
            f"inputs without one sequence dim: {', '.join(sizes)} (a decoder takes tokens and "
            "targets of one length, shifted outside of it, and a loss_fn)"
        )
        return SequenceFactor(atom=None, why=why)
    ((atom,),) = values
    atoms = {atom}
    for op in graph.ops:
        shift = shift_of(graph, op)
        if shift is not None and atoms.issuperset(dims[op.operands[0]][shift.dim]):
            atoms.update(dims[op.results[0]][shift.dim])
        elif _needs_whole(graph, op, ops[op.name], letters[op.name], atoms):
            why = f"{op.key} needs whole sequences (tp may split it)"
            return SequenceFactor(atom=None, why=why)
    return SequenceFactor(atom=atom, shifted=frozenset(atoms - {atom}))


def _read(graph: Graph) -> Iterator[str]:
    """Operands that no operator of a block makes, parameters and buffers apart."""
    inner = {value for op in graph.ops for value in op.results}
    inner |= {*graph.parameters, *graph.buffers}
    yield from dict.fromkeys(v for op in graph.ops for v in op.operands if v not in inner)


def _has_tokens(dims: AtomDims, batch: int | None, dtype: torch.dtype) -> bool:
    """Whether a value is [batch, sequence] or [batch, sequence, features]; real numbers [batch, n]
    are features. A batch of one row, or none, is no factor."""
    ranks = (3,) if dtype.is_floating_point or dtype.is_complex else (2, 3)
    return len(dims) in ranks and dims[0] == (() if batch is None else (batch,))


def shift_of(graph: Graph, op: Op) -> Shift | None:
    """Shift of tokens by a slice, a pad or a roll; None for all other calls."""
    shift = _SHIFTS.get(op.short)
    if shift is None or not op.operands or not op.results:
        return None
    return shift(op, *(graph.values[v].shape for v in (op.operands[0], op.results[0])))


def _sliced(op: Op, before: Shape, after: Shape) -> Shift | None:
    changed = [d for d, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    dim = int(argument(op, 1, "dim", 0)) % len(before)
    if changed != [dim]:
        return None
    one_less = before[dim] - after[dim] == 1 and argument(op, 4, "step", 1) == 1
    return Shift(dim) if one_less else None


def _padded(op: Op, before: Shape, after: Shape) -> Shift | None:
    if argument(op, 2, "mode", "constant") != "constant":
        return None
    return _padded_with(argument(op, 3, "value", None), op, before)


def _padded_constant(op: Op, before: Shape, after: Shape) -> Shift | None:
    return _padded_with(argument(op, 2, "value", None), op, before)


def _padded_with(fill: float | None, op: Op, before: Shape) -> Shift | None:
    amounts = [(k, n) for k, n in enumerate(op.args[1]) if n]
    places = {len(before) - 1 - k // 2 for k, _ in amounts}
    if len(places) == 1 and all(abs(n) == 1 for _, n in amounts):
        first, last = op.args[1][amounts[0][0] // 2 * 2 : amounts[0][0] // 2 * 2 + 2]
        by = first if first == -last else 0
        return Shift(places.pop(), by, fill=float(fill or 0.0))
    return None


def _rolled(op: Op, before: Shape, after: Shape) -> Shift | None:
    by, along = (argument(op, k, name, ()) for k, name in ((1, "shifts"), (2, "dims")))
    if len(along) == 1 and list(by) in ([1], [-1]):
        return Shift(int(along[0]) % len(before), int(by[0]), wraps=True)
    return None


_SHIFTS: Mapping[str, Callable[[Op, Shape, Shape], Shift | None]] = {
    "slice": _sliced,
    "pad": _padded,
    "constant_pad_nd": _padded_constant,
    "roll": _rolled,
}


def _needs_whole(
    graph: Graph, op: Op, rule: OpFactors, letters: Mapping[str, tuple[int, ...]], atoms: set[int]
) -> bool:
    """Whether an operator can't be split by the sequence of an operand, and gives something for
    each of its tokens; one that leaves a token, or a number of all, is no obstacle."""
    if traits_of(op).kernel == "attention":
        return False
    for value, tensor in zip(op.operands, rule.operands, strict=True):
        tokens = {f for dim in tensor for f in dim if not atoms.isdisjoint(letters.get(f, ()))}
        if tokens and all(rule.kinds[f] == "whole" for f in tokens):
            length = max(rule.sizes[f] for f in tokens)
            most = max(graph.values[result].numel for result in op.results)
            if most * length > graph.values[value].numel:
                return True
    return False
