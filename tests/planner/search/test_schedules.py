"""Schedules in the search: zero bubbles, two copies of the model, steps validated afterwards, and
one that is added: its entry in the table and its order are all it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import pytest

from meshwright.costmodel.schedules import (
    SCHEDULES,
    Action,
    Pipeline,
    build_schedule,
    in_flight,
    register_schedule,
    table,
)
from meshwright.costmodel.schedules.orders import DeviceOrder
from meshwright.planner.drafts.candidates import Candidate
from meshwright.planner.overrides.overrides import OverrideError, Overrides
from meshwright.planner.overrides.pinned import plan_overrides
from meshwright.planner.plan.check import check_plan, check_runs
from meshwright.planner.plan.flow import crossings, shared_apart
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.plan.words import describe
from meshwright.planner.pricing import Evaluator, Ledger
from meshwright.planner.pricing.copies import exchanges
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.planner.report.explain import explain_plan
from meshwright.profiles.inputs import MeshwrightError
from tests.costmodel.schedules.pipelines import Shape
from tests.helpers.enumeration import limited
from tests.helpers.planning import cluster, linears, problem_of
from tests.helpers.tiers import second_tier
from tests.parity.parity_cells import Cell, plan_of
from tests.planner.search.test_search import BATCH, CLUSTERS, search, searching


def peak(of: Candidate) -> int:
    return max(of.evaluation.prediction.peak_memory_bytes)


def test_zb_h2_is_chosen_where_its_activations_fit() -> None:
    """It has a smaller bubble than ZB-H1, hides sends that 1F1B waits for, and holds more."""
    asked: dict[str, Any] = {"batch": 16, "pp": 4, "tp": 1}
    on, of = CLUSTERS["slow wires"], linears(512, 8, BATCH, 64)
    ample = search(on, of, **asked, forbid=["virtual_stages"]).best
    assert ample.plan.schedule == "zb_h2"
    assert ample.evaluation.in_flight == (7,) * 4
    without = search(on, of, **asked, forbid=["virtual_stages", "zb_h2"]).best
    assert without.step_time_s > 1.05 * ample.step_time_s
    tight = search(limited(on, peak(ample) - 1), of, **asked, forbid=["virtual_stages"]).best
    assert tight.plan.schedule != "zb_h2"
    assert ample.step_time_s < tight.step_time_s <= without.step_time_s * (1 + 1e-9)


# --- two copies of the model ---------------------------------------------------------------------

MODEL, WIRES = linears(256, 8, BATCH, 64), CLUSTERS["slow wires"]
COPIES = ("chimera", "dualpipe")


@cache
def chosen(schedule: str, pp: int, num_microbatches: int) -> Candidate:
    given = {"schedule": schedule, "pp": pp, "num_microbatches": num_microbatches}
    return search(WIRES, MODEL, batch=16, tp=1, **given).best


@pytest.mark.parametrize(("schedule", "pp"), [("chimera", 4), ("dualpipe", 2)])
def test_a_forced_one_is_planned_with_equal_copies(schedule: str, pp: int) -> None:
    plan = chosen(schedule, pp, 8).plan
    first, second = plan.stages[:pp], plan.stages[pp:]
    assert [s.blocks for s in first] == [s.blocks for s in second]
    assert [s.ranks for s in first] == [s.ranks for s in second][::-1]
    check_plan(plan, MODEL.graph, MODEL.table)
    chains = {(k, k + 1) for k in range(pp - 1)} | {(pp + k, pp + k + 1) for k in range(pp - 1)}
    assert set(crossings(plan, MODEL.graph)) == chains
    assert set(shared_apart(plan, MODEL.graph)) == set(MODEL.graph.parameters.values())
    pinned = plan_overrides(plan, MODEL.graph)
    assert (pinned.pp, pinned.virtual_stages, len(pinned.stages or ())) == (pp, 2, pp)
    assert search(WIRES, MODEL, batch=16, **pinned.given()).best.plan == plan


def test_nobody_is_given_one_unasked() -> None:
    assert search(WIRES, MODEL, batch=16, pp=4, tp=1).best.plan.schedule not in COPIES


def test_weights_states_and_the_sum_of_gradients_are_priced_twice() -> None:
    one, two = (chosen(schedule, 4, 8) for schedule in ("1f1b", "chimera"))
    problem = problem_of(MODEL, WIRES)
    coster, stages = StageCoster(problem), two.evaluation.stages
    summed = exchanges(two.plan, coster, stages)
    for k, own in enumerate(stages):
        assert own.reduce_s == pytest.approx(summed[k].seconds)
        # fp32 gradients over one wire; what latency adds is less
        assert own.reduce_s >= 4 * own.parameters / WIRES.intra_link.bandwidth
    assert exchanges(one.plan, coster, one.evaluation.stages) == {}
    held = [sum(s.kept_bytes for s in x.evaluation.stages) for x in (one, two)]
    assert held[1] == pytest.approx(2 * held[0], rel=0.1)
    priced = [Evaluator(problem).price(each.plan) for each in (one, two)]
    work = [sum(own.flops for own in Ledger.of(each).work()) for each in priced]
    assert work[1] == pytest.approx(work[0])


def test_two_copies_have_fewer_bubbles_than_1f1b() -> None:
    """(p/2 - 1)(2F) and what longer backwards add, against (p - 1)(F + B)."""
    evaluator = Evaluator(problem_of(MODEL, WIRES))
    alone, *copies = (
        evaluator.price(chosen(name, 4, 4).plan).prediction.bubble_fraction
        for name in ("1f1b", *COPIES)
    )
    assert max(copies) < alone


# --- validated afterwards ------------------------------------------------------------------------

ON, OF = CLUSTERS["fast wires"], linears(512, 8, BATCH, 64)
ASKED: dict[str, Any] = {"batch": 16, "pp": 4, "tp": 1}
ALLOWED = ("post_validation",)


def test_validation_afterwards_is_chosen_where_it_is_allowed_pays_and_fits() -> None:
    without, with_it = search(ON, OF, **ASKED).best, search(ON, OF, allow=ALLOWED, **ASKED)
    best = with_it.best
    assert (without.plan.post_validation, best.plan.post_validation) == (False, True)
    assert best.step_time_s < 0.98 * without.step_time_s
    assert with_it.bound_s <= best.step_time_s
    assert "validated afterwards" in describe(best.plan)
    for on, asked in (
        (limited(ON, peak(without)), ASKED),
        (ON, ASKED | {"schedule": "1f1b"}),
        (ON, {"batch": 16, "pp": 1}),
        (ON, ASKED | {"post_validation": False}),
    ):
        assert not search(on, OF, allow=ALLOWED, **asked).best.plan.post_validation


@second_tier("that it is chosen where it pays stays, and not under a schedule that is given")
def test_an_override_wants_a_pipeline_of_it() -> None:
    plan = search(ON, OF, batch=16, post_validation=True).best.plan
    assert plan.post_validation and len(plan.devices) > 1
    assert plan_overrides(plan, OF.graph).post_validation
    text = plan.to_json()
    with pytest.raises(PlanError, match="post_validation='yes'; legal: true, false"):
        Plan.from_json(text.replace('"post_validation": true', '"post_validation": "yes"'))
    assert "post_validation" not in replace(plan, post_validation=False).to_json()


IN_BACKWARD = ("optimizer_in_backward",)


def test_the_optimizer_steps_in_the_backward_where_nothing_else_fits() -> None:
    """Gradients of 4 bytes a parameter are 2 MiB here, those that are stepped at once a block's."""
    asked: dict[str, Any] = {"pp": 1, "tp": 1, "zero": 0, "forbid": ["recompute", "offload"]}
    free = search(ON, OF, batch=16, allow=IN_BACKWARD, **asked).best.plan
    assert not free.optimizer_in_backward  # it gains nothing
    least = peak(search(ON, OF, batch=16, num_microbatches=1, **asked).best)
    stepped = search(ON, OF, batch=16, optimizer_in_backward=True, **asked).best
    assert peak(stepped) < least
    tight = limited(ON, (least + peak(stepped)) / 2)
    found = search(tight, OF, batch=16, allow=IN_BACKWARD, **asked | {"num_microbatches": 1}).best
    assert found.plan.optimizer_in_backward and found.fits
    assert "optimizer in the backward" in describe(found.plan)
    assert plan_overrides(found.plan, OF.graph).optimizer_in_backward
    with pytest.raises(InfeasibleError):
        search(tight, OF, batch=16, **asked | {"num_microbatches": 1})


