"""Saved tensors: an operator's own operands and results that autograd keeps for the backward.

    "0<1 1<0"   operand 0 if operand 1 needs a gradient, and the other way round (products)
    "0"         operand 0
    "y0"        the first result (tanh, softmax: the derivative is a function of it)
    ""          nothing (sums, views: the gradient passes through)

Source: torch's tools/autograd/derivatives.yaml, for the operators that the traced ones are made of.
Tensors that exist for the backward alone are in `memory/kept.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from meshwright.costmodel.graph import Op, argument
from meshwright.costmodel.rules.language import Metas
from meshwright.costmodel.rules.traits import draws

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
    """Operand i as i, result k as -1-k; of an operator not listed every operand, and nothing where
    no gradient flows."""
    if not any(meta.requires_grad for meta in results):
        return ()
    found = []
    for item in _written(op, len(operands)).split():
        kept, _, needed = item.partition("<")
        if needed and not (int(needed) < len(operands) and operands[int(needed)].requires_grad):
            continue
        index = -1 - int(kept[1:]) if kept.startswith("y") else int(kept)
        if index < len(operands):
            found.append(index)
    return tuple(found)


def _written(op: Op, count: int) -> str:
    """The line of a call."""
    every = " ".join(map(str, range(count)))
    by_call = BY_CALL.get(op.short)
    return WRITTEN.get(op.short, every) if by_call is None else by_call(op, count)


def _adaptive_average(op: Op, count: int) -> str:
    """Nothing of one over everything: torch takes a mean."""
    size = op.args[1]
    whole = all(n == 1 for n in (size if isinstance(size, (list, tuple)) else [size]))
    return "" if whole else "0"


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
