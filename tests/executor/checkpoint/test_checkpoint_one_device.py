"""Checkpoints of one device: every optimizer, what does not fit, and damaged files."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.errors import UnwrittenError
from meshwright.executor.files import atomic_folder
from tests.executor.checkpoint.checkpoint_runs import (
    Run,
    differing,
    optimize,
    plan_of,
    resume,
    start,
)
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.tiers import tiered
from tests.helpers.tiny import ROWS, batch, net, planned
from tests.models.models import CASES, GLOBAL_BATCH, MLP, parallelize, traced
from tests.parity import parity_cells
from tests.parity.parity_cells import Cell

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,  # states of other shapes than the parameters'
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
}


FIRST = ("SGD", "AdamW", "Adam fused", "Adafactor")
MORE = "the change tier has states like the parameters, of other shapes, and none of a tensor"


@pytest.mark.parametrize("name", tiered(OPTIMIZERS, FIRST.__contains__, MORE))
def test_any_optimizer_goes_on_bit_by_bit(tmp_path: Path, name: str) -> None:
    def run(other: bool) -> Run:
        made = start("mlp", "alone", other=other)
        optimizer = OPTIMIZERS[name]([*made.runtime.parameters()])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return Run(case="mlp", runtime=made.runtime, optimizer=optimizer, scheduler=scheduler)

    straight = run(False)
    straight.steps(0, 2)
    straight.save(tmp_path / "at2")
    again = run(True)
    before = {fqn: p.clone() for fqn, p in again.runtime.named_parameters()}
    assert differing(before, dict(straight.runtime.named_parameters())) != []
    again.load(tmp_path / "at2")
    assert differing(again.state(), straight.state()) == []
    assert again.steps(2, 2) == straight.steps(2, 2)
    assert differing(again.state(), straight.state()) == []


def test_dropout_goes_on_with_the_same_masks(tmp_path: Path) -> None:
    straight = start("gpt2_dropout", "alone")
    straight.steps(0, 1)
    straight.save(tmp_path / "at1")
    again = resume("gpt2_dropout", "alone", tmp_path / "at1")
    assert again.runtime.steps == 1
    assert again.steps(1, 2) == straight.steps(1, 2)
    other = resume("gpt2_dropout", "alone", tmp_path / "at1")
    other.runtime.seed += 1
    assert other.steps(1, 1) != straight.steps(1, 1), "the seed has no effect"


def test_the_loss_scale_is_kept(tmp_path: Path) -> None:
    of = parity_cells.plan_of(Cell.parse("mlp 1 m1 fp16"))
    run, again = (parallelize(CASES["mlp"].model(), *of) for _ in range(2))
    for finite in (False, True):
        run.loss_scale.update(finite)
    checkpoint.save(run, tmp_path / "at0")
    assert again.loss_scale != run.loss_scale
    checkpoint.load(again, tmp_path / "at0")
    assert again.loss_scale == run.loss_scale


def test_a_model_without_weights_gets_them(tmp_path: Path) -> None:
    """Llama's frequencies are no part of a state dict; on meta they have no value to keep."""
    run = start("llama", "alone")
    run.save(tmp_path / "at0")
    with torch.device("meta"):
        model = CASES["llama"].build()
    runtime = parallelize(model, *plan_of("llama", "alone"))
    with pytest.raises(ValueError, match=r"meta device: .* call init_weights, load_weights, load_"):
        checkpoint.save(runtime, tmp_path / "none")
    optimizer, _ = optimize("llama", dict(runtime.named_parameters()))
    checkpoint.load(runtime, tmp_path / "at0", optimizer)
    assert differing(runtime.full_state_dict(), run.runtime.full_state_dict()) == []
    batch = CASES["llama"].batch(GLOBAL_BATCH, 0)
    assert float(runtime.train_step(batch)) == float(run.runtime.train_step(batch))
    assert not (tmp_path / "none").exists()


def test_notes_that_find_no_room_leave_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", "alone")
    run.save(tmp_path / "at0")
    before = sorted((x.name, x.read_bytes()) for x in (tmp_path / "at0").iterdir())

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_folder, "write_synced", full)
    with pytest.raises(UnwrittenError, match=r"what was there before still is .*No space left"):
        run.save(tmp_path / "at0")
    assert [x.name for x in tmp_path.iterdir()] == ["at0"]
    assert sorted((x.name, x.read_bytes()) for x in (tmp_path / "at0").iterdir()) == before


