"""Alternatives: what a family is; its plan and what it lacks, in bytes, against searches restricted
to it; and what a report is asked later: the price of overrides, sensitivity."""

from functools import cache
from typing import Any

import pytest

from meshwright.costmodel.intervals import SURE
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER, target_named
from meshwright.planner.alternatives import answers as module
from meshwright.planner.alternatives.alternatives import Alternative, families
from meshwright.planner.alternatives.answers import CUT_SHORT, Answers
from meshwright.planner.alternatives.explained import alternative_row
from meshwright.planner.document import Document
from meshwright.planner.overrides.overrides import OverrideError, Overrides
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.words import describe, seconds
from meshwright.planner.report import sensitivity_parts
from meshwright.planner.search.search import Search
from meshwright.planner.search.taste import TIE
from meshwright.profiles.cluster import Cluster
from meshwright.shell.commands.fit import fit
from tests.helpers.enumeration import SERIAL, limited
from tests.helpers.planning import Traced, cluster, large_gpt2, linears, problem_of
from tests.helpers.tiers import second_tier, tiered
from tests.planner.report.test_report import overridden
from tests.planner.report.test_report import searched as reported

AS_FORCED = 0.01  # between a family's line and what forcing it finds
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

FIRST = ("fast wires", "fastest")


def searching(on: Cluster, *, target: Target = EAGER, **given: Any) -> Search:
    problem = problem_of(small(), on, target=target)
    return Search(problem, BATCH, Overrides(**given))


@cache
def searched(name: str, objective: str = "fastest") -> Answers:
    make, on, batch, target = CASES[name]
    problem = problem_of(make(), on, target=target_named(target))
    search = Search(problem, batch, Overrides(), objective=objective)
    return Answers(search=search, result=search.run())


def lines(of: Search) -> dict[str, Alternative]:
    return {a.family: a for a in Answers(search=of, result=of.run()).others}


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        FIRST,
        pytest.param("two nodes", "robust", marks=second_tier("families of the fastest plan stay")),
    ],
)
def test_every_family_but_those_of_the_chosen_plan_has_a_plan_that_fits(
    name: str, objective: str
) -> None:
    """Memory is ample."""
    own = searched(name, objective)
    found = {a.family: a for a in own.others}
    assert len(found) == len(own.others) and "full recompute" in found
    for family in families(own.search, own.result):
        assert not family.has(own.result.best.plan)
        best = found[family.name].best
        assert best is not None and best.fits, family.name
        assert best.step_time_s >= own.result.bound_s


def test_what_does_not_fit_lacks_as_much_as_makes_it_fit() -> None:
    free = searching(ON["fast wires"], target=SERIAL).run().best.evaluation.prediction
    tight = limited(ON["fast wires"], max(free.peak_memory_bytes) * 0.62)
    found = lines(searching(tight, target=SERIAL, forbid=["recompute"]))
    lacking = {name: a for name, a in found.items() if a.shortfall_bytes}
    own = sorted({"pp=4", "no tensor parallelism", "ZeRO-2", "ZeRO-3"} & lacking.keys())
    assert len(own) >= 3
    for family in own:
        short, given = lacking[family].shortfall_bytes or 0.0, dict(lacking[family].asks)
        given["forbid"] = [*given.get("forbid", []), "recompute"]
        room = tight.device.memory_bytes
        enough, little = (limited(tight, room + more) for more in (short * 1.01 + 1, short / 2))
        assert searching(enough, target=SERIAL, **given).run().best.fits
        with pytest.raises(InfeasibleError):
            searching(little, target=SERIAL, **given).run()


# --- what forcing a family finds ------------------------------------------------------------------


FORCED = tiered(
    [(name, objective) for name in CASES for objective in ("fastest", "robust")],
    FIRST.__eq__,
    "two searches for each family; those of one small case stay",
    "-".join,
)


