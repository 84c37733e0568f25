"""Proposes a sharding rule for an operator by running it on shards.

A factor is one dim, or none, of every operand, split together. All such choices among dims of equal
size are tried; whether the parts' results are halves of the whole, or sum or average to it, says of
which kind the factor is, and a trial forward and backward (`verify_rule.py`) whether it holds. An
integer argument that counts something (groups) may be divided too: dims are then (count, rest).
What holds for the example's numbers need not hold for others: numbers should be random, sizes even,
at least 4, and different where dims mean different things. An operator that trusts its shapes
unseen (torch's recurrent ones) may take the process down when it is tried on parts that don't go
together.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.costmodel.graph import Op, Ref, refs
from meshwright.costmodel.rules import Dims, Kind, OpFactors, divided, signature_of
from meshwright.costmodel.user_rules import Tensors, Trial, called, cut_dim, perform

PARTS = 2
SMALLEST = 4  # a part of one element broadcasts
LARGEST_SEARCH = 20_000  # choices of one dim per operand

Choice = tuple[int | None, ...]  # the dim of each tensor that is split


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A factor that holds: where it is in operands and results, its kind, the operands that are
    added once to its sum, and the argument that counts it, with its value."""

    operands: Choice
    results: Choice
    kind: Kind
    pinned: tuple[int, ...] = ()
    counts: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A rule as it would be written, and the dims that stay whole, as (tensor, dim, size)."""

    target: str
    spec: str
    options: dict[str, Any]
    found: tuple[Found, ...]
    whole: tuple[tuple[str, int, int], ...]

    def line(self) -> str:
        """The call that adds the rule."""
        given = "".join(f", {name}={value!r}" for name, value in self.options.items() if value)
        return f'meshwright.rule("{self.target}", "{self.spec}"{given})'


def discover(target: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Proposal:
    """The rule that one call's numbers support. Raises ValueError where the call can't be tried."""
    op, operands = _call(target, args, kwargs or {})
    try:
        trial = Trial.of(op, operands)
    except (NotImplementedError, RuntimeError):  # no kernel in double precision
        trial = Trial.of(op, [x for x in _tensors((args, kwargs or {}))])
    _check_repeats(op, trial)
    factors: list[Found] = []
    for found in _candidates(trial):
        if not any(_overlap(found, other) for other in factors):
            factors.append(found)
    return _proposal(trial, factors)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree.detach()
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _call(target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Op, list[Any]]:
    """The call with tensors by name, and the tensors, in double precision."""
    tensors: list[torch.Tensor] = []

    def named(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            tensors.append(tree.detach().double() if tree.is_floating_point() else tree)
            return Ref(f"x{len(tensors) - 1}")
        if isinstance(tree, (list, tuple)):
            return type(tree)(named(item) for item in tree)
        return {k: named(v) for k, v in tree.items()} if isinstance(tree, dict) else tree

    made = named(tuple(args)), named(kwargs)
    op = Op(name="y", target=target, args=made[0], kwargs=made[1], results=("y",))
    if not list(refs((op.args, op.kwargs))):
        raise ValueError(f"{target}: the example has no tensors; legal: at least one")
    return op, tensors


def _check_repeats(op: Op, trial: Trial) -> None:
    if not trial.repeats():
        raise ValueError(
            f"{op.target}: two equal calls differ: it draws random numbers, or leaves "
            "memory unwritten; nothing can be compared"
        )


# --- the search ----------------------------------------------------------------------------------


def _candidates(trial: Trial) -> Iterator[Found]:
    """Factors that hold, those of fewest operands first: an operand that plays no part is left
    out."""
    shapes = [tuple(x.shape) for x in trial.operands]
    sizes = sorted({n for shape in shapes for n in shape if n % PARTS == 0 and n >= SMALLEST})
    for size in sizes:
        places = [[None, *(d for d, n in enumerate(s) if n == size)] for s in shapes]
        for choice in _choices(places, trial.op.target):
            yield from filter(None, [_try(trial, choice, None)])
    for name, count in _counts(trial.op):
        places = [[None, *(d for d, n in enumerate(s) if n % count == 0)] for s in shapes]
        for choice in _choices(places, trial.op.target):
            yield from filter(None, [_try(trial, choice, (name, count))])


def _choices(places: Sequence[Sequence[int | None]], target: str) -> list[Choice]:
    number = math.prod(map(len, places))
    if number > LARGEST_SEARCH:
        raise ValueError(
            f"{target}: {number:,} choices of dims, at most {LARGEST_SEARCH:,}; give dims that "
            "mean different things different sizes"
        )
    every = [c for c in itertools.product(*places) if any(d is not None for d in c)]
    return sorted(every, key=lambda c: (sum(d is not None for d in c), str(c)))


def _counts(op: Op) -> Iterator[tuple[str, int]]:
    for position, (name, _) in enumerate(signature_of(op.target)):
        value = op.kwargs.get(name, op.args[position] if position < len(op.args) else None)
        number = isinstance(value, int) and not isinstance(value, bool)
        if number and value >= PARTS and value % PARTS == 0:
            yield name, value


def _try(trial: Trial, choice: Choice, counts: tuple[str, int] | None) -> Found | None:
    """The kind by which a choice of dims holds, if any."""
    one = _first_part(trial, choice, counts)
    if one is None:
        return None
    halved: list[int | None] = []
    for part, whole in zip(one, trial.whole.results, strict=True):
        differ = [
            d for d, (a, b) in enumerate(zip(part.shape, whole.shape, strict=False)) if a != b
        ]
        if len(part.shape) != len(whole.shape) or len(differ) > 1:
            return None
        if differ and part.shape[differ[0]] * PARTS != whole.shape[differ[0]]:
            return None
        halved.append(differ[0] if differ else None)
    kinds: tuple[Kind, ...] = ("sum", "mean") if None in halved else ("map",)
    if None in halved and any(d is not None for d in halved):
        return None
    free = [i for i, d in enumerate(choice) if d is None and trial.operands[i].is_floating_point()]
    for kind in kinds:
        for pinned in ((), *((i,) for i in free if kind == "sum")):
            found = Found(
                operands=choice, results=tuple(halved), kind=kind, pinned=pinned, counts=counts
            )
            if trial.split_fault(_factors(trial, [found]), "f0", PARTS) is None:
                return found
    return None


def _first_part(
    trial: Trial, choice: Choice, counts: tuple[str, int] | None
) -> tuple[torch.Tensor, ...] | None:
    """What the first part's run gives; None where it does not run."""
    held = [
        x if d is None else cut_dim(x, d, 1, PARTS, 0)
        for x, d in zip(trial.operands, choice, strict=True)
    ]
    op = trial.op
    if counts is not None:
        made = _factors(trial, [Found(operands=choice, results=(), kind="map", counts=counts)])
        local = {"f0": counts[1] // PARTS}
        args, kwargs = divided(op, made, op.args, op.kwargs, local)
        op = replace(op, args=tuple(args), kwargs=kwargs)
    try:
        _check_shapes(op, held)
        return perform(op, held, None, [False] * len(held)).results
    except Exception:  # noqa: BLE001 - the operator's own: these dims don't go together
        return None


def _check_shapes(op: Op, operands: Tensors) -> None:
    """Raise what the operator raises without data: some kernels don't look before they read."""
    with contextlib.suppress(NotImplementedError):
        called(op, [x.to("meta") for x in operands])


def _overlap(a: Found, b: Found) -> bool:
    pairs = zip((*a.operands, *a.results), (*b.operands, *b.results), strict=True)
    return any(x is not None and x == y for x, y in pairs)


# --- writing it down -----------------------------------------------------------------------------


def _factors(trial: Trial, found: Sequence[Found]) -> OpFactors:
    """The factor form of what was found, all other dims whole."""
    sizes: dict[str, int] = {}
    kinds: dict[str, Kind] = {}

    def named(tensors: Tensors, side: str) -> tuple[Dims, ...]:
        return tuple(
            tuple(_dim(side, i, d, size) for d, size in enumerate(x.shape))
            for i, x in enumerate(tensors)
        )

    def _dim(side: str, i: int, d: int, size: int) -> tuple[str, ...]:
        names: list[str] = []
        for k, factor in enumerate(found):
            places = factor.operands if side == "x" else factor.results
            if i < len(places) and places[i] == d:
                names.append(f"f{k}")
                sizes[f"f{k}"] = factor.counts[1] if factor.counts else size
                kinds[f"f{k}"] = factor.kind
        rest = size // math.prod(sizes[n] for n in names)
        if rest > 1 or not names:
            whole = f"{side}{i}_{d}"
            sizes[whole], kinds[whole] = rest, "whole"
            names.append(whole)
        return tuple(names)

    ins, outs = named(trial.operands, "x"), named(trial.whole.results, "y")
    return OpFactors(
        operands=ins,
        results=outs,
        sizes=sizes,
        kinds=kinds,
        pinned=frozenset(i for f in found for i in f.pinned),
        counts={f.counts[0]: f"f{k}" for k, f in enumerate(found) if f.counts},
    )


def _linear(trial: Trial, made: OpFactors) -> tuple[tuple[int, ...], ...]:
    """Sets of operands that may be partial: each alone, or all that are floating."""
    floating = [i for i, x in enumerate(trial.operands) if x.is_floating_point()]
    if not all(y.is_floating_point() for y in trial.whole.results):
        return ()
    free = [i for i in floating if i not in made.pinned]
    groups = [(i,) for i in free] + ([tuple(free)] if len(free) > 1 else [])
    held = [g for g in groups if trial.partial_fault(made, frozenset(g), PARTS) is None]
    return tuple(held)


def _flops(trial: Trial, made: OpFactors) -> float:
    """FLOPs per product of all factors, where torch's counter says a whole number."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        called(trial.op, trial.operands)
    each = counter.get_total_flops() / math.prod(made.sizes.values())
    return each if each == int(each) else 0.0


def _proposal(trial: Trial, found: Sequence[Found]) -> Proposal:
    made = _factors(trial, found)
    letters = {name: _letter(k) for k, name in enumerate(made.sizes)}

    def term(dims: Dims) -> str:
        words = [" ".join(letters[name] for name in dim) for dim in dims]
        return " ".join(f"({w})" if " " in w else w for w in words)

    def listed(kind: Kind) -> str:
        return " ".join(letters[name] for name, k in made.kinds.items() if k == kind)

    spec = ", ".join(map(term, made.operands)) + " -> " + ", ".join(map(term, made.results))
    whole = [
        (f"{'operand' if side is made.operands else 'result'} {i}", d, made.sizes[name])
        for side in (made.operands, made.results)
        for i, dims in enumerate(side)
        for d, dim in enumerate(dims)
        for name in dim
        if made.kinds[name] == "whole" and made.sizes[name] > 1
    ]
    options = {
        "whole": listed("whole"),
        "mean": listed("mean"),
        "pinned": tuple(sorted(made.pinned)),
        "linear": _linear(trial, made),
        "flops": _flops(trial, made),
        "counts": {name: letters[factor] for name, factor in made.counts.items()},
    }
    return Proposal(
        target=trial.op.target,
        spec=spec.strip(),
        options=options,
        found=tuple(found),
        whole=tuple(whole),
    )


def _letter(k: int) -> str:
    return chr(ord("a") + k % 26) + (str(k // 26) if k >= 26 else "")
