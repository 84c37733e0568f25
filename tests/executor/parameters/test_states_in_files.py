"""Optimizer states in files train as on one device, and lie there and not in memory."""

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from meshwright.executor.errors import StateError
from meshwright.executor.parameters import local_of
from meshwright.executor.runtime.runtime import Runtime
from meshwright.executor.states_in_files import in_file, keep_states_in_files, lies_in_file
from meshwright.profiles.hardware.host import FOLDER_VARIABLE
from tests.executor.trained_cells import cells, goes_on_after_saves
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.models.models import CASES
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import assert_equal, built, compared, reference_of

CELLS = cells(
    "gpt2_tied pp2 m4 zb_h1 front host100 nvme40",
    """
    gpt2_tied dp2 m4 zero1 bf16 host80 nvme50
    gpt2_deep dp2 m2 full host100 weights60 nvme100
    gpt2_untied dp2 m2 host100 nvme100
    llama dp2 m2 zero2 full host100 nvme60
    mlp dp2 m2 zero2 fp16 host100 nvme50
    gpt2_deep tp2 m2 host100 nvme70
    gpt2_deep dp2 m2 bf16 host100 weights100 nvme100
    gpt2_tied dp2 m2 zero2 host100 weights100 nvme50
    """,
    "states of a pipeline in files and in host memory are kept",
)
WORLD = 2
ADAM = 4 + 8  # bytes of an element in files: weight and moments
PAGE = 4096
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
SAVED = Cell.parse("gpt2_tied dp2 m2 zero2 host80 nvme60")
BESIDE = Cell.parse("gpt2_tied dp2 m2 zero2")  # the same without


def with_files(folder: Path | str, function: Any, *arguments: Any) -> Any:
    """What a function returns where files of states go to a folder."""
    with mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(folder)}):
        return function(*arguments)


@pytest.mark.parametrize("cell", CELLS)
def test_training_equals_one_device(cell: Cell, tmp_path: Path) -> None:
    reference_of(cell)
    assert_equal(on_ranks(WORLD, with_files, tmp_path, compared, cell), cell.precision)


def moments(runtime: Runtime, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The states of parameters in files, all of which are there, too."""
    own = [p.api for p in runtime.stage_parameters if p.home == "file"]
    found = [x for p in own for x in optimizer.state[p].values() if x.dim()]
    assert all(map(lies_in_file, found))
    return found


def trained(cell: Cell, make: Any = ADAMW) -> tuple[Runtime, torch.optim.Optimizer]:
    case, runtime = CASES[cell.case], built(cell)
    optimizer = make(runtime.parameters())
    for step in range(2):
        optimizer.zero_grad()
        runtime.train_step(case.batch(cell.rows, step))
        optimizer.step()
    return runtime, optimizer


def resident(cell: Cell) -> None:
    """Weights and moments lie in files after two steps, gradients don't, and no page of the files
    is in memory."""
    runtime, optimizer = trained(cell)
    own = [p for p in runtime.stage_parameters if p.home == "file"]
    states = moments(runtime, optimizer)
    assert len(own) == len([p for p in runtime.stage_parameters if p.trainable])
    assert len(states) == 2 * len(own)
    assert all(lies_in_file(p.api) for p in own)
    assert not any(lies_in_file(p.api.grad) for p in own)
    there = _mappings()
    at = [local_of(x.detach()).data_ptr() for x in (*(p.api for p in own), *states)]
    nbytes = ADAM * sum(p.stored.numel() for p in own)
    assert nbytes <= sum(there[x][0] for x in at) <= nbytes + PAGE * len(at)
    assert not sum(there[x][1] for x in at)


def _mappings() -> dict[int, tuple[int, int]]:
    """Bytes of each mapping of a file of states, and those of them in memory, by its address."""
    found: dict[int, tuple[int, int]] = {}
    start, size = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            start = int(words[0].split("-")[0], 16) if "meshwright-states-" in line else 0
        elif start and words[0] == "Size:":
            size = 1024 * int(words[1])
        elif start and words[0] == "Rss:":
            found[start] = size, 1024 * int(words[1])
    return found


@pytest.mark.parametrize(
    "zero",
    tiered((0, 1, 2), lambda zero: zero == 2, "stages 0 and 1 differ from 2 in gradients alone"),
)
def test_weights_and_moments_lie_in_files_and_not_in_memory(zero: int, tmp_path: Path) -> None:
    cell = Cell.parse(f"gpt2_tied dp2 m2 zero{zero} host100 nvme100")
    on_ranks(WORLD, with_files, tmp_path, resident, cell)


def others() -> None:
    """Optimizers that make their states of gradients have them in files after a step."""
    for make in (
        partial(torch.optim.SGD, momentum=0.9),
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.AdamW, foreach=True),
    ):
        assert moments(*trained(SAVED, partial(make, lr=1e-3))), make.keywords


@second_tier("AdamW's moments in files are kept, and states of any dtype on one process")
def test_states_of_other_optimizers_lie_there_too(tmp_path: Path) -> None:
    on_ranks(WORLD, with_files, tmp_path, others)


def moments_lie_in_files(runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
    own = [p for p in runtime.stage_parameters if p.home == "file"]
    assert len(moments(runtime, optimizer)) == 2 * len(own)


@second_tier("checkpoints of states in memory, and moments in files after steps, are kept")
def test_checkpoints_go_on_with_and_without_files(tmp_path: Path) -> None:
    runs = tmp_path, goes_on_after_saves, tmp_path, SAVED, BESIDE, moments_lie_in_files
    on_ranks(WORLD, with_files, *runs)


def refused(folder: Path) -> None:
    """Folders that are none, aren't there, or are not said."""
    nowhere = str(folder / "nowhere"), "MESHWRIGHT_NVME.*No such file"
    for name, said in (nowhere, ("", "of which no folder is known")):
        with pytest.raises(StateError, match=f"(?s){said}"):
            with_files(name, built, SAVED)


def test_folders_that_will_not_do_are_named(tmp_path: Path) -> None:
    on_ranks(WORLD, refused, tmp_path)


@pytest.fixture
def parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Parameter:
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
