"""Sharding rules of operators that re-arrange dims: transpose, expand, cat, split, pad, index.

A dim that is cut, joined, scanned or indexed is whole; all others map. Cuts into equal parts keep
the part as a factor of its own, so that a fused projection can be split inside each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from meshwright.costmodel.graph import Op, Ref, TensorMeta, argument
from meshwright.costmodel.rules.language import Dims, Kind, Metas, OpFactors, Rule, bind, ein


def _rearranged(
    operands: Metas, outs: Sequence[Dims], ins: Sequence[Dims], whole: set[str]
) -> OpFactors:
    sizes = {
        name: meta.shape[d]
        for dims, meta in zip(ins, operands, strict=True)
        for d, dim in enumerate(dims)
        for name in dim
    }
    floating = operands[0].dtype.is_floating_point
    return OpFactors(
        operands=tuple(ins),
        results=tuple(outs),
        sizes=sizes,
        kinds={name: "whole" if name in whole else "map" for name in sizes},
        linear=(frozenset(range(len(operands))),) if floating else (),
        view=True,
    )


def _named(meta: TensorMeta) -> Dims:
    return tuple((f"d{d}",) if size != 1 else () for d, size in enumerate(meta.shape))


Permutation = Callable[[Op, int], list[int]]


def _last_two(op: Op, rank: int) -> list[int]:
    order = list(range(rank))
    return order[:-2] + order[-2:][::-1]


def _swapped(op: Op, rank: int) -> list[int]:
    order = list(range(rank))
    a, b = (int(d) % rank for d in op.args[1:3])
    order[a], order[b] = order[b], order[a]
    return order


def _moved(op: Op, rank: int) -> list[int]:
    source, target = ([a] if isinstance(a, int) else a for a in op.args[1:3])
    moved = {int(to) % rank: int(d) % rank for d, to in zip(source, target, strict=True)}
    rest = iter([d for d in range(rank) if d not in moved.values()])
    return [moved[to] if to in moved else next(rest) for to in range(rank)]


PERMUTATIONS: Mapping[str, Permutation] = MappingProxyType({
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _swapped),
    **dict.fromkeys(("movedim", "moveaxis"), _moved),
    **dict.fromkeys(("t", "mT"), _last_two),
    "numpy_T": lambda op, rank: list(range(rank))[::-1],
    "permute": lambda op, rank: [int(d) % rank for d in op.args[1]],
})  # fmt: skip


def permutation(op: Op, rank: int) -> list[int]:
    """The operand's dim that each dim of a transposed tensor is."""
    return PERMUTATIONS[op.short](op, rank)


def transpose_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    order = permutation(op, len(operands[0].shape))
    dims = _named(operands[0])
    return _rearranged(operands, [tuple(dims[d] for d in order)], [dims], set())