@pytest.mark.parametrize("case", FORCED)
def test_a_line_is_what_forcing_its_family_finds(case: tuple[str, str]) -> None:
    """In a search that knows nothing of the first."""
    name, objective = case
    own = searched(name, objective)
    make, on, batch, target = CASES[name]
    known = {a.family: a for a in own.others}
    for family in own.families:
        problem = problem_of(make(), on, target=target_named(target))
        try:
            best = Search(problem, batch, Overrides(**family.asks), objective=objective).run().best
        except (InfeasibleError, OverrideError):
            assert family.name not in known or known[family.name].best is None
            continue
        line = known[family.name].best
        assert line is not None, f"{family.name} fits, in {best.step_time_s} s"
        assert line.step_time_s == pytest.approx(best.step_time_s, rel=AS_FORCED), family.name


@pytest.mark.parametrize("case", FORCED)
def test_no_line_is_faster_than_the_choice(case: tuple[str, str]) -> None:
    name, objective = case
    own = searched(name, objective)
    tied = 1 + TIE if objective == "robust" else 1.0
    least_s = own.result.best.step_time_s / tied * (1 - 1e-9)
    for alternative in own.others:
        assert alternative.best is None or alternative.best.step_time_s >= least_s
    for row in own.runners_up():
        assert row["step_time_s"] >= least_s


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part", "margin", "needed", "none"),
    [
        ("two nodes", 0.955, 0.05, 0.045, True),
        pytest.param(
            "slow wires",
            0.97,
            0.1,
            0.051,
            False,
            marks=second_tier("families that have a slower plan; those that have none stay"),
        ),
    ],
)
def test_what_was_refused_is_told_with_the_margin_that_it_needs(
    name: str, part: float, margin: float, needed: float, none: bool
) -> None:
    """Faster plans fit with a smaller margin than what is asked for; of the families that have them
    all have `none` with that, or none has."""
    on, own = ON[name], {"forbid": ["offload", "recompute", "eager_1f1b"]}
    free = searching(on, **own).run().best
    tight = limited(on, free.evaluation.prediction.fullest_bytes / part)
    given = {"overrides": Overrides(**own), "memory_margin": margin}
    search = Search(problem_of(small(), tight), BATCH, **given)
    answers = Answers(search=search, result=search.run())
    chosen_s = answers.result.best.step_time_s
    (row,) = [row for row in answers.advice() if row["kind"] == "margin"]
    told = {a.family: a for a in answers.others if a.smaller}
    assert {a.best is None for a in told.values()} == {none}
    assert row["memory_margin"] == pytest.approx(needed, abs=0.002)
    assert free.step_time_s <= row["step_time_s"] < chosen_s
    asked = {f.name: f for f in answers.families}
    for name, alternative in told.items():
        smaller = alternative.smaller
        assert smaller is not None and smaller.best.fits
        assert alternative.best is None or smaller.best.step_time_s < chosen_s
        there = asked[name].within(search)
        again = there.like(memory_margin=smaller.memory_margin).run().best
        assert again.step_time_s == pytest.approx(smaller.best.step_time_s)
    for line in answers.alternatives():
        smaller = told[line["family"]].smaller if line["family"] in told else None
        said = smaller is not None and f"with memory_margin={smaller.memory_margin:g}: "
        assert (said in line["why"]) if said else "memory_margin" not in line["why"]


def filled(part: float, **given: Any) -> Answers:
    """Of devices that the plan on ample ones fills to a part."""
    own, problem = Overrides(**given), problem_of(small(), ON["fast wires"])
    free = Search(problem, BATCH, own).run().best.evaluation.prediction
    on = limited(ON["fast wires"], free.fullest_bytes / part)
    search = Search(problem_of(small(), on), BATCH, own)
    return Answers(search=search, result=search.run())


