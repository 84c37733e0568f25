"""Operator calls whose sharding rules are verified: what is called, on what, and how it must split.

Batched inputs have four rows, all other dims are told apart by their sizes. `splits` are the placements
that the first result must be able to take on either axis at degree 2: what a rule gains or loses shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

Role = Literal["input", "parameter", "buffer"]
aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A tensor of a case. Floats are normal (`positive`: in [0.5, 1.5]), integers below `high`."""

    role: Role
    shape: tuple[int, ...]
    high: int = 0
    flag: bool = False
    positive: bool = False

    def make(self) -> torch.Tensor:
        if self.flag:
            return torch.rand(self.shape) < 0.6
        if self.high:
            return torch.randint(0, self.high, self.shape)
        return torch.rand(self.shape) + 0.5 if self.positive else torch.randn(self.shape)


def x(*shape: int) -> Spec:
    return Spec(role="input", shape=shape)


def w(*shape: int) -> Spec:
    return Spec(role="parameter", shape=shape)


def k(*shape: int) -> Spec:
    return Spec(role="buffer", shape=shape, positive=True)


def ids(high: int, *shape: int) -> Spec:
    return Spec(role="input", shape=shape, high=high)


def flags(*shape: int) -> Spec:
    return Spec(role="input", shape=shape, flag=True)


def positive(*shape: int) -> Spec:
    return Spec(role="input", shape=shape, positive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`call(*operands)` makes an operator named `op`; `known=False`: it has no rule, by decision."""

    name: str
    op: str
    call: Callable[..., Any]
    operands: tuple[Spec, ...]
    splits: frozenset[str]
    known: bool = True


class CaseModule(nn.Module):
    """The call as a module: parameters and buffers its own, inputs in the order of the operands."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        for i, spec in enumerate(case.operands):
            if spec.role == "parameter":
                self.register_parameter(f"t{i}", nn.Parameter(spec.make()))
            elif spec.role == "buffer":
                self.register_buffer(f"t{i}", spec.make())

    def batch(self) -> tuple[torch.Tensor, ...]:
        return tuple(spec.make() for spec in self.case.operands if spec.role == "input")

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = iter(inputs)
        return self.case.call(
            *(
                next(given) if spec.role == "input" else getattr(self, f"t{i}")
                for i, spec in enumerate(self.case.operands)
            )
        )


def total(output: Any) -> torch.Tensor:
    """A scalar that every result takes part in."""
    tensors = [output] if isinstance(output, torch.Tensor) else list(output)
    return sum((t.to(torch.float32).sum() for t in tensors), torch.zeros((), device="meta"))


def _case(
    name: str, splits: str, call: Callable[..., Any], *operands: Spec, known: bool = True
) -> Case:
    op, _, _ = name.partition(" ")
    return Case(
        name=name,
        op=op,
        call=call,
        operands=operands,
        splits=frozenset(splits.split()),
        known=known,
    )


def _causal(q: torch.Tensor, key: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, key, v, is_causal=True)


def _masked(
    q: torch.Tensor, key: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, key, v, attn_mask=mask)


def _grouped(q: torch.Tensor, key: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, key, v, enable_gqa=True, is_causal=True)


_QKV = (x(4, 8, 6, 12), x(4, 8, 10, 12), x(4, 8, 10, 16))

MATMULS = [
    _case("linear", "R S(0) S(1) S(2) P", F.linear, x(4, 6, 8), w(12, 8)),
    _case("linear bias", "R S(0) S(1) S(2) P", F.linear, x(4, 6, 8), w(12, 8), w(12)),
    _case("linear of a vector", "R", lambda a, b: F.linear(a, b[0]), x(4, 8), w(12, 8), known=False),
    _case("addmm", "R S(0) S(1) P", lambda a, b, c: torch.addmm(c, a, b), x(4, 8), w(8, 12), w(12)),
    _case("addmm full bias", "R", lambda a, b, c: torch.addmm(c, a, b), x(4, 8), w(8, 6), x(4, 6), known=False),
    _case(
        "addmm scaled", "R S(0) S(1) P",
        lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0), x(4, 8), w(8, 12), w(12),
    ),
    _case("mm", "R S(0) S(1) P", torch.mm, x(4, 8), w(8, 12)),
    _case("bmm", "R S(0) S(1) S(2) P", torch.bmm, x(4, 6, 8), x(4, 8, 12)),
    _case("matmul", "R S(0) S(1) P", torch.matmul, x(4, 8), w(8, 12)),
    _case("matmul batched", "R S(0) S(1) S(2) S(3) P", torch.matmul, x(4, 6, 8, 10), x(4, 6, 10, 12)),
    _case("matmul weight", "R S(0) S(1) S(2) P", torch.matmul, x(4, 6, 8), w(8, 12)),
    _case("matmul broadcast", "R S(0) S(1) S(2) S(3) P", torch.matmul, x(4, 1, 8, 10), w(6, 10, 12)),
    _case("matmul vector", "R", torch.matmul, x(4, 8), w(8), known=False),
    _case("matmul dot", "R", lambda a, b: torch.matmul(a[0], b), x(4, 8), w(8), known=False),
    _case("einsum", "R S(0) S(1) S(2) P", lambda a, b: torch.einsum("bsd,od->bso", a, b), x(4, 6, 8), w(12, 8)),
    _case("einsum trace", "R", lambda a: torch.einsum("ii->i", a), x(4, 4), known=False),
    _case("embedding", "R S(0) S(1) S(2) P", lambda i, t: F.embedding(i, t), ids(12, 4, 6), w(12, 8)),
    _case(
        "embedding padding", "R S(0) S(1) S(2) P",
        lambda i, t: F.embedding(i, t, padding_idx=7), ids(12, 4, 6), w(12, 8),
    ),
    _case(
        "embedding negative padding", "R S(0) S(1) S(2) P",
        lambda i, t: F.embedding(i, t, padding_idx=-1), ids(12, 4, 6), w(12, 8),
    ),
    _case(
        "embedding by frequency", "R",
        lambda i, t: F.embedding(i, t, scale_grad_by_freq=True), ids(12, 4, 6), w(12, 8),
        known=False,
    ),
]  # fmt: skip

