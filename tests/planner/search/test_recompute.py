"""What runs again in a backward: block by block, in segments, gathers alone; where memory asks for
it, and where the user does."""

import contextlib
import dataclasses
from typing import Any

import pytest

from meshwright.costmodel.recompute import REGATHERING
from meshwright.costmodel.targets import COMPILED, EAGER, TARGETS
from meshwright.planner.drafts.candidates import Candidate
from meshwright.planner.overrides.of_target import check_plan_for
from meshwright.planner.overrides.overrides import OverrideError
from meshwright.planner.overrides.pinned import plan_overrides
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.plan.words import describe
from tests.helpers.enumeration import limited
from tests.helpers.planning import Traced, cluster, large_gpt2, linears
from tests.helpers.tiers import second_tier
from tests.planner.search.test_search import CLUSTERS, search, searching


def peak(of: Candidate) -> int:
    return max(of.evaluation.prediction.peak_memory_bytes)


def policies(of: Candidate) -> set[str]:
    return {policy for stage in of.plan.stages for policy in stage.policies}


# --- block by block ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("slow wires", {"layers.0": "full"}),
        ("slow starts", {"layers.1": "selective", "layers.2": "none"}),
        pytest.param(
            "two nodes",
            {"**": "full"},
            marks=second_tier("all blocks alike; blocks by themselves stay"),
        ),
    ],
)
def test_recompute_by_block_is_in_the_plan_and_priced(name: str, recompute: dict[str, str]) -> None:
    running = searching(CLUSTERS[name], recompute=recompute)
    for draft in running.run().drafts:
        made = running.written(draft)
        for stage in made.plan.stages:
            for block, policy in zip(stage.blocks, stage.policies, strict=True):
                assert policy == recompute.get(block, recompute.get("**", "none"))
        # what crosses to another tensor-parallel degree is whole: priced when it is written
        alike = len({stage.tp for stage in made.plan.stages}) == 1
        assert made.step_time_s == pytest.approx(draft.step_time_s, rel=1e-9 if alike else 0.01)
        ours, written = (c.evaluation.prediction for c in (draft, made))
        for own, other in zip(ours.peak_memory_bytes, written.peak_memory_bytes, strict=True):
            # a message, or a bucket, is much of so small a model
            assert 0.85 * other <= own <= 1.25 * other


def test_recompute_by_block_is_no_slower_than_one_policy() -> None:
    """Where memory binds; on one device there is nothing else to choose."""
    of, on = linears(64, 4, 8, 512), cluster(1)
    given: dict[str, Any] = {"batch": 8, "num_microbatches": 1, "forbid": ["offload"]}
    least, most = (peak(search(on, of, recompute=p, **given).best) for p in ("full", "none"))
    gains = 0
    for share in (0.9, 0.7, 0.5, 0.3, 0.1, 0.0):
        small = limited(on, least + share * (most - least))
        best = search(small, of, **given).best
        assert policies(best) - {"none"}
        uniform = []
        for policy in ("selective", "full"):
            with contextlib.suppress(InfeasibleError):
                uniform.append(search(small, of, recompute=policy, **given).best.step_time_s)
        assert all(best.step_time_s <= s * (1 + 1e-9) for s in uniform)
        gains += all(best.step_time_s < s * (1 - 1e-3) for s in uniform)
    assert gains >= 3


# --- segments ------------------------------------------------------------------------------------

ROWS, LAYERS, WIDTH, LENGTH = 4, 16, 64, 2048
ONE: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 1, "num_microbatches": 2, "batch": ROWS}


