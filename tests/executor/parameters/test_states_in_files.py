"""Optimizer states in files train as on one device, and lie there and not in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from meshwright.executor.states_in_files import (
    FOLDER_VARIABLE,
    in_file,
    keep_states_in_files,
    lies_in_file,
)
from tests.executor.parameters.files_worker import BESIDE, CELLS, RESIDENT, SAVED, WORLD
from tests.helpers.launching import Results, results_of
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import store

TOLERANCE = {"fp32": 1e-5, "bf16": 32 * 2**-8, "fp16": 32 * 2**-11}
ADAM = 4 + 8  # bytes of an element in files: weight and moments
PAGE = 4096


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("files")
    store(folder, [*CELLS, *RESIDENT, SAVED, BESIDE])
    worker = Path(__file__).with_name("files_worker.py")
    return results_of(worker, folder, ranks=WORLD, timeout_s=300, name="")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_training_equals_one_device(cell: Cell, results: Results) -> None:
    found, tolerance = results[cell.name], TOLERANCE[cell.precision]
    assert found["names"] == []
    assert found["loss"] <= tolerance
    assert found["gradient"][0] <= tolerance, found["gradient"]
    assert found["state"][0] <= tolerance, found["state"]


@pytest.mark.parametrize("cell", RESIDENT, ids=lambda cell: cell.name)
def test_weights_and_moments_lie_in_files_and_not_in_memory(cell: Cell, results: Results) -> None:
    found = results[f"resident_{cell.name}"]
    assert found["whole"] and found["weights"] and all(found["states"])
    assert not any(found["gradients"])
    nbytes = ADAM * found["numel"]
    assert nbytes <= found["mapped"] <= nbytes + PAGE * found["files"]
    assert found["resident"] == 0


def test_states_of_other_optimizers_lie_there_too(results: Results) -> None:
    for states in results["others"].values():
        assert states and all(states)


def test_checkpoints_go_on_with_and_without_files(results: Results) -> None:
    found = results["checkpoint"]
    assert found["difference"] <= 1e-6
    assert found["loaded"] and all(found["loaded"])


def test_folders_that_will_not_do_are_named(results: Results) -> None:
    missing, unsaid = results["refused"]["said"]
    assert "MESHWRIGHT_NVME" in missing and "No such file" in missing
    assert "of which no folder is known" in unsaid


# --- in this process ------------------------------------------------------------------------------


@pytest.fixture
def parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Parameter:
    """A parameter in a file, with a gradient."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    keep_states_in_files()
    made = torch.nn.Parameter(in_file(torch.arange(6.0)))
    made.grad = torch.ones(6)
    return made


class Odd(torch.optim.Optimizer):
    """Keeps a moment in bf16 and one that it asks for on the host; raises unless told not to."""

    raises = True

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            own = torch.zeros_like(p, dtype=torch.bfloat16)
            self.state[p] |= {"own": own, "here": torch.zeros_like(p, device="cpu")}
        if self.raises:
            raise ArithmeticError


def test_states_are_of_the_dtype_that_is_asked_for(parameter: torch.nn.Parameter) -> None:
    optimizer = Odd([parameter])
    optimizer.raises = False
    optimizer.step()
    state = optimizer.state[parameter]
    assert state["own"].dtype == torch.bfloat16 and lies_in_file(state["own"])
    assert state["here"].dtype == torch.float32 and lies_in_file(state["here"])
    assert not state["own"].any()


def test_a_step_that_raises_leaves_nothing_to_the_next(parameter: torch.nn.Parameter) -> None:
    with pytest.raises(ArithmeticError):
        Odd([parameter]).step()
    other = torch.nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.AdamW([other]).step()
    assert _get_current_dispatch_mode() is None
    optimizer = torch.optim.AdamW([parameter], lr=0.5, weight_decay=0.0)
    optimizer.step()
    assert lies_in_file(optimizer.state[parameter]["exp_avg"])
    assert torch.allclose(parameter.detach(), torch.arange(6.0) - 0.5)