NORMS = [
    _case("layer_norm", "R S(0) S(1)", lambda a, g, b: F.layer_norm(a, (8,), g, b), x(4, 6, 8), w(8), w(8)),
    _case("layer_norm plain", "R S(0) S(1)", lambda a: F.layer_norm(a, (8,)), x(4, 6, 8)),
    _case("layer_norm weight", "R S(0) S(1)", lambda a, g: F.layer_norm(a, (8,), g), x(4, 6, 8), w(8)),
    _case("layer_norm two dims", "R S(0)", lambda a, g: F.layer_norm(a, (6, 8), g), x(4, 6, 8), w(6, 8)),
    _case("rms_norm", "R S(0) S(1)", lambda a, g: F.rms_norm(a, (8,), g), x(4, 6, 8), w(8)),
    _case("rms_norm plain", "R S(0) S(1)", lambda a: F.rms_norm(a, (8,)), x(4, 6, 8)),
    _case("group_norm", "R S(0)", lambda a, g, b: F.group_norm(a, 2, g, b), x(4, 8, 3, 5), w(8), w(8)),
    _case(
        "batch_norm train", "R S(0) S(1)",
        lambda a, m, v, g, b: F.batch_norm(a, m, v, g, b, True), x(4, 8, 3, 5), k(8), k(8), w(8), w(8),
    ),
    _case(
        "batch_norm eval", "R S(0) S(1)",
        lambda a, m, v, g, b: F.batch_norm(a, m, v, g, b, False), x(4, 8, 3, 5), k(8), k(8), w(8), w(8),
    ),
    _case(
        "batch_norm untracked", "R S(0) S(1)",
        lambda a, g, b: F.batch_norm(a, None, None, g, b, True), x(4, 8, 3), w(8), w(8),
    ),
    _case(
        "batch_norm plain", "R S(0) S(1)",
        lambda a, m, v: F.batch_norm(a, m, v, training=True, momentum=0.3), x(4, 8), k(8), k(8),
    ),
    _case(
        "batch_norm over time", "R S(0) S(1)",
        lambda a, m, v: F.batch_norm(a.transpose(0, 1).flatten(0, 1), m, v, None, None, True),
        x(4, 6, 8), k(8), k(8),
    ),
    _case("softmax", "R S(0) S(1)", lambda a: F.softmax(a, -1), x(4, 6, 8)),
    _case("softmax inner", "R S(0) S(2)", lambda a: F.softmax(a, 1), x(4, 6, 8)),
    _case("log_softmax", "R S(0) S(1)", lambda a: F.log_softmax(a, -1), x(4, 6, 8)),
]  # fmt: skip

