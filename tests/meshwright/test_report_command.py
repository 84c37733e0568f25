"""`meshwright report` and `plan --html`: pages from the shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from tests.meshwright.commands import FOUR, Captured, in_a_folder

MODEL = ["cli_targets:mlp", "--cluster", "dgx-a100"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_folder(tmp_path, monkeypatch)
    # of which tests of the page itself are; its engine keeps sockets
    monkeypatch.setattr("meshwright.planner.page.page._library", lambda: "")


def read(name: str) -> str:
    return Path(name).read_text(encoding="utf-8")


def test_pages_of_a_search_a_report_and_a_plan(capsys: Captured) -> None:
    assert main([*FOUR, "-o", "plan.json", "--html", "searched.html", "--json"]) == 0
    printed, said = capsys.readouterr()
    assert "page written to searched.html" in said
    Path("report.json").write_text(printed)
    assert main(["report", "report.json", "-o", "again.html"]) == 0
    assert read("again.html") == read("searched.html")
    assert main(["report", "plan.json", *MODEL, "-o", "given.html", "--price", "2.5"]) == 0
    given = read("given.html")
    assert "The plan was given, not searched" in given and 'data-fact="price of a step"' in given
    step_s = json.loads(printed)["summary"]["step_time_s"]
    assert f'<data value="{step_s}">' in read("searched.html")


def test_what_can_not_be_a_page_is_said(capsys: Captured) -> None:
    Path("old.json").write_text('{"schema": 1}')
    Path("plan.json").write_text("{}")
    for arguments, says in (
        (["old.json"], "schema 1; legal: 2"),
        (["plan.json"], "is no Meshwright plan"),
        (["missing.json"], "No such file"),
    ):
        assert main(["report", *arguments, "-o", "page.html"]) == 1
        assert says in capsys.readouterr().err
    assert not Path("page.html").exists()
    assert main(["report", "plan.json", "-o", "page.html", "--price", "0"]) == 1
    assert "legal: a number above 0" in capsys.readouterr().err
