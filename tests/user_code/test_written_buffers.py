"""Buffers and weights that the forward writes without reading rows are written once a step, under
every plan: losses, weights and buffers of three steps are one device's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.costmodel.sharding import written_once
from meshwright.planner.tracing.trace import trace
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.user_code.two_ranks import PLANS

ROWS, WIDTH, STEPS, RATE = 8, 8, 3, 0.1


class Counting(nn.Module):
    """Warms up by a counter of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.last(F.relu(self.first(x))) * torch.clamp(self.n / 10, max=1.0)


class Annealed(Counting):
    """Multiplies a temperature after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.last(F.relu(self.first(x))) / self.temperature.clone()
        self.temperature.mul_(0.9)
        return out


class Averaging(Counting):
    """Keeps an average of its own weights, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", self.first.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.lerp_(self.first.weight, 0.5)
        return self.last(F.relu(F.linear(x, self.first.weight - 0.5 * self.average)))


def spectral() -> nn.Module:
    """Vectors of a power iteration on the weights."""
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(normed, nn.ReLU(), nn.Linear(WIDTH, 4))


class Mixed(Counting):
    """A counter beside statistics of rows, which stay each micro-batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        hidden = F.relu(self.first(x))
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return self.last(hidden) * torch.clamp(self.n / 10, max=1.0)


class Clamped(Counting):
    """Writes its own weights before it reads them, in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.first.weight.data.clamp_(-0.1, 0.1)
            with torch.no_grad():
                self.last.weight.mul_(0.9)
        return self.last(F.relu(self.first(x)))


class Kept(Counting):
    """Writes a tensor in a plain attribute, and a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(WIDTH)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9)
        self.centre = (0.5 * self.centre + 0.1 * self.first.weight.mean(0)).detach()
        return self.last(F.relu(self.first(x - self.centre))) * self.scale


MODELS = {
    "clamped weights": Clamped,
    "counter": Counting, "annealed": Annealed, "average": Averaging, "spectral norm": spectral,
    "beside statistics": Mixed, "kept": Kept,
}  # fmt: skip
NOT_ONCE = {"mean"}
# by model of the change tier, its plan
FIRST = {
    "clamped weights": "zero3", "counter": "tp2", "annealed": "dp2", "average": "pp2",
    "spectral norm": "pp2 zb", "beside statistics": "tp2", "kept": "zero2",
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=draw)
    return x, torch.randint(0, 4, (ROWS,), generator=draw)


def of_one_device(name: str, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, (x, y), losses = made(name), batch(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def planned(name: str, ranks: int, plan: dict[str, Any]) -> Any:
    return auto_parallelize(
        made(name),
        Cluster.local(ranks, "cpu", measure=False),
        example_inputs=batch(),
        global_batch_size=ROWS,
        loss_fn=F.cross_entropy,
        precision="fp32",
        overrides=Overrides(**plan),
    )


def trained(name: str, ranks: int, plan: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    result = planned(name, ranks, plan)
    optimizer = torch.optim.SGD(result.parameters(), lr=RATE)
    losses = [
        float(result.train_step(batch(), optimizer=optimizer, max_grad_norm=None).detach())
        for _ in range(STEPS)
    ]
    return losses, copy.deepcopy(result.full_state_dict())


def check(name: str, losses: list[float], state: dict[str, Any]) -> None:
    expected, tensors = of_one_device(name)
    assert losses == pytest.approx(expected, rel=1e-5)
    for fqn, x in tensors.items():
        if fqn not in NOT_ONCE:
            torch.testing.assert_close(state[fqn], x, rtol=1e-4, atol=1e-5, msg=fqn)


@pytest.mark.parametrize(
    "name", tiered(MODELS, ("counter").__eq__, "each is run in micro-batches on two ranks")
)
def test_on_one_device_in_micro_batches(name: str) -> None:
    check(name, *trained(name, 1, {"num_microbatches": 4}))


ONCE = second_tier("each model and each plan is run once")


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, id=f"{name}-{plan}", marks=() if FIRST[name] == plan else ONCE)
        for name in MODELS
        for plan in PLANS
    ],
)
def test_on_two_ranks(name: str, plan: str) -> None:
    check(name, *on_ranks(2, trained, name, 2, PLANS[plan]))


def test_steps_that_may_be_undone_write_no_weights() -> None:
    with pytest.raises(
        ValueError, match=r"post_validation=True: the forward writes weights \(.*py:"
    ):
        planned("clamped weights", 2, {**PLANS["pp2"], "post_validation": True})


def test_an_evaluation_writes_no_weights() -> None:
    result = planned("clamped weights", 1, {})
    loss, model = float(result.eval_step(batch()).detach()), made("clamped weights").eval()
    assert loss == pytest.approx(float(F.cross_entropy(model(batch()[0]), batch()[1])), rel=1e-6)


class Following(Counting):
    """Buffers that follow one of rows, a draw, and nothing of the batch."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "before", "drawn"):
            self.register_buffer(name, torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x))
        with torch.no_grad():
            self.before.copy_(self.mean)
            self.mean.lerp_(hidden.mean(0), 0.1)
            self.drawn.copy_(F.dropout(torch.ones(WIDTH), 0.5))
            self.n += 1
        return self.last(hidden + self.before) + self.drawn.mean()


def resumed(folder: str) -> list[float]:
    """Losses under ZeRO-2, and of a pipeline that goes on from its checkpoint."""
    losses = []
    for plan in ("zero2", "pp2"):
        result = planned("kept", 2, PLANS[plan])
        optimizer = torch.optim.SGD(result.parameters(), lr=RATE)
        if losses:
            result.load_checkpoint(folder, optimizer=optimizer)
        for _ in range(STEPS):
            losses.append(float(result.train_step(batch(), optimizer=optimizer).detach()))
        result.save_checkpoint(folder, optimizer=optimizer)
    return losses


def test_a_checkpoint_has_what_no_state_dict_has(tmp_path: Path) -> None:
    expected, _ = of_one_device("kept", 2 * STEPS)
    assert on_ranks(2, resumed, str(tmp_path / "kept")) == pytest.approx(expected, rel=1e-5)


def test_what_follows_rows_or_draws_is_written_in_each_micro_batch() -> None:
    graph = trace(Following(), batch(), loss_fn=F.cross_entropy, batch_size=ROWS)
    assert {graph.buffers[value] for value in written_once(graph)} == {"n"}


def test_the_report_names_them() -> None:
    lines = planned("beside statistics", 1, {"num_microbatches": 4}).report.assumptions
    assert "buffers n are written once a step" in lines
    assert "buffers mean are written in each micro-batch, by its rows" in lines