ATTENTION = [
    _case("scaled_dot_product_attention", "R S(0) S(1) S(2)", F.scaled_dot_product_attention, *_QKV),
    _case(
        "scaled_dot_product_attention causal", "R S(0) S(1)",
        _causal, x(4, 8, 6, 12), x(4, 8, 6, 12), x(4, 8, 6, 12),
    ),
    _case("scaled_dot_product_attention masked", "R S(0) S(1) S(2)", _masked, *_QKV, flags(4, 1, 6, 10)),
    _case("scaled_dot_product_attention bias", "R S(0) S(1) S(2)", _masked, *_QKV, w(8, 6, 10)),
    _case("scaled_dot_product_attention flat mask", "R S(0) S(1) S(2)", _masked, *_QKV, w(6, 10)),
    _case(
        "scaled_dot_product_attention grouped", "R S(0) S(1)",
        _grouped, x(4, 24, 6, 12), x(4, 8, 6, 12), x(4, 8, 6, 12),
    ),
    _case(
        "scaled_dot_product_attention one key head", "R S(0) S(1)",
        _grouped, x(4, 8, 6, 12), x(4, 1, 6, 12), x(4, 1, 6, 12),
    ),
    _case(
        "scaled_dot_product_attention no heads", "R S(0) S(1)",
        F.scaled_dot_product_attention, x(4, 6, 12), x(4, 10, 12), x(4, 10, 12),
    ),
    _case(
        "scaled_dot_product_attention dropout", "R S(0) S(1)",
        lambda q, key, v: F.scaled_dot_product_attention(q, key, v, dropout_p=0.4), *_QKV,
    ),
]  # fmt: skip


