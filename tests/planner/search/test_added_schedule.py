"""A schedule is its entry in the table and its order: with these two it is planned, priced,
checked and built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import accumulate

import pytest

from meshwright.costmodel.schedules import table
from meshwright.costmodel.schedules.orders import DeviceOrder
from meshwright.costmodel.schedules.schedule import SCHEDULES, Action, build_schedule, in_flight
from meshwright.planner.overrides.overrides import OverrideError, Overrides
from meshwright.planner.plan.check import check_plan, check_runs
from meshwright.planner.plan.flow import crossings
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.search import Search
from tests.helpers.planning import Traced, cluster, linears, problem_of

NAME = "patient_1f1b"


def patient_1f1b(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """1F1B with one more forward in the warm-up of each device."""
    warmup = min(p - d, m)
    for _ in range(warmup):
        order.forward(stages[0])
    for k in range(m):
        if warmup + k < m:
            order.forward(stages[0])
        order.backward(stages[0])


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    record = dataclasses.replace(
        SCHEDULES["1f1b"], order=patient_1f1b, in_flight=lambda stage, p, m: p - stage + 1
    )
    monkeypatch.setitem(table._TABLE, NAME, record)
    yield NAME


def searched(of: Traced, **overrides: object) -> SearchResult:
    given = Overrides(**overrides)
    return Search(problem_of(of, cluster(4)), 16, given).run()


def test_it_is_unknown_before_it_is_added() -> None:
    with pytest.raises(OverrideError, match=f"schedule='{NAME}'.*legal: gpipe, 1f1b"):
        Overrides(schedule=NAME)


def test_its_streams_are_built_and_hold_what_its_record_says(added: str) -> None:
    streams = build_schedule(added, num_stages=2, num_microbatches=3)
    assert [" ".join(map(str, stream)) for stream in streams] == [
        "F0 sendF0->1 F1 sendF1->1 F2 sendF2->1 recvB0<-1 B0 recvB1<-1 B1 recvB2<-1 B2 reduce",
        "recvF0<-0 F0 recvF1<-0 F1 B0 sendB0->0 recvF2<-0 F2 B1 sendB1->0 B2 sendB2->0 reduce",
    ]
    for stage, stream in enumerate(build_schedule(added, num_stages=4, num_microbatches=9)):
        changes = [
            (each.action is Action.FORWARD) - (each.action is Action.BACKWARD) for each in stream
        ]
        held = in_flight(added, stage=stage, num_stages=4, num_microbatches=9)
        assert held == max(accumulate(changes))


def test_it_is_chosen_where_it_is_asked_for_and_passes_the_checks(added: str) -> None:
    of = linears(48, 6, 8, 24)
    found = searched(of, schedule=added, pp=2, num_microbatches=4)
    plan = found.best.plan
    assert (plan.schedule, len(plan.devices)) == (added, 2)
    assert Plan.from_json(plan.to_json()) == plan
    assert check_plan(plan, of.graph, of.table) == found.best.assignments
    check_runs(plan)
    streams = build_schedule(
        plan.schedule,
        num_stages=len(plan.stages),
        num_microbatches=plan.num_microbatches,
        num_devices=len(plan.devices),
        edges=crossings(plan, of.graph),
    )
    forwards = [sum(i.action is Action.FORWARD for i in stream) for stream in streams]
    assert forwards == [4, 4]
    assert found.best.evaluation.timeline.stages_of == ((0,), (1,))


def test_it_is_among_those_that_a_free_search_simulates(added: str) -> None:
    of = linears(48, 6, 8, 24)
    search = Search(problem_of(of, cluster(4)), 16, Overrides(pp=2))
    assert (added, 1) in search.space.schedules(2, 4, 0)
    search.run()
    assert added in {
        combination.schedule
        for m in search.space.microbatch_counts()
        for choice in search.equal.mesh_choices(m)
        for combination in search.equal.combinations(choice)
    }
