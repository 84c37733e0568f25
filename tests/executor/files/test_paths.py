"""Names of files lead to files of their folder, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.executor.files.paths import inside
from meshwright.executor.files.weight_files import open_source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place in ("at", "elsewhere", "snapshots/1", "blobs"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "file").write_text(place)
    return tmp_path / "at"


def test_names_of_files_inside(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(folder / "file")
    (folder.parent / "other").symlink_to(folder)
    for name in ("file", "link", "sub/new", "new"):
        for place in (folder, folder.parent / "other"):
            assert inside(place, name, "x") == place / name


@pytest.mark.parametrize("name", ["../elsewhere/file", "/etc/passwd", "sub/../../elsewhere/file"])
def test_names_that_lead_outside(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"x names the file .* outside of its folder; it may only"):
        inside(folder, name, "x")


def test_links_that_lead_outside(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "elsewhere" / "file")
    (folder / "sub").symlink_to(folder.parent / "elsewhere")
    for name in ("link", "sub/file"):
        with pytest.raises(ValueError, match=r"a link out of its folder, to '.*elsewhere/file'"):
            inside(folder, name, "x")


def test_the_cache_of_a_hub_links_to_its_blobs(folder: Path) -> None:
    snapshot = folder.parent / "snapshots" / "1"
    (snapshot / "good").symlink_to(Path("../../blobs/file"))
    (snapshot / "bad").symlink_to(Path("../../elsewhere/file"))
    assert inside(snapshot, "good", "x").read_text() == "blobs"
    with pytest.raises(ValueError, match=r"a link out of its folder"):
        inside(snapshot, "bad", "x")


@pytest.mark.parametrize("name", ["", "a\0b", 7, None, ["file"]])
def test_what_is_no_name(folder: Path, name: Any) -> None:
    with pytest.raises(ValueError, match=r"is no name of a file; get it anew"):
        inside(folder, name, "x")


@pytest.mark.parametrize("name", ["x" * 256, "\ud800", "", "a\0b", 3])
def test_what_no_file_can_be_called_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match=r"is no name of a file; get it anew"):
        inside(tmp_path, name, "the index")


@pytest.mark.parametrize("name", ["model.safetensors", "a.bin", "a.bin.index.json"])
def test_a_pipe_is_no_file_of_weights(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=r"is no regular file; give"):
        open_source(tmp_path)