def _ce(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda a, t, *rest: F.cross_entropy(a, t, *rest, **options)


LOSSES = [
    _case("cross_entropy_loss", "R P", _ce(), x(4, 12), ids(12, 4)),
    _case(
        "cross_entropy_loss tokens", "R P", lambda a, t: F.cross_entropy(a.flatten(0, 1), t.flatten()),
        x(4, 6, 12), ids(12, 4, 6),
    ),
    _case("cross_entropy_loss ignored", "R P", _ce(ignore_index=1), x(8, 4), ids(4, 8)),
    _case("cross_entropy_loss sum", "R P", _ce(reduction="sum"), x(8, 4), ids(4, 8)),
    _case("cross_entropy_loss smooth", "R P", _ce(label_smoothing=0.2, ignore_index=0), x(8, 4), ids(4, 8)),
    _case("cross_entropy_loss images", "R P", _ce(), x(4, 12, 6), ids(12, 4, 6)),
    _case("cross_entropy_loss no reduction", "R S(0) S(1)", _ce(reduction="none"), x(4, 12, 6), ids(12, 4, 6)),
    _case("cross_entropy_loss weighted", "R", _ce(), x(4, 12), ids(12, 4), k(12), known=False),
    _case("cross_entropy_loss probabilities", "R", _ce(), x(4, 12), positive(4, 12), known=False),
    _case("cross_entropy_loss one row", "R", lambda a, t: F.cross_entropy(a[0], t[0]), x(4, 12), ids(12, 4), known=False),
    _case("nll_loss_nd", "R P", lambda a, t: F.nll_loss(a, t), x(4, 12), ids(12, 4)),
    _case("nll_loss_nd images", "R P", lambda a, t: F.nll_loss(a, t, ignore_index=3), x(4, 12, 6), ids(12, 4, 6)),
    _case("nll_loss_nd one row", "R", lambda a, t: F.nll_loss(a[0], t[0]), x(4, 12), ids(12, 4), known=False),
    _case("mse_loss", "R P", F.mse_loss, x(4, 6), x(4, 6)),
    _case("mse_loss sum", "R P", lambda a, b: F.mse_loss(a, b, reduction="sum"), x(4, 6), x(4, 6)),
    _case("mse_loss none", "R S(0) S(1)", lambda a, b: F.mse_loss(a, b, reduction="none"), x(4, 6), x(4, 6)),
    _case("l1_loss", "R P", F.l1_loss, x(4, 6), x(4, 6)),
    _case("smooth_l1_loss", "R P", F.smooth_l1_loss, x(4, 6), x(4, 6)),
    _case("huber_loss", "R P", F.huber_loss, x(4, 6), x(4, 6)),
    _case("binary_cross_entropy_with_logits", "R P", F.binary_cross_entropy_with_logits, x(4, 6), positive(4, 6)),
    _case(
        "binary_cross_entropy_with_logits weighted", "R P",
        lambda a, b, p: F.binary_cross_entropy_with_logits(a, b, pos_weight=p), x(4, 6), positive(4, 6), k(6),
    ),
    _case(
        "binary_cross_entropy", "R P",
        lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()), x(4, 6), x(4, 6),
    ),
]  # fmt: skip

CONVOLUTIONS = [
    _case("conv1d", "R S(0) S(1) P", lambda a, f: F.conv1d(a, f, stride=2), x(4, 8, 10), w(12, 8, 3)),
    _case("conv2d", "R S(0) S(1) P", F.conv2d, x(4, 8, 5, 6), w(12, 8, 3, 3), w(12)),
    _case("conv2d strided", "R S(0) S(1) P", lambda a, f: F.conv2d(a, f, None, 2, 1), x(4, 8, 6, 6), w(12, 8, 3, 3)),
    _case("conv2d same", "R S(0) S(1) P", lambda a, f: F.conv2d(a, f, padding="same"), x(4, 8, 6, 6), w(12, 8, 3, 3)),
    _case("conv2d grouped", "R S(0)", lambda a, f: F.conv2d(a, f, groups=2), x(4, 8, 6, 6), w(12, 4, 3, 3)),
    _case("conv2d depthwise", "R S(0)", lambda a, f, b: F.conv2d(a, f, b, groups=8), x(4, 8, 6, 6), w(8, 1, 3, 3), w(8)),
    _case("conv2d one image", "R", lambda a, f: F.conv2d(a[0], f), x(4, 8, 6, 6), w(12, 8, 3, 3), known=False),
    _case("conv3d", "R S(0) S(1) P", F.conv3d, x(4, 4, 3, 3, 3), w(8, 4, 2, 2, 2)),
    _case("max_pool2d", "R S(0) S(1)", lambda a: F.max_pool2d(a, 2), x(4, 8, 6, 6)),
    _case("max_pool2d one image", "R", lambda a: F.max_pool2d(a[0], 2), x(4, 8, 6, 6), known=False),
    _case("avg_pool2d", "R S(0) S(1)", lambda a: F.avg_pool2d(a, 2), x(4, 8, 6, 6)),
    _case("adaptive_avg_pool2d", "R S(0) S(1)", lambda a: F.adaptive_avg_pool2d(a, 1), x(4, 8, 6, 6)),
    _case("max_pool1d", "R S(0) S(1)", lambda a: F.max_pool1d(a, 2), x(4, 8, 6)),
    _case("adaptive_avg_pool1d", "R S(0) S(1)", lambda a: F.adaptive_avg_pool1d(a, 2), x(4, 8, 6)),
]  # fmt: skip

