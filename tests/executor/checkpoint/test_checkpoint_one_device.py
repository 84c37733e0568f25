"""Checkpoints of one device: every optimizer, what does not fit, damaged files and notes."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.errors import DamagedError, SavedError
from meshwright.executor.files import atomic_folder
from tests.executor.checkpoint.checkpoint_runs import Run, differing, optimize, plan_of, start
from tests.helpers.tiers import tiered
from tests.models.models import CASES, GLOBAL_BATCH, parallelize
from tests.parity import parity_cells
from tests.parity.parity_cells import Cell

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
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
    with pytest.raises(ValueError, match=r"extra\['epoch'\] is of type int, .* no state_dict"):
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


def test_an_error_in_the_background_is_raised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = start("mlp", "alone"), tmp_path / "at1"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_folder, "publish", full)
        saving = run.save(path, asynchronous=True)
        with pytest.raises(RuntimeError, match=r"at1': not saved.*No space left"):
            saving.wait()
        saving.wait()
        run.save(path, asynchronous=True)
        with pytest.raises(RuntimeError, match=r"No space left"):
            run.save(path)
    run.save(path)
    run.load(path)


# --- notes: of the right types, or refused before anything is loaded -----------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A checkpoint as an older version wrote it, without checksums, and the run that it is of."""
    run = start("mlp", "alone")
    run.steps(0, 1)
    path = tmp_path_factory.mktemp("notes") / "at"
    run.save(path)
    (path / "manifest.json").unlink()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        del place.xxh3_64
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path, run


def test_an_older_checkpoint_is_loaded_with_a_note(
    saved: tuple[Path, Run], caplog: pytest.LogCaptureFixture
) -> None:
    path, run = saved
    again = start("mlp", "alone", other=True)
    with caplog.at_level(logging.WARNING):
        again.load(path)
    assert "has no 'manifest.json', as those of older versions" in caplog.text
    assert differing(again.state(), run.state()) == []


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "steps": (lambda n: n.update(steps="x"), "steps is 'x', and must be of type int"),
    "no steps": (lambda n: n.pop("steps"), "steps is None"),
    "steps before the first": (lambda n: n.update(steps=-1), "steps is -1, and must not be neg"),
    "half a step": (lambda n: n.update(steps=1.5), "steps is 1.5"),
    "seed": (lambda n: n.update(seed=True), "seed is True"),
    "format": (lambda n: n.update(format="1"), "format is '1'"),
    "model": (lambda n: n.update(model=1), "model is 1"),
    "loss scale": (lambda n: n.update(loss_scale={"value": "x"}), "the loss scale's value is 'x'"),
    "extra": (lambda n: n.update(extra=None), "extra is None, and must be of type dict"),
    "optimizer": (lambda n: n.update(optimizer=[]), "optimizer is [], and must be of type dict"),
    "class": (lambda n: n["optimizer"].pop("class"), "the optimizer's class is None"),
    "groups": (lambda n: n["optimizer"].update(groups=5), "the optimizer's groups is 5"),
    "a group": (lambda n: n["optimizer"]["groups"].append({}), "a group is {}"),
    "options": (lambda n: n["optimizer"]["groups"].append((1, [])), "a group's options is 1"),
    "parameters": (lambda n: n["optimizer"]["groups"].append(({}, [1])), "name of a parameter"),
    "values": (lambda n: n["optimizer"]["values"].update(a=1), "the optimizer's values is 1"),
    "tensors": (lambda n: n["optimizer"]["tensors"].update(a={}), "the optimizer's tensors is {}"),
}


def told(saved: tuple[Path, Run], change: Callable[[Any], Any]) -> Exception:
    """What a load of changed notes raises."""
    path, run = saved
    whole = (path / "training.pt").read_bytes()
    notes = torch.load(path / "training.pt", weights_only=True)
    change(notes)
    torch.save(notes, path / "training.pt")
    try:
        with pytest.raises((SavedError, DamagedError)) as error:
            run.load(path)
    finally:
        (path / "training.pt").write_bytes(whole)
    return error.value


@pytest.mark.parametrize("name", WRONG)
def test_what_is_of_another_type_is_told_before_anything_is_loaded(
    saved: tuple[Path, Run], name: str
) -> None:
    change, says = WRONG[name]
    before = saved[1].state()
    error = told(saved, change)
    assert isinstance(error, DamagedError) and says in str(error)
    assert "'training.pt' is damaged; load an earlier checkpoint" in str(error)
    assert differing(saved[1].state(), before) == []


def test_notes_of_another_format_and_states_that_adam_cannot_take_are_told(
    saved: tuple[Path, Run],
) -> None:
    """Numbers of Adam's steps are notes; without them torch raises a KeyError."""
    error = told(saved, lambda notes: notes.update(format=7))
    assert isinstance(error, SavedError) and "has format 7; this version reads 1" in str(error)

    def without_steps(notes: Any) -> None:
        for values in notes["optimizer"]["values"].values():
            values.pop("step")

    error = told(saved, without_steps)
    assert isinstance(error, DamagedError) and error.place and error.legal and error.way_out
    assert re.search(r"are none that Adam.* can take.*KeyError", str(error))
