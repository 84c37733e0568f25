"""What the report says of overrides without an effect."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.overrides import Overrides, restrict, without_effect
from meshwright.planner.overrides.dropped import each_dropped
from meshwright.planner.plan import check_plan
from tests.helpers.tiny import cut, net, plan_for, with_stage

GRAPH, FACTORS = cut(net())
ALL = "embed, layers.0-2, head"
SPLIT = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
ALONE = "there is one data-parallel rank, so that nothing can be divided"


def said(given: dict[str, Any], **stage: Any) -> list[str]:
    plan = plan_for(GRAPH, dp=stage.pop("dp", 2), tp=stage.pop("tp", 2))
    plan = with_stage(plan, **stage)
    assignments = check_plan(plan, GRAPH, FACTORS)
    restrictions = restrict(Overrides(**given), GRAPH, allow=["quantized"])
    return without_effect(restrictions, plan, assignments)


@pytest.mark.parametrize(
    ("given", "stage", "line"),
    [
        (
            {"tp": 2}, {},
            "override tp=2 splits nothing in stage 0: each of its 2 ranks computes all of it; drop "
            "the override, or give shardings",
        ),
        ({"zero": 1}, {"dp": 1}, f"override zero=1 has no effect on {ALL}: {ALONE}"),
        ({"quantized": "both"}, {"dp": 1},
         f"override quantized='both' has no effect on {ALL}: {ALONE}"),
        ({"dp_shard": 3}, {},
         f"override dp_shard=3 has no effect on {ALL}: the plan uses no ZeRO"),
        ({"dp_shard": 3}, {"zero": 1},
         f"override dp_shard=3 has no effect on {ALL}: the plan has 2"),
        ({"hpz": 2}, {"zero": 1},
         f"override hpz=2 has no effect on {ALL}: the plan uses no ZeRO-3"),
        ({"hpz": 4}, {"zero": 3, "hpz": 2, "dp": 8, "tp": 1},
         f"override hpz=4 has no effect on {ALL}: the plan has 2"),
        ({"recompute": {"layers.1": "full", "layers.2": "full"}}, {},
         "override recompute='full' has no effect on layers.1-2: the plan has 'none'"),
        ({"cp_kind": "ring"}, {},
         "override cp_kind='ring' has no effect: no stage splits the sequence (cp=1)"),
    ],
)  # fmt: skip
def test_a_value_that_the_plan_lacks_is_said(
    given: dict[str, Any], stage: dict[str, Any], line: str
) -> None:
    assert said(given, **stage) == [line]


@pytest.mark.parametrize(
    ("given", "stage"),
    [
        ({}, {}),
        ({"tp": 2}, {"shardings": SPLIT}),
        ({"zero": 1, "dp": 2, "dp_shard": 2, "recompute": "none"}, {"zero": 1}),
        ({"cp_kind": "ring"}, {"cp": 2, "cp_kind": "ring", "dp": 1, "ranks": (0, 1, 2, 3)}),
        ({"hpz": 2}, {"zero": 3, "hpz": 2, "dp": 4, "tp": 1}),
        ({"hpz": 4}, {"zero": 3, "dp": 4, "tp": 1}),  # as many as ZeRO divides among
    ],
)
def test_a_value_that_the_plan_has_is_not_said(
    given: dict[str, Any], stage: dict[str, Any]
) -> None:
    assert said(given, **stage) == []


def test_overrides_are_dropped_one_by_one() -> None:
    given = Overrides(tp=2, recompute={"head": "full"}, forbid=["pp", "zero"])
    found = [(d.said, d.what, d.left.given()) for d in each_dropped(given)]
    recompute = {"recompute": {"head": "full"}}
    assert found == [
        ("tp=2", "leave tp free", {**recompute, "forbid": ["pp", "zero"]}),
        ("recompute={'head': 'full'}", "leave recompute free", {"tp": 2, "forbid": ["pp", "zero"]}),
        ("forbid='pp'", "allow pp", {"tp": 2, **recompute, "forbid": ("zero",)}),
        ("forbid='zero'", "allow zero", {"tp": 2, **recompute, "forbid": ("pp",)}),
    ]
