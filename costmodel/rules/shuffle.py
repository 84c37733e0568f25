"""Sharding rules of operators that re-arrange dims: transpose, expand, cat, split, pad, index.

A dim that is cut, joined, scanned or indexed is whole; all others map. Cuts into equal parts keep
the part as a factor of its own, so that a fused projection can be split inside each part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from meshwright.costmodel.graph import Op, Ref, TensorMeta, argument
from meshwright.costmodel.rules.language import Dims, Kind, OpFactors, Rule, bind, ein

Metas = Sequence[TensorMeta]


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


def permutation(op: Op, rank: int) -> list[int]:
    """Where each dim of a transposed tensor comes from."""
    order = list(range(rank))
    if op.short == "numpy_T":
        order.reverse()
    elif op.short in ("t", "mT"):
        order = order[:-2] + order[-2:][::-1]
    elif op.short in ("movedim", "moveaxis"):
        source, target = ([a] if isinstance(a, int) else a for a in op.args[1:3])
        moved = {int(to) % rank: int(d) % rank for d, to in zip(source, target, strict=True)}
        rest = iter([d for d in order if d not in moved.values()])
        order = [moved[to] if to in moved else next(rest) for to in order]
    elif op.short == "permute":
        order = [int(d) % rank for d in op.args[1]]
    else:
        a, b = (int(d) % rank for d in op.args[1:3])
        order[a], order[b] = order[b], order[a]
    return order


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
    return dataclasses.replace(
        made,
        operands=(ins, *[outs for _ in operands[1:]]),  # the tensor whose shape is taken
        sizes={**made.sizes, **new},
        kinds={**made.kinds, **dict.fromkeys(new, "map")},
        shape_arg=1 if op.short == "expand" else None,
    )


# operator -> (position, default) of its dim argument
ALONG_DIM: Mapping[str, tuple[int, int | tuple[()]]] = MappingProxyType({
    "cat": (1, 0), "stack": (1, 0), "split": (2, 0), "split_with_sizes": (2, 0), "chunk": (2, 0),
    "slice": (1, 0), "select": (1, 0), "unbind": (1, 0), "cumsum": (1, 0), "cumprod": (1, 0),
    "gather": (1, 0), "diff": (2, -1), "roll": (2, ()), "flip": (1, 0), "topk": (2, -1),
    "sort": (1, -1), "argsort": (1, -1), "cummax": (1, -1), "cummin": (1, -1),
    "logcumsumexp": (1, -1),
})  # fmt: skip
LINEAR = frozenset({
    "cat", "stack", "slice", "select", "unbind", "cumsum", "flip", "roll", "diff", "split",
    "split_with_sizes", "chunk",
})  # fmt: skip


def along_dim_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """One dim is cut, joined, scanned or indexed: whole there, mapped elsewhere."""
    name = op.short
    rank = len(operands[0].shape) + (name == "stack")
    position, default = ALONG_DIM[name]
    where = argument(op, position, "dim" if name not in ("roll", "flip") else "dims", default)
    dims = {int(d) % rank for d in (where if isinstance(where, (list, tuple)) else [where])}
    if name == "roll" and not dims:
        dims = set(range(rank))  # rolls the flattened tensor
    if name in ("split", "split_with_sizes", "chunk"):
        return _equal_parts(op, operands, results, dims.pop())
    if name == "slice" and operands[0].shape == results[0].shape:
        return _rearranged(operands, [_named(operands[0])], [_named(operands[0])], set())
    return _whole_dims(op, operands, results, dims)


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


def _whole_dims(op: Op, operands: Metas, results: Metas, whole: set[int]) -> OpFactors:
    """Dims in `whole` stay together in every tensor, as do dims of unequal sizes (a corner is
    gathered); `select`/`unbind` drop them, `stack` adds one."""
    name = op.short
    if name == "gather":
        pairs = enumerate(zip(operands[0].shape, operands[1].shape, strict=True))
        whole = whole | {d for d, (a, b) in pairs if a != b}
    drops = name in ("select", "unbind")
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

    added = min(whole) if name == "stack" else None
    for i, meta in enumerate(operands):
        labels = [d for d in range(len(meta.shape) + (added is not None)) if d != added]
        ins.append(tuple(fresh(meta, d, f"x{i}_", label) for d, label in enumerate(labels)))
    rank = len(operands[0].shape)
    outs = []
    for i, meta in enumerate(results):
        kept = [d for d in range(rank + (added is not None)) if not (drops and d in whole)]
        outs.append(tuple(fresh(meta, d, f"y{i}_", label) for d, label in enumerate(kept)))
    linear = name in LINEAR and operands[0].dtype.is_floating_point
    group = (frozenset(range(len(operands))),) if linear else ()
    return OpFactors(
        operands=tuple(ins),
        results=tuple(outs),
        sizes=sizes,
        kinds=kinds,
        linear=group,
        view=name in ("slice", "select", "unbind"),
    )


def _equal_parts(op: Op, operands: Metas, results: Metas, dim: int) -> OpFactors:
    parts = {meta.shape[dim] for meta in results}
    if len(parts) != 1:
        return _whole_dims(op, operands, results, {dim})
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
        shape_arg=1 if op.short in ("split", "split_with_sizes") else None,
        view=True,
    )


def glu_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Two halves of a dim, one the gate of the other: split inside each half."""
    dim = int(argument(op, 1, "dim", -1)) % len(operands[0].shape)
    halves = _equal_parts(op, operands, (results[0], results[0]), dim)
    return dataclasses.replace(halves, results=halves.results[:1], linear=(), view=False)


