"""Operator calls that verify the automatic classes of sharding rules, and calls without a rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from meshwright.planner.operators.moe import combine, dispatch, grouped_linear
from tests.costmodel.rules.rule_cases import case, flags, ids, positive, w, x

aten = torch.ops.aten

POINTWISE = [
    case("gelu", "R S(0) S(1)", F.gelu, x(4, 6)),
    case("relu", "R S(0) S(1)", F.relu, x(4, 6)),
    case("silu", "R S(0) S(1)", F.silu, x(4, 6)),
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
    case("mul multiply", "R S(0) S(1) P", torch.multiply, x(4, 6), w(6)),
    case("rsub", "R S(0) S(1)", lambda a: torch.rsub(a, 1.0), x(4, 6)),
    case("pow", "R S(0) S(1)", lambda a: a**3, x(4, 6)),
    case("rsqrt", "R S(0) S(1)", torch.rsqrt, positive(4, 6)),
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
    case("floor_divide", "R S(0) S(1)", lambda a: a // 3, ids(9, 4, 6)),
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
    case("unflatten", "R S(0) S(1) S(2) P", lambda a: a.unflatten(1, (6, 8)), x(4, 48)),
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
    case("cat concat", "R S(0) S(2) P", lambda *a: torch.concat(a, 1), x(4, 6, 8), x(4, 2, 8)),
    case("cat", "R S(0) S(2) P", lambda a, b: torch.cat([a, b], 1), x(4, 6, 8), x(4, 2, 8)),
    case("stack", "R S(0) S(2) P", lambda a, b: torch.stack([a, b], 1), x(4, 6), x(4, 6)),
    case("stack last", "R S(0) S(1) P", lambda a, b: torch.stack([a, b], -1), x(4, 6), x(4, 6)),
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
    case("std", "R S(0) S(1)", lambda a: a.std(-1), x(4, 6, 8)),
    case("logsumexp", "R S(0) S(1)", lambda a: a.logsumexp(-1), x(4, 6, 8)),
    case("argmax", "R S(0) S(1)", lambda a: a.argmax(-1), x(4, 6, 8)),
    case("argmax keeping", "R S(0) S(1)", lambda a: a.argmax(-1, True), x(4, 6, 8)),
    case("argmax flat", "R", lambda a: a.argmax(), x(4, 6)),
    case("any", "R S(0) S(1)", lambda a: a.any(-1), flags(4, 6, 8)),
    case("var flat biased", "R", lambda a: aten.var.default(a, False), x(4, 6)),
    case("prod", "R S(0) S(1)", lambda a: a.prod(-1), x(4, 6, 8)),
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
    case("new_ones", "R S(0) S(1)", lambda a: a.new_ones((4, 6)) + a, x(4, 6)),
    case("arange", "R", lambda a: torch.arange(6, device=a.device) + a, x(4, 6)),
]  # fmt: skip

UNRULED = [
    case("linalg_inv", "R", torch.linalg.inv, x(4, 6, 6), known=False),
    case("histc of any range", "R", lambda a: torch.histc(a, 4), x(4, 6), known=False),
]

AUTOMATIC = [
    *POINTWISE, *VIEWS, *ARRANGED, *INDEXED, *REDUCTIONS, *FACTORIES, *DRAWS, *UNRULED,
]  # fmt: skip


def grouped(**options: bool) -> Callable[..., torch.Tensor]:
    def call(
        x: torch.Tensor, weight: torch.Tensor, experts: torch.Tensor, *bias: torch.Tensor
    ) -> torch.Tensor:
        return grouped_linear(x, weight, experts, *(bias or (None,)), **options)

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
    case("histc of numbers", "R P", lambda a: torch.histc(a.float(), bins=6, min=0, max=6),
         ids(6, 4, 2)),
    case("scatter of one", "R S(0)", lambda a, i: a.scatter(1, i, 1.0), x(4, 6), ids(6, 4, 2)),
    case("scatter source", "R S(0) S(2)", lambda a, i, b: a.scatter(1, i, b), x(4, 6, 8),
         ids(6, 4, 2, 8), x(4, 2, 8)),
    case("scatter corner", "R S(0)", lambda a, i, b: a.scatter(1, i, b), x(4, 6, 8),
         ids(6, 4, 2, 4), x(4, 2, 4)),
    case("scatter_add rows", "R P", lambda a, i, b: a.scatter_add(0, i, b), w(6), ids(6, 4), x(4)),
    case("scatter_add dims", "R S(0) P", lambda a, i, b: a.scatter_add(1, i, b), x(4, 6),
         ids(6, 4, 2), x(4, 2)),
    case("new_zeros joined", "R S(0) S(1)", lambda a, b: torch.cat([a, b], 1) + a.new_zeros(4, 10),
         x(4, 6), x(4, 4)),
]  # fmt: skip