POINTWISE = [
    _case("gelu", "R S(0) S(1)", F.gelu, x(4, 6)),
    _case("relu", "R S(0) S(1)", F.relu, x(4, 6)),
    _case("silu", "R S(0) S(1)", F.silu, x(4, 6)),
    _case("tanh", "R S(0) S(1)", torch.tanh, x(4, 6)),
    _case("add", "R S(0) S(1) P", torch.add, x(4, 6), w(6)),
    _case("add scaled", "R S(0) S(1) P", lambda a, b: torch.add(a, b, alpha=2), x(4, 6), x(4, 6)),
    _case("add a number", "R S(0) S(1)", lambda a: a + 2.0, x(4, 6)),
    _case("sub", "R S(0) S(1) S(2) P", torch.sub, x(4, 1, 6), w(8, 6)),
    _case("mul", "R S(0) S(1) S(2) P", torch.mul, x(4, 8, 6), w(8, 1)),
    _case("mul by itself", "R S(0) S(1) P", lambda a: a * a, x(4, 6)),
    _case("mul a number", "R S(0) S(1) P", lambda a: a * 2.0, x(4, 6)),
    _case("div", "R S(0) S(1) P", torch.div, x(4, 6), positive(4, 6)),
    _case("div rounded", "R S(0) S(1)", lambda a, b: torch.div(a, b, rounding_mode="floor"), x(4, 6), positive(4, 6)),
    _case("rsub", "R S(0) S(1)", lambda a: torch.rsub(a, 1.0), x(4, 6)),
    _case("pow", "R S(0) S(1)", lambda a: a**3, x(4, 6)),
    _case("rsqrt", "R S(0) S(1)", torch.rsqrt, positive(4, 6)),
    _case("neg", "R S(0) S(1) P", torch.neg, x(4, 6)),
    _case("clamp", "R S(0) S(1)", lambda a: a.clamp(-0.5, 0.5), x(4, 6)),
    _case("to", "R S(0) S(1) P", lambda a: a.to(torch.float64), x(4, 6)),
    _case("eq", "R S(0) S(1)", lambda a: a == 3, ids(9, 4, 6)),
    _case("where", "R S(0) S(1)", torch.where, flags(4, 6), x(4, 6), w(6)),
    _case("masked_fill", "R S(0) S(1) S(2)", lambda a, m: a.masked_fill(m, -9.0), x(4, 8, 6), flags(4, 1, 6)),
    _case("zeros_like", "R S(0) S(1)", lambda a: torch.zeros_like(a) + a, x(4, 6)),
    _case("dropout", "R S(0) S(1) P", lambda a: F.dropout(a, 0.4), x(4, 6)),
    _case("dropout eval", "R S(0) S(1) P", lambda a: aten.dropout(a, 0.4, False), x(4, 6)),
    _case("detach", "R S(0) S(1) P", lambda a: a.detach() + a, x(4, 6)),
    _case("addcmul", "R S(0) S(1)", torch.addcmul, x(4, 6), x(4, 6), w(6)),
    _case("lerp", "R S(0) S(1)", lambda a, b: torch.lerp(a, b, 0.3), x(4, 6), x(4, 6)),
]  # fmt: skip

