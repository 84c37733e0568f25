"""Paths that users give: refused before anything is done, or written to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshwright.profiles.inputs import MeshwrightError, checked_path
from meshwright.profiles.inputs.paths import check_writable, write_text


@pytest.mark.parametrize("given", [None, 3, b"x", "", "a\0b", "x" * 300, "a/" + "\ud800", ["a"]])
def test_what_can_be_no_path_is_refused(given: Any) -> None:
    with pytest.raises(MeshwrightError, match=r"^place") as caught:
        checked_path(given, "place")
    assert caught.value.legal and caught.value.way_out


def test_a_file_is_written_and_one_that_cannot_be_is_an_os_error_too(tmp_path: Path) -> None:
    path = write_text(str(tmp_path / "a"), "text", "place")
    check_writable(path, "place")
    assert path.read_text() == "text"
    for write in (lambda p: write_text(p, "", "place"), lambda p: check_writable(p, "place")):
        with pytest.raises(OSError, match="can't be written") as caught:
            write(tmp_path / "no folder" / "a")
        assert isinstance(caught.value, MeshwrightError)
    assert os.listdir(tmp_path) == ["a"]