class Hollow(MLP):
    """Reads a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.none = nn.Parameter(torch.empty(0, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + nn.functional.linear(x, self.none).sum(-1, keepdim=True)


def test_a_parameter_without_elements_is_kept(tmp_path: Path) -> None:
    of = traced(replace(CASES["mlp"], build=Hollow), GLOBAL_BATCH)
    plan = build_plan(of.graph, Knobs(meshes=((1, 1),), rows=GLOBAL_BATCH, num_microbatches=1))
    runs = [parallelize(Hollow(), plan, of) for _ in range(2)]
    optimizers = [torch.optim.AdamW(run.parameters()) for run in runs]
    runs[0].train_step(CASES["mlp"].batch(GLOBAL_BATCH, 0))
    optimizers[0].step()
    checkpoint.save(runs[0], tmp_path / "at1", optimizers[0])
    checkpoint.load(runs[1], tmp_path / "at1", optimizers[1])
    assert differing(runs[1].full_state_dict(), runs[0].full_state_dict()) == []
    states = [
        {fqn: optimizer.state[p]["exp_avg"] for fqn, p in run.named_parameters()}
        for run, optimizer in zip(runs, optimizers, strict=True)
    ]
    assert "none" in states[0]
    assert differing(states[1], states[0]) == []


def test_what_does_not_fit_is_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", "alone")
    run.steps(0, 1)
    run.save(tmp_path / "at1")
    other = start("mlp", "alone", other=True)
    before = other.state()

    def disagreeing(_: Any, options: list[Any]) -> list[Any]:
        return [options, options[:1]]  # a rank with one group

    monkeypatch.setattr(checkpoint, "all_gather_object", disagreeing)
    with pytest.raises(ValueError, match=r"has \[2, 1\] groups on the ranks; make the same"):
        other.load(tmp_path / "at1")
    assert differing(other.state(), before) == []


def test_options_go_by_name_and_must_agree_within_a_group(tmp_path: Path) -> None:
    run = start("gpt2_tied", "alone")
    run.save(tmp_path / "at0")
    one = torch.optim.AdamW([{"params": [*run.runtime.parameters()]}])
    with pytest.raises(ValueError, match=r"in group 0 .*saved with different options"):
        checkpoint.load(run.runtime, tmp_path / "at0", one)
    saved = torch.load(tmp_path / "at0" / "training.pt", weights_only=True)["optimizer"]["groups"]
    how = {"foreach": True, "fused": None, "capturable": True, "differentiable": False}
    assert not any(set(how) & set(options) for options, _ in saved)
    part = torch.optim.AdamW([next(iter(run.runtime.parameters()))], lr=1.0, **how)
    checkpoint.load(run.runtime, tmp_path / "at0", part)
    assert part.param_groups[0]["lr"] == 1e-3
    assert how.items() <= part.param_groups[0].items(), "how it runs is the run's own choice"


def test_parameters_that_were_not_trained_have_no_states(tmp_path: Path) -> None:
    run = start("mlp", "alone")
    some = [*run.runtime.parameters()][1:]
    checkpoint.save(run.runtime, tmp_path / "at0", torch.optim.SGD(some, lr=0.1))
    every = torch.optim.SGD([*run.runtime.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"lacks 1 parameters that this one trains"):
        checkpoint.load(run.runtime, tmp_path / "at0", every)
    checkpoint.save(run.runtime, tmp_path / "at0")
    with pytest.raises(ValueError, match=r"saved without an optimizer; load it without one"):
        checkpoint.load(run.runtime, tmp_path / "at0", every)


def test_only_what_loads_without_running_code_is_saved(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("somewhere")}

    run = start("mlp", "alone")
    with pytest.raises(ValueError, match=r"state of 'odd' holds more than tensors, numbers"):
        checkpoint.save(run.runtime, tmp_path / "at0", extra={"odd": Odd()})
    with pytest.raises(
        ValueError, match=r"extra\['epoch'\] is of type int, which has no state_dict"
    ):
        checkpoint.save(run.runtime, tmp_path / "at0", extra={"epoch": 1})
    run.save(tmp_path / "at0")
    with pytest.raises(ValueError, match=r"extra\['odd'\] is of type Odd, .* no load_state_dict"):
        checkpoint.load(run.runtime, tmp_path / "at0", extra={"odd": Odd()})


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    run = start("mlp", "alone")
    run.save(tmp_path / "at0")
    (data,) = (tmp_path / "at0").glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    with pytest.raises(RuntimeError, match=r"'__0_0.distcp' has 100 bytes, and \d+ were saved"):
        run.load(tmp_path / "at0")
    data.write_bytes(whole[:-1000] + bytes(1000))
    says = r"at0': damaged, and read in part.*'model.*' in '.*__0_0.distcp' is damaged: its"
    with pytest.raises(RuntimeError, match=says):
        run.load(tmp_path / "at0")
    (tmp_path / "at0" / "training.pt").write_bytes(b"PK")
    with pytest.raises(RuntimeError, match=r"'training.pt' has 2 bytes, and \d+ were saved"):
        run.load(tmp_path / "at0")


def test_an_error_in_the_background_is_raised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = planned(net())
    optimizer = torch.optim.AdamW(result.parameters())
    result.train_step(batch(ROWS))
    optimizer.step()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_folder, "publish", full)
        saving = result.save_checkpoint(tmp_path / "at1", optimizer, asynchronous=True)
        with pytest.raises(RuntimeError, match=r"at1': not saved.*No space left"):
            saving.wait()
        saving.wait()
        result.save_checkpoint(tmp_path / "at1", optimizer, asynchronous=True)
        with pytest.raises(RuntimeError, match=r"No space left"):
            result.save_checkpoint(tmp_path / "at1", optimizer)
    result.save_checkpoint(tmp_path / "at1", optimizer)
    result.load_checkpoint(tmp_path / "at1", optimizer)
