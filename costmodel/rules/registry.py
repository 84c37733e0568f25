"""Sharding rules: one line per operator, in the language of `language.py`.

Rules of products, norms, attention, losses and images; those of experts are in `moe.py`,
of leaves in `leaf.py`. Most operators need none: `auto.py` knows their class. What else
is special about an operator is in `traits.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshwright.costmodel.graph import Op, Ref, argument
from meshwright.costmodel.rules import auto as auto_rules
from meshwright.costmodel.rules import leaf as leaf_rules
from meshwright.costmodel.rules import moe as moe_rules
from meshwright.costmodel.rules.language import (
    Dims,
    Metas,
    Misfit,
    OpFactors,
    Rule,
    SpecOptions,
    ein,
    given_factors,
    replicated,
    words,
)
from meshwright.costmodel.rules.traits import LOSS_IN_PARTS, draws
from meshwright.profiles.inputs import MeshwrightError


def rule_for(op: Op) -> Rule | None:
    """The rule of an operator, the user's before the one shipped; None if it has none."""
    added = given_for(op.target)
    return shipped_rule_for(op) if added is None else added.rule


def shipped_rule_for(op: Op) -> Rule | None:
    """The rule shipped for an operator: by overload, by name, or by its automatic class."""
    base = op.target.rsplit(".", 1)[0]
    written = RULES.get(op.target) or RULES.get(base) or moe_rules.MOE_RULES.get(base)
    return written or leaf_rules.LEAF_RULES.get(base) or auto_rules.automatic(op)


