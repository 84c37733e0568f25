"""What the page makes of the report's data before it is drawn."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.page import cells
from meshwright.planner.page.blocks import line
from meshwright.planner.page.plans import compared, without_plan
from meshwright.planner.page.ranks import axes_in_use, rank_rows


def group(ranks: str, **degrees: int) -> dict[str, Any]:
    return {"ranks": ranks, "dp": 1, "cp": 1, "ep": 1, "tp": 1, "ep_stride": 1} | degrees


def test_every_rank_has_its_place() -> None:
    groups = [
        group("0-3,8-11", dp=2, cp=2, tp=2, ep=2, ep_stride=2),
        group("4-7,12-15", dp=4, tp=2),
    ]
    rows = rank_rows(groups, 8)
    assert [row[0] for row in rows] == list(range(16))
    by_rank = {row[0]: row[1:] for row in rows}
    assert by_rank[0] == (0, 0, 0, 0, 0, 0, 0)
    assert by_rank[3] == (0, 3, 0, 0, 1, 1, 1)
    assert by_rank[10] == (1, 2, 0, 1, 1, 1, 0)
    assert by_rank[13] == (1, 5, 1, 2, 0, 0, 1)
    for number in (0, 1):  # no two ranks of a group at one place of (dp, cp, tp)
        places = [(r[4], r[5], r[7]) for r in rows if r[3] == number]
        assert len(set(places)) == 8


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([group("0")], ["group"]),
        ([group("0-1", dp=2)], ["dp"]),
        ([group("0-3", dp=2, tp=2), group("4-7", dp=4)], ["group", "dp", "tp"]),
    ],
)
def test_axes_on_which_ranks_differ(groups: list[dict[str, Any]], axes: list[str]) -> None:
    assert axes_in_use(groups) == axes


def test_a_plan_of_several_families_is_compared_once() -> None:
    other = {"plan": "b", "step_time_s": 1.5, "slower": 0.5, "why": "w", "peak_memory_bytes": 7}
    data = {
        "summary": {"chosen": "a", "step_time_s": 1.0, "peak_memory_bytes": [3, 5]},
        "alternatives": [
            {**other, "family": "tp=2"},
            {**other, "family": "1f1b"},
            {"plan": None, "family": "zb_v", "why": "too large"},
        ],
        "runners_up": [
            other,
            {**other, "plan": "c", "step_time_s": 0.99, "slower": -0.01, "tie": True},
        ],
    }
    rows = compared(data)
    assert [(row["id"], row["name"], row["plan"]) for row in rows] == [
        ("plan-0", "runner-up", "c"),
        ("plan-1", "chosen", "a"),
        ("plan-2", "tp=2, 1f1b", "b"),
    ]
    assert rows[1]["peak_memory_bytes"] == 5
    assert [row["tie"] for row in rows] == [True, False, False]
    assert [row["step"] for row in rows] == ["990 ms", "1 s", "1.5 s"]
    assert [row["family"] for row in without_plan(data)] == ["zb_v"]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (cells.time(0.0023), "2.3 ms"),
        (cells.time(6.9e-17), "0"),
        (cells.more_time(-0.5), "−500 ms"),
        (cells.gib(3 * 2**30), "3.00 GiB"),
        (cells.gib(0.5 * 2**30), "0.50 GiB"),
        (cells.gib(3 * 2**20), "3 MiB"),
        (cells.sent(2.5e9), "2.5 GB"),
        (cells.scaled(264_000, "tokens/s"), "264 k tokens/s"),
        (cells.number(12345.0), "12,345"),
        (cells.number(0.070617), "0.07062"),
        (cells.share(0.3456), "34.6%"),
    ],
)
def test_numbers_are_read_easily(cell: cells.Cell, text: str) -> None:
    assert cell.text == text


def test_a_collective_stands_in_its_pass() -> None:
    step = {"kind": "collective", "axis": "tensor", "collective": "all_reduce", "seconds": 0.5}
    forward, backward = (line({**step, "pass": name}) for name in ("forward", "backward"))
    assert forward.forward and forward.forward.value == 0.5 and forward.backward is None
    assert backward.backward and backward.backward.value == 0.5 and backward.forward is None
