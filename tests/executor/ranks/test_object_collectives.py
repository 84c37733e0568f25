"""Collectives on objects, their errors, and the watchdog's phases meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.executor.ranks import object_collectives
from meshwright.executor.ranks.background import Background
from meshwright.executor.ranks.object_collectives import (
    WAITING,
    all_gather_object,
    broadcast_object,
    gather_object,
    phase,
    run_on_all,
    run_on_first,
)
from meshwright.executor.ranks.watchdog import progress
from meshwright.executor.runtime import state
from meshwright.executor.runtime.state import RankState
from tests.executor.checkpoint.checkpoint_runs import start
from tests.helpers.threaded_ranks import talking_ranks


def _talk() -> dict[str, Any]:
    """Everything once, on each of four ranks."""
    group, me = dist.group.WORLD, dist.get_rank()
    calls: list[int] = []

    def decide() -> str:
        calls.append(me)
        return f"decided by {me}"

    def on_two() -> int:
        if me >= 2:
            raise ValueError(f"no on {me}")
        return me

    def on_none() -> None:
        raise ValueError("nothing on 0")

    said = []
    for mistake in (lambda: run_on_all(group, on_two), lambda: run_on_first(group, on_none)):
        with pytest.raises(ValueError) as caught:
            mistake()
        said.append(str(caught.value))
    return {
        "all": all_gather_object(group, f"{me}"), "to first": gather_object(group, f"{me}"),
        "by 2": broadcast_object(group, 2, f"{me}"), "together": run_on_all(group, lambda: me),
        "decided": run_on_first(group, decide), "calls": calls, "said": said,
    }  # fmt: skip


def test_what_one_rank_tells_reaches_those_it_is_for() -> None:
    with talking_ranks() as ranks:
        found = ranks.run((4, 1), lambda *_: _talk())
    for me, (_, result) in enumerate(found.items()):
        assert result["all"] == ["0", "1", "2", "3"]
        assert result["to first"] == (["0", "1", "2", "3"] if me == 0 else [])
        assert result["by 2"] == "2"
        assert result["together"] == me
        assert result["decided"] == "decided by 0"
        assert result["calls"] == ([0] if me == 0 else [])
        assert result["said"] == ["no on 2", "nothing on 0"]


@pytest.mark.parametrize(
    ("groups", "names", "tellers"),
    [(((0, 1, 2, 3),), {"mine"}, []), (((0, 1), (2, 3)), {"of 0", "mine"}, [0, 2])],
)
def test_each_of_several_device_groups_tells_its_part_once(
    monkeypatch: pytest.MonkeyPatch, groups: Any, names: set[str], tellers: list[int]
) -> None:
    told: list[int] = []

    def telling(_: Any, rank: int, mine: dict[str, Any]) -> dict[str, Any]:
        told.append(rank)
        return mine or {f"of {rank}": torch.zeros(1)}

    monkeypatch.setattr(state, "broadcast_object", telling)
    monkeypatch.setattr(state, "gloo_group", lambda: None)
    here: Any = SimpleNamespace(
        plan=SimpleNamespace(devices=groups), place=SimpleNamespace(rank=2, mesh=object())
    )
    assert set(RankState.merged(here, {"mine": torch.zeros(1)})) == names
    assert told == tellers


# --- phases ---------------------------------------------------------------------------------------


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The phases entered from now on, each with whether the rank waits."""
    seen: list[tuple[str, bool]] = []
    enter = progress.enter

    def entering(phase: str, **details: Any) -> None:
        seen.append((phase, details.get("waits", False)))
        enter(phase, **details)

    monkeypatch.setattr(progress, "enter", entering)
    return seen


def test_a_save_and_a_load_are_phases_for_the_watchdog(
    tmp_path: Path, phases: list[tuple[str, bool]]
) -> None:
    """Who writes or reads is at work, and begins anew; all else there is waiting for others."""
    run = start("mlp", "alone")
    run.save(tmp_path / "at")
    waiting, saving = (WAITING, True), ("saving a checkpoint", False)
    assert phases == [
        saving, waiting, ("writing a checkpoint", False), waiting,
        ("finishing a checkpoint", False), waiting, saving,
    ]  # fmt: skip
    phases.clear()
    run.load(tmp_path / "at")
    loading = ("loading a checkpoint", False)
    assert phases == [loading, ("reading a checkpoint", False), loading]
    assert progress.activity.phase is None


def test_who_waits_for_others_says_so(
    monkeypatch: pytest.MonkeyPatch, phases: list[tuple[str, bool]]
) -> None:
    monkeypatch.setattr(object_collectives.dist, "get_world_size", lambda _: 1)
    monkeypatch.setattr(
        object_collectives.dist, "all_gather_object", lambda heard, *_, **__: heard.clear()
    )
    group: Any = object()
    with progress.during("saving a checkpoint"):
        run_on_all(group, lambda: None)
    assert phases == [
        ("saving a checkpoint", False),
        (WAITING, True),
        ("saving a checkpoint", False),
    ]


def test_what_is_saved_in_the_background_is_no_phase(
    tmp_path: Path, phases: list[tuple[str, bool]]
) -> None:
    run = start("mlp", "alone")
    run.save(tmp_path / "at", asynchronous=True).wait()
    assert phases == [
        ("saving a checkpoint", False), ("copying a checkpoint to the host", False),
        ("saving a checkpoint", False),
    ]  # fmt: skip
    phases.clear()

    def work() -> None:
        with phase("not to be seen"):
            pass

    with progress.during("training"):
        Background("work", work).wait()
    assert phases == [("training", False)]


def test_an_old_checkpoint_that_cannot_be_removed_is_left_to_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", "alone")
    run.save(tmp_path / "at")

    def refuse(path: Any, *, dir_fd: Any = None) -> None:
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", refuse)
        run.save(tmp_path / "at")
    assert (tmp_path / ".at.old").exists()
    run.load(tmp_path / "at")
    run.save(tmp_path / "at")
    assert not list(tmp_path.glob(".at*"))
