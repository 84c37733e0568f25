"""Alternatives: what a family is; what it lacks, in bytes, against searches restricted to it; and
what a report is asked later: the price of overrides, the best of each family, sensitivity."""

import dataclasses
from functools import cache
from typing import Any

import pytest

from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER, target_named
from meshwright.planner.alternatives.alternatives import Alternative, alternatives
from meshwright.planner.alternatives.answers import Answers
from meshwright.planner.alternatives.explain import alternative_row
from meshwright.planner.alternatives.families import RUNS_HERE, WITHOUT, families, runs_here
from meshwright.planner.overrides.overrides import OverrideError, Overrides
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.words import seconds
from meshwright.planner.report import Document, sensitivity_parts
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.search import Search
from meshwright.planner.search.taste import TIE
from meshwright.profiles.cluster import Cluster
from tests.helpers.enumeration import SERIAL, limited
from tests.helpers.planning import Traced, cluster, large_gpt2, linears, problem_of
from tests.helpers.tiers import tiered
from tests.planner.report.test_report import overridden
from tests.planner.report.test_report import searched as reported

AS_FORCED = 1.02  # a family's line over what forcing it finds, at most
FAR, FAR_OFF = 1.5, 1.1  # of families that take so many times the best step, this is enough
BATCH = 8


def small() -> Traced:
    return linears(256, 4, BATCH, 64)


ON = {
    "fast wires": cluster(4, bandwidth=1e11),
    "slow wires": cluster(4, bandwidth=2e8),
    "two nodes": cluster(2, nodes=2, node_bandwidth=2e8),
}
CASES: dict[str, tuple[Any, Cluster, int, str]] = {
    **{name: (small, on, BATCH, "eager") for name, on in ON.items()},
    "two nodes, megatron": (
        lambda: linears(512, 6, 16, 64), cluster(4, nodes=2, node_bandwidth=1e9), 16, "megatron"
    ),
    "gpt2": (large_gpt2, Cluster.from_catalog("dgx-h100", num_nodes=2), 64, "eager"),
}  # fmt: skip
NAMES = tiered(
    CASES, ON.__contains__, "a search for each family of larger clusters; three small ones stay"
)


def searching(
    on: Cluster, *, executable: bool = False, target: Target = EAGER, **given: Any
) -> Search:
    problem = problem_of(small(), on, target=target)
    return Search(problem, BATCH, Overrides(**given), executable=executable)


@cache
def searched(
    name: str, objective: str = "fastest"
) -> tuple[Search, SearchResult, tuple[Alternative, ...]]:
    make, on, batch, target = CASES[name]
    problem = problem_of(make(), on, target=target_named(target))
    search = Search(problem, batch, Overrides(), objective=objective)
    result = search.run()
    return search, result, alternatives(search, result)


@pytest.mark.parametrize("name", ON)
def test_every_family_but_those_of_the_chosen_plan_has_a_plan_that_fits(name: str) -> None:
    """Memory is ample."""
    search, result, found = searched(name)
    drafts = {a.family: a.draft for a in found}
    assert len(drafts) == len(found) and "full recompute" in drafts
    belongs = {family.name: family.has for family in families(search, result)}
    for family, has in belongs.items():
        assert has(result.best.plan) != (family in drafts)
    for family, draft in drafts.items():
        assert draft is not None and draft.fits, family
        assert belongs[family](draft.plan), family
        assert draft.step_time_s >= result.bound_s


def test_what_runs_here_is_offered_unless_nothing_else_was_searched() -> None:
    for n in ON:
        here = {a.family: a.draft for a in searched(n)[2]}.get(RUNS_HERE)
        assert here is None or runs_here(here.plan)
    search = searching(ON["two nodes"], executable=True)
    result = search.run()
    assert runs_here(result.best.plan)
    assert RUNS_HERE not in {a.family for a in alternatives(search, result)}


def test_what_does_not_fit_lacks_as_much_as_makes_it_fit() -> None:
    free = searching(ON["fast wires"], target=SERIAL).run().best.evaluation.prediction
    tight = limited(ON["fast wires"], max(free.peak_memory_bytes) * 0.62)
    search = searching(tight, target=SERIAL, forbid=["recompute"])
    found = alternatives(search, search.run())
    lacking = {a.family: a.shortfall_bytes for a in found if a.shortfall_bytes}
    own = sorted({"tp=2", "pp=2", "pp=4", "no tensor parallelism"} & lacking.keys())
    assert len(own) >= 3
    for family in own:
        given, short = forced(family), lacking[family]
        given = {**given, "forbid": [*given.get("forbid", []), "recompute", "unequal_meshes"]}
        room = tight.device.memory_bytes
        enough, little = (limited(tight, room + more) for more in (short * 1.01 + 1, short / 2))
        assert searching(enough, target=SERIAL, **given).run().best.fits
        with pytest.raises(InfeasibleError):
            searching(little, target=SERIAL, **given).run()


def test_out_of_time_nothing_new_is_explored() -> None:
    search, result, _ = searched("slow wires")
    found = alternatives(search, dataclasses.replace(result, complete=False))
    assert any(a.bound_s is not None for a in found)
    for a in found:
        if a.draft is None:
            assert a.shortfall_bytes is None and a.bound_s is not None
        else:
            assert any(a.draft is draft for draft in result.drafts)


# --- what forcing a family finds ------------------------------------------------------------------


