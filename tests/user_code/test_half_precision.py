"""Half precision as `torch.autocast` has it: inputs and buffers are not rounded, operators cast.

Gradients in bf16 miss those in fp32 by no more than torch's own autocast does, within a factor.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, ParallelModel
from tests.helpers import tiny
from tests.helpers.tiers import tiered

ROWS, WIDTH, LENGTH = 4, 16, 8
HERE = Cluster.local(1, "cpu", measure=False)
FACTOR = 1.5  # on torch's own error: parameters are rounded before a sum, not after


class Model(nn.Module):
    """A layer inside, and one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Denoiser(Model):
    """A diffusion model's head: sines of timesteps up to 1,000, which bf16 can't tell apart."""

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-math.log(1e3) * torch.arange(WIDTH // 2) / WIDTH * 2)
        angles = t[:, None] * rates
        embedded = torch.cat([angles.sin(), angles.cos()], -1)
        return F.mse_loss(self.out(F.silu(self.inside(embedded)) + x), y)


class Positions(Model):
    """Positions as a float buffer, which multiply what a product made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(500.0, 500.0 + LENGTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turned = (self.places[:, None] * 0.7).sin()
        return F.mse_loss(self.out(self.inside(x) * turned), y)


class Counting(Positions):
    """A float buffer that the forward counts up: 256 + 1 is 256 in bf16."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.places += 1
        return super().forward(x, y)


class Spectral(Model):
    """A Fourier transform, which has no kernel in bf16, between products."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inside(x)
        return F.mse_loss(self.out(F.layer_norm(torch.fft.fft(h).real + h, (WIDTH,))), y)


class Frozen(nn.Module):
    """A frozen batch norm of buffers behind a convolution: fp32 meets the next convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(LENGTH, LENGTH, 1), nn.Conv1d(LENGTH, LENGTH, 1)
        self.register_buffer("scale", torch.rand(LENGTH, 1) + 0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.b((self.a(x) * self.scale).relu()), y)


class Recurrent(Model):
    """An LSTM on what a buffer made float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("mean", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.out(self.inside(x - self.mean)[0]), y)


class Relative(Model):
    """Attention with a float32 bias of positions, as Transformer-XL adds."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, 3 * WIDTH)
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        self.register_buffer("bias", -0.1 * distance.abs().float())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inside(x).chunk(3, -1)
        scores = torch.einsum("bid,bjd->bij", q, k) / WIDTH**0.5 + self.bias
        return F.mse_loss(self.out(torch.bmm(scores.softmax(-1), v)), y)


def sequences(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"x": torch.randn(ROWS, LENGTH, WIDTH), "y": torch.randn(ROWS, LENGTH, WIDTH)}


def noise(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    x, y = torch.randn(2, ROWS, WIDTH)
    return {"x": x, "t": torch.tensor([3.0, 411.0, 713.0, 997.0]), "y": y}


CASES = (Denoiser, Positions, Counting, Spectral, Frozen, Recurrent, Relative)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def gradients(model: nn.Module, batch: Any, precision: torch.dtype | None) -> torch.Tensor:
    enabled = precision is not None
    with torch.autocast("cpu", dtype=precision or torch.bfloat16, enabled=enabled):
        loss = model(**batch)
    loss.backward()
    return torch.cat([p.grad.flatten().float() for p in model.parameters()])


def planned(
    model: nn.Module, batch: Any, precision: str | None, *, on: Cluster = HERE, parts: int = 1
) -> ParallelModel:
    given = {"example_inputs": batch, "loss_fn": None, "global_batch_size": ROWS}
    given |= {"precision": precision, "overrides": Overrides(num_microbatches=parts)}
    return tiny.planned(model, cluster=on, **given)


CAST = (Denoiser, Spectral, Frozen, Recurrent)


@pytest.mark.parametrize(
    "build",
    tiered(
        CASES,
        CAST.__contains__,
        "buffers stay before a convolution and an LSTM, and come back in their own dtype below",
        lambda build: build.__name__,
    ),
)
def test_half_precision_misses_no_more_than_autocast(build: Callable[[], nn.Module]) -> None:
    batch = noise(1) if build is Denoiser else sequences(1)
    exact = gradients(built(build), batch, None)
    try:
        autocast = gradients(built(build), batch, torch.bfloat16)
    except RuntimeError as error:  # torch's own, of processors that its kernels don't know
        if "primitive descriptor" not in str(error):
            raise
        pytest.skip("torch has no bf16 kernel for this on this processor")
    made = planned(built(build), batch, "bf16")
    made.train_step(batch)
    held = dict(made.named_parameters())
    ours = torch.cat([held[n].grad.flatten() for n, _ in built(build).named_parameters()])

    def error(of: torch.Tensor) -> float:
        return float((of - exact).norm() / exact.norm())

    assert error(ours) <= FACTOR * error(autocast) + 1e-3
    assert error(ours) > 1e-6  # it is bf16


def test_buffers_come_back_in_their_own_dtype() -> None:
    model = built(Counting)
    places = model.places.clone()
    batch = sequences(1)
    made = planned(model, batch, "bf16", parts=2)
    for _ in range(2):
        made.train_step(batch)
    after = made.full_state_dict()["places"]
    assert after.dtype == torch.float32
    assert torch.equal(after, places + 2)  # once a step


def test_the_default_precision_on_the_cpu_is_fp32() -> None:
    batch = sequences(1)
    assert planned(built(Positions), batch, None).plan.precision == "fp32"
    on_gpus = planned(built(Positions), batch, None, on=Cluster.from_catalog("h100-sxm"))
    assert on_gpus.plan.precision == "bf16"