@second_tier("what a page says of a plan that surely fits stays")
def test_where_the_chosen_plan_may_not_fit_one_that_surely_does_is_told() -> None:
    """With its cost, and the margin that chooses it."""
    assert searched("fast wires").surely_fits() == {}
    answers = filled(0.97)
    best, row, search = answers.result.best, answers.surely_fits(), answers.search
    likely = best.evaluation.prediction.memory_probability(search.problem.cluster)
    assert likely < SURE <= row["memory_probability"]
    again = search.like(memory_margin=row["memory_margin"]).run().best
    assert describe(again.plan) == row["plan"]
    assert again.step_time_s == row["step_time_s"] > best.step_time_s
    (said,) = fit(search).helps
    assert row["plan"] in said and f"--memory-margin {row['memory_margin']:g}`" in said
    forced = {"tp": 4, "num_microbatches": 1, "forbid": ["offload", "recompute"]}
    assert filled(0.97, **forced).surely_fits()["plan"] is None


@second_tier("a family as the others, whose lines stay")
def test_nothing_in_host_memory_is_a_family_where_something_is() -> None:
    free = searching(ON["fast wires"]).run().best.evaluation.prediction
    tight = limited(ON["fast wires"], free.fullest_bytes * 0.5)
    search = searching(tight, num_microbatches=1, forbid=["recompute", "tp", "pp"])
    found, name = search.run(), "nothing in host memory"
    assert any(stage.offload for stage in found.best.plan.stages)
    (line,) = [a for a in Answers(search=search, result=found).others if a.family == name]
    assert dict(line.asks) == {"forbid": ["offload"]}
    assert name not in {a.family for a in searched("fast wires").others}


# --- time -----------------------------------------------------------------------------------------


@second_tier("the short text says it in test_text")
def test_a_family_that_was_not_searched_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searching(ON["slow wires"])
    answers = Answers(search=search, result=search.run())
    monkeypatch.setattr(module, "KNOWN_S", 0.0)
    rows = answers.known_alternatives()
    assert {row["family"] for row in rows} == {family.name for family in answers.families}
    assert all(row["plan"] is None and "not searched" in row["why"] for row in rows)
    every = answers.alternatives()
    assert all(row["plan"] for row in every)
    assert sorted(map(str, answers.known_alternatives())) == sorted(map(str, every))


@second_tier("a report's word of its time limit stays (test_report)")
def test_under_a_time_limit_what_overrides_cost_is_left_out() -> None:
    search = searching(ON["slow wires"], pp=2)
    limited_search = search.like(time_limit_s=0.0)
    cut = Answers(search=limited_search, result=limited_search.run())
    assert not cut.result.complete
    assert cut.overrides() == [{"override": "pp=2", "effect": CUT_SHORT}]
    (row,) = Answers(search=search, result=search.run()).overrides()
    assert row["cost_s"] >= 0


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
    given: dict[str, Any] = {"family": "tp=4", "asks": {"tp": 4}}
    lacking = alternative_row(Alternative(**given, shortfall_bytes=3 * 2.0**30), best)
    assert lacking["plan"] is None and lacking["asks"] == {"tp": 4}
    assert "no plan was found to fit: the closest lacks 3 GiB" in lacking["why"]
    late = alternative_row(Alternative(**given, bound_s=1.5), best)
    assert late["why"].startswith("at least 1.5 s; not searched")


def test_sensitivity_names_properties_factors_and_plans() -> None:
    rows = reported().report.sensitivity()
    assert {"intra-node bandwidth", "FLOP/s", "memory bandwidth", "memory"} == {
        row["property"] for row in rows
    }
    more: list[dict[str, Any]] = [
        {"property": "memory", "factor": 0.5, "plan": None},
        {"property": "FLOP/s", "factor": 2.0, "plan": "dp4"},
    ]
    parts = sensitivity_parts([*rows, *more])
    lines = str(Document(tuple(parts))).splitlines()
    assert lines[-2:] == [
        "  memory times 0.5: no plan known from the search fits", "  FLOP/s times 2: dp4",
    ]  # fmt: skip
    for row, line in zip(rows, lines[1:-2], strict=True):
        assert ("no flip" in line) == (row["factor"] is None)
