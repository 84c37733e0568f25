"""Operator calls that verify the sharding rules: what is called, on what, how it splits; written
rules, those of images, automatic classes, and calls without a rule.

Batched inputs have four rows. 'splits' are the placements that the first result must be able to
take on either axis at degree 2, so that what a rule gains or loses shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.planner.operators.moe import combine, dispatch, grouped_linear

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


def _spec(role: Role, **how: bool) -> Callable[..., Spec]:
    return lambda *shape: Spec(role=role, shape=shape, **how)


x, w, k = _spec("input"), _spec("parameter"), _spec("buffer", positive=True)
flags, positive = _spec("input", flag=True), _spec("input", positive=True)


def ids(high: int, *shape: int) -> Spec:
    return Spec(role="input", shape=shape, high=high)


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
        made = self.case.call(*(
            next(given) if spec.role == "input" else getattr(self, f"t{i}")
            for i, spec in enumerate(self.case.operands)
        ))  # fmt: skip
        return (*([made] if isinstance(made, torch.Tensor) else made), self.one)


def total(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
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
        name=name, op=SHORT.get(op, op), call=call, operands=operands,
        splits=frozenset(splits.split()), known=known,
    )  # fmt: skip


_attend = F.scaled_dot_product_attention  # a fourth operand is its mask
_causal = partial(_attend, is_causal=True)
_grouped = partial(_causal, enable_gqa=True)
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
    case("sdpa", "R S(0) S(1) S(2)", _attend, *_QKV),
    case("sdpa causal", "R S(0) S(1)", _causal, x(4, 8, 6, 12), x(4, 8, 6, 12), x(4, 8, 6, 12)),
    case("sdpa masked", "R S(0) S(1) S(2)", _attend, *_QKV, flags(4, 1, 6, 10)),
    case("sdpa bias", "R S(0) S(1) S(2)", _attend, *_QKV, w(8, 6, 10)),
    case("sdpa flat mask", "R S(0) S(1) S(2)", _attend, *_QKV, w(6, 10)),
    case("sdpa grouped", "R S(0) S(1) S(1/8)", _grouped, x(4, 16, 6, 12), x(4, 8, 6, 12),
         x(4, 8, 6, 12)),
    case("sdpa one key head", "R S(0) S(1)", _grouped, x(4, 8, 6, 12), x(4, 1, 6, 12),
         x(4, 1, 6, 12)),
    case("sdpa no heads", "R S(0) S(1)", _attend, x(4, 6, 12), x(4, 10, 12), x(4, 10, 12)),
    case("sdpa dropout", "R S(0) S(1)", partial(_attend, dropout_p=0.4), *_QKV),
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
    case("nll_loss_nd images", "R P", lambda a, t: F.nll_loss(a, t, ignore_index=3), x(4, 12, 6),
         ids(12, 4, 6)),
    case("nll_loss_nd one row", "R", lambda a, t: F.nll_loss(a[0], t[0]), x(4, 12), ids(12, 4),
         known=False),
    case("kl_div", "R P", lambda a, b: aten.kl_div(a, b, 2), x(4, 6), positive(4, 6)),
    case("mse_loss sum", "R P", lambda a, b: F.mse_loss(a, b, reduction="sum"), x(4, 6), x(4, 6)),
    case("mse_loss none", "R S(0) S(1)", lambda a, b: F.mse_loss(a, b, reduction="none"), x(4, 6),
         x(4, 6)),
    *(case(loss.__name__, "R P", loss, x(4, 6), x(4, 6))
      for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)),
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
CONVOLUTIONS = [
    case("conv1d", "R S(0) S(1) P", lambda a, f: F.conv1d(a, f, stride=2), x(4, 8, 10),
         w(12, 8, 3)),
    case("conv2d", "R S(0) S(1) P", F.conv2d, x(4, 8, 5, 6), w(12, 8, 3, 3), w(12)),
    case("conv2d strided", "R S(0) S(1) P", lambda a, f: F.conv2d(a, f, None, 2, 1), x(4, 8, 6, 6),
         w(12, 8, 3, 3)),
    case("conv2d same", "R S(0) S(1) P", lambda a, f: F.conv2d(a, f, padding="same"), x(4, 8, 6, 6),
         w(12, 8, 3, 3)),
    case("conv2d grouped", "R S(0) S(1) S(1/4) P", lambda a, f, b: F.conv2d(a, f, b, groups=4),
         x(4, 8, 6, 6), w(16, 2, 3, 3), w(16)),
    case("conv2d depthwise", "R S(0) S(1)", lambda a, f, b: F.conv2d(a, f, b, groups=8),
         x(4, 8, 6, 6), w(8, 1, 3, 3), w(8)),
    case("conv2d multiplied", "R S(0) S(1) S(1/8)",
         lambda a, f: F.conv2d(a, f, groups=8, padding="same"), x(4, 8, 6, 6), w(16, 1, 3, 3)),
    case("conv2d one image", "R", lambda a, f: F.conv2d(a[0], f), x(4, 8, 6, 6), w(12, 8, 3, 3),
         known=False),
    case("conv3d", "R S(0) S(1) P", F.conv3d, x(4, 4, 3, 3, 3), w(8, 4, 2, 2, 2)),
    case("conv_transpose1d", "R S(0) S(1) P", lambda a, f, b: F.conv_transpose1d(a, f, b, stride=2),
         x(4, 8, 6), w(8, 12, 3), w(12)),
    case("conv_transpose2d", "R S(0) S(1) P", lambda a, f, b: F.conv_transpose2d(a, f, b, 2),
         x(4, 8, 3, 3), w(8, 12, 2, 2), w(12)),
    case("conv_transpose2d grouped", "R S(0) S(1) S(1/4) P",
         lambda a, f: F.conv_transpose2d(a, f, groups=4), x(4, 8, 3, 3), w(8, 2, 2, 2)),
    case("conv_transpose3d", "R S(0) S(1) P", F.conv_transpose3d, x(4, 4, 3, 3, 3),
         w(4, 8, 2, 2, 2)),
]  # fmt: skip
IMAGE_NORMS = [
    case("group_norm", "R S(0) S(1)", lambda a, g, b: F.group_norm(a, 4, g, b), x(4, 8, 3, 5), w(8),
         w(8)),
    case("group_norm plain", "R S(0)", lambda a: F.group_norm(a, 1), x(4, 8, 3)),
    case("instance_norm", "R S(0) S(1)", lambda a, g, b: F.instance_norm(a, None, None, g, b),
         x(4, 8, 3, 5), w(8), w(8)),
    case("batch_norm train", "R S(0) S(1)", lambda a, m, v, g, b: F.batch_norm(a, m, v, g, b, True),
         x(4, 8, 3, 5), k(8), k(8), w(8), w(8)),
    case("batch_norm eval", "R S(0) S(1)", lambda a, m, v, g, b: F.batch_norm(a, m, v, g, b, False),
         x(4, 8, 3, 5), k(8), k(8), w(8), w(8)),
    case("batch_norm untracked", "R S(0) S(1)",
         lambda a, g, b: F.batch_norm(a, None, None, g, b, True), x(4, 8, 3), w(8), w(8)),
    case("batch_norm plain", "R S(0) S(1)",
         lambda a, m, v: F.batch_norm(a, m, v, training=True, momentum=0.3), x(4, 8), k(8), k(8)),
    case("batch_norm over time", "R S(0) S(1)",
         lambda a, m, v: F.batch_norm(a.transpose(0, 1).flatten(0, 1), m, v, None, None, True),
         x(4, 6, 8), k(8), k(8)),
    # 7 rows: the parts differ
    case("batch_norm of a table", "R S(0) S(1)",
         lambda a, t, m, v, g, b: (F.batch_norm(t, m, v, g, b, True), a), x(4, 8), w(7, 8), k(8),
         k(8), w(8), w(8)),
]  # fmt: skip


def _pool(name: str, size: int, *shape: int) -> Case:
    def call(a: torch.Tensor) -> Any:
        return getattr(F, name)(a, size)

    return case(name, "R S(0) S(1)", call, x(*shape))


POOLING = [
    case("max_pool2d one image", "R", lambda a: F.max_pool2d(a[0], 2), x(4, 8, 6, 6), known=False),
    *(_pool(f"{kind}_pool1d", 2, 4, 8, 6)
      for kind in ("max", "avg", "adaptive_avg", "adaptive_max")),
    _pool("max_pool2d", 2, 4, 8, 6, 6), _pool("avg_pool2d", 2, 4, 8, 6, 6),
    *(_pool(f"adaptive_{kind}_pool2d", 1, 4, 8, 6, 6) for kind in ("avg", "max")),
    _pool("max_pool3d", 2, 4, 6, 2, 4, 4), _pool("avg_pool3d", 2, 4, 6, 2, 4, 4),
    *(_pool(f"adaptive_{kind}_pool3d", 1, 4, 6, 2, 4, 4) for kind in ("avg", "max")),
]  # fmt: skip


def _up(mode: str, *shape: int) -> Case:
    rank = len(shape) - 2
    name = {"linear": ("linear", "bilinear", "trilinear")[rank - 1]}.get(mode, mode)
    call = partial(F.interpolate, scale_factor=2, mode=name)
    return case(f"upsample_{name}{rank}d", "R S(0) S(1)", call, x(*shape))


RESAMPLING = [
    _up("nearest", 4, 6, 3), _up("nearest", 4, 6, 3, 5), _up("nearest", 4, 6, 2, 3, 3),
    _up("linear", 4, 6, 3), _up("linear", 4, 6, 3, 5), _up("linear", 4, 6, 2, 3, 3),
    _up("bicubic", 4, 6, 4, 5),
    case("upsample_bilinear2d sized", "R S(0) S(1)",
         lambda a: F.interpolate(a, (4, 7), mode="bilinear"), x(4, 6, 3, 5)),
    case("pixel_shuffle", "R S(0) S(1) S(2) S(3) P", lambda a: F.pixel_shuffle(a, 2),
         x(4, 8, 6, 4)),
    case("pixel_unshuffle", "R S(0) S(1) S(2) S(3) P", lambda a: F.pixel_unshuffle(a, 2),
         x(4, 6, 8, 4)),
    case("channel_shuffle", "R S(0) S(1) S(1/4) S(2) P", lambda a: F.channel_shuffle(a, 2),
         x(4, 8, 6)),
    case("im2col", "R S(0) S(1) P", lambda a: F.unfold(a, 2), x(4, 6, 5, 4)),
    case("col2im", "R S(0) S(1) P", lambda a: F.fold(a, (5, 4), 2), x(4, 24, 12)),
    case("grid_sampler", "R S(0) S(1) S(2) S(3)",
         lambda a, g: F.grid_sample(a, g.tanh(), align_corners=False), x(4, 8, 5, 6),
         x(4, 4, 6, 2)),
]  # fmt: skip
IMAGES = [*CONVOLUTIONS, *IMAGE_NORMS, *POOLING, *RESAMPLING]
POINTWISE = [
    case("gelu", "R S(0) S(1)", F.gelu, x(4, 6)),
    case("tanh", "R S(0) S(1)", torch.tanh, x(4, 6)),
    case("add", "R S(0) S(1) P", torch.add, x(4, 6), w(6)),
    case("add scaled", "R S(0) S(1) P", lambda a, b: torch.add(a, b, alpha=2), x(4, 6), x(4, 6)),
    case("add a number", "R S(0) S(1)", lambda a: a + 2.0, x(4, 6)),
    case("sub", "R S(0) S(1) S(2) P", torch.sub, x(4, 1, 6), w(8, 6)),
    case("mul", "R S(0) S(1) S(2) P", torch.mul, x(4, 8, 6), w(8, 1)),
    case("mul by itself", "R S(0) S(1) P", lambda a: a * a, x(4, 6)),
    case("mul a number", "R S(0) S(1) P", lambda a: a * 2.0, x(4, 6)),
    case("div", "R S(0) S(1) P", torch.div, x(4, 6), positive(4, 6)),
    case("div rounded", "R S(0) S(1)", lambda a, b: torch.div(a, b, rounding_mode="floor"), x(4, 6),
         positive(4, 6)),
    case("rsub", "R S(0) S(1)", lambda a: torch.rsub(a, 1.0), x(4, 6)),
    case("pow", "R S(0) S(1)", lambda a: a**3, x(4, 6)),
    case("neg", "R S(0) S(1) P", torch.neg, x(4, 6)),
    case("clamp", "R S(0) S(1)", lambda a: a.clamp(-0.5, 0.5), x(4, 6)),
    case("to", "R S(0) S(1) P", lambda a: a.to(torch.float64), x(4, 6)),
    case("eq", "R S(0) S(1)", lambda a: a == 3, ids(9, 4, 6)),
    case("where", "R S(0) S(1)", torch.where, flags(4, 6), x(4, 6), w(6)),
    case("masked_fill", "R S(0) S(1) S(2)", lambda a, m: a.masked_fill(m, -9.0), x(4, 8, 6),
         flags(4, 1, 6)),
    case("zeros_like", "R S(0) S(1)", lambda a: torch.zeros_like(a) + a, x(4, 6)),
    case("dropout", "R S(0) S(1) P", lambda a: F.dropout(a, 0.4), x(4, 6)),
    case("addcmul", "R S(0) S(1)", torch.addcmul, x(4, 6), x(4, 6), w(6)),
    case("lerp", "R S(0) S(1)", lambda a, b: torch.lerp(a, b, 0.3), x(4, 6), x(4, 6)),
]  # fmt: skip
VIEWS = [
    case("view split", "R S(0) S(1) S(2) P", lambda a: a.view(4, 6, 8), x(4, 48)),
    case("view merge", "R S(0) S(0/4) S(1) P", lambda a: a.view(24, 8), x(4, 6, 8)),
    case("view regroup", "R S(0) S(1) S(1/6) S(2) P", lambda a: a.view(4, 12, 4), x(4, 6, 8)),
    case("view crossing", "R S(0) P", lambda a: a.view(4, 9, 4), x(4, 6, 6)),
    case("view_as_complex", "R S(0) S(1)", lambda a: torch.view_as_real(torch.view_as_complex(a)),
         x(4, 6, 2)),
    case("view_as_real", "R S(0) S(1)", lambda a: torch.view_as_real(torch.view_as_complex(a) * 1j),
         x(4, 6, 2)),
    case("view_as", "R S(0) S(1) S(2) P", lambda a, b: a.view_as(b), x(4, 12), x(4, 2, 6)),
    case("view bits", "R", lambda a: a.view(torch.int32).view(torch.float32), x(4, 6), known=False),
    case("reshape", "R S(0) S(0/4) S(1) P", lambda a: a.transpose(1, 2).reshape(-1, 6), x(4, 6, 8)),
    case("flatten", "R S(0) S(1) S(1/6) P", lambda a: a.flatten(1), x(4, 6, 8)),
    case("unsqueeze", "R S(0) S(2) P", lambda a: a.unsqueeze(1), x(4, 6)),
    case("squeeze", "R S(0) S(1) P", lambda a: a.squeeze(), x(4, 1, 6, 1)),
    case("squeeze dims", "R S(0) S(1) P", lambda a: a.squeeze((1, 2)), x(4, 1, 6)),
    case("transpose", "R S(0) S(1) S(2) P", lambda a: a.transpose(1, 2), x(4, 6, 8)),
    case("permute", "R S(0) S(1) S(2) P", lambda a: a.permute(2, 0, -2), x(4, 6, 8)),
    case("t", "R S(0) S(1) P", lambda a: a.t(), x(4, 6)),
    case("numpy_T", "R S(0) S(1) S(2) P", lambda a: a.T, x(4, 6, 8)),
    case("mT", "R S(0) S(1) S(2) P", lambda a: a.mT, x(4, 6, 8)),
    case("movedim", "R S(0) S(1) S(2) P", lambda a: a.movedim(0, 1), x(4, 6, 8)),
    case("expand", "R S(0) S(1) S(2) P", lambda a: a.expand(4, 8, 6), x(4, 1, 6)),
    case("expand new dims", "R S(0) S(1) S(2) P", lambda a: a.expand(2, -1, -1), x(4, 6)),
    case("expand_as", "R S(0) S(1) P", lambda a, b: a.expand_as(b), x(4, 1), x(4, 6)),
    case("slice", "R S(0) P", lambda a: a[:, 1:5], x(4, 6)),
    case("select", "R S(0) S(1) P", lambda a: a[:, 1], x(4, 6, 8)),
    case("unbind", "R S(0) S(1) P", lambda a: a.unbind(1), x(4, 6, 8)),
    case("split", "R S(0) S(1) P", lambda a: a.split(4, 1), x(4, 12)),
    case("split unequal", "R S(0) P", lambda a: a.split(8, 1), x(4, 12)),
    case("split_with_sizes", "R S(0) S(1) P", lambda a: a.split([4, 4, 4], 1), x(4, 12)),
    case("split_with_sizes unequal", "R S(0) P", lambda a: a.split([2, 10], 1), x(4, 12)),
    case("chunk", "R S(0) S(1) P", lambda a: a.chunk(3, -1), x(4, 12)),
    case("chunk unequal", "R S(0) P", lambda a: a.chunk(2, -1), x(4, 5)),
]  # fmt: skip
ARRANGED = [
    case("cat", "R S(0) S(2) P", lambda a, b: torch.cat([a, b], 1), x(4, 6, 8), x(4, 2, 8)),
    case("stack", "R S(0) S(2) P", lambda a, b: torch.stack([a, b], 1), x(4, 6), x(4, 6)),
    case("cumsum", "R S(0) S(2) P", lambda a: a.cumsum(1), x(4, 6, 8)),
    case("cumprod", "R S(0) S(2)", lambda a: a.cumprod(1), x(4, 6, 8)),
    case("diff", "R S(0) P", lambda a: a.diff(), x(4, 6)),
    case("flip", "R S(0) S(2) P", lambda a: a.flip(1), x(4, 6, 8)),
    case("roll", "R S(0) S(2) P", lambda a: a.roll(1, 1), x(4, 6, 8)),
    case("roll keyword", "R S(0) S(2) P", lambda a: a.roll(shifts=(1,), dims=(1,)), x(4, 6, 8)),
    case("roll flat", "R P", lambda a: a.roll(3), x(4, 6)),
    case("pad", "R S(0) S(1)", lambda a: F.pad(a, (1, 2)), x(4, 6, 8)),
    case("pad shifting", "R S(0) S(1)", lambda a: F.pad(a, (1, -1)), x(4, 6, 8)),
    case("pad reflecting", "R S(0) S(1)", lambda a: F.pad(a, (1, 1), mode="reflect"), x(4, 6, 8)),
    case("tril", "R S(0)", lambda a: a.tril(), x(4, 6, 8)),
    case("gather", "R S(0) S(2)", lambda a, i: a.gather(1, i), x(4, 6, 8), ids(6, 4, 2, 8)),
    case("gather corner", "R S(0)", lambda a, i: a.gather(1, i), x(4, 6, 8), ids(6, 4, 2, 4)),
    case("index_select", "R S(0) S(1) S(2)", lambda a, i: a.index_select(1, i), x(4, 6, 8),
         ids(6, 6)),
    case("repeat", "R S(0) S(1/3) P", lambda a: a.repeat(1, 3), x(4, 6)),
    case("repeat more dims", "R S(1) S(2) P", lambda a: a.repeat(2, 1, 1), x(4, 6)),
    case("repeat_interleave", "R S(0) S(1) P", lambda a: a.repeat_interleave(3, 1), x(4, 6)),
    case("repeat_interleave counted", "R S(0) S(1) P",
         lambda a: a.repeat_interleave(3, 1, output_size=18), x(4, 6)),
    case("repeat_interleave flat", "R", lambda a: a.repeat_interleave(3), x(4, 6), known=False),
    case("fft_rfft", "R S(0) S(1)", lambda a: torch.fft.rfft(a).abs(), x(4, 6, 8)),
    case("fft_fft", "R S(0) S(2)", lambda a: torch.fft.fft(a, dim=1).abs(), x(4, 6, 8)),
    case("fft_fftn", "R S(0)", lambda a: torch.fft.fftn(a, dim=(1, 2)).abs(), x(4, 6, 8)),
    case("unfold", "R S(0) P", lambda a: a.unfold(1, 3, 1), x(4, 6)),
    case("unfold tiled", "R S(0) S(1) P", lambda a: a.unfold(1, 3, 3), x(4, 12)),
    case("glu", "R S(0) S(1) S(2)", F.glu, x(4, 6, 8)),
    case("topk", "R S(0) S(1)", lambda a: a.topk(2), x(4, 6, 8)),
    case("sort", "R S(0) S(2)", lambda a: a.sort(1), x(4, 6, 8)),
    case("sort stable", "R S(0) S(1)", lambda a: a.sort(stable=True), x(4, 6, 8)),
    case("cummax", "R S(0) S(2)", lambda a: a.cummax(1), x(4, 6, 8)),
    case("logcumsumexp", "R S(0) S(2)", lambda a: a.logcumsumexp(1), x(4, 6, 8)),
]  # fmt: skip
INDEXED = [
    case("index", "R S(0) S(1) S(2)", lambda i, t: t[i], ids(12, 4, 6), w(12, 8)),
    case("index vector", "R S(0) S(1)", lambda i, t: t[i], ids(12, 4, 6), w(12)),
    case("index second", "R S(0) S(1)", lambda a, i: a[:, i], x(4, 12), ids(12, 6)),
    case("index pairs", "R S(0)", lambda a, i: a[i, i], x(4, 4), ids(4, 4)),
    case("index apart", "R S(0) S(1)", lambda a, i: a[i, :, i], x(4, 6, 5), ids(4, 4)),
    case("index apart, inside", "R S(0) S(1) S(2)", lambda a, i: a[:, i, :, i], x(4, 5, 8, 5),
         ids(5, 6)),
    case("index together", "R S(0) S(1) S(2)", lambda a, i: a[:, i, i], x(4, 5, 5, 6), ids(5, 6)),
    case("index_put", "R S(0) S(2)", lambda a, i, b: aten.index_put(a, [None, i], b), x(4, 6, 8),
         ids(6, 5), x(4, 5, 8)),
    case("index_put adding", "R S(0) S(2) P", lambda a, i, b: aten.index_put(a, [None, i], b, True),
         x(4, 6, 8), ids(6, 4), x(4, 4, 8)),
    case("index_put flags", "R S(0) S(1)", lambda a, m, b: aten.index_put(a, [m], b[0]), x(4, 6),
         flags(4, 6), w(1)),
    case("index_add", "R S(0) S(2) P", lambda a, i, b: a.index_add(1, i, b), x(4, 6, 8), ids(6, 4),
         x(4, 4, 8)),
    case("index_copy", "R S(0) S(2)",
         lambda a, i, b: a.index_copy(1, i % 2 + torch.arange(0, 4, 2), b), x(4, 6, 8), ids(6, 2),
         x(4, 2, 8)),
    case("index_fill", "R S(0) S(2)", lambda a, i: a.index_fill(1, i, 2.0), x(4, 6, 8), ids(6, 4)),
    case("scatter", "R S(0) S(2)", lambda a, i: a.scatter(1, i, 3.0), x(4, 6, 8), ids(6, 4, 2, 8)),
    case("scatter values", "R S(0)", lambda a, b: a.scatter(1, torch.tensor([[1, 3]] * 4), b),
         x(4, 6), x(4, 2)),
    case("scatter_add", "R S(0) S(2) P", lambda a, i, b: a.scatter_add(1, i, b), x(4, 6, 8),
         ids(6, 4, 2, 8), x(4, 2, 8)),
    case("scatter_add corner", "R S(0) P", lambda a, i, b: a.scatter_add(1, i, b), x(4, 6, 8),
         ids(6, 4, 2, 4), x(4, 2, 4)),
    case("scatter_reduce", "R S(0) S(2)", lambda a, i, b: a.scatter_reduce(1, i, b, "amax"),
         x(4, 6, 8), ids(6, 4, 2, 8), x(4, 2, 8)),
    case("bucketize", "R S(0) S(1)", lambda a, v: torch.bucketize(a, v.sort()[0]), x(4, 6), w(5)),
    case("isin", "R S(0) S(1)", torch.isin, ids(9, 4, 6), ids(9, 3)),
    case("one_hot", "R S(0) S(1)", lambda i: F.one_hot(i, 5), ids(5, 4, 6)),
]  # fmt: skip
REDUCTIONS = [
    case("sum", "R P", lambda a: a.sum(), x(4, 6)),
    case("sum dim", "R S(0) S(1) P", lambda a: a.sum(1), x(4, 6, 8)),
    case("sum keeping", "R S(0) S(2) P", lambda a: a.sum(1, keepdim=True), x(4, 6, 8)),
    case("sum dims", "R S(0) P", lambda a: a.sum((-1, 1)), x(4, 6, 8)),
    case("mean", "R P", lambda a: a.mean(), x(4, 6)),
    case("mean dim", "R S(0) S(1) P", lambda a: a.mean(-1), x(4, 6, 8)),
    case("mean keeping", "R S(0) S(1) P", lambda a: a.mean(-1, keepdim=True), x(4, 6, 8)),
    case("amax", "R S(0) S(2)", lambda a: a.amax(1, keepdim=True), x(4, 6, 8)),
    case("amin", "R S(0)", lambda a: a.amin((1, 2)), x(4, 6, 8)),
    case("var", "R", lambda a: a.var(), x(4, 6)),
    case("var dim", "R S(0) S(1)", lambda a: a.var(-1), x(4, 6, 8)),
    case("var biased", "R S(0) S(1)", lambda a: a.var(-1, unbiased=False), x(4, 6, 8)),
    case("var keeping", "R S(0) S(1)", lambda a: a.var(-1, keepdim=True), x(4, 6, 8)),
    case("var corrected", "R S(0) S(1)", lambda a: torch.var(a, dim=1, correction=0), x(4, 6, 8)),
    *(case(name, "R S(0) S(1)", partial(getattr(torch, name), dim=-1), x(4, 6, 8))
      for name in ("std", "logsumexp", "argmax", "prod")),
    case("argmax keeping", "R S(0) S(1)", lambda a: a.argmax(-1, True), x(4, 6, 8)),
    case("argmax flat", "R", lambda a: a.argmax(), x(4, 6)),
    case("any", "R S(0) S(1)", lambda a: a.any(-1), flags(4, 6, 8)),
    case("var flat biased", "R", lambda a: aten.var.default(a, False), x(4, 6)),
    case("max", "R", lambda a: a.max(), x(4, 6)),
    case("max dim", "R S(0) S(1)", lambda a: a.max(-1), x(4, 6, 8)),
    case("max of two", "R S(0) S(1)", lambda a, b: aten.max.other(a, b), x(4, 6), x(4, 6)),
    case("median", "R S(0) S(1)", lambda a: a.median(-1), x(4, 6, 7)),
    case("mode", "R S(0) S(1)", lambda a: a.mode(), ids(3, 4, 6, 8)),
    case("kthvalue", "R S(0) S(1)", lambda a: a.kthvalue(2, 1), x(4, 6, 8)),
    case("var_mean", "R S(0) S(1)", lambda a: torch.var_mean(a, -1), x(4, 6, 8)),
    case("count_nonzero", "R S(0) S(1) P", lambda a: a.count_nonzero(-1), ids(3, 4, 6, 8)),
    case("linalg_vector_norm", "R S(0) S(2)", lambda a: a.norm(dim=1, keepdim=True), x(4, 6, 8)),
]  # fmt: skip
DRAWS = [
    case("feature_dropout", "R S(0) S(1) S(2) S(3)", lambda a: F.dropout2d(a, 0.4), x(4, 8, 6, 3)),
    case("rand", "R S(0) S(2)", lambda a: torch.rand(4, 1, 6, device=a.device) * a, x(4, 8, 6)),
    case("rand_like", "R S(0) S(1)", lambda a: torch.rand_like(a) * a, x(4, 6)),
    case("randn", "R S(0) S(1)", lambda a: torch.randn(4, 6, device=a.device) * a, x(4, 6)),
    case("randn_like", "R S(0) S(1)", lambda a: torch.randn_like(a) + a, x(4, 6)),
    case("normal_functional", "R S(0) S(1)", lambda a: torch.empty_like(a).normal_() + a, x(4, 6)),
    case("exponential", "R S(0) S(1)", lambda a: torch.empty_like(a).exponential_() * a, x(4, 6)),
    case("uniform", "R S(0) S(1)", lambda a: torch.empty_like(a).uniform_(-1, 1) * a, x(4, 6)),
    case("randint", "R S(0) S(1)", lambda a: torch.randint(9, (4, 6)) + a, x(4, 6)),
    case("randint_like", "R S(0) S(1)", lambda a: torch.randint_like(a, 3, 9) + a, x(4, 6)),
    case("bernoulli", "R S(0) S(1)", lambda a: torch.bernoulli(a.sigmoid()) + a, x(4, 6)),
    case("bernoulli drop path", "R S(0)", lambda a: a.new_empty(4, 1).bernoulli_(0.7).div_(0.7) * a,
         x(4, 6)),
]  # fmt: skip
FACTORIES = [
    case("zeros", "R S(0) S(1)", lambda a: torch.zeros(4, 6, device=a.device) + a, x(4, 6)),
    case("ones", "R S(0) S(1)", lambda a: torch.ones(4, 6, device=a.device) * a, x(4, 6)),
    case("full", "R S(0) S(1)", lambda a: torch.full((4, 6), 2.0, device=a.device) * a, x(4, 6)),
    case("new_zeros", "R S(0) S(1)", lambda a: a.new_zeros(4, 6) + a, x(4, 6)),
    case("arange", "R", lambda a: torch.arange(6, device=a.device) + a, x(4, 6)),
]  # fmt: skip
AUTOMATIC = [
    *POINTWISE, *VIEWS, *ARRANGED, *INDEXED, *REDUCTIONS, *FACTORIES, *DRAWS,
    case("linalg_inv", "R", torch.linalg.inv, x(4, 6, 6), known=False),
    case("histc of any range", "R", lambda a: torch.histc(a, 4), x(4, 6), known=False),
]  # fmt: skip


def grouped(**options: bool) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor, w: torch.Tensor, i: torch.Tensor, *b: torch.Tensor) -> torch.Tensor:
        return grouped_linear(x, w, i, *(b or (None,)), **options)

    return call


CHOSEN = ids(6, 4, 2, 2)
EXPERTS = [
    case("dispatch", "R S(0) S(1) S(3)", lambda a, i: dispatch(a, i), x(4, 2, 8), CHOSEN),
    case("combine", "R S(0) S(1) S(2)", lambda a: combine(a), x(4, 2, 2, 8)),
    case("grouped_linear", "R S(0) S(1) S(2) S(3) P", grouped(), x(4, 2, 2, 8), w(6, 8, 4), CHOSEN),
    case("grouped_linear transposed", "R S(0) S(1) S(2) S(3) P", grouped(transposed=True),
         x(4, 2, 2, 8), w(6, 4, 8), CHOSEN),
    case("grouped_linear bias", "R S(0) S(1) S(2) S(3) P", grouped(), x(4, 2, 2, 8), w(6, 8, 4),
         CHOSEN, w(6, 4)),
    case("scatter source", "R S(0) S(2)", lambda a, i, b: a.scatter(1, i, b), x(4, 6, 8),
         ids(6, 4, 2, 8), x(4, 2, 8)),
    case("scatter corner", "R S(0)", lambda a, i, b: a.scatter(1, i, b), x(4, 6, 8),
         ids(6, 4, 2, 4), x(4, 2, 4)),
    case("scatter_add rows", "R P", lambda a, i, b: a.scatter_add(0, i, b), w(6), ids(6, 4), x(4)),
    case("new_zeros joined", "R S(0) S(1)", lambda a, b: torch.cat([a, b], 1) + a.new_zeros(4, 10),
         x(4, 6), x(4, 4)),
]  # fmt: skip
