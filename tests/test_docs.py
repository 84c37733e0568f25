"""The documents name files that exist, the README stays a page, and the site is built without a
warning or a broken link."""

import re
from pathlib import Path

import pytest

from scripts import build_docs
from scripts.site import links
from tests.helpers.launching import ROOT
from tests.helpers.source_files import PRODUCT, files_in
from tests.helpers.tiers import second_tier

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = "profiles|costmodel|planner|executor|meshwright|tests|scripts|docs|examples"
GENERATED = re.compile(
    r"docs/(generated|schemas|gallery|reference/(api|catalog))/|command_line|coverage.md"
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w/.*]*)", text))
    assert not [name for name in named if not [*ROOT.glob(name.rstrip("/"))]]
    for name in re.findall(r"\]\(([\w./]+)(?:#[\w-]+)?\)", text):
        path = (document.parent / name).resolve()
        assert path.exists() or GENERATED.search(str(path.relative_to(ROOT))), name
    modules = set(re.findall(r"python -m (scripts[.\w]+)", text))
    assert not [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").exists()]


def test_documents_named_in_the_code_exist() -> None:
    """In messages and docstrings."""
    for file in files_in(*PRODUCT):
        named = re.findall(r"docs/[\w/]+\.md", file.text)
        assert not [name for name in named if not (ROOT / name).exists()], file.path


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there">b</a><a href="#gone">c</a>')
    (tmp_path / "b.html").write_text('<p id="there"><img src="no.png"></p><a href="https://x/y">')
    assert [*links.broken(tmp_path)] == [
        "a.html: #gone: no such place",
        "b.html: no.png: no such file",
    ]


@second_tier("that named files exist stays; this takes a minute")
def test_the_site_is_built_without_warnings_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    assert not build_docs.build(tmp_path)
    assert (tmp_path / "html" / "reference" / "api" / "planning.html").exists()
