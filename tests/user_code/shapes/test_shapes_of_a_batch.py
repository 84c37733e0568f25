"""Batches of other sequence lengths and of fewer rows than planned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Cluster, Overrides, ParallelModel, auto_parallelize
from tests.helpers.launching import Results, results_of
from tests.user_code.shapes.shape_runs import ALONE, MEGATRON, ON_RANKS, RANKS, run

TOLERANCE = 2e-5
WIDTH = 8


@pytest.mark.parametrize("layout", ALONE)
@pytest.mark.parametrize("kind", MEGATRON)
def test_on_one_device(kind: str, layout: str) -> None:
    found = run(kind, ALONE[layout])
    assert max(found.values()) < TOLERANCE, found


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    worker = Path(__file__).with_name("shape_worker.py")
    return results_of(worker, tmp_path_factory.mktemp("shapes"), ranks=RANKS, timeout_s=400)


@pytest.mark.parametrize("key", [", ".join(cell) for cell in ON_RANKS])
def test_on_ranks(launched: Results, key: str) -> None:
    found = launched[key]
    assert "failed" not in found, found["failed"]
    assert max(found.values()) < TOLERANCE, found


class Tokens(nn.Module):
    """A token-wise model; sequences beyond 12 tokens take another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.second = 1.0, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * self.scale
        if x.shape[1] > 12:
            y = self.second(y).relu()
        return self.second(y).square().mean()


def planned(model: nn.Module, **options: Any) -> ParallelModel:
    given: dict[str, Any] = {
        "example_inputs": (torch.randn(4, 6, WIDTH),),
        "global_batch_size": 8,
        "cluster": Cluster.local(1, measure=False),
        "overrides": Overrides(num_microbatches=2),
    }
    return auto_parallelize(model, precision="fp32", **given | options)


def test_what_can_t_be_another_shape_of_the_planned_model_is_refused() -> None:
    result = planned(Tokens())
    for shape, why in (
        ((9, 6, WIDTH), r"\(9, 6, 8\); the plan expects \(8, 6, 8\) .*more rows than planned"),
        ((8, 6, WIDTH + 1), r"\(8, 6, 9\); .*can't be traced.*self.first"),
        ((8, 6), r"\(8, 6\); the plan expects \(8, 6, 8\)"),
        ((8, 0, WIDTH), "pad or drop rows"),
        ((8, 16, WIDTH), "the forward runs other operators"),
    ):
        with pytest.raises(ValueError, match=why):
            result.train_step((torch.randn(shape),))
    assert result.train_step((torch.randn(8, 12, WIDTH),)).isfinite()


def test_what_was_fixed_when_planning_stays_fixed_at_other_shapes() -> None:
    """Attributes are compared, and modes are the planned ones."""
    model = Tokens()
    result, x = planned(model), torch.randn(8, 5, WIDTH)
    model.scale = 2.0
    with pytest.raises(ValueError, match=r"model.scale was 1.0 .* is 2.0 now"):
        result.train_step((x,))
    model.scale = 1.0
    model.eval()
    evaluated = result.eval_step((x,))
    assert not model.training
    model.train()
    assert float(result.train_step((x,))) == pytest.approx(float(evaluated))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, weight: float, x: torch.Tensor) -> torch.Tensor:
        return weight * self.first(x).square().mean()


def test_numbers_stay_numbers_at_other_shapes() -> None:
    """Also where they are given as tensors."""
    model, x = Weighted(), torch.randn(8, 9, WIDTH)
    result = planned(model, example_inputs=(0.5, torch.randn(4, 6, WIDTH)))
    for weight in (torch.tensor(0.25), 0.25):
        wanted = float(model(0.25, x).detach())
        assert result.train_step((weight, x)).item() == pytest.approx(wanted)


def test_longer_sequences_than_fit_the_memory_are_refused() -> None:
    cluster = Cluster.local(1, measure=False)
    room = cluster.device.reserved_bytes + (4 << 20)
    device = dataclasses.replace(cluster.device, memory_bytes=room)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    result = planned(
        layers,
        cluster=dataclasses.replace(cluster, device=device),
        loss_fn=lambda output: output.square().mean(),
        memory_margin=0.0,
    )
    assert result.train_step((torch.randn(8, 100, WIDTH),)).isfinite()
    with pytest.raises(ValueError, match=r"\(8, 8000, 8\); the plan expects .*does not fit"):
        result.train_step((torch.randn(8, 8000, WIDTH),))
