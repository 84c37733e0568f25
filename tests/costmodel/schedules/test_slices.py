"""Token slices as units of schedules: their order, bubble and memory."""

from itertools import pairwise, product

import pytest

from meshwright.costmodel.schedules import SCHEDULES, Action, Pipeline, compute_orders, in_flight
from meshwright.costmodel.schedules.held import fewest_alike, moments
from meshwright.costmodel.schedules.schedule import build_schedule
from meshwright.costmodel.schedules.simulate import simulate
from meshwright.costmodel.schedules.table import ScheduleError
from tests.costmodel.schedules.pipelines import times

TAKES = [name for name, record in SCHEDULES.items() if record.sliced]
SHAPES = [*product((1, 2, 4), (1, 2, 3, 8), (2, 3, 4, 8))]  # devices, micro-batches, slices


def pipelines(name: str) -> list[Pipeline]:
    each = SCHEDULES[name].stages_per_device or 2
    return [Pipeline(name, p * each, m * c, p, c) for p, m, c in SHAPES]


def test_those_of_one_stage_each_and_interleaved_ones_take_slices() -> None:
    assert {*TAKES} == {"gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2"}


@pytest.mark.parametrize("name", TAKES)
def test_backwards_come_from_the_last_slice_to_the_first(name: str) -> None:
    """Each stage runs every forward in order, and the backward of a slice after the forwards of all
    slices of its micro-batch, and after the backwards of the later ones."""
    first = (Action.BACKWARD, Action.BACKWARD_INPUT)
    for pipeline in pipelines(name):
        count, c = pipeline.num_microbatches, pipeline.slices
        for stages, order in zip(pipeline.placed, compute_orders(pipeline), strict=True):
            for stage in stages:
                own = [x for x in order if x.stage == stage]
                forwards = [x.microbatch for x in own if x.action is Action.FORWARD]
                backwards = [x.microbatch for x in own if x.action in first]
                assert forwards == [*range(count)]
                wanted = (range(k + c - 1, k - 1, -1) for k in range(0, count, c))
                assert backwards == [unit for units in wanted for unit in units]
                at = {(x.action is Action.FORWARD, x.microbatch): n for n, x in enumerate(own)}
                assert all(at[True, k // c * c + c - 1] < at[False, k] for k in range(count))


@pytest.mark.parametrize("name", TAKES)
def test_streams_run_and_hold_what_is_said(name: str) -> None:
    for pipeline in pipelines(name):
        edges = dict.fromkeys(pairwise(range(pipeline.num_stages)), 0.0)
        streams = build_schedule(pipeline, edges)
        simulate(streams, [times(1, 2, weight=1)] * pipeline.num_stages, edges)
        held = moments(pipeline)
        for stage in range(pipeline.num_stages):
            device = pipeline.device_of[stage]
            at = pipeline.placed[device].index(stage)
            most = max(one.active[at] + one.put_off[at] for one in held[device])
            assert in_flight(pipeline, stage) == most
        few = fewest_alike(pipeline)
        assert few.num_microbatches % pipeline.slices == 0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_the_bubble_is_divided_by_the_slices(name: str) -> None:
    """(p - 1)(F + B) / c, of a micro-batch's seconds (Seq1F1B)."""
    for p, m, c in SHAPES:
        pipeline = Pipeline(name, p, m * c, p, c)
        edges = dict.fromkeys(pairwise(range(p)), 0.0)
        step = simulate(build_schedule(pipeline, edges), [times(3 / c, 5 / c)] * p, edges)
        assert step.pipeline_s == pytest.approx(8 * m + (p - 1) * 8 / c)


def test_slices_with_times_of_their_own_take_those() -> None:
    """One stage takes the sum; of two the second waits for the first slice, and its gradient."""
    one, two = Pipeline("1f1b", 1, 4, 1, 2), Pipeline("1f1b", 2, 2, 2, 2)
    longer, shorter = times(5, 7), times(1, 3)
    mean = times(3, 5)
    own = [([longer], {}), ([shorter], {})]
    step = simulate(build_schedule(one, []), [mean], {}, own)
    assert step.pipeline_s == pytest.approx(2 * (12 + 4)) == pytest.approx(sum(step.busy_s))
    edges = {(0, 1): 0.0}
    own = [([longer] * 2, edges), ([shorter] * 2, edges)]
    step = simulate(build_schedule(two, edges), [mean] * 2, edges, own)
    # F0 on both, then F1 on the second, B1, B0, and B0 on the first
    assert step.pipeline_s == pytest.approx(5 + 5 + 1 + 3 + 7 + 7)
    named = [event.name for event in step.events if event.name == "optimizer"]
    assert len(named) == 2


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        (Pipeline("zb_v", 4, 8, 2, 2), "takes micro-batches whole; legal: gpipe, 1f1b"),
        (Pipeline("1f1b", 2, 7, 2, 2), "no whole micro-batches of 2; legal: a multiple of 2"),
        (Pipeline("1f1b", 2, 8, 2, 0), "slices=0"),
    ],
)
def test_what_is_no_pipeline_is_refused(pipeline: Pipeline, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        compute_orders(pipeline)
