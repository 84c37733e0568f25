"""Products in 8 bits: which, and their seconds by hand where one resource alone costs time."""

import dataclasses
from collections import OrderedDict
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Op
from meshwright.costmodel.operators.cost import Cost
from meshwright.costmodel.rules import is_narrow
from meshwright.costmodel.sharding.strategies import strategies
from meshwright.costmodel.targets import COMPILED, EAGER, MEGATRON
from meshwright.profiles.cluster import Cluster, Device
from meshwright.profiles.hardware.curve import Curve
from tests.costmodel.operators.test_pricing import ENDLESS, moving, pricer
from tests.helpers.planning import Traced, cluster, cut

ROWS, WIDTH, WIDE, ODD = 32, 64, 128, 24
# bytes of an element: read 2 for the largest number, 2 and written 2 for the quotient, read 2 and
# written 1 for the cast; two passes where kernels are fused; one that writes both ways
EAGER_CAST, FUSED_CAST, DELAYED_CAST, TRANSPOSED = 9.0, 5.0, 4.0, 2.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH, bias=False)
        self.aside = nn.Linear(WIDTH, ODD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x))) + self.aside(x).sum(-1, keepdim=True)


@cache
def net() -> Traced:
    model = nn.Sequential(OrderedDict(
        first=nn.Linear(WIDTH, WIDTH), layers=nn.Sequential(Layer(), Layer()),
        head=nn.Linear(WIDTH, WIDTH),
    ))  # fmt: skip
    batch = (torch.empty(ROWS, WIDTH, device="meta"),) * 2
    return cut(model.to("meta"), batch, F.mse_loss, precision="fp8")


def op_of(module: str) -> Op:
    return next(op for op in net().graph.ops if op.short == "linear" and op.module == module)


def cost(module: str, on: Cluster, precision: str = "fp8", **given: Any) -> Cost:
    made = pricer(net(), on, precision=precision, rows=ROWS, **given)
    whole = strategies(made.graph, made.table, op_of(module), 1)[0]
    return made.op_cost(op_of(module), whole)


def test_layers_products_with_even_sides_are_in_8_bits() -> None:
    graph = net().graph
    found = {op.module for op in graph.ops if is_narrow(graph, op)}
    assert found == {f"layers.{k}.{name}" for k in range(2) for name in ("up", "down")}


def test_products_take_the_units_of_their_precision() -> None:
    """8 bits where the device has them, at twice the rate here, 4 at four times; the head in 16."""
    base = cluster(1, flops=1.0, memory_bandwidth=ENDLESS)
    rates = {"fp32": 1.0, "bf16": 1.0, "fp8": 2.0, "fp4": 4.0}
    eight = dataclasses.replace(base, device=dataclasses.replace(base.device, peak_flops=rates))
    flops = 2 * ROWS * WIDTH * WIDE
    for on, precision, seconds in (
        (eight, "fp8", flops / 2), (eight, "fp8_rowwise", flops / 2), (eight, "mxfp8", flops / 2),
        (eight, "nvfp4", flops / 4), (eight, "bf16", flops),
        (base, "fp8", flops), (base, "nvfp4", flops),
    ):  # fmt: skip
        found = cost("layers.0.up", on, precision)
        assert found.forward_s == pytest.approx(seconds)
        assert (found.backward_s, found.weight_s) == pytest.approx((2 * seconds, seconds))
    assert cost("head", eight).forward_s == 2 * ROWS * WIDTH * WIDTH


def test_efficiency_in_8_bits_is_that_of_16_bits_of_as_many_seconds() -> None:
    curve = Curve(points=((1e3, 0.1), (1e6, 0.4)))
    device: Device = dataclasses.replace(
        cluster(1).device,
        peak_flops={"fp32": 1.0, "bf16": 2.0, "fp8": 6.0},
        matmul_efficiency=curve,
    )
    assert device.product_rate("fp8", 3e5) == pytest.approx(3 * device.product_rate("bf16", 1e5))
    assert device.fastest == "bf16"


@pytest.mark.parametrize(
    ("target", "precision", "forward", "of_input", "of_weight"),
    [
        (EAGER, "fp8", (EAGER_CAST, EAGER_CAST, 0),
         (0, EAGER_CAST + TRANSPOSED, EAGER_CAST), (EAGER_CAST + TRANSPOSED, 0, TRANSPOSED)),
        (EAGER, "fp8_rowwise", (EAGER_CAST, EAGER_CAST, 0),
         (0, EAGER_CAST + TRANSPOSED, EAGER_CAST),
         (EAGER_CAST + TRANSPOSED, 0, EAGER_CAST + TRANSPOSED)),
        (EAGER, "mxfp8", (EAGER_CAST, EAGER_CAST, 0),
         (0, EAGER_CAST + TRANSPOSED, EAGER_CAST),
         (EAGER_CAST + TRANSPOSED, 0, EAGER_CAST + TRANSPOSED)),
        (EAGER, "nvfp4", (8.5, 8.5, 0), (0, 8.5 + 1, 8.5), (8.5 + 1, 0, 8.5 + 1)),
        (COMPILED, "nvfp4", (4.5, 4.5, 0), (0, 4.5, 4.5), (4.5, 0, 4.5)),
        (MEGATRON, "nvfp4", (3, 0, 0), (0, 0, 3), (0, 0, 0)),
        (COMPILED, "fp8", (FUSED_CAST, FUSED_CAST, 0), (0, FUSED_CAST, FUSED_CAST),
         (FUSED_CAST, 0, 0)),
        (MEGATRON, "fp8", (DELAYED_CAST, 0, 0), (0, 0, DELAYED_CAST), (0, 0, 0)),
    ],
)  # fmt: skip
def test_casts_move_bytes(
    target: Any, precision: str, forward: Any, of_input: Any, of_weight: Any
) -> None:
    """Beside the product's own: operands of 8 bits or 4, results of 16."""
    x, w, y = ROWS * WIDTH, WIDTH * WIDE, ROWS * WIDE
    own = (x + w) * (0.5 if precision == "nvfp4" else 1) + 2 * y

    def bytes_of(each: tuple[float, float, float]) -> float:
        return each[0] * x + each[1] * w + each[2] * y

    found = cost("layers.0.up", moving(), precision, target=target)
    assert found.forward_s == pytest.approx(own + bytes_of(forward))
    assert found.weight_s == pytest.approx((own + bytes_of(of_weight)) * target.defers_weights)
    assert found.backward_s == pytest.approx(2 * own + bytes_of(of_input) + bytes_of(of_weight))
