"""The simulation against closed forms: the textbook's, the papers' and those of its docstring;
steps that are validated afterwards: which forwards run early, and the bubbles that are left.

All times are whole numbers of seconds, so sums are exact and times are compared with ==.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.schedules.early import early_parts
from meshwright.costmodel.schedules.schedule import SCHEDULES, Action
from meshwright.costmodel.schedules.simulate import Timeline
from tests.costmodel.schedules.pipelines import Shape, edges_of, run, shapes, times

positive = st.integers(1, 9)


def equal(shape: Shape, forward: int, input_: int, weight: int) -> Timeline:
    return run(shape, [times(forward, input_ + weight, weight=weight)] * shape.num_stages)


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


WHOLE = Form(bubble=lambda p, m, f, i, w: (p - 1) * (f + i + w))
FORMS = {
    "gpipe": WHOLE,
    "1f1b": WHOLE,
    "eager_1f1b": WHOLE,
    "interleaved_1f1b": replace(WHOLE, unit=lambda p: p),
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
    found_s = period_s(shape, timeline)
    validated_s = bubble_s if form.validated is None else form.validated(p, m, f, i, w)
    if form.validated or (not own.splits_backward and own.copies == 1):
        assert found_s == busy_s + validated_s
        assert timeline.validated_bubble(found_s) == pytest.approx(1 - busy_s / found_s)


# --- steps that are validated afterwards -------------------------------------------------------

BACKWARD = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)


def period_s(shape: Shape, timeline: Timeline, verdict_s: float = 0.0) -> float:
    return timeline.validated_s(shape.streams(shape.chain), verdict_s)


@given(data=st.data(), shape=shapes())
def test_what_runs_early_waits_for_nothing_that_comes_later(
    data: st.DataObject, shape: Shape
) -> None:
    """For any edges: no backward, all receives of early sends, and as much as there may be."""
    streams = shape.streams(data.draw(edges_of(shape)))
    parts = early_parts(streams)
    sent = {
        (i.stage, i.peer, i.microbatch)
        for stream, part in zip(streams, parts, strict=True)
        for i in stream[: part.count]
        if i.action is Action.SEND_ACTIVATION
    }
    arriving = set()
    for stream, part in zip(streams, parts, strict=True):
        early, rest = stream[: part.count], stream[part.count :]
        assert all(i.action not in BACKWARD for i in early)
        received = [i for i in early if i.action is Action.RECV_ACTIVATION]
        assert set(received) <= set(part.arriving)
        arriving |= {(i.peer, i.stage, i.microbatch) for i in part.arriving}
        following = rest[0]
        if following.action is Action.RECV_ACTIVATION:
            assert (following.peer, following.stage, following.microbatch) not in sent
        else:
            assert following.action in (*BACKWARD, Action.RECV_GRADIENT)
    assert arriving == sent


@pytest.mark.parametrize("verdict", [0, 10, 100])
def test_a_verdict_that_is_late_is_waited_for(verdict: int) -> None:
    """The last of four devices ends a step after 27 seconds, which it begins with 4 of forwards, 3
    of them of others: so much of the verdict passes beside them."""
    shape = Shape(name="zb_h2", p=4, v=1, m=8)
    timeline = equal(shape, 1, 1, 1)
    assert period_s(shape, timeline, verdict) == max(24, 27 + verdict - 4)