VIEWS = [
    _case("view split", "R S(0) S(1) S(2) P", lambda a: a.view(4, 6, 8), x(4, 48)),
    _case("view merge", "R S(0) S(0/4) S(1) P", lambda a: a.view(24, 8), x(4, 6, 8)),
    _case("view regroup", "R S(0) S(1) S(1/6) S(2) P", lambda a: a.view(4, 12, 4), x(4, 6, 8)),
    _case("view crossing", "R S(0) P", lambda a: a.view(4, 9, 4), x(4, 6, 6)),
    _case("view_as", "R S(0) S(1) S(2) P", lambda a, b: a.view_as(b), x(4, 12), x(4, 2, 6)),
    _case("view bits", "R", lambda a: a.view(torch.int32).view(torch.float32), x(4, 6), known=False),
    _case("reshape", "R S(0) S(0/4) S(1) P", lambda a: a.transpose(1, 2).reshape(-1, 6), x(4, 6, 8)),
    _case("flatten", "R S(0) S(1) S(1/6) P", lambda a: a.flatten(1), x(4, 6, 8)),
    _case("unflatten", "R S(0) S(1) S(2) P", lambda a: a.unflatten(1, (6, 8)), x(4, 48)),
    _case("unsqueeze", "R S(0) S(2) P", lambda a: a.unsqueeze(1), x(4, 6)),
    _case("squeeze", "R S(0) S(1) P", lambda a: a.squeeze(), x(4, 1, 6, 1)),
    _case("squeeze dim", "R S(0) S(1) S(2) P", lambda a: a.squeeze(1), x(4, 2, 6)),
    _case("squeeze dims", "R S(0) S(1) P", lambda a: a.squeeze((1, 2)), x(4, 1, 6)),
    _case("transpose", "R S(0) S(1) S(2) P", lambda a: a.transpose(1, 2), x(4, 6, 8)),
    _case("permute", "R S(0) S(1) S(2) P", lambda a: a.permute(2, 0, -2), x(4, 6, 8)),
    _case("t", "R S(0) S(1) P", lambda a: a.t(), x(4, 6)),
    _case("numpy_T", "R S(0) S(1) S(2) P", lambda a: a.T, x(4, 6, 8)),
    _case("mT", "R S(0) S(1) S(2) P", lambda a: a.mT, x(4, 6, 8)),
    _case("movedim", "R S(0) S(1) S(2) P", lambda a: a.movedim(0, 1), x(4, 6, 8)),
    _case("expand", "R S(0) S(1) S(2) P", lambda a: a.expand(4, 8, 6), x(4, 1, 6)),
    _case("expand new dims", "R S(0) S(1) S(2) P", lambda a: a.expand(2, -1, -1), x(4, 6)),
    _case("expand_as", "R S(0) S(1) P", lambda a, b: a.expand_as(b), x(4, 1), x(4, 6)),
    _case("slice", "R S(0) P", lambda a: a[:, 1:5], x(4, 6)),
    _case("slice whole", "R S(0) S(1) P", lambda a: aten.slice(a, 1, 0, 6), x(4, 6)),
    _case("select", "R S(0) S(1) P", lambda a: a[:, 1], x(4, 6, 8)),
    _case("unbind", "R S(0) S(1) P", lambda a: a.unbind(1), x(4, 6, 8)),
    _case("split", "R S(0) S(1) P", lambda a: a.split(4, 1), x(4, 12)),
    _case("split unequal", "R S(0) P", lambda a: a.split(8, 1), x(4, 12)),
    _case("split_with_sizes", "R S(0) S(1) P", lambda a: a.split([4, 4, 4], 1), x(4, 12)),
    _case("split_with_sizes unequal", "R S(0) P", lambda a: a.split([2, 10], 1), x(4, 12)),
    _case("chunk", "R S(0) S(1) P", lambda a: a.chunk(3, -1), x(4, 12)),
    _case("chunk unequal", "R S(0) P", lambda a: a.chunk(2, -1), x(4, 5)),
]  # fmt: skip

