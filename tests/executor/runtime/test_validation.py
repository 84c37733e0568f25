"""Steps that are validated afterwards train what clipping first trains, to the bit.

One launch (`validation_worker.py`) on four ranks: schedules, ZeRO, precisions, buffers, parameters
of two stages, gradients that are clipped in some steps, and in fp16 not finite in some.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from meshwright.executor.errors import StateError
from meshwright.executor.runtime.losses import PendingScalar
from meshwright.executor.runtime.undoable import UndoableStep
from tests.executor.runtime.validation_worker import CELLS, HALF, WORLD
from tests.helpers.launching import Results, results_of
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import store

TIMEOUT_S = 300


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("validation")
    store(folder, CELLS)
    worker = Path(__file__).with_name("validation_worker.py")
    return results_of(worker, folder, ranks=WORLD, timeout_s=TIMEOUT_S, name="-validation")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_what_is_trained_is_the_same(launched: Results, cell: Cell) -> None:
    found = launched[cell.name]
    assert found["after"] == found["first"]  # losses, norms, skipped steps, rates, the scale
    assert found["state"] == 0  # weights, buffers and moments
    assert found["evaluated"][0] == found["evaluated"][1]
    assert len(set(found["ahead"])) == len(set(found["undone"])) == 1  # all ranks decide alike
    assert found["ahead"][0] > found["undone"][0] > 0
    norms = found["first"]["norms"]
    assert min(x for x in norms if x) < found["max_norm"] < max(norms)


def test_a_gradient_that_leaves_fp16_undoes_a_step(launched: Results) -> None:
    """More steps are undone than were clipped."""
    found = launched["-".join(HALF.split())]
    clipped = sum(x > found["max_norm"] for x in found["first"]["norms"])
    assert found["after"]["skipped"] > 4
    assert found["undone"][0] > clipped


def test_a_run_is_the_same(launched: Results) -> None:
    """Logged losses and norms, checkpoints, and a run that goes on from one."""
    found = launched["fit"]
    one, two, again = found["one"], found["two"], found["one again"]
    assert (one["loss"], one["rows"]) == (two["loss"], two["rows"])
    assert one["rows"][2:] == again["rows"]
    assert found["state"] == found["state again"] == 0
    assert one["ahead"] > 0
    assert two["ahead"] == 0


def test_an_optimizer_of_whole_tensors_is_refused(launched: Results) -> None:
    assert "train_step: optimizer" in launched["refused"]["said"]


# --- on one process ------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor_rate", [False, True])
def test_a_step_is_undone_and_made_again(tensor_rate: bool) -> None:
    """With the gradients and the rate of then, whatever a schedule made of it since."""

    def made() -> tuple[nn.Module, optim.Optimizer, LambdaLR]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        rate = torch.tensor(0.1) if tensor_rate else 0.1
        optimizer = optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, foreach=False)
        schedule = LambdaLR(optimizer, lambda k: 1 / (1 + k))
        for k in range(2):
            _gradients(model, k, 1.0)
            optimizer.step()
            schedule.step()
        return model, optimizer, schedule

    (model, optimizer, schedule), (other, its, its_schedule) = made(), made()
    step = UndoableStep.of(optimizer)
    _gradients(model, 2, 1.0)
    step.step()
    schedule.step()
    step.undo()
    _gradients(model, 2, 0.5)
    step.step_again()
    _gradients(other, 2, 0.5)
    its.step()
    its_schedule.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for name, x in optimizer.state[ours].items():
            assert torch.equal(x, its.state[theirs][name])
    assert optimizer.param_groups[0]["lr"] == its.param_groups[0]["lr"]


def test_gradients_of_a_step_are_its_own() -> None:
    """Whatever was made of `.grad` since; but not if their memory was written."""
    model = nn.Linear(3, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    _gradients(model, 0, 1.0)
    mine = [p.grad for p in model.parameters()]
    step = UndoableStep.of(optimizer)
    step.step()
    optimizer.zero_grad()
    with step.own_gradients():
        assert all(p.grad is own for p, own in zip(model.parameters(), mine, strict=True))
    assert all(p.grad is None for p in model.parameters())
    mine[0].zero_()
    with pytest.raises(StateError, match="were written before"), step.own_gradients():
        raise AssertionError


def _gradients(model: nn.Module, k: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(k)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator)


def test_a_number_on_its_way_is_waited_for_when_it_is_read() -> None:
    asked: list[int] = []

    def read() -> torch.Tensor:
        asked.append(1)
        return torch.tensor(2.5)

    loss = PendingScalar.of(read)
    assert isinstance(loss, torch.Tensor)
    kept = loss.detach()
    assert not asked
    assert float(kept) == 2.5
    assert float(loss * 2) == float(2 * loss) == 5.0
    assert loss.item() == 2.5
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert torch.stack([loss, loss]).tolist() == [2.5, 2.5]
    assert f"{loss:.1f}" == "2.5"
    assert asked
