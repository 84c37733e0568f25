"""Numbers and plans in words."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.planner.plan.plan import StagePlan
from meshwright.planner.plan.words import counted, describe, seconds
from tests.planner.report.test_report import overridden


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 µs"),
        (2e-6, "2 µs"),
        (999.7e-6, "1 ms"),
        (0.0456, "45.6 ms"),
        (0.9999, "1 s"),
        (75.3, "75.3 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(808, "808"), (1_234, "1.23 k"), (999_999, "1 M"), (124_439_808, "124 M"), (7e9, "7 B")],
)
def test_counted(value: float, text: str) -> None:
    assert counted(value) == text


def test_a_plan_in_a_line() -> None:
    text = describe(overridden().plan)
    assert text.startswith("pp2 × dp")
    assert ", gpipe, 2 micro-batches of 4 rows" in text
    one = overridden().plan
    stages = tuple(
        StagePlan(blocks=s.blocks, ranks=s.ranks, dp=s.dp, tp=s.tp, zero=k, recompute="full")
        for k, s in enumerate(one.stages)
    )

    twice = dataclasses.replace(one, schedule="interleaved_1f1b", stages=(*one.stages, *one.stages))
    assert describe(twice).startswith(describe(one).split(", ")[0])
    assert ", interleaved_1f1b with 2 stages on each, " in describe(twice)
    split = tuple(dataclasses.replace(s, dp=2, cp=2, ep=2, tp=1) for s in one.stages)
    assert "pp2 × dp2×cp2(all_gather)×ep2×tp1" in describe(dataclasses.replace(one, stages=split))

    mixed = describe(dataclasses.replace(one, stages=stages, num_microbatches=8))
    assert mixed.endswith("8 micro-batches of 1 row, ZeRO-1 on some stages, full recompute")