@second_tier("where nothing else fits it is chosen, above")
def test_states_fill_a_device_that_gradients_would_overflow() -> None:
    """Whatever is priced before: weights and moments of 8 layers are 28 MiB here."""
    of, asked = linears(512, 8, 2, 8), {"batch": 2, "pp": 1, "tp": 1, "dp": 1, "zero": 0}
    on, one = cluster(1), {"num_microbatches": 1, "forbid": ["recompute", "offload"]}
    late = search(on, of, **asked, **one).best
    stepped = search(on, of, optimizer_in_backward=True, **asked, **one).best
    assert peak(stepped) < 0.85 * peak(late)
    tight = limited(on, peak(stepped) * 1.01)
    assert search(tight, of, optimizer_in_backward=True, **asked, **one).best.fits
    found = search(tight, of, allow=IN_BACKWARD, **asked, **one).best
    assert found.fits and found.plan.optimizer_in_backward


@pytest.mark.parametrize("first", ["at_end", "in_backward"])
def test_the_price_of_a_way_to_step_is_its_own(first: str) -> None:
    """A GPU's host takes as long as it takes to issue the kernels of each parameter."""
    late = search(ON, OF, batch=16, pp=1, num_microbatches=1, zero=0).best.plan
    plans = {"at_end": late, "in_backward": replace(late, optimizer_in_backward=True)}
    problem = searching(ON, OF, batch=16).problem
    device = replace(ON.device, launch_overhead_s=5e-6)
    problem = replace(problem, cluster=replace(ON, device=device))
    alone = {way: Evaluator(problem).price(plan).stages[0] for way, plan in plans.items()}
    evaluator = Evaluator(problem)
    for way in sorted(plans, key=lambda way: way != first):
        assert evaluator.price(plans[way]).stages[0].optimizer_s == alone[way].optimizer_s
    assert alone["in_backward"].optimizer_s > alone["at_end"].optimizer_s


