"""Text with tables in it, as plain text."""

from __future__ import annotations

from meshwright.planner.report.document import MAX_CELL, Document, Table
from tests.planner.report.test_report import searched


def test_a_table_is_aligned_or_says_it_in_other_words() -> None:
    rows = [("0", "x" * 200, "0-3"), ("10", "y", "4")]
    lines = str(Table(heads=("stage", "blocks", "ranks"), rows=rows)).splitlines()
    ends = zip(lines, ("ranks", "0-3", "4"), strict=True)
    assert len({line.index(end) for line, end in ends}) == 1
    assert max(map(len, lines)) < MAX_CELL + 20
    assert str(Table(heads=("a",), rows=[("b",)], plain=["one", "two"])) == "one\ntwo"


def test_sections_have_a_line_between_them() -> None:
    table = Table(heads=("a",), rows=[("b",)])
    assert str(Document.of(["one", table], [], ["two"])) == "one\n  a\n  b\n\ntwo"


def test_the_reports_tables_say_what_its_text_says() -> None:
    report = searched().report
    for full in (False, True):
        document = report.document(full=full)
        tables = [part for part in document.parts if isinstance(part, Table)]
        assert str(document) == report.text(full=full)
        assert all(len(row) == len(each.heads) for each in tables for row in each.rows)
        cells = "\n".join(cell for each in tables for row in each.rows for cell in row)
        assert len(tables) >= 4
        for stage in report.stages:
            assert ", ".join(stage["blocks"]) in cells
        for row in report.runners_up[:1]:
            assert row["plan"] in cells and row["why"] in cells
