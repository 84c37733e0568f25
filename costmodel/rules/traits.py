"""Traits of special operators: properties beyond the sharding rule that pricing, memory, tracing
and execution read.

`TRAITS` has one line per special operator; every other operator is `ORDINARY`. Readers ask a trait
(`traits_of(op).leaf`, `draws(op)`), never a name, so that a special operator is added here and in
the tables of rules and of saved tensors alone. `IMPLEMENTATIONS` says the same of the programs that
run in an operator's place where a factor named in its rule is split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from meshwright.costmodel.graph import Block, Graph, Op, Ref, argument, short_name
from meshwright.costmodel.precisions import SIDE

if TYPE_CHECKING:
    import torch

DrawKind = Literal[
    "dropout", "channel dropout", "attention dropout",
    "uniform", "normal", "exponential", "integers", "flags", "stream", "unplanned",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Random numbers an operator draws.

    `kind`: how the executor draws them so that every plan, and one device, sees the same: by
    counter, as a function of a seed and of an element's global number; as a "stream" of seeded
    generators (leaves); or not at all ("unplanned": on one device only, and other numbers whenever
    it is run again). `when` tells the calls that draw, None: those of overloads that torch tags so.
    `training`: none draws in evaluation. `bounds`: position of the numbers' first bound.
    """

    kind: DrawKind = "unplanned"
    when: Callable[[Op], bool] | None = None
    training: bool = False
    bounds: int | None = None

    @property
    def by_counter(self) -> bool:
        """Whether the executor draws by counter."""
        return self.kind not in ("stream", "unplanned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics that a norm takes in training: `of_batch` over the whole batch, else per row.
    Positions of the `running` buffers, updated unseen by its schema, and of the `training` flag."""

    of_batch: bool
    running: tuple[int, ...] = (3, 4)
    training: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLoss:
    """A loss of rows with class numbers as targets, of which some are ignored: its mean divides by
    the number of the others, over all ranks and micro-batches. `reduction`: position of the
    argument, none (0), mean (1) or sum (2)."""

    kind: Literal["cross_entropy", "nll", "chunked"]
    reduction: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Positions of the operands of a matrix product y = x w + b; `transposed`: w is [out, in]."""

    x: int = 0
    weight: int = 1
    bias: int = 2
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of an operator; the defaults are those of an ordinary one.

    kernel        how it is priced, where that is not by its FLOPs and bytes: fused attention, a
                  look-up of rows (dense gradient), a sum whose gradient passes through, a product
                  with its loss in parts
    fused_at      the least `Target.fusion` level at which it joins another's kernel, as pointwise
                  operators do
    copies        moves memory, though its rule is a view's
    stride_bound  takes time by strides alone, and none on contiguous operands
    reshapes      runs as a reshape at local sizes: a shard's memory need not allow a view
    sizes         what the argument `OpFactors.shape_arg` holds: the result's shape, the sizes of
                  equal parts, or those of some of the result's dims
    casts         changes the dtype alone: there or not as the precision wants
    main          what `colwise` and the like mean for a module with several operators
    leaf          a module or function kept as one operator (`leaf.py`)
    experts       its part in a mixture of experts (`moe.py`)
    backward_temporaries
                  tensors like its first operand that its backward makes one after the other, before
                  its gradient
    backward_joins
                  calls whose backward gives a row a gradient by other rows, too, though the forward
                  does not: of torch's derivatives those that divide by how often an id is there
    written_in_turn
                  the operand whose elements, in order, go to where the flags before it are up
    """

    kernel: Literal["", "attention", "lookup", "sum", "chunked"] = ""
    fused_at: Literal["", "pointwise", "full"] = ""
    copies: bool = False
    stride_bound: bool = False
    reshapes: bool = False
    sizes: Literal["shape", "parts", "dims"] = "shape"
    casts: bool = False
    main: bool = False
    leaf: bool = False
    experts: Literal["", "dispatch", "product", "combine"] = ""
    backward_temporaries: int = 0
    backward_joins: Callable[[Op], bool] | None = None
    written_in_turn: int | None = None
    draw: Draw | None = None
    statistics: Statistics | None = None
    loss: RowLoss | None = None
    product: Product | None = None

    @property
    def batch_statistics(self) -> bool:
        """Whether it takes the statistics of the whole batch in training."""
        return self.statistics is not None and self.statistics.of_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """A program in an operator's place that knows the axis a factor is split on. `exchanges`: it
    communicates by itself, so that the operator's own timing says nothing of it; `per_row` single
    precision numbers are then summed for each element of its second operand."""

    exchanges: bool = False
    per_row: int = 0


ORDINARY = Traits()
LOSS_IN_PARTS = "loss_in_parts"  # the operator of `planner/plan/loss_parts.py`
SCORES = "scores"  # stands for logits among the arguments of its steps


def _drops(op: Op) -> bool:
    return bool(argument(op, 2, "train", True)) and argument(op, 1, "p", 0.0) != 0.0


def _drops_between_layers(op: Op) -> bool:
    _, layers, p, train = op.args[3:7]
    return bool(train) and p != 0.0 and layers > 1


def _by_frequency(op: Op) -> bool:
    return bool(argument(op, 3, "scale_grad_by_freq", False))


_RECURRENT = Traits(draw=Draw(when=_drops_between_layers))
_UNIFORM, _NORMAL = Traits(draw=Draw(kind="uniform")), Traits(draw=Draw(kind="normal"))
_INTEGERS = Traits(draw=Draw(kind="integers"))
_ROWWISE = Traits(fused_at="full")  # norms (rsqrt is part of one), reductions and copies
_ADDED = Product(x=1, weight=2, bias=0)

TRAITS: Mapping[str, Traits] = MappingProxyType({
    "linear": Traits(product=Product(transposed=True), main=True),
    "addmm": Traits(product=_ADDED, main=True),
    "baddbmm": Traits(product=_ADDED),
    **dict.fromkeys(("mm", "matmul"), Traits(product=Product(), main=True)),
    **dict.fromkeys(("bmm", "conv1d", "conv2d", "conv3d"), Traits(main=True)),
    "scaled_dot_product_attention": Traits(
        kernel="attention",
        draw=Draw(
            kind="attention dropout",
            when=lambda op: bool(argument(op, 4, "dropout_p", 0.0)),
            training=True,
        ),
    ),
    "embedding": Traits(kernel="lookup", main=True, backward_joins=_by_frequency),
    **dict.fromkeys(("embedding_bag", "_embedding_bag"), Traits(backward_joins=_by_frequency)),
    **dict.fromkeys(("add", "sub"), Traits(kernel="sum")),
    "pow": Traits(backward_temporaries=2),  # n, xⁿ⁻¹
    **dict.fromkeys(("softmax", "_softmax"), Traits(fused_at="pointwise")),
    **dict.fromkeys(("log_softmax", "layer_norm", "rms_norm", "native_layer_norm"), _ROWWISE),
    **dict.fromkeys(("rsqrt", "mean", "sum", "amax", "amin", "var"), _ROWWISE),
    **dict.fromkeys(("cat", "stack"), Traits(fused_at="full", copies=True)),
    "batch_norm": Traits(statistics=Statistics(of_batch=True)),
    "instance_norm": Traits(statistics=Statistics(of_batch=False)),
    "cross_entropy_loss": Traits(loss=RowLoss(kind="cross_entropy"), fused_at="full"),
    **dict.fromkeys(("nll_loss", "nll_loss_nd"), Traits(loss=RowLoss(kind="nll"))),
    LOSS_IN_PARTS: Traits(loss=RowLoss(kind="chunked"), kernel="chunked", main=True),
    "dropout": Traits(draw=Draw(kind="dropout", when=_drops, training=True)),
    "feature_dropout": Traits(draw=Draw(kind="channel dropout", when=_drops, training=True)),
    "native_dropout": Traits(draw=Draw(when=_drops)),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), Traits(draw=Draw(when=_drops))),
    "rrelu": Traits(draw=Draw(when=lambda op: bool(argument(op, 3, "training", False)))),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _RECURRENT),
    **dict.fromkeys(("rand", "rand_like"), _UNIFORM),
    **dict.fromkeys(("randn", "randn_like"), _NORMAL),
    **dict.fromkeys(("randint", "randint_like"), _INTEGERS),
    "uniform": Traits(draw=Draw(kind="uniform", bounds=1)),
    "normal_functional": Traits(draw=Draw(kind="normal", bounds=1)),
    "exponential": Traits(draw=Draw(kind="exponential")),
    "bernoulli": Traits(draw=Draw(kind="flags")),
    **dict.fromkeys(("contiguous", "clone", "detach", "alias"), Traits(stride_bound=True)),
    **dict.fromkeys(("to", "_to_copy"), Traits(casts=True)),
    **dict.fromkeys(("view", "_unsafe_view", "squeeze"), Traits(reshapes=True)),
    **dict.fromkeys(("split", "split_with_sizes"), Traits(sizes="parts")),
    "unflatten": Traits(sizes="dims"),
    "masked_scatter": Traits(written_in_turn=2),
    "dispatch": Traits(experts="dispatch"),
    "grouped_linear": Traits(experts="product", main=True),
    "combine": Traits(experts="combine"),
    "leaf": Traits(leaf=True),
    "random_leaf": Traits(leaf=True, draw=Draw(kind="stream", training=True)),
})  # fmt: skip

IMPLEMENTATIONS: Mapping[str, Implementation] = MappingProxyType({
    "": Implementation(),  # the operator itself
    "cross_entropy": Implementation(exchanges=True, per_row=3),  # maximum, Σ exponentials, target
    LOSS_IN_PARTS: Implementation(exchanges=True, per_row=3),
    "batch_norm": Implementation(exchanges=True),
    "embedding": Implementation(),  # results come out partial
})  # fmt: skip


def traits_of(op: Op) -> Traits:
    """The traits of a call's operator."""
    return TRAITS.get(op.short, ORDINARY)


def traits_of_target(target: str) -> Traits:
    """The traits of `aten.add.Tensor` and the like."""
    return TRAITS.get(short_name(target), ORDINARY)


def is_narrow(graph: Graph, op: Op) -> bool:
    """Whether "fp8" and the like multiply an operator's operands in few bits: a layer's product
    with a parameter whose sides are multiples of `SIDE`, plus a vector or nothing, or those of its
    experts."""
    traits = traits_of(op)
    product = traits.product
    if op.name not in graph.in_layers:
        return False
    if traits.experts == "product":
        matrices = op.operands[1]
        sides = graph.values[matrices].shape[1:]
        return matrices in graph.parameters and all(side % SIDE == 0 for side in sides)
    if product is None:
        return False
    if op.kwargs or len(op.args) != len(op.operands):  # factors of the sum
        return False
    weight, x = op.operands[product.weight], op.operands[product.x]
    shape = graph.values[weight].shape
    vector = len(op.operands) < 3 or len(graph.values[op.operands[product.bias]].shape) == 1
    return (
        weight in graph.parameters
        and x not in graph.parameters
        and len(shape) == 2
        and all(side % SIDE == 0 for side in shape)
        and len(graph.values[x].shape) >= 2
        and vector
    )


def draws(op: Op) -> bool:
    """Whether a call draws random numbers: dropouts only in training, and with a chance to drop."""
    import torch

    draw = traits_of(op).draw
    if draw is None or draw.when is None:
        return tagged(op.target, torch.Tag.nondeterministic_seeded)
    return draw.when(op)


def is_causal(op: Op) -> bool:
    """Whether an attention operator itself leaves out later keys."""
    return bool(argument(op, 5, "is_causal", False))


def draws_anew(op: Op) -> bool:
    """Whether a call draws other random numbers each time it is run in a step."""
    draw = traits_of(op).draw
    return draws(op) and (draw is None or draw.kind == "unplanned")


def backward_joins(op: Op) -> bool:
    """Whether rows meet in its backward, though not in its forward."""
    joins = traits_of(op).backward_joins
    return joins is not None and joins(op)


def updates_statistics(op: Op) -> bool:
    """Whether a norm takes statistics and adds them to running ones."""
    statistics = traits_of(op).statistics
    if statistics is None:
        return False
    return bool(op.args[statistics.training]) and isinstance(op.args[statistics.running[0]], Ref)


def recomputable(block: Block, *, pure: bool = False) -> bool:
    """Whether a block may run twice: no statistics updated (unless `pure`), no new random
    numbers."""
    return not any((not pure and updates_statistics(op)) or draws_anew(op) for op in block.ops)


def takes_batch_statistics(op: Op) -> bool:
    """Whether a norm takes the statistics of the whole batch, over all data-parallel ranks."""
    statistics = traits_of(op).statistics
    if statistics is None or not statistics.of_batch:
        return False
    return bool(argument(op, statistics.training, "training", True))


def row_reduction(op: Op) -> int:
    """Reduction of a loss of rows: mean (1) or sum (2); 0 if it has none, or is no such loss."""
    loss = traits_of(op).loss
    return 0 if loss is None else int(argument(op, loss.reduction, "reduction", 1))


def class_weights(op: Op) -> str | None:
    """The value that weighs the classes of a loss of rows, if there is one."""
    weights = argument(op, 2, "weight", None)
    return weights.name if isinstance(weights, Ref) else None


def runs_as_reshape(op: Op) -> bool:
    """Whether a view is run as a reshape at local sizes; one of the bytes (`view.dtype`) is not."""
    return traits_of(op).reshapes and not op.target.endswith(".dtype")


@functools.cache
def tagged(target: str, tag: torch.Tag) -> bool:
    """Whether torch tags an operator so."""
    import torch

    namespace, name, overload = [*target.split("."), "default"][:3]
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    return operator is not None and tag in operator.tags
