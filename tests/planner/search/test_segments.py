"""Segments are chosen where nothing else fits, and where the user says so."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.planner.drafts.candidates import Candidate
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.pinned import plan_overrides
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.plan.words import describe
from tests.helpers.planning import Traced, cluster, linears
from tests.planner.search.test_search import search

ROWS, LAYERS, WIDTH, LENGTH = 4, 16, 64, 2048
ONE = {"dp": 1, "tp": 1, "pp": 1, "num_microbatches": 2, "batch": ROWS}


def model() -> Traced:
    """Activations weigh more than states."""
    return linears(WIDTH, LAYERS, ROWS // 2, LENGTH)


def best(memory_bytes: float = 2.0**40, devices: int = 1, **given: object) -> Candidate:
    on = cluster(devices, memory_bytes=memory_bytes)
    return search(on, model(), **{**ONE, **given}).best  # type: ignore[arg-type]


def peak(of: Candidate) -> int:
    return max(of.evaluation.prediction.peak_memory_bytes)


def test_segments_free_what_full_recompute_keeps() -> None:
    """About √n blocks in one: n/k inputs, and k."""
    full = best(recompute="full")
    peaks = {k: peak(best(recompute="full", segments=k)) for k in (2, 4, 8)}
    assert peaks[4] == min(peaks.values()) < peak(full)
    kept = WIDTH * LENGTH * 2 * ROWS // 2
    assert peak(full) - peaks[4] == pytest.approx((LAYERS - LAYERS / 4 - 4) * kept, abs=2 * kept)


def test_they_cost_a_forward_more() -> None:
    full, segments = best(recompute="full"), best(recompute="full", segments=4)
    forward_s = full.evaluation.stages[0].forward_s
    more = segments.evaluation.stages[0].backward_s - full.evaluation.stages[0].backward_s
    assert 0.9 * forward_s <= more <= forward_s


def test_they_are_chosen_where_nothing_else_fits() -> None:
    full, segments = best(recompute="full"), best(recompute="full", segments=4)
    between = (peak(full) + peak(segments)) / 2
    with pytest.raises((InfeasibleError, OverrideError)):
        best(between, segments=1, forbid=["offload"])
    found = best(between, forbid=["offload"])
    assert found.plan.stages[0].segments > 1 and peak(found) <= between
    assert "segments of" in describe(found.plan)
    assert best(peak(full) * 1.01).plan.stages[0].segments == 1


def test_activations_in_host_memory_take_their_place_where_that_is_faster() -> None:
    full, segments = best(recompute="full"), best(recompute="full", segments=4)
    between = (peak(full) + peak(segments)) / 2
    on = cluster(1, memory_bytes=between)
    assert on.host is not None
    at_no_cost = dataclasses.replace(on.host, link_bandwidth=1e15)
    given = {"dp": 1, "tp": 1, "pp": 1, "num_microbatches": 2, "batch": ROWS}
    found = search(dataclasses.replace(on, host=at_no_cost), model(), **given).best
    stage = found.plan.stages[0]
    assert stage.segments == 1 and stage.offload["activations"] > 0
    assert peak(found) <= between
    assert found.step_time_s < best(between, forbid=["offload"]).step_time_s


def test_a_pipeline_with_segments_is_pinned_and_survives_its_file() -> None:
    given = {"pp": 2, "num_microbatches": 4, "schedule": "1f1b"}
    found = best(devices=2, segments=4, recompute="pointwise", **given)
    plan = found.plan
    assert [stage.segments for stage in plan.stages] == [4, 4]
    assert Plan.from_json(plan.to_json()) == plan
    graph = model().graph
    pinned = plan_overrides(plan, graph)
    assert isinstance(pinned, Overrides) and pinned.segments == 4
    plain = dataclasses.replace(plan, stages=tuple(
        dataclasses.replace(stage, segments=1) for stage in plan.stages
    ))  # fmt: skip
    assert "segments" not in plain.to_json()


def test_split_backwards_have_none() -> None:
    plan = best(devices=2, pp=2, segments=2, num_microbatches=4, schedule="1f1b").plan
    of = model()
    check_plan(plan, of.graph, of.table)
    with pytest.raises(PlanError, match="segments=2 with schedule='zb_h1'"):
        check_plan(dataclasses.replace(plan, schedule="zb_h1"), of.graph, of.table)
