"""Sharding rules that need no writing: whole classes of operators by what they are.

Pointwise operators (torch's own tag) map every dim; views follow from the common refinement of the
sizes before and after; factories make local shapes; reductions sum over their dims; the rest
re-arranges dims in ways that one line each describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from meshwright.costmodel.graph import Op, Ref, argument
from meshwright.costmodel.rules.language import (
    Dims,
    Kind,
    Metas,
    OpFactors,
    Rule,
    bind,
    ein,
    place_of,
    spec_of,
)
from meshwright.costmodel.rules.shuffle import SHUFFLES
from meshwright.costmodel.rules.traits import tagged

# torch leaves the pointwise tag off these, or they are pointwise in their first operand
POINTWISE = frozenset({
    "to", "contiguous", "clone", "alias", "detach", "dropout", "type_as", "float_power", "__and__",
    "__or__", "__xor__", "square", "_to_copy", "zeros_like", "ones_like", "full_like",
    "lift_fresh_copy", "hardswish", "relu6", "silu", "mish", "selu", "celu", "softplus",
    "log_sigmoid", "detach_", "rsub", "masked_fill", "where", "clamp", "feature_dropout",
    "native_dropout", "rand_like", "float", "half", "bfloat16",
    "floor_divide", "empty_like", "copy", "fill", "randn_like", "randint_like", "bernoulli",
    "uniform", "normal_functional", "exponential", "real", "imag", "conj", "resolve_conj",
    "resolve_neg",
})  # fmt: skip
# sets of operands that f(a + b) = f(a) + f(b) holds in, together
LINEAR: Mapping[str, tuple[frozenset[int], ...]] = MappingProxyType({
    **dict.fromkeys(("add", "sub"), (frozenset({0, 1}),)),
    "mul": (frozenset({0}), frozenset({1})),
    **dict.fromkeys(("neg", "div", "contiguous", "clone", "alias", "to"), (frozenset({0}),)),
    **dict.fromkeys(("_to_copy", "dropout", "detach"), (frozenset({0}),)),
})  # fmt: skip
SAME_MEMORY = frozenset({"alias", "detach"})
LINEAR_REDUCTIONS = frozenset({"sum", "mean"})
# operator -> position of the argument that holds the result's sizes
VIEWS: Mapping[str, int | None] = MappingProxyType({
    "view": 1, "reshape": 1, "_unsafe_view": 1, "flatten": None, "unflatten": 2, "unsqueeze": None,
    "squeeze": None, "view_as": None, "reshape_as": None, "ravel": None,
})  # fmt: skip
FACTORIES = frozenset({
    "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "rand",
    "randn", "randint",
})  # fmt: skip
REDUCTIONS: Mapping[str, Kind] = MappingProxyType({
    "sum": "sum", "mean": "mean", "amax": "whole", "amin": "whole", "var": "whole", "any": "whole",
    "argmax": "whole", "logsumexp": "whole", "std": "whole", "all": "whole", "argmin": "whole",
    "prod": "whole", "max": "whole", "min": "whole", "linalg_vector_norm": "whole",
    "var_mean": "whole", "std_mean": "whole", "median": "whole", "mode": "whole",
    "kthvalue": "whole", "norm": "whole", "nansum": "sum", "count_nonzero": "sum",
})  # fmt: skip
# position, name and default of the argument that holds the reduced dims
REDUCED_DIM: Mapping[str, tuple[int, str, int | None]] = MappingProxyType({
    "mode": (1, "dim", -1), "kthvalue": (2, "dim", -1),
    **dict.fromkeys(("linalg_vector_norm", "norm"), (2, "dim", None)),
})  # fmt: skip


def automatic(op: Op) -> Rule | None:
    """The rule of the class an operator belongs to, or None."""
    if not op.target.startswith("aten."):
        return pointwise_rule if is_pointwise(op) else None  # others' names say nothing
    name = op.short
    if name in VIEWS:
        return view_rule if op.target != "aten.view.dtype" else None
    if name in FACTORIES:
        return factory_rule
    if name in REDUCTIONS and not op.target.endswith(".other"):
        return reduction_rule
    special = SHUFFLES.get(name) or INDEXING.get(name)
    return special or (pointwise_rule if is_pointwise(op) else None)


def is_pointwise(op: Op) -> bool:
    """Whether every element of the result depends on the operands' elements at its place alone."""
    import torch

    named = op.target.startswith("aten.") and op.short in POINTWISE
    return named or tagged(op.target, torch.Tag.pointwise)


