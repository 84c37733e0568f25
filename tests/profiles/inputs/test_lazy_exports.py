"""Exports that are imported when they are first asked for."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.helpers.source_files import PRODUCT, files_in

LAZY = [
    file.module
    for file in files_in(*PRODUCT)
    if file.is_package and "lazy_exports(__name__" in file.text
]


@pytest.mark.parametrize("package", LAZY)
def test_every_export_is_there_and_none_has_a_modules_name(package: str) -> None:
    module = import_module(package)
    folder = Path(str(module.__file__)).parent
    beside = {path.stem for path in folder.iterdir()}
    assert module.__all__
    for name in module.__all__:
        assert name not in beside
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"{package!r} has no attribute 'nowhere'"):
        module.nowhere  # noqa: B018 - the error is asked for


def test_a_module_is_imported_when_its_name_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lazily_exported"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from meshwright.profiles.inputs.lazy_exports import lazy_exports\n"
        "if TYPE_CHECKING:\n"
        "    from lazily_exported.late import answer\n"
        "__getattr__, __all__ = lazy_exports(__name__, __file__)\n"
    )
    (folder / "late.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = import_module("lazily_exported")
    assert "lazily_exported.late" not in sys.modules
    assert package.answer == 42
    assert package.__all__ == ["answer"]
