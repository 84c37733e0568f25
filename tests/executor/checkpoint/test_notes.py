"""The notes of a checkpoint: of the right types, or refused before anything is loaded."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.executor.errors import DamagedError
from tests.executor.checkpoint.checkpoint_runs import Run, differing, start


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


@pytest.mark.parametrize("name", WRONG)
def test_what_is_of_another_type_is_told_before_anything_is_loaded(
    saved: tuple[Path, Run], name: str
) -> None:
    path, run = saved
    whole = (path / "training.pt").read_bytes()
    change, says = WRONG[name]
    notes = torch.load(path / "training.pt", weights_only=True)
    change(notes)
    torch.save(notes, path / "training.pt")
    before = run.state()
    try:
        with pytest.raises(RuntimeError) as error:
            run.load(path)
    finally:
        (path / "training.pt").write_bytes(whole)
    assert "'training.pt' is damaged; load an earlier checkpoint" in str(error.value)
    assert says in str(error.value)
    assert differing(run.state(), before) == []


def test_another_format_is_told(saved: tuple[Path, Run]) -> None:
    path, run = saved
    whole = (path / "training.pt").read_bytes()
    torch.save({"format": 7}, path / "training.pt")
    with pytest.raises(ValueError, match=r"has format 7; this version reads 1"):
        run.load(path)
    (path / "training.pt").write_bytes(whole)


def test_states_that_an_optimizer_cannot_take_are_told(saved: tuple[Path, Run]) -> None:
    """Numbers of Adam's steps are notes; without them torch raises a KeyError."""
    path, _ = saved
    whole = (path / "training.pt").read_bytes()
    notes = torch.load(path / "training.pt", weights_only=True)
    assert any("step" in values for values in notes["optimizer"]["values"].values())
    for values in notes["optimizer"]["values"].values():
        values.pop("step", None)
    try:
        torch.save(notes, path / "training.pt")
        with pytest.raises(DamagedError, match=r"are none that Adam.* can take.*KeyError") as found:
            start("mlp", "alone", other=True).load(path)
        assert found.value.place and found.value.legal and found.value.way_out
    finally:
        (path / "training.pt").write_bytes(whole)
