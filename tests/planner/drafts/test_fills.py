"""What a schedule adds to equal stages, beside the simulation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.schedules.steady import simulate_step
from meshwright.costmodel.schedules.table import SCHEDULES
from meshwright.planner.drafts.fills import in_turn_s
from tests.costmodel.schedules.pipelines import Shape, run, seconds, shapes, times


@given(data=st.data(), shape=shapes(paired=st.just(False)))
def test_no_step_is_shorter_than_its_passes_and_messages_in_turn(
    data: st.DataObject, shape: Shape
) -> None:
    forward, weight, rest = (data.draw(seconds) for _ in "FWI")
    stages = [times(forward, weight + rest, weight=weight)] * shape.num_stages
    at = shape.pipeline.device_of
    sends = {(a, b): data.draw(seconds) for a, b in shape.chain if at[a] != at[b]}
    first = {edge: sent for edge, sent in sends.items() if edge[1] in shape.pipelines[0]}
    one_s = len(shape.pipelines[0]) * (forward + rest) + 2 * sum(first.values())
    bound_s = in_turn_s(shape.pipeline, one_s, max(first.values(), default=0))
    step_s = run(shape, stages, dict.fromkeys(shape.chain, 0) | sends).step_time_s
    assert bound_s <= step_s + 1e-9


LATE = [name for name, own in SCHEDULES.items() if not own.flushes]


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("slow", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("m", [3, 4, 8])
def test_steps_that_are_not_flushed_wait_for_the_slowest_link(
    name: str, slow: float, m: int
) -> None:
    """And for no more than their part of the way of those in flight."""
    shape = Shape(name=name, p=4, v=1, m=m)
    sends = dict(zip(shape.chain, (0.0, slow, 0.0), strict=True))
    stages = [times(1.0, 2.0)] * 4
    step_s = simulate_step(shape.pipeline, shape.streams(), stages, sends).step_time_s
    bound_s = in_turn_s(shape.pipeline, 4 * 3.0 + 2 * slow, slow)
    assert m * slow <= bound_s <= step_s * (1 + 1e-9)


def test_where_all_is_in_flight_a_slow_link_carries_one_message_after_the_other() -> None:
    """Of messages that take much longer than computes, one way hides behind the other."""
    pipeline = Pipeline("zb_h2", 2, 8, 2)
    assert in_turn_s(pipeline, 2 * 2.0 + 2 * 100.0, 100.0) == 4.0 + 200.0 + 7 * 100.0
    shape = Shape(name="zb_h2", p=2, v=1, m=8)
    assert run(shape, [times(1, 2, weight=1)] * 2, {(0, 1): 100}).step_time_s == 905
