"""Checkpoints of a run: the newest are kept, the newest sound one is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.executor.errors import DamagedError, SavedError
from meshwright.training.kept import KeptCheckpoints
from tests.executor.checkpoint.checkpoint_runs import start


def test_the_newest_are_kept_and_resumed(tmp_path: Path) -> None:
    run, kept = start("mlp", "alone"), KeptCheckpoints(folder=tmp_path / "run", keep=2)
    loaded: list[Path] = []
    assert kept.steps() == [] and kept.resume(loaded.append) is None
    for step in (5, 10, 1_000_000_000):
        run.save(kept.path(step))
        kept.drop_old(step)
    assert kept.steps() == [10, 1_000_000_000]
    (kept.folder / "step-best").mkdir()
    (kept.folder / "notes.txt").write_text("mine")
    leftover = kept.folder / ".step-00000015.0123abcd.saving"
    leftover.mkdir()
    kept.path(10).rename(kept.folder / ".step-00000010.old")  # killed between two renames
    assert kept.steps() == [10, 1_000_000_000]
    assert kept.resume(loaded.append) == 1_000_000_000
    assert loaded == [kept.path(1_000_000_000)] and not leftover.exists()
    assert (kept.folder / "notes.txt").exists() and (kept.folder / "step-best").exists()


def test_a_damaged_one_is_left_and_the_one_before_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, kept = start("mlp", "alone"), KeptCheckpoints(folder=tmp_path, keep=3)
    for step in (1, 2):
        run.save(kept.path(step))
    (shard,) = kept.path(2).glob("*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert kept.resume(run.load) == 1
    assert "is damaged" in caplog.text and "the checkpoint before it is tried" in caplog.text
    assert kept.steps() == [1, 2]
    (shard,) = kept.path(1).glob("*.distcp")
    shard.write_bytes(b"")
    with pytest.raises(DamagedError):
        kept.resume(run.load)


def test_a_checkpoint_of_another_model_is_an_error(tmp_path: Path) -> None:
    kept = KeptCheckpoints(folder=tmp_path, keep=3)
    start("mlp", "alone").save(kept.path(1))
    with pytest.raises(SavedError):
        kept.resume(start("gpt2_tied", "alone").load)


def test_what_was_just_saved_is_never_dropped(tmp_path: Path) -> None:
    """A damaged newer checkpoint, which the run went on before, does not count; a folder with
    somebody's file stays, with a warning."""
    run, kept = start("mlp", "alone"), KeptCheckpoints(folder=tmp_path, keep=1)
    for step in (5, 6, 7, 60):
        run.save(kept.path(step))
    (kept.path(5) / "mine.txt").write_text("1")
    kept.drop_old(7)
    assert kept.steps() == [5, 7, 60]
    assert (kept.path(5) / "mine.txt").exists()
