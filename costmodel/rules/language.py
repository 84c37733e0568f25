"""The language of sharding rules: an operator's dims as products of named factors.

Every dim of an operand or result is a product of factors, major to minor. A factor's kind says what
happens when one mesh axis splits it:

    map     split in every operand and result that has it
    sum     contracted: results come out partial, to be summed over the axis
    mean    as `sum`, each rank's part weighted by its share
    inner   the implementation exchanges what it needs itself; results come out replicated
    whole   can't be split by this operator

Everything else follows from the form: an operand without the split factor is needed whole, and its
gradient comes out partial; forward and backward need no second rule. `implementations` names the
factors for which the operator is replaced by a version that knows the axis (vocabulary-parallel
cross-entropy, masked embedding, synchronised batch norm). `linear` lists operand sets that may be
partial together, the result then being partial too. `pinned` operands (biases) are added after the
sum.

In a spec, `b (g i) *x, (g o) i k -> b (g o) *y`, terms are separated by commas, the words of a term
name its dims, and

    (g i)   is one dim made of two factors; all but one of the sizes must be known
    *x      is any number of dims, x0 the last: aligned at the minor end, so that broadcasting works
    _       is a dim that stays whole

In a spec that a user gives (`given_factors`: `meshwright.rule` and `meshwright.leaf`) terms at the
end may be left out: those tensors stay whole.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from meshwright.costmodel.graph import Op, TensorMeta, argument

if TYPE_CHECKING:
    import torch

Kind = Literal["map", "sum", "mean", "inner", "whole"]
Dims = tuple[tuple[str, ...], ...]
Metas = Sequence[TensorMeta]
Rule = Callable[[Op, Metas, Metas], "OpFactors | None"]
SureRule = Callable[[Op, Metas, Metas], "OpFactors"]  # applies to every call


class Misfit(ValueError):
    """A call whose tensors are not what a spec describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFactors:
    """The factors of one operator call: a rule applied to it.

    `operands` and `results` give, per tensor and dim, factor names major to minor; dims of size 1
    that broadcast have none. Forward FLOPs are `flops × Π size(f), f in flop_factors`. `saves`
    (filled in by `registry.py`) are what autograd keeps for the backward: operand i as i, result i
    as -1-i. `shape_arg` is the index of an argument holding the result's sizes, to be rewritten
    with the local ones; `counts` maps the name of an integer argument to the factor it is
    proportional to (groups of a convolution), to be divided where that is split. `equal` tells that
    parts have to be equal.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    kinds: Mapping[str, Kind]
    implementations: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    pinned: frozenset[int] = frozenset()
    flops: float = 0.0
    flop_factors: tuple[str, ...] = ()
    saves: tuple[int, ...] = ()
    shape_arg: int | None = None
    counts: Mapping[str, str] = field(default_factory=dict)
    equal: bool = False
    view: bool = False
    known: bool = True

    @property
    def matmul(self) -> bool:
        return self.flops > 0

    def place(self, dims: Dims, factor: str) -> tuple[int, int] | None:
        """(dim, product of the sizes before it in that dim) of a factor; None if absent."""
        for d, names in enumerate(dims):
            if factor in names:
                return d, math.prod(self.sizes[name] for name in names[: names.index(factor)])
        return None


def replicated(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Every dim whole: the operator runs in full on every rank."""
    sizes: dict[str, int] = {}
    dims = [
        _fresh(meta, f"{side}{i}_", sizes)
        for side, metas in (("x", operands), ("y", results))
        for i, meta in enumerate(metas)
    ]
    count = len(operands)
    return OpFactors(
        operands=tuple(dims[:count]),
        results=tuple(dims[count:]),
        sizes=sizes,
        kinds=dict.fromkeys(sizes, "whole"),
        known=False,
    )


def _fresh(meta: TensorMeta, prefix: str, sizes: dict[str, int]) -> Dims:
    dims: list[tuple[str, ...]] = []
    for d, size in enumerate(meta.shape):
        sizes[f"{prefix}{d}"] = size
        dims.append((f"{prefix}{d}",) if size != 1 else ())
    return tuple(dims)


