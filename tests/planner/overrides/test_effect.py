"""What the report says of overrides without an effect."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.overrides import Overrides, restrict, without_effect
from meshwright.planner.plan import check_plan
from tests.helpers.tiny import cut, net, plan_for, with_stage

GRAPH, FACTORS = cut(net())


def said(given: dict[str, Any], **stage: Any) -> list[str]:
    plan = plan_for(GRAPH, dp=stage.pop("dp", 2), tp=stage.pop("tp", 2))
    plan = with_stage(plan, **stage)
    assignments = check_plan(plan, GRAPH, FACTORS)
    return without_effect(restrict(Overrides(**given), GRAPH), plan, assignments)


def test_a_degree_that_splits_nothing_is_said() -> None:
    (line,) = said({"tp": 2})
    assert line.startswith("override tp=2 splits nothing in stage 0: each of its 2 ranks")
    assert said({"tp": 2}, shardings={"layers.*.up": "colwise", "layers.*.down": "rowwise"}) == []
    assert said({}) == []


@pytest.mark.parametrize(
    ("given", "stage", "why"),
    [
        ({"zero": 1}, {"dp": 1}, "one data-parallel rank"),
        ({"dp_shard": 3}, {}, "the plan uses no ZeRO"),
        ({"dp_shard": 3}, {"zero": 1}, "the plan has 2"),
        ({"hpz": 2}, {"zero": 1}, "the plan uses no ZeRO-3"),
        ({"recompute": {"layers.1": "full"}}, {}, "the plan has 'none'"),
    ],
)
def test_a_value_that_the_plan_lacks_is_said(
    given: dict[str, Any], stage: dict[str, Any], why: str
) -> None:
    (line,) = said(given, **stage)
    assert "has no effect on" in line and why in line


def test_a_value_that_the_plan_has_is_not_said() -> None:
    assert said({"zero": 1, "dp": 2, "dp_shard": 2, "recompute": "none"}, zero=1) == []
