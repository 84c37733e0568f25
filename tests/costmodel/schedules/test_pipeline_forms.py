"""The simulation against closed forms: the textbook's, the papers' and those of its docstring.

All times are whole numbers of seconds, so sums are exact and times are compared with ==.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.schedules.schedule import SCHEDULES, peak_activation
from meshwright.costmodel.schedules.simulate import StageTimes, Timeline
from tests.costmodel.schedules.pipelines import (
    Shape,
    chain,
    counts,
    run,
    seconds,
    shapes,
    stage_times,
    times,
)

positive = st.integers(1, 9)
uneven = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6)
Pipeline = tuple[list[tuple[int, int]], dict[tuple[int, int], int]]  # (F, B) times, transfers


def chained(
    name: str,
    of_stages: list[tuple[int, int]],
    m: int,
    transfers: dict[tuple[int, int], int] | None = None,
) -> Timeline:
    """A step of stages with times (F, B), each on its own device."""
    shape = Shape(name=name, p=len(of_stages), v=1, m=m)
    return run(shape, [times(*each) for each in of_stages], transfers)


def equal(shape: Shape, forward: int, input_: int, weight: int) -> Timeline:
    return run(shape, [times(forward, input_ + weight, weight=weight)] * shape.num_stages)


# --- equal stages ----------------------------------------------------------------------------


@given(shape=shapes(names=("gpipe", "1f1b", "eager_1f1b")), forward=positive, backward=positive)
def test_one_stage_per_device_takes_the_textbook_time(
    shape: Shape, forward: int, backward: int
) -> None:
    p, m = shape.p, shape.m
    timeline = equal(shape, forward, backward, 0)
    assert timeline.step_time_s == timeline.pipeline_s == (m + p - 1) * (forward + backward)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.busy_s == (m * (forward + backward),) * p
    assert all(timeline.idle_s(d) == (p - 1) * (forward + backward) for d in range(p))


@given(
    p=st.integers(1, 5),
    v=st.integers(1, 4),
    rounds=st.integers(1, 4),
    forward=positive,
    backward=positive,
)
def test_interleaving_divides_the_bubble_by_the_stages_per_device(
    p: int, v: int, rounds: int, forward: int, backward: int
) -> None:
    shape = Shape(name="interleaved_1f1b", p=p, v=v, m=rounds * p)
    step_time_s = equal(shape, forward, backward, 0).step_time_s
    ideal_s = shape.m * v * (forward + backward)
    assert step_time_s - ideal_s == (p - 1) * (forward + backward)
    assert (step_time_s - ideal_s) / ideal_s == pytest.approx((p - 1) / (shape.m * v))


@given(
    p=st.integers(1, 6),
    more=st.integers(0, 9),
    w=positive,
    f=st.integers(0, 5),
    i=st.integers(0, 5),
)
def test_zb_h1_puts_weight_gradients_into_the_bubble(
    p: int, more: int, w: int, f: int, i: int
) -> None:
    """(p-1)(F + I - W) where neither F nor I is shorter than W."""
    f, i, m = w + f, w + i, p + more
    timeline = equal(Shape(name="zb_h1", p=p, v=1, m=m), f, i, w)
    assert timeline.step_time_s - m * (f + i + w) == (p - 1) * (f + i - w)


@given(
    p=st.integers(2, 6),
    more=st.integers(0, 9),
    w=positive,
    f=st.integers(0, 5),
    i=st.integers(0, 9),
)
def test_zb_h2_waits_for_its_first_forward_where_steps_begin_together(
    p: int, more: int, w: int, f: int, i: int
) -> None:
    """(p-1) max(F, F + I - 2W), of which the first F is none without a barrier between steps."""
    f, i, m = w + f, w + i, 2 * p - 1 + more
    timeline = equal(Shape(name="zb_h2", p=p, v=1, m=m), f, i, w)
    assert timeline.step_time_s - m * (f + i + w) == (p - 1) * max(f, f + i - 2 * w)
    if i <= 2 * w:
        assert timeline.period_s - m * (f + i + w) == (p - 1) * (f + i - 2 * w)


@given(p=st.integers(1, 6), more=st.integers(0, 9), t=positive)
def test_zb_v_has_no_bubble_in_the_memory_of_1f1b(p: int, more: int, t: int) -> None:
    """The paper's claim for F = I = W: what a step idles is waiting for the first F alone, which
    overlaps with the last step where no barrier is between them; and on no device activations of
    more than p micro-batches, as on the first one under 1F1B."""
    m = 2 * p + more
    timeline = equal(Shape(name="zb_v", p=p, v=2, m=m), t, t, t)
    assert timeline.period_s == max(timeline.busy_s) == 2 * m * 3 * t
    assert timeline.step_time_s - timeline.period_s == (p - 1) * t
    halves = peak_activation("zb_v", num_microbatches=m, bytes_per_stage=[0.5] * (2 * p))
    whole = peak_activation("1f1b", num_microbatches=m, bytes_per_stage=[1.0] * p)
    assert max(halves) == max(whole) == p


@given(p=st.integers(1, 6), more=st.integers(0, 9), w=positive, longer=st.integers(0, 5))
def test_zb_v_has_no_bubble_when_all_take_the_same(p: int, more: int, w: int, longer: int) -> None:
    f, m = w + longer, 2 * p - 1 + more
    timeline = equal(Shape(name="zb_v", p=p, v=2, m=m), f, f, w)
    assert timeline.period_s - 2 * m * (2 * f + w) == 2 * (p - 1) * longer
    assert timeline.step_time_s - timeline.period_s <= (p - 1) * f


@given(
    p=st.integers(2, 6),
    more=st.integers(0, 9),
    w=positive,
    longer=st.integers(0, 5),
    saved=st.integers(0, 9),
)
def test_dualpipe_v_idles_as_published(p: int, more: int, w: int, longer: int, saved: int) -> None:
    """(PP/2 - 1)(F&B + B - 3W) on the busiest path, for PP = 2p stages."""
    f = w + longer
    saved = min(saved, f)
    one = StageTimes(
        forward_s=f, backward_s=f + w, weight_s=w, overlap_s=saved, reduce_s=0, optimizer_s=0
    )
    shape = Shape(name="dualpipe_v", p=p, v=2, m=2 * p + more, paired=True)
    timeline = run(shape, [one] * (2 * p))
    both, backward = f + (f + w) - saved, f + w
    assert max(timeline.idle_s(d) for d in range(p)) == (p - 1) * (both + backward - 3 * w)


@given(p=st.integers(1, 6), more=st.integers(0, 9), w=positive, longer=st.integers(0, 5))
def test_dualpipe_v_without_an_overlap_has_half_the_bubble_of_zb_h1(
    p: int, more: int, w: int, longer: int
) -> None:
    """(p-1)(F + I - W) of stages half as long: F and B of a pair don't wait for each other."""
    f, m = w + longer, 2 * p + more
    apart = equal(Shape(name="dualpipe_v", p=p, v=2, m=m), f, f, w)
    assert apart.step_time_s - 2 * m * (2 * f + w) == (p - 1) * (2 * f - w)
    whole = equal(Shape(name="zb_h1", p=p, v=1, m=m), 2 * f, 2 * f, 2 * w)
    assert 2 * (apart.step_time_s - sum(apart.busy_s) / p) == whole.step_time_s - whole.busy_s[0]