# --- specs ---------------------------------------------------------------------------------------


def words(term: str) -> list[str]:
    """The dims of a term: names, `*names` and `(products of names)`."""
    return re.findall(r"\([^()]*\)|[^\s()]+", term)


def bind(spec: str, metas: Metas, sizes: dict[str, int]) -> tuple[Dims, ...]:
    """Name the dims of `metas` by the terms of `spec`, filling in factor sizes; a dim of size 1 has
    no factor. Raises Misfit where ranks or sizes disagree with the spec."""
    terms = spec.split(",") if spec.strip() or metas else []
    return tuple(_bind_term(t, meta, sizes) for t, meta in zip(terms, metas, strict=False))


def _bind_term(term: str, meta: TensorMeta, sizes: dict[str, int]) -> Dims:
    names: list[str] = []
    rest = len(meta.shape) - sum(not word.startswith("*") for word in words(term))
    for word in words(term):
        names += [f"{word[1:]}{rest - 1 - k}" for k in range(rest)] if word[0] == "*" else [word]
    if len(names) != len(meta.shape):
        raise Misfit(f"`{term.strip()}` has {len(names)} dims, the tensor {list(meta.shape)}")
    return tuple(
        _factors(name.strip("()").split(), size, sizes) if size != 1 else ()
        for name, size in zip(names, meta.shape, strict=True)
    )


def _factors(names: Sequence[str], size: int, sizes: dict[str, int]) -> tuple[str, ...]:
    """The factors of one dim; the size that is not known yet follows from the others."""
    unknown = [name for name in names if name not in sizes]
    if len(unknown) > 1:
        raise Misfit(f"`({' '.join(names)})`: the sizes of {', '.join(unknown)} are not known")
    known = math.prod(sizes[name] for name in names if name in sizes)
    if size % known if unknown else size != known:
        raise Misfit(f"`{' '.join(names)}` is of size {known} and stands for a dim of {size}")
    if unknown:
        sizes[unknown[0]] = size // known
    return tuple(name for name in names if sizes[name] != 1)


class SpecOptions(TypedDict, total=False):
    """Options of a rule besides its spec.

    `whole` and `mean` list factors (regular expressions, separated by spaces) that can't be split,
    or are averaged; `inner` maps factors to the implementation that exchanges by itself,
    `implementations` to one whose results are as the factor's kind says. `pinned` operands are
    added after a sum, those of a set in `linear` may be partial together. Forward FLOPs are `flops`
    times the product of all factors but the `uncounted`. `counts` maps integer arguments to the
    factor that they count, `sizes` are those that the tensors don't tell. `shape_arg` and `view`
    are those of `OpFactors`.
    """

    whole: str
    mean: str
    inner: Mapping[str, str]
    implementations: Mapping[str, str]
    pinned: Sequence[int]
    linear: Collection[Collection[int]]
    flops: float
    uncounted: str
    counts: Mapping[str, str]
    sizes: Mapping[str, int]
    shape_arg: int | None
    view: bool