def pointwise_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Dims aligned at the minor end; a dim of size 1 broadcasts."""
    groups: tuple[frozenset[int], ...] = ()
    if all(side and side[0].dtype.is_floating_point for side in (operands, results)):
        groups = () if op.kwargs.get("rounding_mode") else LINEAR.get(op.short, ())
    tensors = [isinstance(a, Ref) for a in op.args[:2]]
    count = [*tensors, False].index(False)  # of tensors before the first number
    return ein(
        spec_of([["*d"]] * len(operands), [["*d"]] * len(results)),
        linear=[group for group in groups if max(group) < count],
        view=op.short in SAME_MEMORY,
    )(op, operands, results)


def refine(
    before: Sequence[int], after: Sequence[int]
) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Common refinement of two shapes of equal size: factors of each dim, sizes, and those that
    can't be split. [b, s, 12] -> [b, s, 3, 4] gives [f0, f1, f2·f3] -> [f0, f1, f2, f3]; where the
    boundaries of two groups of dims don't nest ([6, 4] -> [4, 6]) the group is whole."""
    before_dims: list[list[str]] = [[] for _ in before]
    after_dims: list[list[str]] = [[] for _ in after]
    sizes: dict[str, int] = {}
    unsplit: set[str] = set()
    i = j = 0
    rest_i, rest_j = (before[0] if before else 1), (after[0] if after else 1)

    def advance(k: int, rest: int, shape: Sequence[int]) -> tuple[int, int]:
        while rest == 1 and k < len(shape):
            k += 1
            rest = shape[k] if k < len(shape) else 1
        return k, rest

    def factor(size: int, *places: list[str]) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        for place in places:
            place.append(name)
        return name

    while True:
        i, rest_i = advance(i, rest_i, before)
        j, rest_j = advance(j, rest_j, after)
        if i >= len(before) or j >= len(after):
            break
        if rest_i % rest_j == 0 or rest_j % rest_i == 0:
            size = min(rest_i, rest_j)
            factor(size, before_dims[i], after_dims[j])
            rest_i, rest_j = rest_i // size, rest_j // size
            continue
        unsplit.add(factor(rest_i, before_dims[i]))
        unsplit.add(factor(rest_j, after_dims[j]))
        while rest_i != rest_j:  # the group ends where the products meet
            if rest_i < rest_j:
                i += 1
                rest_i *= before[i]
                unsplit.add(factor(before[i], before_dims[i]))
            else:
                j += 1
                rest_j *= after[j]
                unsplit.add(factor(after[j], after_dims[j]))
        rest_i = rest_j = 1
    return tuple(map(tuple, before_dims)), tuple(map(tuple, after_dims)), sizes, unsplit


def view_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    if operands[0].numel == 0:
        return None
    before, after, sizes, unsplit = refine(operands[0].shape, results[0].shape)
    shape_arg = VIEWS[op.short]
    kinds: dict[str, Kind] = {name: "whole" if name in unsplit else "map" for name in sizes}
    return OpFactors(
        operands=(before, *[after for _ in operands[1:]]),  # the tensor whose shape is taken
        results=(after,),
        sizes=sizes,
        kinds=kinds,
        linear=(frozenset({0}),) if operands[0].dtype.is_floating_point else (),
        shape_arg=shape_arg,
        view=True,
    )


