"""What a report is asked later: the price of overrides, the best of each family, sensitivity."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import Overrides
from meshwright.planner.alternatives.alternatives import Alternative
from meshwright.planner.alternatives.answers import Answers
from meshwright.planner.alternatives.explain import alternative_row
from meshwright.planner.plan.words import seconds
from meshwright.planner.pricing.evaluate import Evaluation
from meshwright.planner.report import Document, sensitivity_parts
from tests.planner.report.test_report import overridden, searched

# --- overrides ---


def test_overrides_are_priced_against_the_free_optimum() -> None:
    together, *each = overridden().report.overrides
    best, ours = searched().prediction, overridden().prediction
    assert together["free_step_time_s"] == pytest.approx(best.step_time_s)
    extra = ours.step_time_s - best.step_time_s
    assert extra > 0
    assert f"cost {seconds(extra)} a step" in together["effect"]
    assert together["cost_s"] == pytest.approx(extra)
    assert all(word in together["override"] for word in ("pp=2", "schedule='gpipe'"))
    assert together["effect"] in overridden().report.text(full=True)
    assert len(each) == 3


def test_each_override_is_priced_against_the_best_without_it() -> None:
    given: dict[str, Any] = {"pp": 2, "schedule": "gpipe", "num_microbatches": 2}
    rows = {row["override"]: row for row in overridden().report.overrides}
    for name, value in given.items():
        rest = {key: kept for key, kept in given.items() if key != name}
        without = overridden().replan(Overrides(**rest)).prediction.step_time_s
        row = rows[f"{name}={value!r}"]
        assert row["cost_s"] == pytest.approx(
            max(0.0, overridden().prediction.step_time_s - without), abs=1e-12
        )
        assert row["cost"] == pytest.approx(row["cost_s"] / without)


def test_overrides_that_hold_anyway_cost_nothing() -> None:
    (stage,) = searched().plan.stages
    result = searched().replan(Overrides(tp=stage.tp, dp=stage.dp, pp=1))
    rows = result.report.overrides
    assert [row["effect"][:12] for row in rows] == ["cost nothing"] * 4
    assert [row["cost_s"] for row in rows] == [0.0] * 4


def test_many_overrides_are_priced_together_only() -> None:
    forbidden = ["cp", "ep", "dp_shard", "gpipe", "unequal_meshes", "virtual_stages", "placement"]
    (row,) = searched().replan(Overrides(forbid=forbidden)).report.overrides
    assert "not priced one by one" in row["effect"]


def test_no_overrides_no_rows() -> None:
    assert searched().report.overrides == []
    assert "Overrides" not in searched().report.text(full=True)


# --- alternatives --------------------------------------------------------------------------


def test_alternatives_are_against_the_chosen_plan() -> None:
    report = searched().report
    rows = [row for row in report.alternatives if row["plan"]]
    assert {"full recompute"} <= {row["family"] for row in rows}
    best_s = report.summary["step_time_s"]
    for row in rows:
        assert row["slower"] == pytest.approx(row["step_time_s"] / best_s - 1)
        total_s = sum(row["components_s"].values())
        assert total_s == pytest.approx(row["step_time_s"] - best_s, abs=1e-12)


def test_every_alternative_is_in_the_text() -> None:
    report, text = searched().report, searched().report.text(full=True)
    for row in report.alternatives:
        assert row["family"] in text
        assert (row["plan"] or row["why"]) in text
    for runner in report.runners_up:
        assert runner["plan"] in text


def test_why_a_family_has_no_plan() -> None:
    best = searched_evaluation()
    lacking = alternative_row(Alternative(family="tp=4", shortfall_bytes=3 * 2.0**30), best)
    assert (
        lacking["plan"] is None
        and "no plan with equal stages was found to fit: the leanest lacks 3 GiB" in lacking["why"]
    )
    late = alternative_row(Alternative(family="tp=4", bound_s=1.5), best)
    assert late["why"].startswith("at least 1.5 s; not explored")


def searched_evaluation() -> Evaluation:
    answers = searched().report.deferred
    assert isinstance(answers, Answers)
    return answers.result.best.evaluation


# --- sensitivity ---


def test_sensitivity_names_properties_factors_and_plans() -> None:
    rows = searched().report.sensitivity()
    assert {"intra-node bandwidth", "FLOP/s", "memory bandwidth", "memory"} == {
        row["property"] for row in rows
    }
    parts = sensitivity_parts(
        [
            *rows,
            {"property": "memory", "factor": 0.5, "plan": None},
            {"property": "FLOP/s", "factor": 2.0, "plan": "dp4×tp1"},
        ]
    )
    lines = str(Document(tuple(parts))).splitlines()
    assert lines[-2:] == [
        "  memory times 0.5: no plan known from the search fits", "  FLOP/s times 2: dp4×tp1",
    ]  # fmt: skip
    for row, line in zip(rows, lines[1:-2], strict=True):
        assert ("no flip" in line) == (row["factor"] is None)
