"""Steps that are validated afterwards: which forwards run early, and the bubbles that are left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.schedules.early import early_parts
from meshwright.costmodel.schedules.schedule import Action
from meshwright.costmodel.schedules.simulate import Timeline
from tests.costmodel.schedules.pipelines import (
    Shape,
    edges_of,
    run,
    seconds,
    shapes,
    stage_times,
    times,
)

BACKWARD = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)


def equal(shape: Shape, forward: int, input_: int, weight: int) -> Timeline:
    return run(shape, [times(forward, input_ + weight, weight=weight)] * shape.num_stages)


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


@given(data=st.data(), shape=shapes(), verdict=seconds)
def test_steps_follow_each_other_as_they_can(
    data: st.DataObject, shape: Shape, verdict: int
) -> None:
    """No sooner than a device is done with its own, no later than behind a common end, and the more
    the verdict takes, the later."""
    of_stages = [data.draw(stage_times()) for _ in range(shape.num_stages)]
    timeline = run(shape, of_stages)
    found_s = period_s(shape, timeline, verdict)
    assert max(timeline.busy_s) <= timeline.period_s <= found_s
    assert found_s <= timeline.step_time_s + verdict
    assert period_s(shape, timeline) <= found_s


@pytest.mark.parametrize("verdict", [0, 10, 100])
def test_a_verdict_that_is_late_is_waited_for(verdict: int) -> None:
    """The last of four devices ends a step after 27 seconds, which it begins with 4 of forwards, 3
    of them of others: so much of the verdict passes beside them."""
    shape = Shape(name="zb_h2", p=4, v=1, m=8)
    timeline = equal(shape, 1, 1, 1)
    assert period_s(shape, timeline, verdict) == max(24, 27 + verdict - 4)