def factory_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Elements that are all equal: any dim may be made at its local size. Only the type of an
    operand (`new_zeros`) counts: dims that it shares with the result stay as they are split."""
    sizes: dict[str, int] = {}
    outs = bind("*d", results, sizes)
    shape = results[0].shape
    return OpFactors(
        operands=tuple(
            tuple(
                outs[0][d] if d < len(shape) and size == shape[d] else ()
                for d, size in enumerate(meta.shape)
            )
            for meta in operands
        ),
        results=outs,
        sizes=sizes,
        kinds=dict.fromkeys(sizes, "map"),
        shape_arg=place_of(op, "size")[0],
    )


def _dims_argument(value: Any, rank: int) -> set[int]:
    if value is None or value == [] or value == ():
        return set(range(rank))
    if isinstance(value, int):
        return {value % rank} if rank else set()
    return {int(d) % rank for d in value}


def reduction_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    rank = len(operands[0].shape)
    dims = argument(op, *REDUCED_DIM.get(op.short, (1, "dim", None)))
    dims = None if isinstance(dims, bool) else dims  # `unbiased` stands first where no dim does
    reduced = _dims_argument(dims, rank)
    keep = len(results[0].shape) == rank  # keepdim stands at different places
    names = [f"r{d}" if d in reduced else f"d{d}" for d in range(rank)]
    remaining = [name for d, name in enumerate(names) if keep or d not in reduced]
    how = REDUCTIONS[op.short]
    return ein(
        spec_of([names], [remaining] * len(results)),
        whole="r.*" if how == "whole" else "",
        mean="r.*" if how == "mean" else "",
        linear=[[0]] if op.short in LINEAR_REDUCTIONS else [],
    )(op, operands, results)


# --- indices --------------------------------------------------------------------------------------

# Sharding rules of look-ups and writes by index.
#
# What is looked up in, or written to, by position must be whole in that dim; its other dims map.
# The dims of the indices map in a look-up. In a write they do only where all writes add up: each
# rank then adds its own part, and the parts are to be summed.


def _entries(rank: int, places: Sequence[int]) -> list[str]:
    """The dims of a table: `v` where it is indexed, `e` elsewhere."""
    return [f"{'v' if d in places else 'e'}{d}" for d in range(rank)]


def _looked_up(entries: Sequence[str], places: Sequence[int]) -> str:
    """Dims of a look-up's result: the indices' at the first indexed dim, or first of all."""
    rest = [name for name in entries if name[0] == "e"]
    adjacent = list(places) == list(range(places[0], places[-1] + 1))
    at = places[0] if adjacent else 0
    return " ".join([*rest[:at], "*i", *rest[at:]])


def _indices(op: Op) -> list[int]:
    return [d for d, index in enumerate(op.args[1]) if isinstance(index, Ref)]


def index_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """`x[:, i, j]`: a look-up; one by flags has as many results as flags are up, and no rule."""
    import torch

    places, table = _indices(op), operands[0]
    if any(meta.dtype in (torch.bool, torch.uint8) for meta in operands[1:]):
        return None
    entries = _entries(len(table.shape), places)
    spec = ", ".join([" ".join(entries), *["*i"] * len(places)])
    return ein(f"{spec} -> {_looked_up(entries, places)}", whole="v.*")(op, operands, results)


def index_put_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """`x[:, i, j] = values`, or `+=`; under flags a single number alone, which any part writes."""
    import torch

    table, *indices, values = operands
    rank, places = len(table.shape), _indices(op)
    flagged = [meta for meta in indices if meta.dtype in (torch.bool, torch.uint8)]
    entries = _entries(rank, places)
    if flagged:
        if len(indices) > 1 or values.numel != 1:
            return None
        entries = [f"e{d}" for d in range(rank)]
        flags = entries[places[0] : places[0] + len(flagged[0].shape)]
        spec = f"{' '.join(entries)}, {' '.join(flags)}, *one -> {' '.join(entries)}"
        return ein(spec)(op, operands, results)
    written = _looked_up(entries, places) if values.numel != 1 else "*one"
    spec = ", ".join([" ".join(entries), *["*i"] * len(indices), written])
    adds = bool(argument(op, 3, "accumulate", False))
    return ein(
        f"{spec} -> {' '.join(entries)}",
        whole="v.*" if adds else "v.* i.*",
        pinned=(0,) if adds else (),
    )(op, operands, results)


def _along(op: Op, rank: int) -> int:
    return int(argument(op, 1, "dim", 0)) % rank


def index_select_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    entries = _entries(rank := len(operands[0].shape), [dim := _along(op, rank)])
    selected = " ".join([*entries[:dim], "i", *entries[dim + 1 :]])
    return ein(f"{' '.join(entries)}, i -> {selected}", whole="v.*")(op, operands, results)


def _index_write(*, adds: bool = False, fills: bool = False) -> Rule:
    """index_add, index_copy, index_fill: rows of one dim written by their numbers."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        entries = _entries(rank := len(operands[0].shape), [dim := _along(op, rank)])
        table = " ".join(entries)
        rows = " ".join([*entries[:dim], "i", *entries[dim + 1 :]])
        terms = [table, "i", "" if fills else rows][: len(operands)]
        return ein(
            f"{', '.join(terms)} -> {table}",
            whole="v.*" if adds else "v.* i",
            pinned=(0,) if adds else (),
        )(op, operands, results)

    return rule


def _scatter(*, adds: bool) -> Rule:
    """Elements written along one dim; other dims of which indices take a corner are whole."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
        table, index, *sources = (meta.shape for meta in operands)
        if not index:
            return None
        names = _entries(rank := len(table), [dim := _along(op, rank)])
        cornered = {d for d in range(rank) if d != dim and table[d] != index[d]}
        cornered |= {d for s in sources for d in range(len(s)) if s[d] != index[d]}
        inner = [f"c{d}" if d in cornered else "i" if d == dim else n for d, n in enumerate(names)]
        outer = [f"v{d}" if d in cornered else n for d, n in enumerate(names)]
        source = [f"s{d}" if d in cornered else n for d, n in enumerate(inner)]
        spec = ", ".join(" ".join(t) for t in (outer, inner, *[source] * len(sources)))
        return ein(
            f"{spec} -> {' '.join(outer)}",
            whole="v.* c.* s.*" + ("" if adds else " i"),
            pinned=(0,) if adds else (),
        )(op, operands, results)

    return rule


INDEXING: Mapping[str, Rule] = MappingProxyType({
    "index": index_rule,
    "index_put": index_put_rule,
    "index_select": index_select_rule,
    "index_add": _index_write(adds=True),
    "index_copy": _index_write(),
    "index_fill": _index_write(fills=True),
    "scatter_add": _scatter(adds=True),
    **dict.fromkeys(("scatter", "scatter_reduce"), _scatter(adds=False)),
    "bucketize": ein("*b, v -> *b", whole="v"),
    "isin": ein("*b, *v -> *b", whole="v.*"),
    "one_hot": ein("*b -> *b n", whole="n"),
})  # fmt: skip
