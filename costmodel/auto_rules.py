"""Sharding rules that need no writing: whole classes of operators by what they are.

Pointwise operators (torch's own tag) map every dim; views follow from the common refinement of the sizes
before and after; factories make local shapes; reductions sum over their dims; the rest re-arranges
dims in ways that one line each describes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from costmodel.graph import Op, Ref, TensorMeta
from costmodel.rules import Dims, Kind, OpFactors, Rule, argument, bind, ein

Metas = Sequence[TensorMeta]

# torch leaves the pointwise tag off these, or they are pointwise in their first operand
POINTWISE = set(
    "to contiguous clone alias detach dropout type_as float_power __and__ __or__ __xor__ square _to_copy "
    "zeros_like ones_like full_like new_zeros new_ones lift_fresh_copy hardswish relu6 silu mish selu "
    "celu softplus log_sigmoid detach_ rsub masked_fill where clamp feature_dropout native_dropout "
    "one_like rand_like float half bfloat16".split()
)
# f(a + b) = f(a) + f(b) in the first operand, alone or together with the second
LINEAR_TOGETHER = {"add", "sub"}
LINEAR_FIRST = set(
    "neg mul div view reshape _unsafe_view transpose permute contiguous clone alias expand unsqueeze squeeze "
    "to _to_copy t flatten unflatten dropout slice select split split_with_sizes chunk movedim detach".split()
)
VIEWS = {
    "view": 1,
    "reshape": 1,
    "_unsafe_view": 1,
    "flatten": None,
    "unflatten": 2,
    "unsqueeze": None,
}
VIEWS |= {"squeeze": None, "view_as": None}
FACTORIES = {
    "zeros": 0,
    "ones": 0,
    "full": 0,
    "empty": 0,
    "new_zeros": 1,
    "new_ones": 1,
    "new_full": 1,
}
REDUCTIONS = {
    "sum": "sum",
    "mean": "mean",
    "amax": "whole",
    "amin": "whole",
    "var": "whole",
    "any": "whole",
}
REDUCTIONS |= {"argmax": "whole", "logsumexp": "whole", "std": "whole", "all": "whole"}
SAVES_RESULT = set("tanh sigmoid relu exp rsqrt sqrt reciprocal softmax".split())
SAVES_NOTHING = set(
    "add sub neg to _to_copy contiguous clone alias rsub detach type_as masked_fill eq ne lt gt le ge".split()
)


def automatic(op: Op) -> Rule | None:
    """The rule of the class an operator belongs to, or None."""
    name = op.short
    special = SHUFFLES.get(name)
    if special:
        return special
    if name in VIEWS:
        return view_rule
    if name in FACTORIES:
        return factory_rule
    if name in REDUCTIONS:
        return reduction_rule
    if name in POINTWISE or _tagged_pointwise(op.target):
        return pointwise_rule
    return None


def _tagged_pointwise(target: str) -> bool:
    namespace, name, overload = (target.split(".") + ["default"])[:3]
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    found = getattr(packet, overload, None)
    return found is not None and torch.Tag.pointwise in found.tags


def pointwise_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Dims aligned at the minor end; a dim of size 1 broadcasts."""
    sizes: dict[str, int] = {}
    ins = bind(", ".join(["*d"] * len(operands)), operands, sizes)
    outs = bind(", ".join(["*d"] * len(results)), results, sizes)
    name = op.short
    floating = bool(operands) and operands[0].dtype.is_floating_point
    linear: tuple[frozenset[int], ...] = ()
    tensors = [isinstance(a, Ref) for a in op.args[:2]]
    if floating and results[0].dtype.is_floating_point:
        if name in LINEAR_TOGETHER and all(tensors) and len(tensors) == 2:
            linear = (frozenset({0, 1}),)
        elif name in LINEAR_FIRST and tensors[:1] == [True]:
            linear = (frozenset({0}),)
            if name == "mul" and len(operands) == 2:
                linear += (frozenset({1}),)
    scalar_factor = name in ("mul", "div") and len(operands) == 1
    if name in SAVES_RESULT:
        saves: tuple[int, ...] = (-1,)
    elif name in SAVES_NOTHING or scalar_factor:
        saves = ()
    else:
        saves = tuple(range(len(operands)))
    if name == "dropout":
        saves = (-1,) if argument(op, 2, "train", True) and argument(op, 1, "p", 0.0) else ()
    return OpFactors(
        operands=ins,
        results=outs,
        sizes=sizes,
        kinds=dict.fromkeys(sizes, "map"),
        linear=linear,
        saves=saves,
        view=name in ("alias", "detach"),
    )


