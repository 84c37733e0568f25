"""Operator calls that verify the written sharding rules: what is called, on what, how it splits.

Batched inputs have four rows. `splits` are the placements that the first result must be able to
take on either axis at degree 2, so that what a rule gains or loses shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

aten = torch.ops.aten

Role = Literal["input", "parameter", "buffer"]


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
    """`call(*operands)` makes an operator `op`; `known=False`: it has no rule, by decision."""

    name: str
    op: str
    call: Callable[..., Any]
    operands: tuple[Spec, ...]
    splits: frozenset[str]
    known: bool = True


class CaseModule(nn.Module):
    """The call as a module: parameters and buffers its own, inputs in the order of the operands;
    one more parameter among the results, as a loss depends on one."""

    def __init__(self, of: Case) -> None:
        super().__init__()
        self.case = of
        self.one = nn.Parameter(torch.ones(()))
        for i, spec in enumerate(of.operands):
            if spec.role == "parameter":
                self.register_parameter(f"t{i}", nn.Parameter(spec.make()))
            elif spec.role == "buffer":
                self.register_buffer(f"t{i}", spec.make())

    def batch(self) -> tuple[torch.Tensor, ...]:
        return tuple(spec.make() for spec in self.case.operands if spec.role == "input")

    def forward(self, *inputs: torch.Tensor) -> Any:
        given = iter(inputs)
        made = self.case.call(
            *(
                next(given) if spec.role == "input" else getattr(self, f"t{i}")
                for i, spec in enumerate(self.case.operands)
            )
        )
        return (*([made] if isinstance(made, torch.Tensor) else made), self.one)


def total(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A scalar that every result takes part in."""
    return torch.stack([t.to(torch.float32).sum() for t in results]).sum()


SHORT = {
    "sdpa": "scaled_dot_product_attention",
    "ce": "cross_entropy_loss",
    "bce": "binary_cross_entropy",
    "bce_logits": "binary_cross_entropy_with_logits",
}


def case(
    name: str, splits: str, call: Callable[..., Any], *operands: Spec, known: bool = True
) -> Case:
    """The first word of the name is the operator's."""
    op = name.partition(" ")[0]
    return Case(
        name=name,
        op=SHORT.get(op, op),
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
    case("linear", "R S(0) S(1) S(2) P", F.linear, x(4, 6, 8), w(12, 8)),
    case("linear bias", "R S(0) S(1) S(2) P", F.linear, x(4, 6, 8), w(12, 8), w(12)),
    case("linear of a vector", "R", lambda a, b: F.linear(a, b[0]), x(4, 8), w(12, 8), known=False),
    case("addmm", "R S(0) S(1) P", lambda a, b, c: torch.addmm(c, a, b), x(4, 8), w(8, 12), w(12)),
    case("addmm full bias", "R", lambda a, b, c: torch.addmm(c, a, b), x(4, 8), w(8, 6), x(4, 6),
         known=False),
    case("addmm scaled", "R S(0) S(1) P", lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
         x(4, 8), w(8, 12), w(12)),
    case("mm", "R S(0) S(1) P", torch.mm, x(4, 8), w(8, 12)),
    case("bmm", "R S(0) S(1) S(2) P", torch.bmm, x(4, 6, 8), x(4, 8, 12)),
    case("baddbmm", "R S(0) S(1) S(2) P", torch.baddbmm, x(4, 1, 12), x(4, 6, 8), x(4, 8, 12)),
    case("matmul", "R S(0) S(1) P", torch.matmul, x(4, 8), w(8, 12)),
    case("matmul batched", "R S(0) S(1) S(2) S(3) P", torch.matmul, x(4, 6, 8, 10),
         x(4, 6, 10, 12)),
    case("matmul weight", "R S(0) S(1) S(2) P", torch.matmul, x(4, 6, 8), w(8, 12)),
    case("matmul broadcast", "R S(0) S(1) S(2) S(3) P", torch.matmul, x(4, 1, 8, 10), w(6, 10, 12)),
    case("matmul vector", "R S(0) P", torch.matmul, x(4, 8), w(8)),
    case("matmul by a vector", "R S(0) S(1) P", lambda a, b: torch.matmul(b, a), x(4, 6, 8), w(6)),
    case("matmul dot", "R P", lambda a, b: torch.matmul(a[0], b), x(4, 8), w(8)),
    case("mv", "R S(0) P", torch.mv, x(4, 8), w(8)),
    case("dot", "R P", lambda a, b: torch.dot(a[0], b), x(4, 8), w(8)),
    case("outer", "R S(0) S(1) P", lambda a, b: torch.outer(a[:, 0], b), x(4, 8), w(6)),
    case("cdist", "R S(0) S(1) S(2)", torch.cdist, x(4, 6, 5), x(4, 8, 5)),
    case("histc", "R P", lambda a: torch.histc(a, 5, -1.0, 2.0), x(4, 6)),
    case("prelu", "R S(0) S(1) S(2)", F.prelu, x(4, 6, 8), w(6)),
    case("einsum", "R S(0) S(1) S(2) P", lambda a, b: torch.einsum("bsd,od->bso", a, b), x(4, 6, 8),
         w(12, 8)),
    case("einsum of three", "R S(0) S(1) S(2) P",
         lambda a, b, c: torch.einsum("bsd,do,ob->bso", a, b, c), x(4, 6, 8), w(8, 12), w(12, 4)),
    case("einsum of one", "R S(0) S(1) P", lambda a: torch.einsum("bsd->db", a), x(4, 6, 8)),
    case("einsum with dots", "R S(0) S(1) S(2) P", lambda a, b: torch.einsum("...d,od->...o", a, b),
         x(4, 6, 8), w(12, 8)),
    case("einsum unnamed", "R S(0) S(1) P", lambda a, b: torch.einsum("ij,jk", a, b), x(4, 8),
         w(8, 12)),
    case("einsum trace", "R", lambda a: torch.einsum("ii->i", a), x(4, 4), known=False),
    case("embedding", "R S(0) S(1) S(2) P", lambda i, t: F.embedding(i, t), ids(12, 4, 6),
         w(12, 8)),
    case("embedding padding", "R S(0) S(1) S(2) P", lambda i, t: F.embedding(i, t, padding_idx=7),
         ids(12, 4, 6), w(12, 8)),
    case("embedding negative padding", "R S(0) S(1) S(2) P",
         lambda i, t: F.embedding(i, t, padding_idx=-1), ids(12, 4, 6), w(12, 8)),
    case("embedding by frequency", "R", lambda i, t: F.embedding(i, t, scale_grad_by_freq=True),
         ids(12, 4, 6), w(12, 8), known=False),
]  # fmt: skip

