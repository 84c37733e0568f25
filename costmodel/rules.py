"""Sharding rules: one line per operator, in factor form.

Every dim of an operand or result is a product of named factors, major to minor. A factor's kind
says what happens when one mesh axis splits it:

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
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from costmodel.graph import Op, Ref, TensorMeta, argument
from costmodel.saves import saves_of

Kind = Literal["map", "sum", "mean", "inner", "whole"]
Dims = tuple[tuple[str, ...], ...]
Metas = Sequence[TensorMeta]
Rule = Callable[[Op, Metas, Metas], "OpFactors | None"]
SureRule = Callable[[Op, Metas, Metas], "OpFactors"]  # applies to every call


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFactors:
    """A rule applied to one operator call.

    `operands` and `results` give, per tensor and dim, factor names major to minor; dims of size 1
    that broadcast have none. Forward FLOPs are `flops × Π size(f), f in flop_factors`. `saves`
    (filled in from `saves.py`) are what autograd keeps for the backward: operand i as i, result i
    as -1-i. `shape_arg` is the index of an argument holding the result's sizes, to be rewritten
    with the local ones.
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
    view: bool = False
    known: bool = True

    @property
    def matmul(self) -> bool:
        return self.flops > 0


RULES: dict[str, Rule] = {}


def rule_for(op: Op) -> Rule | None:
    """The rule of an operator: by overload, by name, or by its automatic class; None if it has
    none."""
    from costmodel import auto_rules, moe_rules  # these use the helpers of this module

    base = op.target.rsplit(".", 1)[0]
    written = RULES.get(op.target) or RULES.get(base) or moe_rules.MOE_RULES.get(base)
    return written or auto_rules.automatic(op)


