"""The simulation against closed forms: the textbook's, the papers' and those of its docstring.

All times are whole numbers of seconds, so sums are exact and times are compared with ==.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.schedules.schedule import SCHEDULES
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


@dataclass(frozen=True, kw_only=True)
class Form:
    """Seconds that a schedule adds to the ideal time, of equal stages with F, I and W seconds: in a
    step by itself, and where steps are validated afterwards (None: the same). They hold from
    `least(p)` micro-batches on, of multiples of `unit(p)`, W <= F, I; `alike`: where F = I."""

    bubble: Callable[..., float]
    validated: Callable[..., float] | None = None
    least: Callable[[int], int] = lambda p: 1
    unit: Callable[[int], int] = lambda p: 1
    alike: bool = False


FORMS = {
    "gpipe": Form(bubble=lambda p, m, f, i, w: (p - 1) * (f + i + w)),
    "1f1b": Form(bubble=lambda p, m, f, i, w: (p - 1) * (f + i + w)),
    "eager_1f1b": Form(bubble=lambda p, m, f, i, w: (p - 1) * (f + i + w)),
    "interleaved_1f1b": Form(bubble=lambda p, m, f, i, w: (p - 1) * (f + i + w), unit=lambda p: p),
    "zb_h1": Form(bubble=lambda p, m, f, i, w: (p - 1) * (f + i - w), least=lambda p: p),
    "zb_h2": Form(
        bubble=lambda p, m, f, i, w: (p - 1) * max(f, f + i - 2 * w),
        validated=lambda p, m, f, i, w: (p - 1) * (f + i - 2 * w),
        least=lambda p: 2 * p - 1,
    ),
    "zb_v": Form(
        bubble=lambda p, m, f, i, w: (p - 1) * max(f, 2 * (f - w)),
        validated=lambda p, m, f, i, w: 2 * (p - 1) * (f - w),
        least=lambda p: 2 * p - 1,
        alike=True,
    ),
    "dualpipe_v": Form(
        bubble=lambda p, m, f, i, w: (p - 1) * (2 * f - w), least=lambda p: 2 * p, alike=True
    ),
    # p - 2 slots of F, and in each unit of p micro-batches as many times what B takes more
    "chimera": Form(
        bubble=lambda p, m, f, i, w: (p - 2) * (f + m // p * (i + w - f)), unit=lambda p: p
    ),
    "dualpipe": Form(
        bubble=lambda p, m, f, i, w: (p // 2 - 1) * (2 * f - w),
        least=lambda p: 2 * p,
        unit=lambda p: 2,
        alike=True,
    ),
}


@pytest.mark.parametrize("name", FORMS)
@given(data=st.data(), p=st.integers(1, 6), w=positive, f=st.integers(0, 5), i=st.integers(0, 5))
def test_equal_stages_take_the_time_of_the_papers(
    name: str, data: st.DataObject, p: int, w: int, f: int, i: int
) -> None:
    form, own = FORMS[name], SCHEDULES[name]
    v, p = own.stages_per_device or data.draw(st.integers(1, 4)), p * own.copies
    f, i = w + f, w + (f if form.alike else i)
    if name == "chimera":
        i = max(i, f)  # B no shorter than F
    unit = form.unit(p)
    m = unit * (-(-form.least(p) // unit) + data.draw(st.integers(0, 9 if unit < 3 else 2)))
    shape = Shape(name=name, p=p, v=v, m=m)
    timeline = equal(shape, f, i, w)
    busy_s = m * v // own.copies * (f + i + w)
    bubble_s = form.bubble(p, m, f, i, w)
    assert timeline.busy_s == (busy_s,) * p
    assert timeline.step_time_s == timeline.pipeline_s == busy_s + bubble_s
    assert timeline.bubble_fraction == pytest.approx(bubble_s / (busy_s + bubble_s))
    period_s = timeline.validated_s(shape.streams(shape.chain), 0.0)
    validated_s = bubble_s if form.validated is None else form.validated(p, m, f, i, w)
    if form.validated or (not own.splits_backward and own.copies == 1):
        assert period_s == busy_s + validated_s
        assert timeline.validated_bubble(period_s) == pytest.approx(1 - busy_s / period_s)


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