def ein(spec: str, **options: Unpack[SpecOptions]) -> SureRule:
    """A rule from `"operand, operand -> result"`; every dim is whole in calls that don't fit."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        try:
            return factors(spec, op, operands, results, **options)
        except Misfit:
            return replicated(op, operands, results)

    return rule


def factors(
    spec: str, op: Op, operands: Metas, results: Metas, **options: Unpack[SpecOptions]
) -> OpFactors:
    """The factors of one call by its spec: those listed in no option are mapped if a result has
    them, else summed. Raises Misfit where ranks or sizes disagree."""
    inputs, outputs = spec.split("->")
    if len(operands) > len(inputs.split(",")):
        raise Misfit(f"`{spec}` has {len(inputs.split(','))} operands, the call {len(operands)}")
    counts, inner = options.get("counts", {}), options.get("inner", {})
    known = {factor: _count(op, name) for name, factor in counts.items()}
    known |= options.get("sizes", {})
    ins, outs = bind(inputs, operands, known), bind(outputs, results, known)
    if len(outs) != len(results):
        raise Misfit(f"`{spec}` has {len(outs)} results, the call {len(results)}")
    known = {name: size for name, size in known.items() if size != 1}
    mapped = {name for dims in outs for dim in dims for name in dim}

    def kind(name: str) -> Kind:
        if _listed(name, options.get("whole", "")):
            return "whole"
        if name in inner or name in mapped:
            return "inner" if name in inner else "map"
        return "mean" if _listed(name, options.get("mean", "")) else "sum"

    flops, uncounted = options.get("flops", 0.0), options.get("uncounted", "")
    return OpFactors(
        operands=ins,
        results=outs,
        sizes=known,
        kinds={name: kind(name) for name in known},
        implementations={**options.get("implementations", {}), **inner},
        pinned=frozenset(i for i in options.get("pinned", ()) if i < len(operands)),
        linear=tuple(frozenset(group) for group in options.get("linear", ())),
        flops=flops,
        flop_factors=tuple(f for f in known if not _listed(f, uncounted)) if flops else (),
        counts=dict(counts),
        shape_arg=options.get("shape_arg"),
        view=options.get("view", False),
    )


def given_factors(
    spec: str, op: Op, operands: Metas, results: Metas, **options: Unpack[SpecOptions]
) -> OpFactors:
    """The factors of a call by a user's spec: `_` and tensors without a term stay whole. Raises
    Misfit as `factors`."""
    inputs, outputs = (side.split(",") if side.strip() else [] for side in spec.split("->"))
    numbers = itertools.count()

    def filled(terms: Sequence[str], metas: Metas) -> str:
        missing = (" ".join("_" * len(meta.shape)) for meta in metas[len(terms) :])
        both = ", ".join((*terms, *missing))
        return re.sub(r"(?<!\w)_(?!\w)", lambda _: f"_{next(numbers)}", both)

    named = f"{filled(inputs, operands)} -> {filled(outputs, results)}"
    options["whole"] = f"{options.get('whole', '')} {_UNNAMED}"
    return factors(named, op, operands, results, **options)


_UNNAMED = r"_\d+"  # names of dims that a spec gives none


def spec_of(before: Iterable[Sequence[str]], after: Iterable[Sequence[str]]) -> str:
    """A spec from the names of the dims of every operand and result."""
    return " -> ".join(", ".join(map(" ".join, side)) for side in (before, after))


def together(operands: Metas) -> Collection[Collection[int]]:
    """The option `linear` of an operator that is linear in all of its operands together."""
    return [range(len(operands))] if operands[0].dtype.is_floating_point else []


def _listed(name: str, patterns: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns.split())


# --- arguments that hold local numbers -----------------------------------------------------------


def overload(target: str) -> torch._ops.OpOverload:
    """The operator of a target: `aten.add.Tensor` -> torch.ops.aten.add.Tensor."""
    import torch

    namespace, name, which = target.split(".")
    operator: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), which)
    return operator


@functools.cache
def signature_of(target: str) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of an operator's arguments, in order."""
    return tuple((a.name, a.default_value) for a in overload(target)._schema.arguments)


def place_of(op: Op, name: str) -> tuple[int, Any]:
    """Position and default of an argument."""
    places = {n: (k, default) for k, (n, default) in enumerate(signature_of(op.target))}
    if name not in places:
        raise Misfit(f"{op.target} has no argument {name!r}; legal: {', '.join(places)}")
    return places[name]


def _count(op: Op, name: str) -> int:
    """An argument's value in a call."""
    position, default = place_of(op, name)
    value = argument(op, position, name, default)
    if not isinstance(value, int):
        raise Misfit(f"argument {name!r} of {op.target} is {value!r}, and counts nothing")
    return value


def divided(
    op: Op,
    factors: OpFactors,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments with local counts of split factors, whose local `sizes` are these."""
    local, named = list(args), dict(kwargs)
    for name, factor in factors.counts.items():
        size = factors.sizes.get(factor, 1)
        part = sizes.get(factor, size)
        if part == size:
            continue
        position, _ = place_of(op, name)
        value = _count(op, name) * part // size
        if name not in named and position < len(local):
            local[position] = value
        else:  # named, or left at its default
            named[name] = value
    return local, named