NORMS = [
    case("layer_norm", "R S(0) S(1)", lambda a, g, b: F.layer_norm(a, (8,), g, b), x(4, 6, 8), w(8),
         w(8)),
    case("layer_norm plain", "R S(0) S(1)", lambda a: F.layer_norm(a, (8,)), x(4, 6, 8)),
    case("layer_norm weight", "R S(0) S(1)", lambda a, g: F.layer_norm(a, (8,), g), x(4, 6, 8),
         w(8)),
    case("layer_norm two dims", "R S(0)", lambda a, g: F.layer_norm(a, (6, 8), g), x(4, 6, 8),
         w(6, 8)),
    case("rms_norm", "R S(0) S(1)", lambda a, g: F.rms_norm(a, (8,), g), x(4, 6, 8), w(8)),
    case("rms_norm plain", "R S(0) S(1)", lambda a: F.rms_norm(a, (8,)), x(4, 6, 8)),
    case("softmax", "R S(0) S(1)", lambda a: F.softmax(a, -1), x(4, 6, 8)),
    case("softmax inner", "R S(0) S(2)", lambda a: F.softmax(a, 1), x(4, 6, 8)),
    case("_softmax", "R S(0) S(1)", lambda a: aten._softmax(a, -1, False), x(4, 6, 8)),
    case("log_softmax", "R S(0) S(1)", lambda a: F.log_softmax(a, -1), x(4, 6, 8)),
]  # fmt: skip

ATTENTION = [
    case("sdpa", "R S(0) S(1) S(2)", F.scaled_dot_product_attention, *_QKV),
    case("sdpa causal", "R S(0) S(1)", _causal, x(4, 8, 6, 12), x(4, 8, 6, 12), x(4, 8, 6, 12)),
    case("sdpa masked", "R S(0) S(1) S(2)", _masked, *_QKV, flags(4, 1, 6, 10)),
    case("sdpa bias", "R S(0) S(1) S(2)", _masked, *_QKV, w(8, 6, 10)),
    case("sdpa flat mask", "R S(0) S(1) S(2)", _masked, *_QKV, w(6, 10)),
    case("sdpa grouped", "R S(0) S(1) S(1/8)", _grouped, x(4, 16, 6, 12), x(4, 8, 6, 12),
         x(4, 8, 6, 12)),
    case("sdpa one key head", "R S(0) S(1)", _grouped, x(4, 8, 6, 12), x(4, 1, 6, 12),
         x(4, 1, 6, 12)),
    case("sdpa no heads", "R S(0) S(1)", F.scaled_dot_product_attention, x(4, 6, 12), x(4, 10, 12),
         x(4, 10, 12)),
    case("sdpa dropout", "R S(0) S(1)",
         lambda q, key, v: F.scaled_dot_product_attention(q, key, v, dropout_p=0.4), *_QKV),
]  # fmt: skip


