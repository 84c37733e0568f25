"""A working folder for commands."""

import sys
from pathlib import Path

import pytest

from tests.meshwright.commands import TARGETS, TINY


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a module of targets, which is forgotten again, and a cache of its
    own."""
    (tmp_path / "cli_targets.py").write_text(TARGETS)
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_targets", raising=False)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    # tests of the page itself are of its library, whose engine keeps sockets
    monkeypatch.setattr("meshwright.planner.page.page._library", lambda: "")
    return tmp_path
