"""The short text: what it has, what it leaves to the full one, that it explores nothing; tables."""

from dataclasses import replace

import pytest

from meshwright.planner import document
from meshwright.planner.alternatives import answers as module
from meshwright.planner.alternatives.answers import Answers
from meshwright.planner.plan.words import sized
from meshwright.planner.report import report as text
from meshwright.planner.search import TIE
from tests.planner.report.test_report import overridden, searched


def test_the_short_text_searches_families_for_a_moment_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KNOWN_S", 0.0)
    result = searched().replan()
    short, title = str(result.report), "not searched for this text: "
    answers = result.report.deferred
    assert isinstance(answers, Answers)
    assert not answers._rows and "_proof" not in vars(answers)
    (line,) = [x for x in short.splitlines() if title in x]
    assert line.split(title)[1].split(", ") == [
        row["family"] for row in answers.known_alternatives()
    ]
    full = result.report.text(full=True)
    assert len(short) < len(full) and title not in full
    assert title not in str(result.report)  # they are known now


def test_what_is_left_out_is_said() -> None:
    short, full = str(overridden().report), overridden().report.text(full=True)
    for title in ("Overrides", "Shardings", "proved by the solver"):
        assert title not in short
    assert "Overrides" in full and "`--full`" in short and "`--full`" not in full


def test_the_nearest_plans_are_few_and_no_faster_than_the_chosen_but_for_ties() -> None:
    report = searched().report
    known = [row for row in report.known_alternatives if row["plan"]]  # the others had no time
    rows = [*known, *report.runners_up]
    plans = {row["plan"] for row in rows}
    short = str(report)
    assert 0 < sum(plan in short for plan in plans) <= text.MAX_OTHERS
    assert all(row["tie"] == (abs(row["slower"]) <= TIE) for row in rows)
    every = {row["family"]: row for row in report.alternatives}
    assert all(every[row["family"]] == row for row in known)


def test_the_largest_parts_of_the_memory_are_named_and_the_rest_is_their_sum() -> None:
    parts = {f"part {k}": 2**30 * (k + 1) for k in range(text.MAX_PARTS + 2)}
    named = [f"{name} {sized(parts[name])}" for name in [*parts][:1:-1]]
    assert text._parts_of({"parts": parts}) == ", ".join([*named, f"other {sized(3 * 2**30)}"])


def test_a_near_tie_is_called_one() -> None:
    row = {"step_time_s": 1.0, "slower": 0.01, "tie": True, "plan": "another", "why": "more"}
    assert "(+1.0%, a tie)" in str(text._compared([((), row)]))
    assert "tie" not in str(text._compared([((), row | {"tie": False})]))


def test_numbers_of_the_catalog_are_counted_and_the_rest_is_listed() -> None:
    report = searched().report
    of_hardware = [a for a in report.assumptions if " is assumed (" in a or " is fitted (" in a]
    (line,) = [x for x in str(report).splitlines() if x.startswith("  - numbers of ")]
    counts = [int(word) for word in line.split(": ")[1].split() if word.isdigit()]
    assert sum(counts) == len(of_hardware) > 1
    for other in set(report.assumptions) - set(of_hardware):
        assert f"  - {other}" in str(report)
    assert not any(a in str(report) for a in of_hardware)


def test_notes_on_other_plans_are_left_out() -> None:
    report = replace(searched().report, notes=("own", "of others"), aside=("of others",))
    assert "  - own" in str(report) and "  - of others" not in str(report)
    assert "1 note on other plans" in str(report)
    assert "  - of others" in report.text(full=True)


def test_many_stages_are_shortened_to_those_that_matter() -> None:
    report = searched().report
    row = dict(report.stages[0])
    stages = [row | {"ranks": f"r{k}"} for k in range(40)]
    stages[20]["forward_s"] *= 2
    stages[30]["memory_bytes"] *= 2
    many = replace(report, stages=stages)
    shown = [x for x in str(many).splitlines() if f" {row['mesh']} " in x and " r" in x]
    assert len(shown) == text.MAX_STAGES
    assert [x.split()[0] for x in shown[-3:]] == ["20", "30", "39"]
    assert "(8 of 40 stages" in str(many) and " r25 " in many.text(full=True)


def test_the_largest_parts_of_the_memory_are_named() -> None:
    report = searched().report
    assert report.details is not None
    (row,) = report.details.memory
    name, nbytes = max(row["parts"].items(), key=lambda part: part[1])
    assert f"ranks 0-3: {name} {sized(nbytes)}, " in str(report)
    assert "What holds the memory" not in str(replace(report, details=None))


def test_tokens_are_told_where_there_is_a_sequence() -> None:
    summary = searched().report.summary
    assert summary["tokens_per_s"] == pytest.approx(summary["rows_per_s"] * 6)
    assert " tokens/s" in str(searched().report)


# --- tables --------------------------------------------------------------------------------------


def test_a_table_is_aligned_or_says_it_in_other_words() -> None:
    rows = [("0", "x" * 200, "0-3"), ("10", "y", "4")]
    lines = str(text.Table(heads=("stage", "blocks", "ranks"), rows=rows)).splitlines()
    ends = zip(lines, ("ranks", "0-3", "4"), strict=True)
    assert len({line.index(end) for line, end in ends}) == 1
    assert max(map(len, lines)) < document.MAX_CELL + 20
    assert lines[1].endswith("...  0-3")
    assert str(text.Table(heads=("a",), rows=[("b",)], plain=["one", "two"])) == "one\ntwo"


def test_sections_have_a_line_between_them() -> None:
    table = text.Table(heads=("a",), rows=[("b",)])
    assert str(text.Document.of(["one", table], [], ["two"])) == "one\n  a\n  b\n\ntwo"


def test_the_reports_tables_say_what_its_text_says() -> None:
    report = searched().report
    for full in (False, True):
        document = report.document(full=full)
        tables = [part for part in document.parts if isinstance(part, text.Table)]
        assert str(document) == report.text(full=full)
        assert all(len(row) == len(each.heads) for each in tables for row in each.rows)
        cells = "\n".join(cell for each in tables for row in each.rows for cell in row)
        assert len(tables) >= 4
        for stage in report.stages:
            assert ", ".join(stage["blocks"]) in cells
        for row in report.runners_up[:1]:
            assert row["plan"] in cells and row["why"] in cells
