"""Gathered inputs are gathered again where memory asks for it, and where a plan may say so."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.costmodel.blocks.policies import REGATHERING
from meshwright.costmodel.targets import COMPILED, EAGER, TARGETS
from meshwright.planner.drafts.candidates import Candidate
from meshwright.planner.overrides.of_target import check_plan_for
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.plan import Plan, PlanError
from tests.helpers.planning import cluster, large_gpt2
from tests.planner.search.test_search import search, searching

SEQUENCE = {
    "**.attn.c_attn": "colwise",
    "**.attn.c_proj": "rowwise",
    "**.mlp.c_fc": "colwise",
    "**.mlp.c_proj": "rowwise",
    "transformer.h.*:add": "-> S(1)",
    "transformer.h.*:add#1": "-> S(1)",
}
GIVEN = {"tp": 2, "dp": 1, "zero": 0, "num_microbatches": 2, "batch": 4, "shardings": SEQUENCE}


def best(memory_bytes: float, **given: object) -> Candidate:
    """On two devices that talk fast: gathering costs less than computing anything again."""
    on = cluster(given.pop("devices", 2), bandwidth=1e12, memory_bytes=memory_bytes)  # type: ignore[arg-type]
    return search(on, large_gpt2(), **{**GIVEN, **given}).best  # type: ignore[arg-type]


def policies(of: Candidate) -> set[str]:
    return {policy for stage in of.plan.stages for policy in stage.policies}


def peak(of: Candidate) -> int:
    return max(of.evaluation.prediction.peak_memory_bytes)


def test_what_is_gathered_is_kept_unless_memory_binds() -> None:
    ample = best(2.0**40)
    assert policies(ample) == {"none"}
    tight = best(peak(ample) * 0.97)
    assert policies(tight) & {*REGATHERING}
    assert peak(tight) < peak(ample)
    other = best(peak(ample) * 0.97, forbid=[*REGATHERING])
    assert not policies(other) & {*REGATHERING}
    assert ample.step_time_s <= tight.step_time_s < other.step_time_s


def test_a_split_backward_gathers_again_and_computes_nothing_again() -> None:
    given = {"devices": 4, "pp": 2, "schedule": "zb_h1", "num_microbatches": 4, "batch": 16}
    ample = best(2.0**40, **given)
    least = best(2.0**40, recompute="regather", **given)
    assert policies(ample) == {"none"} and peak(least) < peak(ample)
    tight = best(peak(least) * 1.001, **given)
    assert policies(tight) <= {"none", "regather"} and "regather" in policies(tight)


def test_a_plan_that_gathers_again_survives_its_file() -> None:
    plan = best(2.0**40, recompute="pointwise+regather").plan
    assert plan.stages[0].recompute == "pointwise+regather"
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("policy", REGATHERING)
def test_targets_that_keep_what_they_gather_refuse(policy: str) -> None:
    with pytest.raises(OverrideError, match="can't run it"):
        searching(cluster(2), large_gpt2(), target=COMPILED, recompute=policy).run()
    plan = best(2.0**40).plan
    stages = tuple(dataclasses.replace(stage, recompute=policy) for stage in plan.stages)
    asked = dataclasses.replace(plan, stages=stages)
    check_plan_for(asked, EAGER)
    with pytest.raises(PlanError, match="recompute"):
        check_plan_for(asked, COMPILED)
    assert [target.name for target in TARGETS.values() if target.regathers] == ["eager"]
