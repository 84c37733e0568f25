"""Plans and prices of the committed record are what the search finds now.

A record is made with one seed of Python's hashes and compared under another, on any machine: what
is chosen depends on neither, and no search has a time limit.
"""

import copy
from pathlib import Path
from typing import Any

import pytest

from scripts import record_plans as records
from scripts.record_plans import RECORD, change, read, recorded, repriced
from scripts.recording.cases import cases
from tests.helpers.tiers import second_tier, tiered

ANEW = f"python -m scripts.record_plans record scripts/recording/{RECORD.name}"
FIRST = ("small llama, zb_v", "small llama, host memory")
MORE = "minutes of searches; a schedule, and what fits with a host and a loss in parts, stay"


@pytest.mark.parametrize("name", tiered([name for name, _ in cases()], FIRST.__contains__, MORE))
def test_a_case_is_as_recorded(name: str) -> None:
    """It is searched; where it chose otherwise, its plan of before is priced, too."""
    case, before = dict(cases())[name], read(RECORD)[name]
    after, _ = recorded(name, case)
    moved = before.get("plan") != after.get("plan") and "plan" in before
    found = change(name, before, after, repriced(case, before) if moved else None)
    assert not found, f"{found}\nWhere all of it is meant: {ANEW}"


def test_every_case_is_recorded_and_nothing_else() -> None:
    assert read(RECORD).keys() == dict(cases()).keys()
    assert RECORD.read_text() == records.written(read(RECORD))


# --- what changed ---------------------------------------------------------------------------------


def entry(zero: int = 0, step_time_s: float = 1.0, bound_s: float = 0.5) -> dict[str, Any]:
    return {
        "plan": {"stages": [{"zero": zero}]},
        "price": {"summary": {"step_time_s": step_time_s, "peak_memory_bytes": [10**9]}},
        "search": {"bound_s": bound_s},
    }


def test_a_change_of_choice_is_told_from_a_change_of_price() -> None:
    assert not change("a", entry(), entry())
    assert not change("a", entry(), entry(step_time_s=1 + 1e-8))
    assert str(change("a", entry(), entry(step_time_s=1.25, bound_s=0.6))) == (
        "a: price changed\n  summary/step_time_s: 1.0 -> 1.25\n"
        "a: search changed\n  bound_s: 0.5 -> 0.6"
    )
    chosen = "a: choice changed\n  step_time_s of the two: 1.0 -> 0.9\n  plan/stages/0/zero: 0 -> 1"
    other, same = entry(1, 0.9, 0.4), entry()["price"]
    assert str(change("a", entry(), other, same)) == chosen
    dearer = {"summary": {"step_time_s": 1.5, "peak_memory_bytes": [10**9 + 2000]}}
    assert str(change("a", entry(), other, dearer)) == (
        f"{chosen}\na: price changed\n"
        "  summary/peak_memory_bytes/0: 1000000000 -> 1000002000\n"
        "  summary/step_time_s: 1.0 -> 1.5"
    )
    refused = {"error": "InfeasibleError", "price": {}, "search": {}}
    assert change("a", entry(), refused).choice[-1] == "error: None -> 'InfeasibleError'"


@second_tier("what changed of a price is told in the test above")
def test_recorded_plans_are_priced_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "small llama, tp 2 zero 3 full recompute"
    old, after = tmp_path / "old.json", tmp_path / "after.json"
    own = read(RECORD)[name]
    old.write_text(records.written({name: own}))
    assert records.reprice(old, None, "") == 0
    assert capsys.readouterr().out == "1 cases, no difference\n"
    wrong = copy.deepcopy(own)
    wrong["price"]["summary"]["mfu"] *= 2
    old.write_text(records.written({name: wrong}))
    assert records.reprice(old, after, "") == 0
    assert records.compare(old, after) == 1
    said = capsys.readouterr().out
    assert f"{name}: price changed\n  summary/mfu: {wrong['price']['summary']['mfu']} -> " in said
    assert "choice" not in said and read(after)[name]["plan"] == own["plan"]