def refine(
    before: Sequence[int], after: Sequence[int]
) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Common refinement of two shapes of equal size: factors of each dim, sizes, and those that can't be split.

    [b, s, 12] -> [b, s, 3, 4] gives [f0, f1, f2·f3] -> [f0, f1, f2, f3]. Where the boundaries of two groups
    of dims don't nest ([6, 4] -> [4, 6]) the group is whole.
    """
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
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
            factor(size, left[i], right[j])
            rest_i, rest_j = rest_i // size, rest_j // size
            continue
        whole.add(factor(rest_i, left[i]))
        whole.add(factor(rest_j, right[j]))
        while rest_i != rest_j:  # the group ends where the products meet
            if rest_i < rest_j:
                i += 1
                rest_i *= before[i]
                whole.add(factor(before[i], left[i]))
            else:
                j += 1
                rest_j *= after[j]
                whole.add(factor(after[j], right[j]))
        rest_i = rest_j = 1
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, whole


def view_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    if operands[0].numel == 0:
        return None
    left, right, sizes, whole = refine(operands[0].shape, results[0].shape)
    shape_arg = VIEWS[op.short]
    kinds: dict[str, Kind] = {name: "whole" if name in whole else "map" for name in sizes}
    others = [tuple(() for _ in meta.shape) for meta in operands[1:]]
    return OpFactors(
        operands=(left, *others),
        results=(right,),
        sizes=sizes,
        kinds=kinds,
        linear=(frozenset({0}),) if operands[0].dtype.is_floating_point else (),
        shape_arg=shape_arg,
        view=True,
    )


def factory_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Every element equal: any dim may be made at its local size."""
    sizes: dict[str, int] = {}
    outs = bind("*d", results, sizes)
    return OpFactors(
        operands=tuple(tuple(() for _ in meta.shape) for meta in operands),
        results=outs,
        sizes=sizes,
        kinds=dict.fromkeys(sizes, "map"),
        shape_arg=FACTORIES[op.short],
    )


def _dims_argument(value: Any, rank: int) -> set[int]:
    if value is None or value == [] or value == ():
        return set(range(rank))
    if isinstance(value, int):
        return {value % rank} if rank else set()
    return {int(d) % rank for d in value}


def reduction_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    rank = len(operands[0].shape)
    has_dim = len(op.args) > 1 or "dim" in op.kwargs
    reduced = _dims_argument(argument(op, 1, "dim", None), rank) if has_dim else set(range(rank))
    keep = bool(argument(op, 2, "keepdim", False)) and has_dim
    left = " ".join(f"r{d}" if d in reduced else f"d{d}" for d in range(rank))
    sizes: dict[str, int] = {}
    ins = bind(left, operands[:1], sizes)
    outs: Dims = tuple(
        () if d in reduced else ins[0][d] for d in range(rank) if keep or d not in reduced
    )
    how: Any = REDUCTIONS[op.short]
    return OpFactors(
        operands=ins,
        results=(outs,) * len(results),
        sizes=sizes,
        kinds={name: how if name.startswith("r") else "map" for name in sizes},
        linear=(frozenset({0}),) if how in ("sum", "mean") else (),
        saves=() if how in ("sum", "mean") else (0,),
    )


# --- operators that re-arrange dims --------------------------------------------------------------


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


def transpose_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    rank = len(operands[0].shape)
    order = list(range(rank))
    if op.short in ("t", "numpy_T", "mT"):
        order = order[:-2] + order[-2:][::-1]
    elif op.short == "permute":
        order = [int(d) % rank for d in op.args[1]]  # type: ignore[attr-defined]
    else:
        a, b = (int(d) % rank for d in op.args[1:3])  # type: ignore[call-overload]
        order[a], order[b] = order[b], order[a]
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
    others = tuple(tuple(() for _ in meta.shape) for meta in operands[1:])
    return dataclasses.replace(
        made,
        operands=(ins, *others),
        sizes={**made.sizes, **new},
        kinds={**made.kinds, **dict.fromkeys(new, "map")},
        shape_arg=1 if op.short == "expand" else None,
    )


