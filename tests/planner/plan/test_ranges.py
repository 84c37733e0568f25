"""Names and ranks, short: the limits before they are expanded. What they mean: test_plan.py."""

from __future__ import annotations

import time
from typing import Any

import pytest

from meshwright.planner.plan.ranges import PlanError, expand_names, expand_ranks
from meshwright.profiles.inputs.limits import MAX_DEVICES, MAX_NAMES

LATE_S = 10.0


@pytest.mark.parametrize(
    "ranks",
    ["0-99999999999", f"0-{MAX_DEVICES}", "9" * 5000, "0-9999999," * 9 + "0", None, 3, "", "1-0",
     ",".join(["0-1000000"] * 9), "0," * 2**20 + "0-1000000"],
)  # fmt: skip
def test_ranks_that_cannot_be_are_refused_before_they_are_listed(ranks: Any) -> None:
    before = time.process_time()
    with pytest.raises(PlanError) as caught:
        expand_ranks(ranks, "plan: stage 0")
    assert time.process_time() - before < LATE_S
    assert caught.value.place == "plan: stage 0: ranks" and caught.value.legal


def test_as_many_ranks_as_may_be_are_listed() -> None:
    assert len(expand_ranks(f"0-{MAX_DEVICES - 1}")) == MAX_DEVICES


@pytest.mark.parametrize(
    "names",
    [["h.0-99999999999"], [f"h.0-{MAX_NAMES}"], ["h.0-60000", "g.0-60000"], ["x" * 5000],
     ["h." + "9" * 5000 + "-" + "9" * 5001], ["a"] * (MAX_NAMES + 1)],
)  # fmt: skip
def test_names_that_cannot_be_are_refused_before_they_are_listed(names: list[str]) -> None:
    before = time.process_time()
    with pytest.raises(PlanError) as caught:
        expand_names(names, "plan: stage 0: blocks")
    assert time.process_time() - before < LATE_S
    assert caught.value.place == "plan: stage 0: blocks" and caught.value.legal


def test_as_many_names_as_may_be_are_listed() -> None:
    assert len(expand_names([f"h.0-{MAX_NAMES - 1}"])) == MAX_NAMES
