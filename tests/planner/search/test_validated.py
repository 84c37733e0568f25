"""Steps validated afterwards: chosen where they are allowed and pay, and left elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.pinned import plan_overrides
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.plan.words import describe
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.planner.report.explain import explain_plan
from tests.helpers.enumeration import limited
from tests.helpers.planning import cluster, linears, problem_of
from tests.parity.parity_cells import Cell, plan_of
from tests.planner.search.test_search import BATCH, CLUSTERS, search, searching

ON, OF = CLUSTERS["fast wires"], linears(512, 8, BATCH, 64)
ASKED: dict[str, Any] = {"batch": 16, "pp": 4, "tp": 1}
ALLOWED = ("post_validation",)


def test_it_is_chosen_where_it_is_allowed_and_pays() -> None:
    without, with_it = search(ON, OF, **ASKED).best, search(ON, OF, allow=ALLOWED, **ASKED)
    best = with_it.best
    assert (without.plan.post_validation, best.plan.post_validation) == (False, True)
    assert best.step_time_s < 0.98 * without.step_time_s
    assert with_it.bound_s <= best.step_time_s
    assert "validated afterwards" in describe(best.plan)


def test_it_is_left_where_its_copies_do_not_fit_or_nothing_is_gained() -> None:
    free = search(ON, OF, **ASKED).best
    peak = max(free.evaluation.prediction.peak_memory_bytes)
    for on, asked in (
        (limited(ON, peak), ASKED),
        (ON, ASKED | {"schedule": "1f1b"}),
        (ON, {"batch": 16, "pp": 1}),
    ):
        assert not search(on, OF, allow=ALLOWED, **asked).best.plan.post_validation


def test_an_override_wants_a_pipeline_of_it() -> None:
    best = search(ON, OF, batch=16, post_validation=True).best
    assert best.plan.post_validation
    assert len(best.plan.devices) > 1
    refused = search(ON, OF, allow=ALLOWED, **ASKED, post_validation=False).best
    assert not refused.plan.post_validation


def test_what_it_saves_and_what_it_costs() -> None:
    """Of ZB-H2 the wait for the first forward, for 12 bytes for each parameter."""
    asked = ASKED | {"schedule": "zb_h2", "num_microbatches": 8}
    found = search(ON, OF, **asked, post_validation=True).best
    evaluator = Evaluator(searching(ON, OF, **asked).problem)
    plain = replace(found.plan, post_validation=False)
    one, two = evaluator.price(found.plan), evaluator.price(plain)
    assert one.prediction.step_time_s < two.prediction.step_time_s
    assert one.prediction.bubble_fraction < two.prediction.bubble_fraction
    parameters = OF.graph.num_parameters() / 4
    more = [
        a - b
        for a, b in zip(
            one.prediction.peak_memory_bytes, two.prediction.peak_memory_bytes, strict=True
        )
    ]
    assert sum(more) / 4 == pytest.approx(12 * parameters, rel=0.1)
    assert one.stages[0].optimizer_s == pytest.approx(two.stages[0].optimizer_s * (1 + 24 / 28))


@pytest.mark.parametrize(("schedule", "gains"), [("zb_h2", False), ("zb_v", True)])
def test_a_parameter_of_two_stages_ends_a_step_together(schedule: str, gains: bool) -> None:
    """Unless both lie on the same ranks, as a pipeline's ends do under ZB-V."""
    plan, of = plan_of(Cell.parse(f"gpt2_tied pp2 {schedule} m8"))
    evaluator = Evaluator(problem_of(of, cluster(2, flops=1e9, bandwidth=1e12), precision="fp32"))
    priced = evaluator.price(replace(plan, post_validation=True))
    if not gains:
        assert priced.prediction.step_time_s == priced.timeline.step_time_s
    notes = " ".join(explain_plan(priced, evaluator.problem, {}).notes)
    assert ("gains nothing" in notes) == (not gains)


def test_a_plan_file_keeps_it() -> None:
    best = search(ON, OF, **ASKED, post_validation=True).best
    text = best.plan.to_json()
    assert '"post_validation": true' in text
    assert Plan.from_json(text) == best.plan
    assert "post_validation" not in replace(best.plan, post_validation=False).to_json()
    with pytest.raises(PlanError, match="post_validation='yes'; legal: true, false"):
        Plan.from_json(text.replace('"post_validation": true', '"post_validation": "yes"'))
    again = plan_overrides(best.plan, OF.graph)
    assert again.post_validation


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"post_validation": "yes"}, "legal: True, False"),
        ({"pp": 1}, "contradicts pp=1"),
        ({"forbid": ["pp"]}, "contradicts forbid='pp'"),
        ({"zero": 3}, "contradicts zero=3"),
        ({"offload": {"optimizer": 0.5}}, "contradicts offload="),
    ],
    ids=str,
)
def test_what_it_contradicts_is_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OverrideError, match=says):
        Overrides(**({"post_validation": True} | given))
