"""The speed of files in a folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshwright.profiles.measure import flash
from meshwright.profiles.measure.flash import measure_flash


def test_ranks_are_timed_together_and_nothing_is_left(tmp_path: Path) -> None:
    nbytes, taken = measure_flash(tmp_path, ranks=2, nbytes=2**22 + 1)
    assert nbytes == 2 * (2**22 + 1)
    assert [*taken] == ["from_flash", "to_flash"]
    assert all(len(times) == flash.REPETITIONS and min(times) > 0 for times in taken.values())
    assert not list(tmp_path.iterdir())


def test_one_repetition_is_taken_after_the_deadline(tmp_path: Path) -> None:
    _, taken = measure_flash(tmp_path, nbytes=4096, deadline_s=time.monotonic())
    assert [len(times) for times in taken.values()] == [1, 1]


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--flash.*nowhere.*No such file.*legal: a folder"):
        measure_flash(tmp_path / "nowhere")


def test_processes_that_take_too_long_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "TIMEOUT_S", 0.0)
    with pytest.raises(RuntimeError, match=r"profile: flash.*not read and written in 0 s"):
        measure_flash(tmp_path)
    assert not list(tmp_path.iterdir())