def test_what_it_saves_and_what_it_costs() -> None:
    """Of ZB-H2 the wait for the first forward, for 12 bytes for each parameter."""
    asked = ASKED | {"schedule": "zb_h2", "num_microbatches": 8}
    found = search(ON, OF, **asked, post_validation=True).best
    evaluator = Evaluator(searching(ON, OF, **asked).problem)
    one, two = map(evaluator.price, (found.plan, replace(found.plan, post_validation=False)))
    assert one.prediction.step_time_s < two.prediction.step_time_s
    assert one.prediction.bubble_fraction < two.prediction.bubble_fraction
    more = sum(one.prediction.peak_memory_bytes) - sum(two.prediction.peak_memory_bytes)
    assert more == pytest.approx(12 * OF.graph.num_parameters(), rel=0.1)
    assert one.stages[0].optimizer_s == pytest.approx(two.stages[0].optimizer_s * (1 + 24 / 80))


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


# --- an added one --------------------------------------------------------------------------------

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


PATIENT = replace(
    SCHEDULES["1f1b"], order=patient_1f1b, in_flight=lambda stage, p, m: p - stage + 1, sliced=False
)


@pytest.fixture
def added() -> Iterator[str]:
    with pytest.raises(OverrideError, match=f"schedule='{NAME}'.*legal: gpipe, 1f1b"):
        Overrides(schedule=NAME)
    register_schedule(NAME, PATIENT)
    yield NAME
    del table._TABLE[NAME]