ARRANGED = [
    _case("cat", "R S(0) S(2) P", lambda a, b: torch.cat([a, b], 1), x(4, 6, 8), x(4, 2, 8)),
    _case("stack", "R S(0) S(2) P", lambda a, b: torch.stack([a, b], 1), x(4, 6), x(4, 6)),
    _case("stack last", "R S(0) S(1) P", lambda a, b: torch.stack([a, b], -1), x(4, 6), x(4, 6)),
    _case("cumsum", "R S(0) S(2) P", lambda a: a.cumsum(1), x(4, 6, 8)),
    _case("cumprod", "R S(0) S(2)", lambda a: a.cumprod(1), x(4, 6, 8)),
    _case("diff", "R S(0) P", lambda a: a.diff(), x(4, 6)),
    _case("flip", "R S(0) S(2) P", lambda a: a.flip(1), x(4, 6, 8)),
    _case("roll", "R S(0) S(2) P", lambda a: a.roll(1, 1), x(4, 6, 8)),
    _case("roll keyword", "R S(0) S(2) P", lambda a: a.roll(shifts=(1,), dims=(1,)), x(4, 6, 8)),
    _case("roll flat", "R P", lambda a: a.roll(3), x(4, 6)),
    _case("pad", "R S(0) S(1)", lambda a: F.pad(a, (1, 2)), x(4, 6, 8)),
    _case("pad shifting", "R S(0) S(1)", lambda a: F.pad(a, (1, -1)), x(4, 6, 8)),
    _case("pad reflecting", "R S(0) S(1)", lambda a: F.pad(a, (1, 1), mode="reflect"), x(4, 6, 8)),
    _case("tril", "R S(0)", lambda a: a.tril(), x(4, 6, 8)),
    _case("gather", "R S(0) S(2)", lambda a, i: a.gather(1, i), x(4, 6, 8), ids(6, 4, 2, 8)),
    _case("gather corner", "R S(0)", lambda a, i: a.gather(1, i), x(4, 6, 8), ids(6, 4, 2, 4)),
    _case("index_select", "R S(0) S(2)", lambda a, i: a.index_select(1, i), x(4, 6, 8), ids(6, 6)),
    _case("index", "R S(0) S(1) S(2)", lambda i, t: t[i], ids(12, 4, 6), w(12, 8)),
    _case("index vector", "R S(0) S(1)", lambda i, t: t[i], ids(12, 4, 6), w(12)),
    _case("index second", "R", lambda a, i: a[:, i], x(4, 12), ids(12, 6), known=False),
    _case("index pairs", "R", lambda a, i: a[i, i], x(4, 4), ids(4, 4), known=False),
    _case("repeat", "R S(0) S(1/3) P", lambda a: a.repeat(1, 3), x(4, 6)),
    _case("repeat more dims", "R S(1) S(2) P", lambda a: a.repeat(2, 1, 1), x(4, 6)),
    _case("repeat_interleave", "R S(0) S(1) P", lambda a: a.repeat_interleave(3, 1), x(4, 6)),
    _case("repeat_interleave flat", "R", lambda a: a.repeat_interleave(3), x(4, 6), known=False),
    _case("glu", "R S(0) S(1) S(2)", F.glu, x(4, 6, 8)),
    _case("topk", "R S(0) S(1)", lambda a: a.topk(2), x(4, 6, 8)),
    _case("sort", "R S(0) S(2)", lambda a: a.sort(1), x(4, 6, 8)),
]  # fmt: skip

