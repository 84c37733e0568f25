"""Sharding rules of operators that re-arrange dims: transpose, expand, cat, split, pad, index.

A dim that is cut, joined, scanned or indexed is whole; all others map. Cuts into equal parts keep
the part as a factor of its own, so that a fused projection can be split inside each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

from meshwright.costmodel.graph import Op, Ref, TensorMeta, argument
from meshwright.costmodel.rules.language import Metas, OpFactors, Rule, ein, spec_of, together


def _names(meta: TensorMeta) -> list[str]:
    return [f"d{d}" for d in range(len(meta.shape))]


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
    names = _names(operands[0])
    spec = spec_of([names], [[names[d] for d in permutation(op, len(names))]])
    return ein(spec, linear=together(operands), view=True)(op, operands, results)


def expand_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """New factors for dims that appear or grow, which can be made at local size."""
    before, after = operands[0].shape, results[0].shape
    offset = len(after) - len(before)
    names = _names(operands[0])
    out = [
        f"e{d}" if d < offset or before[d - offset] == 1 else names[d - offset]
        for d in range(len(after))
    ]
    return ein(
        spec_of([names, *[out] * (len(operands) - 1)], [out]),  # the tensor whose shape is taken
        linear=together(operands[:1]),
        shape_arg=1 if len(operands) == 1 else None,
        view=True,
    )(op, operands, results)


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
    if along.effect == "parts" and len({meta.shape for meta in results}) == 1:
        cut, part = _parts(operands[0], dims.pop())
        return ein(
            spec_of([cut], [part] * len(results)),
            whole="parts",
            sizes={"parts": len(results)},
            linear=together(operands),
            shape_arg=along.sizes,
            view=True,
        )(op, operands, results)
    if along.effect == "window" and operands[0].shape == results[0].shape:
        dims = set()
    return _whole_dims(op, operands, results, dims, along)


def scatter_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """A part of one dim replaced (slice, select): whole there, mapped elsewhere."""
    base, part = operands
    dim = int(argument(op, 2, "dim", 0)) % len(base.shape)
    names, inner = _names(base), _names(base)
    names[dim] = "whole"
    inner[dim : dim + 1] = ["part"] if len(part.shape) == len(base.shape) else []
    spec = spec_of([names, inner], [names])
    return ein(spec, whole="whole part", linear=together(operands))(op, operands, results)


def _whole_dims(
    op: Op, operands: Metas, results: Metas, unsplit: set[int], along: Along = NOWHERE
) -> OpFactors:
    """Dims that stay together, as do those of which a corner is gathered; some drop, or add one."""
    if along.effect == "corner":
        pairs = enumerate(zip(operands[0].shape, operands[1].shape, strict=True))
        unsplit = unsplit | {d for d, (a, b) in pairs if a != b}
    rank = len(operands[0].shape) + (along.effect == "add")

    def named(tensor: str, without: bool) -> list[str]:
        dims = [d for d in range(rank) if not (without and d in unsplit)]
        return [f"w{tensor}_{d}" if d in unsplit else f"d{d}" for d in dims]

    before = [named(f"x{i}", along.effect == "add") for i in range(len(operands))]
    after = [named(f"y{i}", along.effect == "drop") for i in range(len(results))]
    return ein(
        spec_of(before, after),
        whole="w.*",
        linear=together(operands) if along.linear else [],
        view=along.effect in ("window", "drop"),
    )(op, operands, results)


def glu_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Two halves of a dim, one the gate of the other: split inside each half."""
    cut, part = _parts(operands[0], int(argument(op, 1, "dim", -1)))
    spec = spec_of([cut], [part])
    return ein(spec, whole="parts", sizes={"parts": 2})(op, operands, results)


def _parts(meta: TensorMeta, dim: int) -> tuple[list[str], list[str]]:
    """The names of a tensor's dims, of which one is (part, place in it), and of those of a part."""
    cut, part = _names(meta), _names(meta)
    cut[dim], part[dim] = "(parts part)", "part"
    return cut, part


def repeat_interleave_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """Copies of each element of one dim, (element, copy), where their number is fixed."""
    dim = argument(op, 2, "dim", None)
    if dim is None or isinstance(op.args[1], Ref):
        return None
    factors = _repeated(op, operands, results, "({name} {copy})")
    if op.kwargs.get("output_size") is None:
        return factors
    return replace(factors, counts={"output_size": f"d{int(dim) % len(operands[0].shape)}"})


