"""A ParallelModel of one rank: its steps, names, state and checkpoints against the plain model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Overrides, ParallelModel
from tests.helpers.tiny import ROWS, Net, batch, loss, net, planned


def plain_gradients(model: nn.Module, inputs: Any, targets: Any) -> tuple[float, dict[str, Any]]:
    model = copy.deepcopy(model)
    value = loss(model(inputs), targets)
    value.backward()
    return value.item(), {name: p.grad for name, p in model.named_parameters()}


# --- running on one device -----------------------------------------------------------------------


@pytest.mark.parametrize(("tied", "microbatches"), [(False, 1), (True, 4)])
def test_a_step_is_the_plain_step(tied: bool, microbatches: int) -> None:
    model = net(tied=tied)
    expected, gradients = plain_gradients(model, *batch(ROWS))
    result = planned(model, overrides=Overrides(num_microbatches=microbatches))
    assert result.plan.num_microbatches == microbatches
    value = result.train_step(batch(ROWS))
    assert value.dtype == torch.float32 and value.shape == ()
    assert value.item() == pytest.approx(expected, rel=1e-6)
    found = {name: p.grad for name, p in result.named_parameters()}
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_gradients_add_up_over_steps() -> None:
    result = planned(net())
    result.train_step(batch(ROWS))
    once = {name: p.grad.clone() for name, p in result.named_parameters()}
    result.train_step(batch(ROWS))
    for name, p in result.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name])


def test_inputs_may_be_named() -> None:
    class Named(Net):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
            return {"loss": loss(super().forward(ids), labels)}

    torch.manual_seed(0)
    ids, labels = batch(ROWS)
    result = planned(Named(), example_inputs={"ids": ids[:4], "labels": labels[:4]}, loss_fn=None)
    expected, _ = plain_gradients(net(), ids, labels)
    given = {"labels": labels, "ids": ids}
    assert float(result.train_step(given)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("as_dict", [False, True])
def test_targets_may_come_apart(as_dict: bool) -> None:
    ids, targets = batch(ROWS)
    example = {"ids": ids[:4], "targets": targets[:4]} if as_dict else batch(4)
    inputs = {"ids": ids} if as_dict else ids
    result = planned(net(), example_inputs=example)
    expected, _ = plain_gradients(net(), ids, targets)
    assert float(result.train_step(inputs, targets)) == pytest.approx(expected, rel=1e-6)
    assert float(result.train_step(inputs, targets=targets)) == pytest.approx(expected, rel=1e-6)


def test_a_loss_may_be_a_module() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5))
    x, y = torch.randn(ROWS, 6), torch.randint(0, 5, (ROWS,))
    for loss_fn in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)):
        result = planned(model, example_inputs=(x[:4], y[:4]), loss_fn=loss_fn)
        expected = loss_fn(model(x), y).item()
        assert float(result.train_step((x, y))) == pytest.approx(expected, rel=1e-6)


def test_a_loss_of_the_output_alone() -> None:
    model = nn.Linear(6, 5)
    x = torch.randn(ROWS, 6)
    result = planned(model, example_inputs=(x[:4],), loss_fn=lambda out: out.square().mean())
    expected = model(x).square().mean().item()
    assert float(result.train_step((x,))) == pytest.approx(expected, rel=1e-6)


# --- names and state -----------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norm (buffers), a buffer of its own, one that is not saved, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.b = nn.Linear(12, 5)
        self.a.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(1.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)) * self.scale + self.shift)


def normed() -> tuple[nn.Module, ParallelModel, Any]:
    torch.manual_seed(0)
    model = Normed()
    data = (torch.randn(ROWS, 6), torch.randint(0, 5, (ROWS,)))
    example = tuple(x[:4] for x in data)
    result = planned(
        model,
        example_inputs=example,
        loss_fn=F.cross_entropy,
        overrides=Overrides(num_microbatches=1),
    )
    return model, result, data


def test_state_goes_back_into_the_model() -> None:
    model, result, data = normed()
    plain = copy.deepcopy(model)
    result.train_step(data)
    torch.optim.SGD([p for p in result.parameters() if p.requires_grad], lr=0.1).step()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    F.cross_entropy(plain(data[0]), data[1]).backward()
    optimizer.step()
    for state in (result.state_dict(), result.full_state_dict()):
        fresh = Normed()
        fresh.load_state_dict(state)  # strict: the very same names
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(fresh.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_state_that_does_not_fit_is_named() -> None:
    result, state = planned(net()), net().state_dict()
    with pytest.raises(ValueError, match=r"missing 'head.weight'"):
        result.load_state_dict({n: x for n, x in state.items() if n != "head.weight"})
    with pytest.raises(ValueError, match=r"'head.weight' has shape \(2, 2\), the model"):
        result.load_state_dict({**state, "head.weight": torch.zeros(2, 2)})


def test_a_checkpoint_continues_bit_by_bit(tmp_path: Path) -> None:
    def start() -> tuple[ParallelModel, torch.optim.Optimizer]:
        torch.manual_seed(3)
        result = planned(net())
        return result, torch.optim.AdamW(result.parameters(), lr=1e-2)

    def steps(result: ParallelModel, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            optimizer.zero_grad()
            losses.append(float(result.train_step(batch(ROWS, seed))))
            optimizer.step()
        return losses

    straight, optimizer = start()
    steps(straight, optimizer, range(2))
    straight.save_checkpoint(str(tmp_path / "at2"), optimizer)
    expected = steps(straight, optimizer, range(2, 5))

    resumed, fresh = start()
    steps(resumed, fresh, range(7, 8))  # other weights and moments than those saved
    resumed.load_checkpoint(str(tmp_path / "at2"), fresh)
    assert steps(resumed, fresh, range(2, 5)) == expected
    for (name, p), (_, q) in zip(
        straight.named_parameters(), resumed.named_parameters(), strict=True
    ):
        assert torch.equal(p, q), name


# --- wrong batches -------------------------------------------------------------------------------


@cache
def alone() -> ParallelModel:
    return planned(net())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (batch(12), r"'0' has shape \(12, 6\); the plan expects \(8, 6\)"),
        ((batch(8)[0], batch(4)[1]), r"'1' has shape \(4, 6\); the plan expects \(8, 6\)"),
        ((batch(8)[0][:, :3], batch(8)[1]), r"'0' has shape \(8, 3\)"),
        (batch(8)[:1], r"missing \['1'\]; the model was planned with inputs"),
        ({"ids": batch(8)[0]}, "'ids'.*were not among example_inputs"),
        ((*batch(8), batch(8)[0]), r"\['2'\] were not among example_inputs.*inputs \['0', '1'\]"),
    ],
)
def test_a_wrong_batch_is_named(given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"batch: .*{says}"):
        alone().train_step(given)