REDUCTIONS = [
    _case("sum", "R P", lambda a: a.sum(), x(4, 6)),
    _case("sum dim", "R S(0) S(1) P", lambda a: a.sum(1), x(4, 6, 8)),
    _case("sum keeping", "R S(0) S(2) P", lambda a: a.sum(1, keepdim=True), x(4, 6, 8)),
    _case("sum dims", "R S(0) P", lambda a: a.sum((-1, 1)), x(4, 6, 8)),
    _case("mean", "R P", lambda a: a.mean(), x(4, 6)),
    _case("mean dim", "R S(0) S(1) P", lambda a: a.mean(-1), x(4, 6, 8)),
    _case("mean keeping", "R S(0) S(1) P", lambda a: a.mean(-1, keepdim=True), x(4, 6, 8)),
    _case("amax", "R S(0) S(2)", lambda a: a.amax(1, keepdim=True), x(4, 6, 8)),
    _case("amin", "R S(0)", lambda a: a.amin((1, 2)), x(4, 6, 8)),
    _case("var", "R", lambda a: a.var(), x(4, 6)),
    _case("var dim", "R S(0) S(1)", lambda a: a.var(-1), x(4, 6, 8)),
    _case("var biased", "R S(0) S(1)", lambda a: a.var(-1, unbiased=False), x(4, 6, 8)),
    _case("var keeping", "R S(0) S(1)", lambda a: a.var(-1, keepdim=True), x(4, 6, 8)),
    _case("var corrected", "R S(0) S(1)", lambda a: torch.var(a, dim=1, correction=0), x(4, 6, 8)),
    _case("std", "R S(0) S(1)", lambda a: a.std(-1), x(4, 6, 8)),
    _case("logsumexp", "R S(0) S(1)", lambda a: a.logsumexp(-1), x(4, 6, 8)),
    _case("argmax", "R S(0) S(1)", lambda a: a.argmax(-1), x(4, 6, 8)),
    _case("argmax keeping", "R S(0) S(1)", lambda a: a.argmax(-1, True), x(4, 6, 8)),
    _case("argmax flat", "R", lambda a: a.argmax(), x(4, 6)),
    _case("any", "R S(0) S(1)", lambda a: a.any(-1), flags(4, 6, 8)),
    _case("var flat biased", "R", lambda a: aten.var.default(a, False), x(4, 6)),
    _case("prod", "R S(0) S(1)", lambda a: a.prod(-1), x(4, 6, 8)),
    _case("max", "R", lambda a: a.max(), x(4, 6)),
    _case("max dim", "R S(0) S(1)", lambda a: a.max(-1), x(4, 6, 8)),
    _case("max of two", "R S(0) S(1)", lambda a, b: aten.max.other(a, b), x(4, 6), x(4, 6)),
    _case("linalg_vector_norm", "R S(0) S(2)", lambda a: a.norm(dim=1, keepdim=True), x(4, 6, 8)),
]  # fmt: skip

FACTORIES = [
    _case("zeros", "R S(0) S(1)", lambda a: torch.zeros(4, 6, device=a.device) + a, x(4, 6)),
    _case("ones", "R S(0) S(1)", lambda a: torch.ones(4, 6, device=a.device) * a, x(4, 6)),
    _case("full", "R S(0) S(1)", lambda a: torch.full((4, 6), 2.0, device=a.device) * a, x(4, 6)),
    _case("new_zeros", "R S(0) S(1)", lambda a: a.new_zeros(4, 6) + a, x(4, 6)),
    _case("new_ones", "R S(0) S(1)", lambda a: a.new_ones((4, 6)) + a, x(4, 6)),
    _case("arange", "R", lambda a: torch.arange(6, device=a.device) + a, x(4, 6)),
]  # fmt: skip

UNKNOWN = [
    _case("linalg_inv", "R", torch.linalg.inv, x(4, 6, 6), known=False),
    _case("histc", "R", lambda a: torch.histc(a, 4), x(4, 6), known=False),
]

CASES = [
    *MATMULS, *NORMS, *ATTENTION, *LOSSES, *CONVOLUTIONS, *POINTWISE, *VIEWS, *ARRANGED,
    *REDUCTIONS, *FACTORIES, *UNKNOWN,
]  # fmt: skip