def expand_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Dims that appear or grow are new factors of the result; they can be made at local size."""
    before, after = operands[0].shape, results[0].shape
    offset = len(after) - len(before)
    ins = _named(operands[0])
    outs = tuple(
        (f"e{d}",)
        if size != 1 and (d < offset or before[d - offset] == 1)
        else ins[d - offset]
        if d >= offset
        else ()
        for d, size in enumerate(after)
    )
    made = _rearranged(operands[:1], [outs], [ins], set())
    new = {f"e{d}": size for d, size in enumerate(after) if outs[d] == (f"e{d}",)}
    return replace(
        made,
        operands=(ins, *[outs for _ in operands[1:]]),  # the tensor whose shape is taken
        sizes={**made.sizes, **new},
        kinds={**made.kinds, **dict.fromkeys(new, "map")},
        shape_arg=1 if len(operands) == 1 else None,
    )


@dataclass(frozen=True, slots=True)
class Along:
    """An operator along one dim: position, default and name of the argument that names it.

    `effect` on the dim: "drop" and "add" it, take a "window" of it, cut it in "parts" (whose sizes
    are at `sizes`, if given), take elements of a "corner" of the others, or "flatten" all dims if
    none is named. `linear`: f(a + b) = f(a) + f(b).
    """

    position: int
    default: int | tuple[()]
    effect: Literal["", "drop", "add", "window", "parts", "corner", "flatten"] = ""
    linear: bool = False
    name: str = "dim"
    sizes: int | None = None


NOWHERE = Along(0, 0)
ALONG_DIM: Mapping[str, Along] = MappingProxyType({
    "cat": Along(1, 0, linear=True),
    "stack": Along(1, 0, "add", linear=True),
    "split": Along(2, 0, "parts", linear=True, sizes=1),
    "split_with_sizes": Along(2, 0, "parts", linear=True, sizes=1),
    "chunk": Along(2, 0, "parts", linear=True),
    "slice": Along(1, 0, "window", linear=True),
    "select": Along(1, 0, "drop", linear=True),
    "unbind": Along(1, 0, "drop", linear=True),
    "cumsum": Along(1, 0, linear=True),
    "diff": Along(2, -1, linear=True),
    "flip": Along(1, 0, linear=True, name="dims"),
    "roll": Along(2, (), "flatten", linear=True, name="dims"),
    "gather": Along(1, 0, "corner"),
    "topk": Along(2, -1),
    **dict.fromkeys(("sort", "argsort", "cummax", "cummin", "logcumsumexp"), Along(1, -1)),
    "cumprod": Along(1, 0),
})  # fmt: skip


def along_dim_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """One dim is cut, joined, scanned or indexed: whole there, mapped elsewhere."""
    along = ALONG_DIM[op.short]
    rank = len(operands[0].shape) + (along.effect == "add")
    where = argument(op, along.position, along.name, along.default)
    dims = {int(d) % rank for d in (where if isinstance(where, (list, tuple)) else [where])}
    if along.effect == "flatten" and not dims:
        dims = set(range(rank))
    if along.effect == "parts":
        return _equal_parts(operands, results, dims.pop(), along)
    if along.effect == "window" and operands[0].shape == results[0].shape:
        return _rearranged(operands, [_named(operands[0])], [_named(operands[0])], set())
    return _whole_dims(operands, results, dims, along)


def scatter_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """A part of one dim replaced (slice, select): whole there, mapped elsewhere."""
    base, part = operands
    dim = int(argument(op, 2, "dim", 0)) % len(base.shape)
    labels = [d for d in range(len(base.shape)) if len(part.shape) == len(base.shape) or d != dim]
    dims = tuple(
        ("whole",) if d == dim and size != 1 else n
        for d, (n, size) in enumerate(zip(_named(base), base.shape, strict=True))
    )
    sizes = {f"d{d}": size for d, size in enumerate(base.shape) if size != 1 and d != dim}
    kinds: dict[str, Kind] = dict.fromkeys(sizes, "map")
    if base.shape[dim] != 1:
        sizes["whole"], kinds["whole"] = base.shape[dim], "whole"
    inner: list[tuple[str, ...]] = []
    for d, size in zip(labels, part.shape, strict=True):
        if d == dim and size != 1:
            sizes["part"], kinds["part"] = size, "whole"
        inner.append(("part",) if d == dim and size != 1 else () if d == dim else dims[d])
    floating = base.dtype.is_floating_point
    return OpFactors(
        operands=(dims, tuple(inner)),
        results=(dims,),
        sizes=sizes,
        kinds=kinds,
        linear=(frozenset({0, 1}),) if floating else (),
    )


def _whole_dims(
    operands: Metas, results: Metas, whole: set[int], along: Along = NOWHERE
) -> OpFactors:
    """Dims in `whole` stay together in every tensor, as do dims of unequal sizes of which a corner
    is gathered; some operators drop them, or add one."""
    if along.effect == "corner":
        pairs = enumerate(zip(operands[0].shape, operands[1].shape, strict=True))
        whole = whole | {d for d, (a, b) in pairs if a != b}
    drops = along.effect == "drop"
    ins: list[Dims] = []
    sizes: dict[str, int] = {}
    kinds: dict[str, Kind] = {}

    def fresh(meta: TensorMeta, d: int, tag: str, label: int) -> tuple[str, ...]:
        if meta.shape[d] == 1:
            return ()
        key = f"w{tag}{label}" if label in whole else f"d{label}"
        sizes[key] = meta.shape[d]
        kinds[key] = "whole" if label in whole else "map"
        return (key,)

    added = min(whole) if along.effect == "add" else None
    for i, meta in enumerate(operands):
        labels = [d for d in range(len(meta.shape) + (added is not None)) if d != added]
        ins.append(tuple(fresh(meta, d, f"x{i}_", label) for d, label in enumerate(labels)))
    rank = len(operands[0].shape)
    outs = []
    for i, meta in enumerate(results):
        kept = [d for d in range(rank + (added is not None)) if not (drops and d in whole)]
        outs.append(tuple(fresh(meta, d, f"y{i}_", label) for d, label in enumerate(kept)))
    linear = along.linear and operands[0].dtype.is_floating_point
    group = (frozenset(range(len(operands))),) if linear else ()
    return OpFactors(
        operands=tuple(ins),
        results=tuple(outs),
        sizes=sizes,
        kinds=kinds,
        linear=group,
        view=along.effect in ("window", "drop"),
    )


def _equal_parts(operands: Metas, results: Metas, dim: int, along: Along = NOWHERE) -> OpFactors:
    parts = {meta.shape[dim] for meta in results}
    if len(parts) != 1:
        return _whole_dims(operands, results, {dim}, along)
    size = parts.pop()
    named = _named(operands[0])
    sizes = {f"d{d}": n for d, n in enumerate(operands[0].shape) if n != 1}
    sizes.pop(f"d{dim}", None)
    sizes |= {"parts": len(results), "part": size}
    cut = tuple(("parts", "part") if d == dim else name for d, name in enumerate(named))
    out = tuple(("part",) if d == dim else name for d, name in enumerate(named))
    kinds: dict[str, Kind] = {name: "whole" if name == "parts" else "map" for name in sizes}
    floating = operands[0].dtype.is_floating_point
    return OpFactors(
        operands=(cut,),
        results=(out,) * len(results),
        sizes=sizes,
        kinds=kinds,
        linear=(frozenset({0}),) if floating else (),
        shape_arg=along.sizes,
        view=True,
    )


def glu_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Two halves of a dim, one the gate of the other: split inside each half."""
    dim = int(argument(op, 1, "dim", -1)) % len(operands[0].shape)
    halves = _equal_parts(operands, (results[0], results[0]), dim)
    return replace(halves, results=halves.results[:1], linear=(), view=False)