def along_dim_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """One dim is cut, joined, scanned or indexed: whole there, mapped elsewhere. Cuts into equal parts
    keep the part as a factor, so that a fused projection can be split inside each part."""
    name = op.short
    rank = len(operands[0].shape)
    index = {"cat": 1, "stack": 1, "split": 2, "split_with_sizes": 2, "chunk": 2}.get(name, 1)
    if name == "slice":
        dim = int(argument(op, 1, "dim", 0)) % rank  # type: ignore[call-overload]
    elif name in (
        "cumsum",
        "select",
        "unbind",
        "gather",
        "index_select",
        "cumprod",
        "diff",
        "roll",
        "flip",
    ):
        where = argument(
            op, {"diff": 2, "roll": 2}.get(name, 1), "dim", -1 if name == "diff" else 0
        )
        dims = where if isinstance(where, (list, tuple)) else [where]
        return _whole_dims(op, operands, results, {int(d) % rank for d in dims})  # type: ignore[call-overload]
    else:
        dim = int(argument(op, index, "dim", 0)) % (rank + (name == "stack"))  # type: ignore[call-overload]
    if name in ("split", "split_with_sizes", "chunk"):
        return _equal_parts(op, operands, results, dim)
    if name == "slice" and operands[0].shape == results[0].shape:
        return _rearranged(operands, [_named(operands[0])], [_named(operands[0])], set())
    return _whole_dims(op, operands, results, {dim})


def _whole_dims(op: Op, operands: Metas, results: Metas, whole: set[int]) -> OpFactors:
    """Dims in `whole` stay together in every tensor; `select`/`unbind` drop them, `stack` adds one."""
    name = op.short
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
    linear = name in ("cat", "stack", "slice", "select", "unbind", "cumsum", "flip", "roll")
    group = (
        (frozenset(range(len(operands))),) if linear and operands[0].dtype.is_floating_point else ()
    )
    return OpFactors(
        operands=tuple(ins), results=tuple(outs), sizes=sizes, kinds=kinds, linear=group,
        saves=(1,) if name in ("gather", "index_select") else (),
        view=name in ("slice", "select", "unbind"),
    )  # fmt: skip


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


def pad_rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
    before, after = operands[0].shape, results[0].shape
    changed = {d for d in range(len(before)) if before[d] != after[d]}
    return _whole_dims(op, operands, results, changed)


def matmul_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    left, right = len(operands[0].shape), len(operands[1].shape)
    if left < 2 or right < 2:
        return None
    spec = "*b m i, *b i o -> *b m o"
    return ein(spec, linear=[[0], [1]], flops=2.0, saves=(0, 1))(op, operands, results)


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


def index_rule(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """`x[i]` with one index tensor on dim 0: a lookup."""
    indices = op.args[1]
    if len(operands) == 2 and isinstance(indices, (list, tuple)) and indices[0] is not None:
        if all(item is None for item in indices[1:]):
            return ein("v *e, *i -> *i *e", whole="v", saves=(1,))(op, operands, results) if (
                len(operands[1].shape) == 1 or len(operands[0].shape) == 1
            ) else None  # fmt: skip
    return None


_dim = along_dim_rule
SHUFFLES: dict[str, Rule] = {
    "transpose": transpose_rule, "permute": transpose_rule, "t": transpose_rule, "swapaxes": transpose_rule,
    "mT": transpose_rule, "numpy_T": transpose_rule, "expand": expand_rule, "expand_as": expand_rule,
    "cat": _dim, "stack": _dim, "split": _dim, "split_with_sizes": _dim, "chunk": _dim, "slice": _dim,
    "select": _dim, "unbind": _dim, "cumsum": _dim, "gather": _dim, "diff": _dim, "roll": _dim, "flip": _dim,
    "pad": pad_rule, "constant_pad_nd": pad_rule, "matmul": matmul_rule, "arange": arange_rule,
    "scalar_tensor": arange_rule, "tril": triangle_rule, "triu": triangle_rule, "index": index_rule,
}  # fmt: skip