def _ce(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda a, t, *rest: F.cross_entropy(a, t, *rest, **options)


LOSSES = [
    case("ce", "R P", _ce(), x(4, 12), ids(12, 4)),
    case("ce tokens", "R P", lambda a, t: F.cross_entropy(a.flatten(0, 1), t.flatten()),
         x(4, 6, 12), ids(12, 4, 6)),
    case("ce ignored", "R P", _ce(ignore_index=1), x(8, 4), ids(4, 8)),
    case("ce sum", "R P", _ce(reduction="sum"), x(8, 4), ids(4, 8)),
    case("ce smooth", "R P", _ce(label_smoothing=0.2, ignore_index=0), x(8, 4), ids(4, 8)),
    case("ce images", "R P", _ce(), x(4, 12, 6), ids(12, 4, 6)),
    case("ce no reduction", "R S(0) S(1)", _ce(reduction="none"), x(4, 12, 6), ids(12, 4, 6)),
    case("ce weighted", "R", _ce(), x(4, 12), ids(12, 4), k(12), known=False),
    case("ce probabilities", "R", _ce(), x(4, 12), positive(4, 12), known=False),
    case("ce one row", "R", lambda a, t: F.cross_entropy(a[0], t[0]), x(4, 12), ids(12, 4),
         known=False),
    case("nll_loss", "R P", lambda a, t: aten.nll_loss(a, t), x(4, 12), ids(12, 4)),
    case("nll_loss_nd", "R P", lambda a, t: F.nll_loss(a, t), x(4, 12), ids(12, 4)),
    case("nll_loss_nd images", "R P", lambda a, t: F.nll_loss(a, t, ignore_index=3), x(4, 12, 6),
         ids(12, 4, 6)),
    case("nll_loss_nd one row", "R", lambda a, t: F.nll_loss(a[0], t[0]), x(4, 12), ids(12, 4),
         known=False),
    case("kl_div", "R P", lambda a, b: aten.kl_div(a, b, 2), x(4, 6), positive(4, 6)),
    case("kl_div mean", "R P", lambda a, b: aten.kl_div(a, b), x(4, 6), positive(4, 6)),
    case("mse_loss", "R P", F.mse_loss, x(4, 6), x(4, 6)),
    case("mse_loss sum", "R P", lambda a, b: F.mse_loss(a, b, reduction="sum"), x(4, 6), x(4, 6)),
    case("mse_loss none", "R S(0) S(1)", lambda a, b: F.mse_loss(a, b, reduction="none"), x(4, 6),
         x(4, 6)),
    case("l1_loss", "R P", F.l1_loss, x(4, 6), x(4, 6)),
    case("smooth_l1_loss", "R P", F.smooth_l1_loss, x(4, 6), x(4, 6)),
    case("huber_loss", "R P", F.huber_loss, x(4, 6), x(4, 6)),
    case("bce_logits", "R P", F.binary_cross_entropy_with_logits, x(4, 6), positive(4, 6)),
    case("bce_logits weighted", "R P",
         lambda a, b, p: F.binary_cross_entropy_with_logits(a, b, pos_weight=p), x(4, 6),
         positive(4, 6), k(6)),
    case("bce", "R P", lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()), x(4, 6),
         x(4, 6)),
]  # fmt: skip

RECURRENT = [
    case("lstm", "R S(0)",
         lambda a, h, c, *p: torch._VF.lstm(a, (h, c), p, True, 1, 0.0, True, False, True),
         x(4, 6, 5), k(1, 4, 3), k(1, 4, 3), w(12, 5), w(12, 3), w(12), w(12)),
    case("lstm steps first", "R S(1)",
         lambda a, h, *p: torch._VF.lstm(
             a.transpose(0, 1), (h, h), p, False, 1, 0.0, True, False, False),
         x(4, 6, 5), k(1, 4, 3), w(12, 5), w(12, 3)),
    case("gru both ways", "R S(0)",
         lambda a, h, *p: torch._VF.gru(a, h, p, False, 1, 0.0, True, True, True), x(4, 6, 5),
         k(2, 4, 3), w(9, 5), w(9, 3), w(9, 5), w(9, 3)),
    case("rnn_tanh", "R S(0)",
         lambda a, h, *p: torch._VF.rnn_tanh(a, h, p, False, 1, 0.0, True, False, True), x(4, 6, 5),
         k(1, 4, 3), w(3, 5), w(3, 3)),
    case("rnn_relu", "R S(0)",
         lambda a, h, *p: torch._VF.rnn_relu(a, h, p, False, 1, 0.0, True, False, True), x(4, 6, 5),
         k(1, 4, 3), w(3, 5), w(3, 3)),
]  # fmt: skip

WRITTEN = [*MATMULS, *NORMS, *ATTENTION, *LOSSES, *RECURRENT]