def factors_of(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """The factors of one call; an operator without a rule gets the replicated one
    (`known=False`)."""
    rule = rule_for(op)
    made = rule(op, operands, results) if rule else None
    found = made or replicated(op, operands, results)
    return replace(found, saves=saves_of(op, operands, results))


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


# --- the einsum-like language of written rules ---------------------------------------------------


def bind(spec: str, metas: Metas, sizes: dict[str, int]) -> tuple[Dims, ...]:
    """Name the dims of `metas` by the terms of `spec` (`"*b i, o i"`), filling in factor sizes.

    `*x` stands for any number of dims (`x0 x1 ...`), aligned at the minor end so that broadcasting
    works.
    """
    bound = []
    for term, meta in zip(spec.split(","), metas, strict=False):
        names: list[str] = []
        tokens = term.split()
        rest = len(meta.shape) - sum(not t.startswith("*") for t in tokens)
        for token in tokens:
            if token.startswith("*"):
                names += [f"{token[1:]}{rest - 1 - k}" for k in range(rest)]
            else:
                names.append(token)
        dims: list[tuple[str, ...]] = []
        for name, size in zip(names, meta.shape, strict=True):
            if size != 1:
                sizes[name] = size
            dims.append((name,) if size != 1 else ())
        bound.append(tuple(dims))
    return tuple(bound)


def fits(spec: str, metas: Metas) -> bool:
    """Whether `metas` have the ranks that the terms of `spec` name (unbatched and vector forms of
    an operator may not)."""
    terms = [term.split() for term in spec.split(",")]
    named = [sum(not token.startswith("*") for token in term) for term in terms]
    return len(metas) <= len(terms) and all(
        len(meta.shape) == n or (len(meta.shape) > n and n < len(term))
        for term, n, meta in zip(terms, named, metas, strict=False)
    )


def ein(
    spec: str,
    *,
    whole: str = "",
    inner: Mapping[str, str] | None = None,
    implementations: Mapping[str, str] | None = None,
    pinned: Sequence[int] = (),
    linear: Sequence[Sequence[int]] = (),
    flops: float = 0.0,
) -> SureRule:
    """A rule from `"operand, operand -> result"`.

    `whole` lists factors (regular expressions) that can't be split; `inner` maps factors to the
    implementation that exchanges by itself; a factor in no result is summed. `flops` multiplies the
    product of all factors. A call of other ranks than the spec's runs replicated.
    """
    left, right = spec.split("->")

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        if not (fits(left, operands) and fits(right, results)):
            return replicated(op, operands, results)
        sizes: dict[str, int] = {}
        ins = bind(left, operands, sizes)
        outs = bind(right, results, sizes)
        kept = {name for dims in outs for dim in dims for name in dim}
        kinds: dict[str, Kind] = {
            name: "whole"
            if any(re.fullmatch(p, name) for p in whole.split())
            else "inner"
            if inner and name in inner
            else ("map" if name in kept else "sum")
            for name in sizes
        }
        return OpFactors(
            operands=ins,
            results=outs,
            sizes=sizes,
            kinds=kinds,
            implementations={**(implementations or {}), **(inner or {})},
            pinned=frozenset(i for i in pinned if i < len(operands)),
            linear=tuple(frozenset(group) for group in linear),
            flops=flops,
            flop_factors=tuple(sizes) if flops else (),
        )

    return rule


def _cross_entropy(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """Rows are summed, or mapped without a reduction; the class factor is exchanged inside
    (vocabulary-parallel). Class weights and probabilities as targets have no rule."""
    if len(operands) != 2 or operands[1].dtype.is_floating_point:
        return None
    reduced = argument(op, 3, "reduction", 1) != 0
    smoothing = argument(op, 5, "label_smoothing", 0.0)
    plain = reduced and not smoothing and len(operands[0].shape) == 2
    inner = {"vocab": "cross_entropy"} if plain else {}
    spec = "n vocab *x, n *x -> " + ("" if reduced else "n *x")
    return ein(spec, whole="" if plain else "vocab", inner=inner)(op, operands, results)


def _nll_loss(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    if len(operands) != 2:
        return None
    spec = "n v *x, n *x -> " + ("n *x" if argument(op, 3, "reduction", 1) == 0 else "")
    return ein(spec, whole="v")(op, operands, results)


def _pointwise_loss(position: int) -> Rule:
    """Element-wise losses: reduced by mean (1) or sum (2), or not at all (0)."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        reduction = argument(op, position, "reduction", 1)
        left = ", ".join(["*n"] * len(operands))
        made = ein(f"{left} -> " + ("*n" if reduction == 0 else ""))(op, operands, results)
        if reduction != 1:
            return made
        return replace(made, kinds=dict.fromkeys(made.sizes, "mean"))

    return rule


def _conv(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """Convolution over whole windows; channels split when there is one group."""
    groups = argument(op, 6, "groups", 1)
    window = len(operands[1].shape) - 2
    kernel = " ".join(f"k{i}" for i in range(window))
    space = " ".join(f"s{i}" for i in range(window))
    out = " ".join(f"p{i}" for i in range(window))
    if groups != 1:
        spec, whole = f"b g {space}, o c {kernel}, o -> b o {out}", "g o c s. k. p."
    else:
        spec, whole = f"b c {space}, o c {kernel}, o -> b o {out}", "s. k. p."
    made = ein(spec, whole=whole, pinned=(2,), flops=2.0)(op, operands, results)
    counted = tuple(f for f in made.flop_factors if not re.fullmatch("s.|g", f))
    return replace(made, flop_factors=counted)


def _embedding(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    if argument(op, 3, "scale_grad_by_freq", False):
        return None  # counts ids over the whole batch
    made = ein("vocab hidden, *b -> *b hidden", implementations={"vocab": "embedding"})
    return made(op, operands, results)


def _sdpa(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """Attention: heads and batch split freely, queries only where nothing ties them to their
    position.

    With `enable_gqa` the query's head dim is (kv heads × group); the group splits where there is
    one kv head. FLOPs: two products of 2·s·t·d per head.
    """
    query, key = operands[0].shape, operands[1].shape
    mask = "*b heads s t" if len(operands) > 3 and len(operands[3].shape) > 2 else "s t"
    spec = f"*b heads s d, *b kv t d, *b kv t e, {mask}"
    if not fits(spec, operands):
        return None
    positional = argument(op, 5, "is_causal", False) or argument(op, 4, "dropout_p", 0.0)
    whole = {"t", "d", "e"} | ({"s"} if positional else set())
    sizes: dict[str, int] = {}
    ins = bind(spec, operands, sizes)
    outs = bind("*b heads s e", results, sizes)
    heads: tuple[str, ...] = ("heads",)
    if query[-3] != key[-3]:
        sizes["group"] = query[-3] // key[-3]
        sizes["heads"] = key[-3]
        heads, whole = ("heads", "group"), whole | ({"group"} if key[-3] > 1 else set())
    swap: dict[tuple[str, ...], tuple[str, ...]] = {("heads",): heads, ("kv",): ("heads",)}
    kinds: dict[str, Kind] = {name: "whole" if name in whole else "map" for name in sizes}
    return OpFactors(
        operands=tuple(tuple(swap.get(dim, dim) for dim in dims) for dims in ins),
        results=tuple(tuple(swap.get(dim, dim) for dim in dims) for dims in outs),
        sizes=sizes,
        kinds=kinds,
        flops=4.0,
        flop_factors=tuple(f for f in sizes if f not in ("e", "kv")),
    )


def _einsum(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """The equation is the rule."""
    left, arrow, right = str(op.args[0]).replace(" ", "").partition("->")
    terms = left.split(",")
    simple = all(t.isalpha() and len(set(t)) == len(t) for t in terms)
    if not arrow or not simple or len(operands) > 2:
        return None
    spec = ", ".join(" ".join(t) for t in terms) + " -> " + " ".join(right)
    each = [[i] for i in range(len(operands))]
    flops = 2.0 if len(operands) == 2 else 0.0
    return ein(spec, linear=each, flops=flops)(op, operands, results)


def _softmax(op: Op, operands: Metas, results: Metas) -> OpFactors:
    rank = len(operands[0].shape)
    dim = int(op.args[1]) % rank
    names = " ".join("w" if d == dim else f"a{d}" for d in range(rank))
    return ein(f"{names} -> {names}", whole="w")(op, operands, results)


def _batch_norm(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Statistics span the batch, so a split batch needs the synchronised version (training
    only)."""
    affine = sum(isinstance(a, Ref) for a in op.args[1:3])
    spec = ", ".join(["b c *x", *["c"] * affine, "c, c"]) + " -> b c *x"
    sync = {"b": "batch_norm"} if argument(op, 5, "training", True) else {}
    return ein(spec, whole="x.*", implementations=sync)(op, operands, results)


def _group_norm(op: Op, operands: Metas, results: Metas) -> OpFactors:
    return ein("b c *x, c, c -> b c *x", whole="c x.*")(op, operands, results)


def _norm(spec_norm: str) -> Rule:
    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        shape = op.args[1]
        names = " ".join(f"n{i}" for i in range(len(shape)))
        spec = spec_norm.replace("N", names)
        return ein(spec, whole="n.*")(op, operands, results)

    return rule


def _register() -> None:
    mm: dict[str, Any] = {"flops": 2.0}
    written: dict[str, Rule] = {
        "aten.linear": ein("*b in, out in, out -> *b out", pinned=(2,), linear=[[0]], **mm),
        "aten.addmm": ein("out, m in, in out -> m out", pinned=(0,), flops=2.0),
        "aten.mm": ein("m i, i o -> m o", linear=[[0], [1]], **mm),
        "aten.bmm": ein("b m i, b i o -> b m o", linear=[[0], [1]], **mm),
        "aten.baddbmm": ein("b m o, b m i, b i o -> b m o", pinned=(0,), flops=2.0),
        "aten.embedding": _embedding,
        "aten.layer_norm": _norm("*b N, N, N -> *b N"),
        "aten.rms_norm": _norm("*b N, N -> *b N"),
        "aten.group_norm": _group_norm,
        "aten.batch_norm": _batch_norm,
        "aten.scaled_dot_product_attention": _sdpa,
        "aten.softmax": _softmax,
        "aten._softmax": _softmax,
        "aten.log_softmax": _softmax,
        "aten.cross_entropy_loss": _cross_entropy,
        "aten.nll_loss": _nll_loss,
        "aten.nll_loss_nd": _nll_loss,
        "aten.mse_loss": _pointwise_loss(2),
        "aten.l1_loss": _pointwise_loss(2),
        "aten.smooth_l1_loss": _pointwise_loss(2),
        "aten.huber_loss": _pointwise_loss(2),
        "aten.binary_cross_entropy_with_logits": _pointwise_loss(4),
        "aten.binary_cross_entropy": _pointwise_loss(3),
        "aten.conv1d": _conv,
        "aten.conv2d": _conv,
        "aten.conv3d": _conv,
        "aten.einsum": _einsum,
        "aten.upsample_nearest2d": ein("b c h w -> b c p q", whole="h w p q"),
        "aten.upsample_bilinear2d": ein("b c h w -> b c p q", whole="h w p q"),
    }
    for n, (space, out) in enumerate((("l", "p"), ("h w", "p q"), ("k h w", "o p q")), 1):
        spec, whole = f"b c {space} -> b c {out}", f"{space} {out}"
        written[f"aten.max_pool{n}d"] = ein(spec, whole=whole)
        written[f"aten.avg_pool{n}d"] = ein(spec, whole=whole)
        written[f"aten.adaptive_avg_pool{n}d"] = ein(spec, whole=whole)
    RULES.update(written)


_register()