def forced(family: str) -> dict[str, Any]:
    """The override that asks for a family."""
    without = {name: {axis: 1} for axis, name in WITHOUT.items()}
    plain: dict[str, dict[str, Any]] = {
        **without,
        "equal meshes": {"forbid": ["unequal_meshes"]},
        "no pipeline": {"pp": 1},
        "pipeline inside the node": {"placement": "tp,pp,dp"},
        "no recompute": {"recompute": "none"},
        "full recompute": {"recompute": "full"},
    }
    if family in plain:
        return plain[family]
    if family.startswith("ZeRO-"):
        return {"zero": int(family.removeprefix("ZeRO-"))}
    if "=" in family:
        axis, degree = family.split("=")
        return {axis: int(degree)}
    return {"schedule": family}


@pytest.mark.parametrize("name", NAMES)
def test_a_line_is_as_good_as_what_forcing_its_family_finds(name: str) -> None:
    search, result, found = searched(name)
    for alternative in found:
        if alternative.family == RUNS_HERE:
            continue
        given = Overrides(**forced(alternative.family))
        try:
            best_s = search.again(given).best.step_time_s
        except (InfeasibleError, OverrideError):
            assert alternative.draft is None, alternative.family
            continue
        said = [d.step_time_s for d in (alternative.draft, alternative.instead) if d]
        assert said, f"{alternative.family} fits, in {best_s} s"
        far = best_s > FAR * result.best.step_time_s
        most_s = best_s * (FAR_OFF if far else AS_FORCED)
        assert min(said) <= most_s, f"{alternative.family}: {min(said)}, {best_s}"


@pytest.mark.parametrize("objective", ["fastest", "robust"])
@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_faster_than_the_choice(name: str, objective: str) -> None:
    _, result, found = searched(name, objective)
    tied = 1 + TIE if objective == "robust" else 1.0
    least_s = result.best.step_time_s / tied * (1 - 1e-9)
    for alternative in found:
        for draft in (alternative.draft, alternative.instead):
            assert draft is None or draft.step_time_s >= least_s, alternative.family


# --- what a report is asked later ----------------------------------------------------------------


def test_overrides_are_priced_against_the_free_optimum() -> None:
    together, *each = overridden().report.overrides
    best, ours = reported().prediction, overridden().prediction
    assert together["free_step_time_s"] == pytest.approx(best.step_time_s)
    extra = ours.step_time_s - best.step_time_s
    assert extra > 0
    assert f"cost {seconds(extra)} a step" in together["effect"]
    assert together["cost_s"] == pytest.approx(extra)
    assert all(word in together["override"] for word in ("pp=2", "schedule='gpipe'"))
    assert together["effect"] in overridden().report.text(full=True)
    assert len(each) == 3
    assert reported().report.overrides == []
    assert "Overrides" not in reported().report.text(full=True)


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
    (stage,) = reported().plan.stages
    result = reported().replan(Overrides(tp=stage.tp, dp=stage.dp, pp=1))
    rows = result.report.overrides
    assert [row["effect"][:12] for row in rows] == ["cost nothing"] * 4
    assert [row["cost_s"] for row in rows] == [0.0] * 4


def test_many_overrides_are_priced_together_only() -> None:
    forbidden = ["cp", "ep", "dp_shard", "gpipe", "unequal_meshes", "virtual_stages", "placement"]
    (row,) = reported().replan(Overrides(forbid=forbidden)).report.overrides
    assert "not priced one by one" in row["effect"]


def test_alternatives_are_against_the_chosen_plan_and_in_the_text() -> None:
    report, text = reported().report, reported().report.text(full=True)
    assert {"full recompute"} <= {row["family"] for row in report.alternatives if row["plan"]}
    best_s = report.summary["step_time_s"]
    for row in (*report.alternatives, *report.runners_up):
        assert row.get("family", "") in text
        assert (row["plan"] or row["why"]) in text
        if row["plan"]:
            assert row["peak_memory_bytes"] > 0
            assert row["slower"] == pytest.approx(row["step_time_s"] / best_s - 1)
            total_s = sum(row["components_s"].values())
            assert total_s == pytest.approx(row["step_time_s"] - best_s, abs=1e-12)


def test_why_a_family_has_no_plan() -> None:
    answers = reported().report.deferred
    assert isinstance(answers, Answers)
    best = answers.result.best.evaluation
    lacking = alternative_row(Alternative(family="tp=4", shortfall_bytes=3 * 2.0**30), best)
    assert lacking["plan"] is None
    says = "no plan with equal stages was found to fit: the leanest lacks 3 GiB"
    assert says in lacking["why"]
    late = alternative_row(Alternative(family="tp=4", bound_s=1.5), best)
    assert late["why"].startswith("at least 1.5 s; not explored")


def test_sensitivity_names_properties_factors_and_plans() -> None:
    rows = reported().report.sensitivity()
    assert {"intra-node bandwidth", "FLOP/s", "memory bandwidth", "memory"} == {
        row["property"] for row in rows
    }
    more: list[dict[str, Any]] = [
        {"property": "memory", "factor": 0.5, "plan": None},
        {"property": "FLOP/s", "factor": 2.0, "plan": "dp4×tp1"},
    ]
    parts = sensitivity_parts([*rows, *more])
    lines = str(Document(tuple(parts))).splitlines()
    assert lines[-2:] == [
        "  memory times 0.5: no plan known from the search fits", "  FLOP/s times 2: dp4×tp1",
    ]  # fmt: skip
    for row, line in zip(rows, lines[1:-2], strict=True):
        assert ("no flip" in line) == (row["factor"] is None)
