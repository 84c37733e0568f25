"""The work of token slices, and sizes that even it out, against all ways to cut; their price."""

from itertools import combinations, pairwise
from typing import Any

import pytest

from meshwright.costmodel.schedules import (
    Action,
    Pipeline,
    build_schedule,
    compute_orders,
    simulate,
)
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.plan.slices import slices_at
from meshwright.planner.pricing.evaluate import Evaluation, Evaluator
from meshwright.planner.pricing.slice_work import even_work, most_tokens, slice_works
from tests.costmodel.schedules.pipelines import times
from tests.helpers.planning import cluster, large_llama, problem_of
from tests.helpers.tiny import plan_for, with_stage


def seconds(before: int, size: int, length: int, attention: float) -> float:
    """Score by score: a token reads those up to itself."""
    scores = sum(before + k + 0.5 for k in range(size)) / (length**2 / 2)
    return (1 - attention) * size / length + attention * scores


@pytest.mark.parametrize("attention", [0.0, 0.3, 0.8])
def test_works_are_those_of_tokens_and_of_scores(attention: float) -> None:
    sizes, before = (7, 1, 5, 3), 0
    works = slice_works(sizes, attention)
    for size, work in zip(sizes, works, strict=True):
        assert work.tokens == pytest.approx(size / 16 * 4)
        assert work.seconds == pytest.approx(4 * seconds(before, size, 16, attention))
        before += size
    assert sum(work.seconds for work in works) == pytest.approx(4)


@pytest.mark.parametrize("attention", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_sizes_are_terapipe_s(count: int, attention: float) -> None:
    """No cuts into as many slices have a smaller sum and (p - 1) times the longest, for any p."""
    length = 14
    took = {}
    for inner in combinations(range(1, length), count - 1):
        ends = [*pairwise((0, *inner, length))]
        each = [seconds(a, b - a, length, attention) for a, b in ends]
        took[tuple(b - a for a, b in ends)] = sum(each), max(each)
    ours = even_work(length, count, attention)
    for p in (2, 4, 16):
        objective = {sizes: total + (p - 1) * most for sizes, (total, most) in took.items()}
        assert objective[ours] == pytest.approx(min(objective.values()))


def test_sizes_are_whole_multiples_and_late_ones_are_shorter() -> None:
    sizes = even_work(131072, 8, 0.6, 16)
    assert sum(sizes) == 131072 and all(size % 16 == 0 for size in sizes)
    assert list(sizes) == sorted(sizes, reverse=True) and sizes[0] > 1.5 * sizes[-1]
    assert even_work(64, 4, 0.0) == (16,) * 4


# --- plans ----------------------------------------------------------------------------------------


def sliced(sizes: tuple[int, ...], **given: Any) -> Plan:
    asked = {"stages": 2, "dp": 1, "tp": 1, "num_microbatches": 2, "global_batch_size": 2}
    return plan_for(large_llama().graph, precision="bf16", slices=sizes, **{**asked, **given})


def priced(plan: Plan) -> Evaluation:
    return Evaluator(problem_of(large_llama(), cluster(8, bandwidth=1e12))).price(plan)


def test_a_plan_is_written_and_read_with_its_slices() -> None:
    plan = sliced((1024, 768, 256))
    assert Plan.from_json(plan.to_json()) == plan
    assert '"slices"' not in sliced(()).to_json()
    one = plan.to_json().replace("[\n    1024,\n    768,\n    256\n  ]", "[2048]")
    assert Plan.from_json(one).slices == ()
    with pytest.raises(PlanError, match="slices=3; legal: a list of sizes"):
        Plan.from_json(plan.to_json().replace("[\n    1024,\n    768,\n    256\n  ]", "3"))


def test_slices_of_even_work_take_less_than_equal_ones_and_those_less_than_none() -> None:
    step_s = {
        name: priced(sliced(sizes)).prediction.step_time_s
        for name, sizes in {
            "none": (), "equal": (512,) * 4, "even": even_work(2048, 4, 0.2),
        }.items()
    }  # fmt: skip
    assert step_s["even"] < step_s["equal"] < step_s["none"]


def test_the_step_is_simulated_with_the_work_of_each_slice() -> None:
    plan = sliced((1024, 1024), num_microbatches=1, global_batch_size=1)
    found = priced(plan)
    streams = build_schedule(plan.pipeline, [(0, 1)])
    alike = simulate(
        streams, [times(s.forward_s, s.backward_s) for s in found.stages], {(0, 1): 0.0}
    )
    assert found.timeline.busy_s == pytest.approx(alike.busy_s)
    assert found.timeline.pipeline_s > alike.pipeline_s  # the second slice takes longer


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            sliced((1024, 512)),
            r"slices=\[1024, 512\] are 1536 tokens in all; legal: two sizes from 1 or more, that",
        ),
        (sliced((0, 2048)), "legal: two sizes from 1 or more"),
        (sliced((2048,)), "legal: two sizes from 1 or more"),
        (sliced((1025, 1023), tp=2), r"the tensor axis splits the tokens.*legal: multiples of 2"),
        (sliced((1024, 1024), schedule="dualpipe_v"), "leaves no room for backwards"),
        (with_stage(sliced((1024, 1024)), zero=3), "zero 0 to 2"),
        (with_stage(sliced((1024, 1024)), cp=2, ranks=(0, 1)), "cp=1, or no slices"),
        (with_stage(sliced((1024, 1024)), segments=2), "segments=1"),
    ],
)
def test_slices_that_can_t_hold_are_refused(plan: Plan, says: str) -> None:
    of = large_llama()
    with pytest.raises(PlanError, match=says):
        check_plan(plan, of.graph, of.table)