def repeat_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """Copies of a dim: (copy, element) in `repeat`, (element, copy) in `repeat_interleave`, which
    may be told how many there will be."""
    interleaved = op.short == "repeat_interleave"
    dim = argument(op, 2, "dim", None) if interleaved else None
    if interleaved and (dim is None or isinstance(op.args[1], Ref)):
        return None
    before, after = operands[0].shape, results[0].shape
    offset = len(after) - len(before)
    named = [*((),) * offset, *_named(operands[0])]
    copies = [n // size for n, size in zip(after, (*(1,) * offset, *before), strict=True)]
    made: list[tuple[str, ...]] = []
    for d, (name, count) in enumerate(zip(named, copies, strict=True)):
        copy = (f"c{d}",) if count != 1 else ()
        made.append((*copy, *name) if op.short == "repeat" else (*name, *copy))
    told = op.kwargs.get("output_size")
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
        counts={} if told is None else {"output_size": f"d{int(dim) % len(before)}"},
    )


def pad_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Dims that are padded or cropped, listed as pairs from the last dim on."""
    padded = {k // 2 for k, amount in enumerate(op.args[1]) if amount}
    return _whole_dims(op, operands, results, {len(operands[0].shape) - 1 - k for k in padded})


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


def complex_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Pairs of reals as complex numbers, and back: the pair is whole."""
    spec = "*d pair -> *d" if op.short == "view_as_complex" else "*d -> *d pair"
    return dataclasses.replace(ein(spec, whole="pair")(op, operands, results), view=True)


def fourier_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """A transform over one dim, the last two, or all; every frequency sees every place."""
    rank = len(operands[0].shape)
    default = -1 if op.short[-1] not in "2n" else (-2, -1) if op.short[-1] == "2" else None
    given = argument(op, 2, "dim", default)
    if given is None:
        given = range(-len(op.args[1]), 0) if len(op.args) > 1 and op.args[1] else range(rank)
    dims = {int(d) % rank for d in (given if isinstance(given, Iterable) else [given])}
    sides = [" ".join(f"{p}{d}" if d in dims else f"d{d}" for d in range(rank)) for p in "wv"]
    return ein(" -> ".join(sides), whole="w. v.")(op, operands, results)


FOURIER = [f"fft_{kind}fft{n}" for kind in ("", "i", "r", "ir", "h", "ih") for n in ("", "2", "n")]
SHUFFLES: Mapping[str, Rule] = MappingProxyType({
    **dict.fromkeys(("transpose", "permute", "t", "mT", "numpy_T"), transpose_rule),
    **dict.fromkeys(("swapaxes", "swapdims", "movedim", "moveaxis"), transpose_rule),
    **dict.fromkeys(("expand", "expand_as"), expand_rule),
    **dict.fromkeys(ALONG_DIM, along_dim_rule),
    **dict.fromkeys(("slice_scatter", "select_scatter"), scatter_rule),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad_rule),
    **dict.fromkeys(("arange", "scalar_tensor", "linspace", "eye"), arange_rule),
    **dict.fromkeys(("tril_indices", "triu_indices"), arange_rule),
    **dict.fromkeys(("tril", "triu"), triangle_rule),
    **dict.fromkeys(FOURIER, fourier_rule),
    **dict.fromkeys(("repeat", "repeat_interleave"), repeat_rule),
    **dict.fromkeys(("view_as_complex", "view_as_real"), complex_rule),
    "glu": glu_rule,
    "matmul": matmul_rule,
    "unfold": unfold_rule,
})  # fmt: skip
