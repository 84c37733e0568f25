"""A release: its version, what a wheel has, completion in shells."""

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest

import meshwright
from meshwright.cli import COMMANDS
from tests.meshwright.commands import Captured, printed

ROOT = Path(__file__).parents[2]


def test_the_version_is_one_and_has_its_heading() -> None:
    headings = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert any(line.split()[:2] == ["##", meshwright.__version__] for line in headings)
    assert importlib.metadata.version("meshwright") == meshwright.__version__


def test_types_travel_with_the_package() -> None:
    assert (Path(meshwright.__file__).parent / "py.typed").is_file()
    assert '"meshwright" = ["py.typed"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_take_the_completion(shell: str, capsys: Captured) -> None:
    pytest.importorskip("shtab")
    script = printed(capsys, "completion", shell)
    assert all(command in script for command in COMMANDS) and "--optimizer-in-backward" in script
    if program := shutil.which(shell):
        said = subprocess.run([program, "-n"], input=script, text=True, capture_output=True)
        assert (said.returncode, said.stderr) == (0, "")