def factors_of(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Factors of one call; without a rule the replicated ones (`known=False`)."""
    rule = rule_for(op)
    known = rule(op, operands, results) if rule else None
    factors = known or replicated(op, operands, results)
    return replace(factors, saves=saves_of(op, operands, results))


def _cross_entropy(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """Rows summed, or mapped without a reduction; classes exchanged inside (vocabulary-parallel).
    Class weights and probabilities as targets have no rule."""
    if len(operands) != 2 or operands[1].dtype.is_floating_point:
        return None
    reduced = argument(op, 3, "reduction", 1) != 0
    smoothing = argument(op, 5, "label_smoothing", 0.0)
    plain = reduced and not smoothing and len(operands[0].shape) == 2
    inner = {"vocab": "cross_entropy"} if plain else {}
    spec = "n vocab *x, n *x -> " + ("" if reduced else "n *x")
    return ein(spec, whole="" if plain else "vocab", inner=inner)(op, operands, results)


def _chunked_loss(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Rows of x summed, classes exchanged inside: x, targets, the weight, its bias."""
    smoothing, transposed = op.args[5], op.args[8]
    weight = "out d" if transposed else "d out"
    rule = ein(
        f"n d, n, {weight}, out ->",
        whole="d out" if smoothing else "d",
        inner={} if smoothing else {"out": LOSS_IN_PARTS},
        flops=2.0,
    )
    return rule(op, operands, results)


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
        factors = ein(f"{left} -> " + ("*n" if reduction == 0 else ""))(op, operands, results)
        if reduction != 1:
            return factors
        return replace(factors, kinds=dict.fromkeys(factors.sizes, "mean"))

    return rule


def _embedding(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    if argument(op, 3, "scale_grad_by_freq", False):
        return None  # counts ids over the whole batch
    rule = ein("vocab hidden, *b -> *b hidden", implementations={"vocab": "embedding"})
    return rule(op, operands, results)


def _sdpa(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Attention: heads and batch split freely, queries only where nothing ties them to their place.

    The query's heads are (key heads × group), so that more ranks than there are key heads can share
    the queries: they read all keys, whose gradients are then partial. FLOPs: two products of
    2·s·t·d per head.
    """
    query, key = operands[0].shape, operands[1].shape
    mask = "*b (heads group) s t" if len(operands) > 3 and len(operands[3].shape) > 2 else "s t"
    positional = argument(op, 5, "is_causal", False) or argument(op, 4, "dropout_p", 0.0)
    grouped = len(query) > 2 and len(key) > 2
    return ein(
        f"*b (heads group) s d, *b heads t d, *b heads t e, {mask} -> *b (heads group) s e",
        whole="t d e" + (" s" if positional else ""),
        flops=4.0,
        uncounted="e",
        sizes={"heads": key[-3], "group": query[-3] // key[-3]} if grouped else {},
    )(op, operands, results)


def _einsum(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """The equation as a rule; a product of several is priced as its dearest step from the left."""
    inputs, arrow, out = str(op.args[0]).replace(" ", "").partition("->")
    if not arrow:
        letters = sorted(a for a in {*inputs} - {*",."} if inputs.count(a) == 1)
        out = ("..." if "..." in inputs else "") + "".join(letters)
    terms = [re.findall(r"\.\.\.|.", term) for term in (*inputs.split(","), out)]
    if any(len(set(term)) != len(term) for term in terms[:-1]):
        return None  # a diagonal
    *words, out = (" ".join(term).replace("...", "*z") for term in terms)
    linear = [[i] for i in range(len(operands))]
    factors = ein(f"{', '.join(words)} -> {out}", linear=linear, flops=2.0)(op, operands, results)
    return replace(factors, flops=0.0, flop_factors=()) if len(words) == 1 else _dearest(factors)


def _dearest(factors: OpFactors) -> OpFactors:
    def names(dims: Dims) -> set[str]:
        return {name for dim in dims for name in dim}

    operands = [names(dims) for dims in factors.operands]
    joined, steps = operands[0], []
    for k in range(1, len(operands)):
        steps.append(joined | operands[k])
        joined = steps[-1] & set().union(names(factors.results[0]), *operands[k + 1 :])
    dearest = max(steps, key=lambda step: math.prod(factors.sizes[n] for n in step))
    return replace(factors, flop_factors=tuple(f for f in factors.flop_factors if f in dearest))


def _softmax(op: Op, operands: Metas, results: Metas) -> OpFactors:
    rank = len(operands[0].shape)
    names = " ".join("w" if d == int(op.args[1]) % rank else f"a{d}" for d in range(rank))
    return ein(f"{names} -> {names}", whole="w")(op, operands, results)


def _norm(spec_norm: str) -> Rule:
    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        names = " ".join(f"n{i}" for i in range(len(op.args[1])))
        return ein(spec_norm.replace("N", names), whole="n.*")(op, operands, results)

    return rule


def _recurrent(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """LSTM, GRU, RNN: rows are independent, steps and the hidden dims are not."""
    steps = "b t i" if argument(op, 8, "batch_first", False) else "t b i"
    states = len(results) - 1
    weights = [
        " ".join(f"w{k}_{d}" for d in range(len(m.shape)))
        for k, m in enumerate(operands[1 + states :])
    ]
    hidden = [f"l b h{k}" for k in range(states)]
    inputs, outputs = [steps, *hidden, *weights], [steps.replace("i", "o"), *hidden]
    spec = f"{', '.join(inputs)} -> {', '.join(outputs)}"
    return ein(spec, whole="t i o l h. w.*")(op, operands, results)


def _histc(op: Op, operands: Metas, results: Metas) -> OpFactors | None:
    """Counts add up where the bins don't depend on the data."""
    fixed = argument(op, 2, "min", 0) != argument(op, 3, "max", 0)
    return ein("*x -> bins", whole="bins")(op, operands, results) if fixed else None


# --- images ---------------------------------------------------------------------------------------

# Sharding rules of images and sequences of frames: convolutions, their norms, pooling, resampling.
#
# Windows reach over their neighbours, so space is whole; the batch and the channels split. Channels
# of grouped operators are (groups × channels of a group): a split of the groups makes their number,
# an argument, local.


def _dims(prefix: str, count: int) -> str:
    return " ".join(f"{prefix}{i}" for i in range(count))


def _convolution(weight: str, *, coarse: str) -> Rule:
    """Channels in (g i) meet weights per group and give channels out (g o). Each product has one
    weight and one place of the finer of the two grids of places, `coarse` being the other."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        window = len(operands[1].shape) - 2
        space, kernel, out = (_dims(p, window) for p in "skp")
        return ein(
            f"b (g i) {space}, {weight} {kernel}, (g o) -> b (g o) {out}",
            whole="s. k. p.",
            pinned=(2,),
            flops=2.0,
            uncounted=coarse,
            counts={"groups": "g"},
        )(op, operands, results)

    return rule


def _batch_norm(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Statistics span the batch: a split batch needs the synchronised version (training only)."""
    spec = ", ".join(["b c *x", *["c"] * (len(operands) - 1)]) + " -> b c *x"
    sync = {"b": "batch_norm"} if argument(op, 5, "training", True) else {}
    return ein(spec, whole="x.*", implementations=sync)(op, operands, results)


def _instance_norm(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Statistics per row and channel; running ones, where kept, are means over the batch."""
    spec = ", ".join(["b c *x", *["c"] * (len(operands) - 1)]) + " -> b c *x"
    tracked = any(isinstance(a, Ref) for a in op.args[3:5])
    return ein(spec, whole="x.* b" if tracked else "x.*")(op, operands, results)


def _pool(count: int) -> Rule:
    """A pool over windows; some also say where each maximum was."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        out = f"b c {_dims('p', count)}"
        spec = f"b c {_dims('s', count)} -> " + ", ".join([out] * len(results))
        return ein(spec, whole="s. p.")(op, operands, results)

    return rule


def _pixels(spec: str) -> Rule:
    """Channels (c, r, r) become places, or back: any of the dims that stay whole pieces splits."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        sizes = dict.fromkeys(("r1", "r2"), int(op.args[1]))
        return ein(spec, whole="r1 r2", sizes=sizes, linear=[[0]])(op, operands, results)

    return rule


def _windows(spec: str, image: int) -> Rule:
    """(Channels × places of the window) per window of an image: operand 0, or result -1."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        sizes = {"c": (*operands, *results)[image].shape[-3]}
        return ein(spec, whole="h w k l", sizes=sizes, linear=[[0]])(op, operands, results)

    return rule


def _grid_sample(op: Op, operands: Metas, results: Metas) -> OpFactors:
    count = len(operands[0].shape) - 2
    space, out = _dims("s", count), _dims("p", count)
    return ein(f"b c {space}, b {out} xy -> b c {out}", whole="s. xy")(op, operands, results)


_UPSAMPLED = {1: "nearest linear", 2: "nearest bilinear bicubic", 3: "nearest trilinear"}


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "group_norm": ein(
            "b (g c) *x, (g c), (g c) -> b (g c) *x", whole="c x.*", counts={"num_groups": "g"}
        ),
        "batch_norm": _batch_norm,
        "instance_norm": _instance_norm,
        "pixel_shuffle": _pixels("*b (c r1 r2) h w -> *b c (h r1) (w r2)"),
        "pixel_unshuffle": _pixels("*b c (h r1) (w r2) -> *b (c r1 r2) h w"),
        "channel_shuffle": ein("b (g c) *x -> b (c g) *x", linear=[[0]], counts={"groups": "g"}),
        "im2col": _windows("b c h w -> b (c k) l", 0),
        "col2im": _windows("b (c k) l -> b c h w", -1),
        "grid_sampler": _grid_sample,
    }
    for n in (1, 2, 3):
        rules[f"conv{n}d"] = _convolution("(g o) i", coarse="s.")
        rules[f"conv_transpose{n}d"] = _convolution("(g i) o", coarse="p.")
        for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
            rules[f"{kind}{n}d"] = _pool(n)
        for kind in _UPSAMPLED[n].split():
            rules[f"upsample_{kind}{n}d"] = _pool(n)
    return {f"aten.{name}": rule for name, rule in rules.items()}


IMAGE_RULES: Mapping[str, Rule] = MappingProxyType(_rules())


# --- the rules ------------------------------------------------------------------------------------


RULES: dict[str, Rule] = {
    "aten.linear": ein("*b in, out in, out -> *b out", pinned=(2,), linear=[[0]], flops=2.0),
    "aten.addmm": ein("out, m in, in out -> m out", pinned=(0,), flops=2.0),
    "aten.mm": ein("m i, i o -> m o", linear=[[0], [1]], flops=2.0),
    "aten.bmm": ein("b m i, b i o -> b m o", linear=[[0], [1]], flops=2.0),
    "aten.baddbmm": ein("b m o, b m i, b i o -> b m o", pinned=(0,), flops=2.0),
    "aten.embedding": _embedding,
    "aten.layer_norm": _norm("*b N, N, N -> *b N"),
    "aten.rms_norm": _norm("*b N, N -> *b N"),
    "aten.scaled_dot_product_attention": _sdpa,
    **{f"aten.{name}": _softmax for name in ("softmax", "_softmax", "log_softmax")},
    "aten.cross_entropy_loss": _cross_entropy,
    f"meshwright.{LOSS_IN_PARTS}": _chunked_loss,
    **dict.fromkeys(("aten.nll_loss", "aten.nll_loss_nd"), _nll_loss),
    **{f"aten.{name}_loss": _pointwise_loss(2) for name in ("mse", "l1", "smooth_l1", "huber")},
    "aten.binary_cross_entropy_with_logits": _pointwise_loss(4),
    "aten.binary_cross_entropy": _pointwise_loss(3),
    "aten.kl_div": _pointwise_loss(2),
    "aten.einsum": _einsum,
    "aten.mv": ein("m i, i -> m", linear=[[0], [1]], flops=2.0),
    "aten.dot": ein("i, i -> ", linear=[[0], [1]], flops=2.0),
    "aten.outer": ein("m, n -> m n", linear=[[0], [1]]),
    "aten.cdist": ein("*b m d, *b n d -> *b m n", whole="d"),
    "aten.prelu": ein("b c *x, c -> b c *x"),
    "aten.histc": _histc,
    **{f"aten.{name}.input": _recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **IMAGE_RULES,
}


# --- rules that users add -------------------------------------------------------------------------


class RuleError(MeshwrightError):
    """A rule of an operator that can't be read, or that does not hold."""

    CODE = "MW205"
    PLACE = "rule"
    LEGAL = "a rule of the language, which holds for the operator on parts of its operands"
    WAY_OUT = "correct the rule, or leave the operator without one: it is then not split"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRule:
    """A rule as the user gave it; its factors split into equal parts alone, as they are tried."""

    target: str
    spec: str
    options: SpecOptions
    verify: bool = True

    def rule(self, op: Op, operands: Metas, results: Metas) -> OpFactors:
        """The factors of a call; RuleError where the rule does not fit it."""
        try:
            bound = given_factors(self.spec, op, operands, results, **self.options)
        except Misfit as error:
            shapes = ", ".join(str(list(meta.shape)) for meta in operands)
            gives = ", ".join(str(list(meta.shape)) for meta in results)
            raise RuleError(
                f"{error}. The call {op.key} at {op.source or 'an unknown place'} takes "
                f"{shapes or 'no tensors'} and gives {gives}",
                place=f"rule of {self.target}, {self.spec!r}",
                way_out="name their dims, or use *x for any number of dims",
            ) from None
        floating = [k for k, meta in enumerate(operands) if meta.dtype.is_floating_point]
        for i in sorted(bound.pinned.union(*bound.linear)):
            if i not in floating:
                raise RuleError(
                    f"operand {i} of pinned or linear is no floating tensor in the call {op.key} "
                    f"at {op.source or 'an unknown place'}",
                    place=f"rule of {self.target}, {self.spec!r}",
                    legal=f"{', '.join(map(str, floating)) or 'none'}",
                )
        return replace(bound, equal=True)


GIVEN: dict[str, UserRule] = {}


def named_in(spec: str, place: str) -> set[str]:
    """The names in a user's spec, those of any number of dims with their star. Raises RuleError for
    what is no spec."""
    if spec.count("->") != 1:
        raise RuleError(
            f" is {spec!r}",
            place=place,
            legal="terms for what it takes, one '->', terms for what it gives: 'b _ d, d -> b _ d'",
        )
    named: set[str] = set()
    for term in spec.replace("->", ",").split(","):
        names = [name for word in words(term) for name in word.strip("()").split() if name != "_"]
        legible = all(re.fullmatch(r"\*?[a-zA-Z]\w*", name) for name in names)
        if re.sub(r"[\w\s*()]", "", term) or not legible:
            what, legal = f"{term.strip()!r} is not made of", "names, _, *names and (a b)"
            raise RuleError(f"{what} {legal}", place=f"{place}, {spec!r}", legal=legal)
        if len(set(names)) != len(names):
            what, legal = f"{term.strip()!r} names a dim twice", "once per tensor"
            raise RuleError(what, place=f"{place}, {spec!r}", legal=legal)
        named |= set(names)
    return named


def given_for(target: str) -> UserRule | None:
    """The user's rule for an operator, by overload or by name."""
    return GIVEN.get(target) or GIVEN.get(target.rsplit(".", 1)[0])


# --- what operators save --------------------------------------------------------------------------

# Saved tensors: an operator's own operands and results that autograd keeps for the backward.
#
#     "0<1 1<0"   operand 0 if operand 1 needs a gradient, and the other way round (products)
#     "0"         operand 0
#     "y0"        the first result (tanh, softmax: the derivative is a function of it)
#     ""          nothing (sums, views: the gradient passes through)
#
# Source: torch's tools/autograd/derivatives.yaml, for the operators that the traced ones are made
# of. Tensors that exist for the backward alone are in `memory/kept.py`.


NOTHING = (
    "add sub neg rsub sum mean to _to_copy type_as float half bfloat16 contiguous clone alias "
    "detach detach_ zeros_like ones_like full_like rand_like eq ne lt gt le ge round floor ceil "
    "sign stack cat cumsum diff flip roll tril triu repeat repeat_interleave constant_pad_nd "
    "slice_scatter select_scatter upsample_nearest2d upsample_bilinear2d argmax argmin any all "
    "arange scalar_tensor zeros ones full empty new_zeros new_ones new_full new_empty histc "
    "view reshape _unsafe_view flatten unflatten unsqueeze squeeze view_as reshape_as transpose "
    "permute t mT numpy_T swapaxes swapdims movedim moveaxis expand expand_as slice split "
    "split_with_sizes chunk select unbind lift_fresh_copy logical_not logical_and logical_or "
    "rand randn randint randint_like randn_like bernoulli uniform normal_functional exponential "
    "__and__ __or__ __xor__ bitwise_and bitwise_or bitwise_not isinf isnan"
)
FIRST = (
    "gelu silu mish cos sin tan log log1p log2 abs erf clamp clamp_min clamp_max leaky_relu elu "
    "selu celu softplus hardtanh relu6 hardswish hardsigmoid log_sigmoid square var avg_pool1d "
    "avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d glu rms_norm layer_norm "
    "group_norm batch_norm"
)
RESULT = (
    "tanh sigmoid relu exp expm1 rsqrt sqrt reciprocal softmax _softmax log_softmax _log_softmax "
    "_safe_softmax"
)
POWERS = {"Tensor_Scalar": "0", "Scalar": "0 y0"}  # by overload
BOTH = "amax amin std logsumexp prod linalg_vector_norm cumprod norm"
PRODUCTS = "linear mm mv bmm matmul einsum"
WRITTEN: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(NOTHING.split(), ""),
    **dict.fromkeys(FIRST.split(), "0"),
    **dict.fromkeys(RESULT.split(), "y0"),
    **dict.fromkeys(BOTH.split(), "0 y0"),
    **dict.fromkeys(PRODUCTS.split(), "0<1 1<0"),
    **dict.fromkeys(("addmm", "baddbmm", "addcmul"), "1<2 2<1"),
    **dict.fromkeys(("embedding", "index_select", "masked_fill"), "1"),
    **dict.fromkeys(("topk", "sort"), "y1"),
    **dict.fromkeys(("maximum", "minimum", "conv1d", "conv2d", "conv3d"), "0 1"),
    "where": "0",
    "scaled_dot_product_attention": "0 1 2 y0",
    "cross_entropy_loss": "0 1",
    "nll_loss": "0 1",
    "nll_loss_nd": "0 1",
    "dispatch": "1",
    "grouped_linear": "0<1 1<0 2",
    "combine": "",
})  # fmt: skip

Line = Callable[[Op, int], str]  # from a call and the number of its operands


def saves_of(op: Op, operands: Metas, results: Metas) -> tuple[int, ...]:
    """Saved operand i as i, result k as -1-k; every operand of an operator not listed."""
    if not any(meta.requires_grad for meta in results):
        return ()
    count, by_call = len(operands), BY_CALL.get(op.short)
    every = " ".join(map(str, range(count)))
    line = by_call(op, count) if by_call else WRITTEN.get(op.short, every)
    saves = []
    for saved, _, needed in (entry.partition("<") for entry in line.split()):
        if needed and not (int(needed) < count and operands[int(needed)].requires_grad):
            continue
        index = -1 - int(saved[1:]) if saved.startswith("y") else int(saved)
        if index < count:
            saves.append(index)
    return tuple(saves)


def _adaptive_average(op: Op, count: int) -> str:
    """Nothing of a pool over everything: torch takes a mean."""
    size = op.args[1]
    sizes = size if isinstance(size, (list, tuple)) else [size]
    return "" if all(n == 1 for n in sizes) else "0"


# lines that depend on an argument or on the number of tensors
BY_CALL: Mapping[str, Line] = MappingProxyType({
    "mul": lambda op, count: "" if count == 1 else "0<1 1<0",  # "": by a number
    "div": lambda op, count: "" if count == 1 else "0<1 1",
    "lerp": lambda op, count: "" if count == 2 else "0 1 2",
    "pow": lambda op, count: POWERS.get(op.target.rsplit(".", 1)[1], "0 1 y0"),
    **dict.fromkeys(("max", "min"), lambda op, count: (
        "0 1" if count == 2 else "y1" if len(op.results) == 2 else "0 y0"
    )),
    "index": lambda op, count: " ".join(map(str, range(1, count))),
    "index_put": lambda op, count: " ".join(map(str, range(1, count - 1))),
    "dropout": lambda op, count: "y0" if draws(op) else "",
    "pad": lambda op, count: "" if argument(op, 2, "mode", "constant") == "constant" else "0",
    **dict.fromkeys((f"adaptive_avg_pool{n}d" for n in (1, 2, 3)), _adaptive_average),
})  # fmt: skip
