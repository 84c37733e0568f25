"""Schedules with two copies of the model: forced, priced, checked, and left out where not asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.pinned import plan_overrides
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.flow import crossings, shared_apart
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.ranges import PlanError
from meshwright.planner.pricing.copies import with_exchange
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.planner.pricing.work import priced_work
from tests.helpers.planning import linears, problem_of
from tests.planner.search.test_search import BATCH, CLUSTERS, search

MODEL, ON = linears(256, 8, BATCH, 64), CLUSTERS["slow wires"]
COPIES = ("chimera", "dualpipe")


def chosen(schedule: str, **given: Any) -> Any:
    return search(ON, MODEL, batch=16, schedule=schedule, tp=1, **given).best


@pytest.mark.parametrize("schedule", COPIES)
@pytest.mark.parametrize("pp", [2, 4])
def test_a_forced_one_is_planned_with_equal_copies(schedule: str, pp: int) -> None:
    plan = chosen(schedule, pp=pp, num_microbatches=8).plan
    first, second = plan.stages[:pp], plan.stages[pp:]
    assert [s.blocks for s in first] == [s.blocks for s in second]
    assert [s.ranks for s in first] == [s.ranks for s in second][::-1]
    check_plan(plan, MODEL.graph, MODEL.table)
    assert Plan.from_json(plan.to_json()) == plan
    chains = {(k, k + 1) for k in range(pp - 1)} | {(pp + k, pp + k + 1) for k in range(pp - 1)}
    assert set(crossings(plan, MODEL.graph)) == chains
    assert set(shared_apart(plan, MODEL.graph)) == set(MODEL.graph.parameters.values())
    pinned = plan_overrides(plan, MODEL.graph)
    assert (pinned.pp, pinned.virtual_stages, len(pinned.stages or ())) == (pp, 2, pp)
    again = search(ON, MODEL, batch=16, **pinned.given()).best
    assert again.plan == plan


def test_nobody_is_given_one_unasked() -> None:
    assert search(ON, MODEL, batch=16, pp=4, tp=1).best.plan.schedule not in COPIES
    with pytest.raises(OverrideError, match="chimera"):
        Overrides(schedule="chimera", pp=3)


def test_weights_states_and_the_sum_of_gradients_are_priced_twice() -> None:
    given: dict[str, Any] = {"pp": 4, "num_microbatches": 8}
    one, two = chosen("1f1b", **given), chosen("chimera", **given)
    problem = problem_of(MODEL, ON)
    coster = StageCoster(problem)
    stages = two.evaluation.stages
    bare = tuple(replace(own, reduce_s=0.0) for own in stages)
    exchanged = [own.reduce_s for own in with_exchange(two.plan, coster, bare)]
    # fp32 gradients over one wire; what latency adds is less
    wire = ON.intra_link if ON.num_nodes == 1 else ON.inter_link
    for seconds, own in zip(exchanged, stages, strict=True):
        assert own.reduce_s == pytest.approx(seconds)
        assert seconds >= 4 * own.parameters / wire.bandwidth
    assert with_exchange(one.plan, coster, one.evaluation.stages) == one.evaluation.stages
    held = [sum(s.kept_bytes for s in x.evaluation.stages) for x in (one, two)]
    assert held[1] == pytest.approx(2 * held[0], rel=0.1)
    work = [sum(w.flops for w in priced_work(x.plan, problem, x.assignments)) for x in (one, two)]
    assert work[1] == pytest.approx(work[0])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pp": 3}, "contradicts pp=3"),
        ({"num_microbatches": 5}, "contradicts num_microbatches=5"),
        ({"zero": 3}, "contradicts zero=3"),
        ({"cp": 2}, "contradicts cp=2"),
        ({"ep": 2}, "contradicts ep=2"),
        ({"offload": {"optimizer": 0.5}}, "contradicts offload"),
        ({"post_validation": True}, "contradicts post_validation"),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", COPIES)
def test_what_is_not_built_is_refused(schedule: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(OverrideError, match=f"schedule='{schedule}' {says}.*an even pp"):
        Overrides(schedule=schedule, **given)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda plan: replace(plan, num_microbatches=1), "num_microbatches=1: it runs 2 copies"),
        (lambda plan: replace(plan, stages=plan.stages[:3]), "with stages=3: it runs 2 copies"),
        (lambda plan: replace(plan, post_validation=True), "with post_validation: two copies"),
        (
            lambda plan: with_first(plan, zero=(plan.stages[0].zero + 1) % 3),
            "stages 0 and 2 are copies of one stage",
        ),
        (lambda plan: with_all(plan, zero=3), "with zero=3: two copies"),
        (lambda plan: with_all(plan, offload={"optimizer": 1.0}), "with offload: two copies"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(change: Any, says: str) -> None:
    plan = chosen("chimera", pp=2, num_microbatches=4).plan
    with pytest.raises(PlanError, match=says):
        check_plan(change(plan), MODEL.graph, MODEL.table)


def with_first(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], **changes), *plan.stages[1:]))


def with_all(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, stages=tuple(replace(s, **changes) for s in plan.stages))


def test_fewer_bubbles_than_1f1b() -> None:
    """(p/2 - 1)(2F) and what longer backwards add, against (p - 1)(F + B)."""
    given: dict[str, Any] = {"pp": 4, "num_microbatches": 4}
    found = {name: chosen(name, **given) for name in ("1f1b", *COPIES)}
    priced = {n: Evaluator(problem_of(MODEL, ON)).price(c.plan) for n, c in found.items()}
    bubbles = {name: each.prediction.bubble_fraction for name, each in priced.items()}
    assert bubbles["chimera"] < bubbles["1f1b"] and bubbles["dualpipe"] < bubbles["1f1b"]