def long_sequences() -> Traced:
    """Activations weigh more than states."""
    return linears(WIDTH, LAYERS, ROWS // 2, LENGTH)


def segmented(memory_bytes: float = 2.0**40, devices: int = 1, **given: Any) -> Candidate:
    on = cluster(devices, memory_bytes=memory_bytes)
    return search(on, long_sequences(), **{**ONE, **given}).best


def test_segments_free_what_full_recompute_keeps_and_cost_a_forward_more() -> None:
    """About √n blocks in one: n/k inputs, and k."""
    full = segmented(recompute="full")
    found = {k: segmented(recompute="full", segments=k) for k in (2, 4, 8)}
    assert peak(found[4]) == min(map(peak, found.values())) < peak(full)
    kept = WIDTH * LENGTH * 2 * ROWS // 2
    freed = (LAYERS - LAYERS / 4 - 4) * kept
    assert peak(full) - peak(found[4]) == pytest.approx(freed, abs=2 * kept)
    (costs,), (plain,) = found[4].evaluation.stages, full.evaluation.stages
    assert 0.9 * plain.forward_s <= costs.backward_s - plain.backward_s <= plain.forward_s


def test_segments_are_chosen_where_nothing_else_fits_and_no_host_is_faster() -> None:
    full, segments = segmented(recompute="full"), segmented(recompute="full", segments=4)
    between = (peak(full) + peak(segments)) / 2
    with pytest.raises((InfeasibleError, OverrideError)):
        segmented(between, segments=1, forbid=["offload"])
    found = segmented(between, forbid=["offload"])
    assert found.plan.stages[0].segments > 1 and peak(found) <= between
    assert "segments of" in describe(found.plan)
    assert segmented(peak(full) * 1.01).plan.stages[0].segments == 1
    on = cluster(1, memory_bytes=between)
    assert on.host is not None
    at_no_cost = dataclasses.replace(on.host, link_bandwidth=1e15)
    sent = search(dataclasses.replace(on, host=at_no_cost), long_sequences(), **ONE).best
    (stage,) = sent.plan.stages
    assert stage.segments == 1 and stage.offload["activations"] > 0
    assert peak(sent) <= between
    assert sent.step_time_s < found.step_time_s


def test_a_pipeline_with_segments_is_checked_and_pinned() -> None:
    given = {"pp": 2, "num_microbatches": 4, "schedule": "1f1b"}
    plan = segmented(devices=2, segments=4, recompute="pointwise", **given).plan
    assert [stage.segments for stage in plan.stages] == [4, 4]
    of = long_sequences()
    check_plan(plan, of.graph, of.table)
    assert plan_overrides(plan, of.graph).segments == 4
    plain = [dataclasses.replace(stage, segments=1) for stage in plan.stages]
    assert "segments" not in dataclasses.replace(plan, stages=tuple(plain)).to_json()


# --- gathers -------------------------------------------------------------------------------------

SEQUENCE = {
    "**.attn.c_attn": "colwise", "**.attn.c_proj": "rowwise", "**.mlp.c_fc": "colwise",
    "**.mlp.c_proj": "rowwise", "transformer.h.*:add": "-> S(1)",
    "transformer.h.*:add#1": "-> S(1)",
}  # fmt: skip
GIVEN = {"tp": 2, "dp": 1, "zero": 0, "num_microbatches": 2, "batch": 4, "shardings": SEQUENCE}


def gathering(memory_bytes: float = 2.0**40, devices: int = 2, **given: Any) -> Candidate:
    """On devices that talk fast: gathering costs less than computing anything again."""
    on = cluster(devices, bandwidth=1e12, memory_bytes=memory_bytes)
    return search(on, large_gpt2(), **{**GIVEN, **given}).best


def test_what_is_gathered_is_kept_unless_memory_binds() -> None:
    ample = gathering()
    assert policies(ample) == {"none"}
    tight = gathering(peak(ample) * 0.97)
    assert policies(tight) & {*REGATHERING}
    assert peak(tight) < peak(ample)
    other = gathering(peak(ample) * 0.97, forbid=[*REGATHERING])
    assert not policies(other) & {*REGATHERING}
    assert ample.step_time_s <= tight.step_time_s <= other.step_time_s * 1.0001


def test_a_split_backward_gathers_again_and_computes_nothing_again() -> None:
    given = {"devices": 4, "pp": 2, "schedule": "zb_h1", "num_microbatches": 4, "batch": 16}
    ample, least = gathering(**given), gathering(recompute="regather", **given)
    assert policies(ample) == {"none"} and peak(least) < peak(ample)
    tight = gathering(peak(least) * 1.005, **given)
    assert policies(tight) <= {"none", "regather"} and "regather" in policies(tight)


def test_targets_that_keep_what_they_gather_refuse() -> None:
    plan = gathering(recompute="pointwise+regather").plan
    assert plan.stages[0].recompute == "pointwise+regather"
    for policy in REGATHERING:
        with pytest.raises(OverrideError, match="can't run it"):
            searching(cluster(2), large_gpt2(), target=COMPILED, recompute=policy).run()
        stages = [dataclasses.replace(stage, recompute=policy) for stage in plan.stages]
        asked: Plan = dataclasses.replace(plan, stages=tuple(stages))
        check_plan_for(asked, EAGER)
        with pytest.raises(PlanError, match="recompute"):
            check_plan_for(asked, COMPILED)
    assert [target.name for target in TARGETS.values() if target.regathers] == ["eager"]