def repeat_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Copies of the dims one after the other: each is (copy, element)."""
    return _repeated(op, operands, results, inner=False)


def repeat_interleave_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """Copies of each element of one dim, (element, copy), where their number is fixed; the call may
    say how many elements there will be."""
    dim = argument(op, 2, "dim", None)
    if dim is None or isinstance(op.args[1], Ref):
        return None
    made = _repeated(op, operands, results, inner=True)
    if op.kwargs.get("output_size") is None:
        return made
    return replace(made, counts={"output_size": f"d{int(dim) % len(operands[0].shape)}"})


def _repeated(op: Op, operands: Metas, results: Metas, *, inner: bool) -> OpFactors:
    before, after = operands[0].shape, results[0].shape
    offset = len(after) - len(before)
    named = [*((),) * offset, *_named(operands[0])]
    copies = [n // size for n, size in zip(after, (*(1,) * offset, *before), strict=True)]
    made: list[tuple[str, ...]] = []
    for d, (name, count) in enumerate(zip(named, copies, strict=True)):
        copy = (f"c{d}",) if count != 1 else ()
        made.append((*name, *copy) if inner else (*copy, *name))
    sizes = {f"d{d}": n for d, n in enumerate(before) if n != 1}
    kinds: dict[str, Kind] = dict.fromkeys(sizes, "map")
    for d, count in enumerate(copies):
        if count != 1:
            sizes[f"c{d}"], kinds[f"c{d}"] = count, "whole"
    return OpFactors(
        operands=(_named(operands[0]),),
        results=(tuple(made),),
        sizes=sizes,
        kinds=kinds,
        linear=(frozenset({0}),) if operands[0].dtype.is_floating_point else (),
    )


def pad_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Dims that are padded or cropped, listed as pairs from the last dim on."""
    padded = {k // 2 for k, amount in enumerate(op.args[1]) if amount}
    return _whole_dims(operands, results, {len(operands[0].shape) - 1 - k for k in padded})


def matmul_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Products of batches of matrices, or vectors on either side."""
    left = "i" if len(operands[0].shape) == 1 else "*b m i"
    right = "i" if len(operands[1].shape) == 1 else "*b i o"
    kept = [word for word in f"{left} {right}".split() if word != "i"]
    spec = f"{left}, {right} -> {' '.join(dict.fromkeys(kept))}"
    return ein(spec, linear=[[0], [1]], flops=2.0)(op, operands, results)


def arange_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Values depend on the position: made whole."""
    sizes: dict[str, int] = {}
    outs = bind("*y", results, sizes)
    ins = tuple(tuple(() for _ in meta.shape) for meta in operands)
    kinds: dict[str, Kind] = dict.fromkeys(sizes, "whole")
    return OpFactors(operands=ins, results=outs, sizes=sizes, kinds=kinds)


def triangle_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """tril/triu: positions matter in the last two dims."""
    return ein("*b m n -> *b m n", whole="m n")(op, operands, results)


def unfold_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Windows along a dim, each a new last dim: by windows where they lie side by side."""
    dim, size, step = (int(n) for n in op.args[1:4])
    shape = operands[0].shape
    dim %= len(shape)
    names = [f"d{d}" for d in range(len(shape))]
    tiled = step == size and shape[dim] % size == 0
    before, after = [*names], [*names]
    before[dim], after[dim] = ("(n w)" if tiled else "whole"), "n"
    return ein(
        f"{' '.join(before)} -> {' '.join(after)} w",
        whole="w whole" if tiled else "w whole n",
        sizes={"w": size},
        linear=[[0]],
    )(op, operands, results)


def _of_pairs(spec: str) -> Rule:
    """Pairs of reals as complex numbers, and back: the pair is whole."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        return replace(ein(spec, whole="pair")(op, operands, results), view=True)

    return rule


def _fourier(default: int | tuple[int, int] | None) -> Rule:
    """A transform over one dim, the last two, or all; every frequency sees every place."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        rank = len(operands[0].shape)
        given = argument(op, 2, "dim", default)
        if given is None:
            given = range(-len(op.args[1]), 0) if len(op.args) > 1 and op.args[1] else range(rank)
        dims = {int(d) % rank for d in (given if isinstance(given, Iterable) else [given])}
        sides = [" ".join(f"{p}{d}" if d in dims else f"d{d}" for d in range(rank)) for p in "wv"]
        return ein(" -> ".join(sides), whole="w. v.")(op, operands, results)

    return rule


FOURIER = {
    f"fft_{kind}fft{suffix}": _fourier(default)
    for kind in ("", "i", "r", "ir", "h", "ih")
    for suffix, default in (("", -1), ("2", (-2, -1)), ("n", None))
}
SHUFFLES: Mapping[str, Rule] = MappingProxyType({
    **dict.fromkeys(PERMUTATIONS, transpose_rule),
    **dict.fromkeys(("expand", "expand_as"), expand_rule),
    **dict.fromkeys(ALONG_DIM, along_dim_rule),
    **dict.fromkeys(("slice_scatter", "select_scatter"), scatter_rule),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad_rule),
    **dict.fromkeys(("arange", "scalar_tensor", "linspace", "eye"), arange_rule),
    **dict.fromkeys(("tril_indices", "triu_indices"), arange_rule),
    **dict.fromkeys(("tril", "triu"), triangle_rule),
    **FOURIER,
    "repeat": repeat_rule,
    "repeat_interleave": repeat_interleave_rule,
    "view_as_complex": _of_pairs("*d pair -> *d"),
    "view_as_real": _of_pairs("*d -> *d pair"),
    "glu": glu_rule,
    "matmul": matmul_rule,
    "unfold": unfold_rule,
})  # fmt: skip