@given(shape=shapes(names=("dualpipe_v",), m=st.integers(1, 16)), data=st.data())
def test_a_pair_that_overlaps_nothing_is_no_faster_than_f_and_b_apart(
    shape: Shape, data: st.DataObject
) -> None:
    of_stages = [replace(data.draw(stage_times()), overlap_s=0) for _ in range(shape.num_stages)]
    transfers = {edge: data.draw(seconds) for edge in chain(shape.num_stages)}
    apart, paired = (run(replace(shape, paired=x), of_stages, transfers) for x in (False, True))
    assert apart.busy_s == paired.busy_s
    assert apart.pipeline_s <= paired.pipeline_s


# --- uneven stages ---------------------------------------------------------------------------


@given(of_stages=uneven, m=counts)
def test_gpipe_of_uneven_stages_fills_and_then_waits_for_the_slowest(
    of_stages: list[tuple[int, int]], m: int
) -> None:
    """Σ t + (m-1)(max F + max B): Alpa's formula only if one stage has both maxima."""
    slowest = max(f for f, _ in of_stages) + max(b for _, b in of_stages)
    fill_s = sum(map(sum, of_stages))
    assert chained("gpipe", of_stages, m).step_time_s == fill_s + (m - 1) * slowest


def test_alpas_formula_can_be_wrong_both_ways_for_1f1b() -> None:
    # Too high: the first stage never waits for the quick second one.
    assert chained("1f1b", [(4, 4), (1, 1)], 8).step_time_s == 64 < (8 + 2) + 7 * 8
    # Too low: one stage is slow forward and another backward.
    assert chained("1f1b", [(10, 0), (0, 10), (0, 0)], 2).step_time_s == 40 > 20 + 10


# --- transfers -------------------------------------------------------------------------------


@st.composite
def chains_with_transfers(draw: st.DrawFn) -> Pipeline:
    of_stages = draw(uneven)
    return of_stages, {edge: draw(seconds) for edge in chain(len(of_stages))}


@given(case=chains_with_transfers(), m=counts)
def test_gpipe_hides_transfers_behind_computes_once_filled(case: Pipeline, m: int) -> None:
    of_stages, transfers = case
    slowest_forward = max([f for f, _ in of_stages] + list(transfers.values()))
    slowest_backward = max([b for _, b in of_stages] + list(transfers.values()))
    fill_s = sum(map(sum, of_stages)) + 2 * sum(transfers.values())
    expected_s = fill_s + (m - 1) * (slowest_forward + slowest_backward)
    assert chained("gpipe", of_stages, m, transfers).step_time_s == expected_s


@given(p=st.integers(2, 6), m=st.integers(12, 20), f=positive, data=st.data())
def test_eager_1f1b_hides_transfers_that_1f1b_waits_for(
    p: int, m: int, f: int, data: st.DataObject
) -> None:
    """A link of up to half of F + B: only filling and draining pay it, once per stage and way."""
    c = data.draw(st.integers(1, 3 * f // 2)) if f > 1 else 1
    of_stages, transfers = [(f, 2 * f)] * p, dict.fromkeys(chain(p), c)
    eager = chained("eager_1f1b", of_stages, m, transfers)
    assert eager.step_time_s == (m + p - 1) * 3 * f + 2 * (p - 1) * c
    assert chained("1f1b", of_stages, m, transfers).step_time_s > eager.step_time_s


ONE_EACH = [name for name, own in SCHEDULES.items() if own.stages_per_device != 2]
WHOLE = [name for name in ONE_EACH if not SCHEDULES[name].splits_backward]


@pytest.mark.parametrize("name", WHOLE)
def test_splitting_a_backward_that_runs_whole_changes_nothing(name: str) -> None:
    shape = Shape(name=name, p=3, v=1, m=5)
    assert equal(shape, 1, 2, 1) == equal(shape, 1, 3, 0)