@pytest.mark.parametrize(
    ("length", "tp", "expected"),
    [
        (1024, 1, (512, 384, 128)), (1000, 2, (500, 376, 124)), (3, 1, (2, 1)), (1, 1, ()),
        (1001, 2, ()),
    ],
)  # fmt: skip
def test_other_lengths_are_sliced_alike(length: int, tp: int, expected: tuple[int, ...]) -> None:
    found = slices_at(with_stage(sliced((1024, 768, 256)), tp=tp), length)
    assert found == expected and sum(found) in (0, length)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "interleaved_1f1b"])
def test_of_uneven_slices_those_in_flight_have_the_most_tokens_of_any(schedule: str) -> None:
    """By the order itself: the large slices of a micro-batch come as the small ones of the one
    before leave."""
    sizes, each = (1024, 512, 384, 128), 2 if schedule == "interleaved_1f1b" else 1
    pipeline = Pipeline(schedule, 2 * each, 8 * 4, 2, 4)
    most = [0] * pipeline.num_stages
    for order in compute_orders(pipeline):
        held = {stage: set[int]() for stage in range(pipeline.num_stages)}
        for compute in order:
            now = held[compute.stage]
            if compute.action is Action.FORWARD:
                now = now | {compute.microbatch}
            tokens = sum(sizes[unit % 4] for unit in now)
            most[compute.stage] = max(most[compute.stage], tokens)
            if compute.action in (Action.BACKWARD, Action.BACKWARD_WEIGHT):
                now = now - {compute.microbatch}
            held[compute.stage] = now
    assert most_tokens(pipeline, sizes) == most
    if schedule == "1f1b":
        assert most[1] > 2048  # more than a whole micro-batch


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_slices_keep_keys_and_sums_of_their_gradients_whatever_runs_again(recompute: str) -> None:
    """Of a token of a layer 2 · 8 heads · 128, in 16 bits, and the sums in 32; a recompute frees
    neither."""
    plan = with_stage(sliced((512,) * 4, stages=1), recompute=recompute)
    more = priced(plan).stages[0].activation_bytes * 4
    without = with_stage(sliced((), stages=1), recompute=recompute)
    kept = 2048 * 2 * (2 * 8 * 128)
    less = {"none": 4 * kept, "full": 6 * kept}[recompute]
    assert more - priced(without).stages[0].activation_bytes >= 0.99 * less