def _repeated(op: Op, operands: Metas, results: Metas, dim: str) -> OpFactors:
    names = _names(operands[0])
    offset = len(results[0].shape) - len(names)
    repeated = [f"c{d}" for d in range(offset)]
    repeated += [dim.format(name=name, copy=f"c{d}") for d, name in enumerate(names, offset)]
    return ein(
        spec_of([names], [repeated]),
        whole="c.*",
        sizes=dict(zip(names, operands[0].shape, strict=True)),  # also those of one element
        linear=together(operands),
    )(op, operands, results)


def pad_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Dims that are padded or cropped, listed as pairs from the last dim on."""
    padded = {k // 2 for k, amount in enumerate(op.args[1]) if amount}
    unsplit = {len(operands[0].shape) - 1 - k for k in padded}
    return _whole_dims(op, operands, results, unsplit)


def matmul_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Products of batches of matrices, or vectors on either side."""
    left = "i" if len(operands[0].shape) == 1 else "*b m i"
    right = "i" if len(operands[1].shape) == 1 else "*b i o"
    words = dict.fromkeys(word for word in f"{left} {right}".split() if word != "i")
    spec = f"{left}, {right} -> {' '.join(words)}"
    return ein(spec, linear=[[0], [1]], flops=2.0)(op, operands, results)


def unfold_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Windows along a dim, each a new last dim: by windows where they lie side by side."""
    dim, size, step = (int(n) for n in op.args[1:4])
    shape = operands[0].shape
    tiled = step == size and shape[dim] % size == 0
    before, after = _names(operands[0]), _names(operands[0])
    before[dim], after[dim] = ("(n w)" if tiled else "whole"), "n"
    return ein(
        spec_of([before], [[*after, "w"]]),
        whole="w whole" if tiled else "w whole n",
        sizes={"w": size},
        linear=[[0]],
    )(op, operands, results)


def _fourier(default: int | tuple[int, int] | None) -> Rule:
    """A transform over one dim, the last two, or all; every frequency sees every place."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        rank = len(operands[0].shape)
        dim = argument(op, 2, "dim", default)
        if dim is None:
            dim = range(-len(op.args[1]), 0) if len(op.args) > 1 and op.args[1] else range(rank)
        dims = {int(d) % rank for d in (dim if isinstance(dim, Iterable) else [dim])}
        sides = [" ".join(f"{p}{d}" if d in dims else f"d{d}" for d in range(rank)) for p in "wv"]
        return ein(" -> ".join(sides), whole="w. v.")(op, operands, results)

    return rule


FOURIER = {
    f"fft_{kind}fft{suffix}": _fourier(default)
    for kind in ("", "i", "r", "ir", "h", "ih")
    for suffix, default in (("", -1), ("2", (-2, -1)), ("n", None))
}
MADE_WHOLE = ein("*x, *x, *x -> *y", whole="x.* y.*")
SHUFFLES: Mapping[str, Rule] = MappingProxyType({
    **dict.fromkeys(PERMUTATIONS, transpose_rule),
    **dict.fromkeys(("expand", "expand_as"), expand_rule),
    **dict.fromkeys(ALONG_DIM, along_dim_rule),
    **dict.fromkeys(("slice_scatter", "select_scatter"), scatter_rule),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad_rule),
    # values depend on the position: made whole
    **dict.fromkeys(("arange", "scalar_tensor", "linspace", "eye"), MADE_WHOLE),
    **dict.fromkeys(("tril_indices", "triu_indices"), MADE_WHOLE),
    **dict.fromkeys(("tril", "triu"), ein("*b m n -> *b m n", whole="m n")),
    **FOURIER,
    # copies of the dims one after the other: each is (copy, element)
    "repeat": partial(_repeated, dim="({copy} {name})"),
    "repeat_interleave": repeat_interleave_rule,
    "view_as_complex": ein("*d pair -> *d", whole="pair", view=True),
    "view_as_real": ein("*d -> *d pair", whole="pair", view=True),
    "glu": glu_rule,
    "matmul": matmul_rule,
    "unfold": unfold_rule,
})  # fmt: skip
