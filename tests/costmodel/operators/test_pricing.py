"""Prices of operators and parameters by hand, on devices where one resource alone costs time."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Op
from meshwright.costmodel.kernels.transfers import OpProfile
from meshwright.costmodel.operators.cost import Cost
from meshwright.costmodel.operators.fusion import fuse
from meshwright.costmodel.operators.pricing import VIEW_HOST_SHARE, Pricer
from meshwright.costmodel.sharding.strategies import Placement, Strategy, strategies
from meshwright.costmodel.targets import EAGER
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import Traced, cluster, cut, setting_on
from tests.helpers.traced import with_forward

ROWS, LENGTH, WIDTH, WIDE, HEADS = 4, 6, 8, 16, 2
ENDLESS = 1e30


class Net(nn.Module):
    """A perceptron and an attention over its output; `written` by hand or fused."""

    def __init__(self, *, written: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.written = written
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(F.gelu(self.up(x)))
        b, s, _ = y.shape
        parts = self.qkv(y).view(b, s, HEADS, 3 * WIDTH // HEADS).transpose(1, 2)
        q, k, v = parts.chunk(3, -1)
        y = torch.softmax(q @ k.transpose(-2, -1), -1) @ v if self.written else None
        y = F.scaled_dot_product_attention(q, k, v) if y is None else y
        return y.transpose(1, 2).reshape(b, s, WIDTH)


@cache
def net(*, written: bool = False, frozen: bool = False) -> Traced:
    with torch.device("meta"):
        batch = (torch.empty(ROWS, LENGTH, WIDTH),) * 2
        model = Net(written=written, frozen=frozen)
        return cut(model, batch, F.mse_loss, precision="fp32")


def pricer(of: Traced, on: Cluster, *, fusion: str = "none", **given: Any) -> Pricer:
    setting = setting_on(on, **{"rows": ROWS, **given})
    fused = fuse(of.graph, of.table, fusion)
    return Pricer(graph=of.graph, table=of.table, setting=setting, fusion=fused)


def costs(found: Pricer, short: str, strategy: str = "replicate") -> list[Cost]:
    ops = [op for op in found.graph.ops if op.short == short]
    return [found.op_cost(op, named(found, op, strategy)) for op in ops]


def named(found: Pricer, op: Op, name: str) -> Strategy:
    options = strategies(found.graph, found.table, op, found.setting.mesh.tp)
    return next(s for s in options if s.name.split(".")[0] == name)


def busy() -> Cluster:
    """One FLOP takes a second, all else nothing."""
    return cluster(4, flops=1.0, memory_bandwidth=ENDLESS, bandwidth=ENDLESS)


def moving() -> Cluster:
    """One byte of memory takes a second, all else nothing."""
    return cluster(4, flops=ENDLESS, memory_bandwidth=1.0, bandwidth=ENDLESS)


def talking(latency_s: float = 0.0) -> Cluster:
    """One byte on a wire takes a second, all else nothing."""
    return cluster(4, flops=ENDLESS, memory_bandwidth=ENDLESS, bandwidth=1.0, latency_s=latency_s)


def test_what_can_not_split_the_batch_runs_on_all_rows_and_pays_for_them() -> None:
    """An operator without a rule, and what comes after it."""
    with torch.device("meta"):
        model = with_forward(lambda self, x: self.l(torch.renorm(self.l(x), 2, 0, 1.0)).mean())
        made = cut(model, (torch.empty(ROWS, WIDTH),), None, precision="fp32")
    rows = ROWS // 2
    nbytes = 4 * rows * WIDTH
    for on, wanted in ((moving(), 2 * 2 * nbytes), (talking(), nbytes)):
        (cost,) = costs(pricer(made, on, dp=2, rows=rows), "renorm")
        assert cost.forward_s == pytest.approx(wanted)
    once, twice = (costs(pricer(made, busy(), dp=dp, rows=rows), "linear") for dp in (1, 2))
    assert once == twice


UP = DOWN = 2 * ROWS * LENGTH * WIDTH * WIDE
QKV = 2 * ROWS * LENGTH * WIDTH * 3 * WIDTH
SCORES = 2 * ROWS * LENGTH * LENGTH * WIDTH  # all heads


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_multiplies_for_wanted_gradients_alone(frozen: bool) -> None:
    """The input of `up` is data: no dX. A frozen weight has no dW."""
    up, down, qkv = costs(pricer(net(frozen=frozen), busy()), "linear")
    assert (up.forward_s, up.backward_s, up.weight_s) == pytest.approx((UP, UP, UP))
    wanted = (DOWN, DOWN, 0) if frozen else (DOWN, 2 * DOWN, DOWN)
    assert (down.forward_s, down.backward_s, down.weight_s) == pytest.approx(wanted)
    assert (qkv.forward_s, qkv.backward_s, qkv.weight_s) == pytest.approx((QKV, 2 * QKV, QKV))


def test_products_of_activations_and_attention() -> None:
    for cost in costs(pricer(net(written=True), busy()), "matmul"):
        assert (cost.forward_s, cost.backward_s, cost.weight_s) == pytest.approx(
            (SCORES, 2 * SCORES, 0)
        )
    (cost,) = costs(pricer(net(), busy()), "scaled_dot_product_attention")
    assert cost.forward_s == pytest.approx(2 * SCORES)
    assert cost.backward_s == pytest.approx(2.5 * cost.forward_s)
    up, *_ = costs(pricer(net(), busy(), rows=ROWS * 3), "linear")
    assert up.forward_s == pytest.approx(3 * UP)
    up, *_ = costs(pricer(net(), busy(), tp=2), "linear", "colwise")
    assert (up.forward_s, up.backward_s) == pytest.approx((UP / 2, UP / 2))
    (attention,) = costs(pricer(net(), busy(), tp=2), "scaled_dot_product_attention", "heads")
    assert attention.forward_s == pytest.approx(SCORES)
    found = pricer(net(), moving(), tp=3)
    op = next(op for op in found.graph.ops if op.short == "linear")
    assert WIDTH == 8
    assert found.numel(op.operands[0], Placement("S", 2)) == ROWS * LENGTH * 3


def test_products_of_unaligned_activations_are_slow_where_the_target_says() -> None:
    """Heads of 4, a length of 6: no multiples of 8. Products with weights are as ever."""
    batch = (torch.empty(ROWS, LENGTH, WIDTH),) * 2
    of = cut(Net(written=True), batch, F.mse_loss, precision="bf16")
    slow = dataclasses.replace(EAGER, unaligned_products=0.25)
    for target, times in ((EAGER, 1), (slow, 4)):
        found = pricer(of, busy(), precision="bf16", target=target)
        for cost in costs(found, "matmul"):
            assert (cost.forward_s, cost.backward_s) == pytest.approx(
                (times * SCORES, times * 2 * SCORES)
            )
        up, *_ = costs(found, "linear")
        assert up.forward_s == pytest.approx(UP)
    (exact, _) = costs(pricer(net(written=True), busy(), target=slow), "matmul")
    assert exact.forward_s == pytest.approx(SCORES)


GELU = 4 * ROWS * LENGTH * WIDE


def test_a_target_may_move_bytes_faster() -> None:
    faster = dataclasses.replace(EAGER, stream_speed=2.0)
    (gelu,) = costs(pricer(net(), moving(), target=faster), "gelu")
    assert (gelu.forward_s, gelu.backward_s) == pytest.approx((GELU, 1.5 * GELU))


def test_a_pointwise_kernel_reads_and_writes_and_views_move_nothing() -> None:
    """Backward: the result's gradient, the saved input, the input's gradient."""
    (gelu,) = costs(pricer(net(), moving()), "gelu")
    assert (gelu.forward_s, gelu.backward_s) == pytest.approx((2 * GELU, 3 * GELU))
    found = pricer(net(), moving())
    views = [c for short in ("view", "transpose", "chunk") for c in costs(found, short)]
    assert len(views) == 4
    assert not any(c.forward_s or c.backward_s for c in views)


def test_what_a_fused_kernel_makes_stays_in_registers() -> None:
    with torch.device("meta"):
        model = with_forward(lambda self, x: self.l(F.gelu(self.l(x) * 2.0)))
        of = cut(model, (torch.empty(ROWS, WIDTH),) * 2, F.mse_loss, precision="fp32")
    ops = tuple(op for block in of.graph.blocks for op in block.ops)
    whole = dataclasses.replace(of.graph.blocks[0], ops=ops, inputs=(), outputs=())
    of = dataclasses.replace(of, graph=dataclasses.replace(of.graph, blocks=(whole,)))
    size = 4 * ROWS * WIDTH
    for fusion, scaled, gelu in (("none", 2, 2), ("pointwise", 1, 1)):
        found = pricer(of, moving(), fusion=fusion)
        assert costs(found, "mul")[0].forward_s == pytest.approx(scaled * size)
        assert costs(found, "gelu")[0].forward_s == pytest.approx(gelu * size)
    # what was timed of an operator by itself says nothing about its part of a fused kernel
    known = pricer(of, moving(), fusion="pointwise", profile=Measured("measured"))
    assert costs(known, "linear")[0].measured_s == 3
    assert not costs(known, "mul")[0].measured_s and not costs(known, "gelu")[0].measured_s


def hosted() -> Cluster:
    on = cluster(4)
    return dataclasses.replace(on, device=dataclasses.replace(on.device, host_overhead_s=1.0))


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_the_host_issues_every_operator(scale: float) -> None:
    """A product's backward is two kernels, a view costs less, what joins a kernel nothing."""
    found = pricer(net(), hosted(), target=dataclasses.replace(EAGER, host_scale=scale))
    (gelu,), up, (view,) = (costs(found, short) for short in ("gelu", "linear", "view"))
    assert (gelu.forward_host_s, gelu.backward_host_s) == pytest.approx((scale, scale))
    assert (up[0].forward_host_s, up[0].backward_host_s) == pytest.approx((scale, 2 * scale))
    assert view.forward_host_s == pytest.approx(VIEW_HOST_SHARE * scale)


class Measured(OpProfile):
    def __init__(self, label: str) -> None:
        self.label = label

    def op(self, signature_text: str) -> tuple[float, float, str]:
        return 1.0, 2.0, self.label

    def collective(self, kind: str, nbytes: float, size: int, per_node: int) -> tuple[float, str]:
        return 5.0, self.label


def test_measurements_come_before_models() -> None:
    for label, field in (("measured", "measured_s"), ("interpolated", "interpolated_s")):
        found = pricer(net(), busy(), profile=Measured(label))
        *_, cost = costs(found, "linear")
        assert (cost.forward_s, cost.backward_s) == (1, 2)
        assert getattr(cost, field) == cost.measured_s + cost.interpolated_s == 3
        assert cost.weight_s == pytest.approx(1)  # half of the backward, as modelled
    split = pricer(net(), busy(), tp=2, profile=Measured("measured"))
    assert split.comm("forward_s", "all_reduce", 8.0).seconds == 5
    # signatures hold whole sequences
    up, *_ = costs(pricer(net(), busy(), cp=2, profile=Measured("measured")), "linear")
    assert up.forward_s == pytest.approx(UP / 2)