def late(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """All but the last micro-batch."""
    patient_1f1b(order, stages, d, p, m - 1)


def waiting(order: DeviceOrder, stages: Sequence[int], d: int, p: int, m: int) -> None:
    """The first device waits for a backward before it begins the micro-batches of the others."""
    for _ in range(m):
        order.forward(stages[0])
        if d == 0:
            order.backward(stages[0])
    for _ in range(m if d else 0):
        order.backward(stages[0])


@pytest.mark.parametrize(
    ("name", "record", "says"),
    [
        ("1f1b", PATIENT, "name='1f1b'; legal: a new identifier"),
        ("a b", PATIENT, "name='a b'"),
        ("odd", "1f1b", r"record is '1f1b'; legal: a meshwright\.Schedule"),
        ("odd", replace(PATIENT, order=late), "odd: .*stage 0 runs 2 of 3 micro-batches"),
        ("cut", replace(PATIENT, sliced=True), "cut: .*, or say sliced=False"),
        ("odd", replace(PATIENT, order=waiting), "odd: .*deadlock"),
        ("odd", replace(PATIENT, in_flight=lambda *_: 1), "holds 3 micro-batches, its in_flight 1"),
        ("odd", replace(PATIENT, order=None), "odd: TypeError: 'NoneType' .* is not callable"),
    ],
)
def test_a_schedule_that_does_not_run_is_not_added(name: str, record: Any, says: str) -> None:
    before = set(SCHEDULES)
    with pytest.raises(MeshwrightError, match=f"register_schedule: .*{says}"):
        register_schedule(name, record)
    assert set(SCHEDULES) == before


def test_its_streams_are_built_and_hold_what_its_record_says(added: str) -> None:
    streams = Shape(name=added, p=2, v=1, m=3).streams()
    assert [" ".join(map(str, stream)) for stream in streams] == [
        "F0 sendF0->1 F1 sendF1->1 F2 sendF2->1 recvB0<-1 B0 recvB1<-1 B1 recvB2<-1 B2 reduce",
        "recvF0<-0 F0 recvF1<-0 F1 B0 sendB0->0 recvF2<-0 F2 B1 sendB1->0 B2 sendB2->0 reduce",
    ]
    for stage, stream in enumerate(Shape(name=added, p=4, v=1, m=9).streams()):
        changes = [
            (each.action is Action.FORWARD) - (each.action is Action.BACKWARD) for each in stream
        ]
        held = in_flight(Pipeline(added, 4, 9, 4), stage)
        assert held == max(accumulate(changes))


def test_it_is_chosen_where_it_is_asked_for_and_passes_the_checks(added: str) -> None:
    of = linears(48, 6, 8, 24)
    found = search(cluster(4), of, batch=16, schedule=added, pp=2, num_microbatches=4)
    plan = found.best.plan
    assert (plan.schedule, len(plan.devices)) == (added, 2)
    assert check_plan(plan, of.graph, of.table) == found.best.assignments
    check_runs(plan)
    streams = build_schedule(plan.pipeline, crossings(plan, of.graph))
    assert [sum(i.action is Action.FORWARD for i in stream) for stream in streams] == [4, 4]
    assert found.best.evaluation.timeline.stages_of == ((0,), (1,))


def test_it_is_forbidden_by_its_name_and_left_where_another_is(added: str) -> None:
    assert "1f1b" in Overrides(forbid=[added]).left("schedule")
    assert added not in Overrides(forbid=[added]).left("schedule")
    assert added in Overrides(forbid=["gpipe"]).left("schedule")


@second_tier("where it is asked for it is searched, above")
def test_it_is_among_those_that_a_free_search_simulates(added: str) -> None:
    free = searching(cluster(4), linears(48, 6, 8, 24), batch=16, pp=2)
    assert Pipeline(added, 2, 4, 2) in free.space.schedules(2, 4)
    free.run()
    assert added in {
        combination.pipeline.schedule
        for m in free.space.microbatch_counts()
        for choice in free.equal.mesh_choices(m)
        for combination in free.equal.combinations(choice)
    }
