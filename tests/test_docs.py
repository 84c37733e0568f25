"""The documents name files that exist, and the README stays a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FOLDERS = "profiles|costmodel|planner|executor|meshwright|tests|scripts|docs|examples"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w/.*]*)", text))
    assert not [name for name in named if not [*ROOT.glob(name.rstrip("/"))]]
    linked = set(re.findall(r"\]\(([\w./]+)\)", text))
    assert not [name for name in linked if not (document.parent / name).exists()]
    modules = set(re.findall(r"python -m (scripts[.\w]+)", text))
    assert not [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").exists()]


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
