"""Schedules without a flush: the time from one step to the next is the longest cycle of what waits
for what, orders end each step's backwards in time, and weights are kept while they are read."""

import random
from itertools import pairwise

import pytest

from meshwright.costmodel.schedules import (
    Action,
    Pipeline,
    ScheduleError,
    StageTimes,
    build_schedule,
    compute_orders,
    in_flight,
    moments,
    simulate_steady,
    simulate_step,
)
from meshwright.costmodel.schedules.schedule import unrolled
from meshwright.costmodel.stages import HELD, held_weights

LATE = ("pipedream_2bw", "pipedream")
SHAPES = ((2, 1), (2, 4), (3, 2), (3, 4), (4, 3), (4, 8), (5, 4))  # devices, micro-batches
SHORT = ((3, 1), (4, 1), (4, 2), (5, 3))  # with fewer than p - 1


def cases() -> list[Pipeline]:
    few = [Pipeline("pipedream", p, m, p) for p, m in SHORT]
    return few + [Pipeline(name, p, m, p) for name in LATE for p, m in SHAPES]


def drawn(of: Pipeline, once: float) -> tuple[list[StageTimes], dict[tuple[int, int], float]]:
    random.seed(of.num_stages * 100 + of.num_microbatches)
    stages = range(of.num_stages)
    sends = {edge: random.uniform(0.0, 1.5) for edge in pairwise(stages)}
    times = [
        StageTimes(
            forward_s=random.uniform(1, 3),
            backward_s=random.uniform(2, 5),
            reduce_s=once * random.random(),
            optimizer_s=once * random.random(),
        )
        for _ in stages
    ]
    return times, sends


def longest_cycle(times: list[StageTimes], sends: list[float]) -> float:
    """Seconds a micro-batch by what waits for what: of F, B and the two sends of each stage, those
    of a micro-batch after others so many micro-batches before. The largest ratio of a cycle's
    seconds to its micro-batches is the least for which no cycle takes longer."""
    p = len(times)
    waits = list[tuple[str, str, int, float]]()  # (first, then, micro-batches on, seconds of it)
    for k, time in enumerate(times):
        behind = p - 1 - k
        waits += [(f"F{k}", f"B{k}", -behind, time.backward_s)]
        waits += [(f"B{k}", f"F{k}", behind + 1, time.forward_s)]
        if k + 1 < p:
            waits += [(f"F{k}", f"S{k}", 0, sends[k]), (f"S{k}", f"S{k}", 1, sends[k])]
            waits += [(f"S{k}", f"F{k + 1}", 0, times[k + 1].forward_s)]
            waits += [(f"B{k + 1}", f"T{k}", 0, sends[k]), (f"T{k}", f"T{k}", 1, sends[k])]
            waits += [(f"T{k}", f"B{k}", 0, time.backward_s)]

    def is_met(seconds: float) -> bool:
        late = {name: 0.0 for wait in waits for name in wait[:2]}
        for _ in range(len(late) + 1):
            before = dict(late)
            for first, then, on, own in waits:
                late[then] = max(late[then], late[first] + own - seconds * on)
            if late == before:
                return True
        return False

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_met(middle) else (middle, high)
    return high


@pytest.mark.parametrize("of", cases(), ids=str)
def test_a_step_takes_the_longest_cycle(of: Pipeline) -> None:
    """Mostly what a device does in a step; or the way of a micro-batch through the stages behind
    one and back, of as many as that one has in flight."""
    times, sends = drawn(of, 0.0)
    streams, m, p = build_schedule(of, sends), of.num_microbatches, of.num_stages
    wanted = m * longest_cycle(times, [*sends.values()])
    step = simulate_steady(of, streams, times, sends)
    near = 1e-3 if (p, m) == (5, 3) else 1e-6  # whose steps are alike after 20
    assert step.step_time_s == pytest.approx(wanted, rel=near)
    turns = [time.forward_s + time.backward_s for time in times]
    ways = [sum(turns[k:]) + 2 * sum([*sends.values()][k:]) for k in range(p)]
    simple = m * max(*turns, *(way / (p - k) for k, way in enumerate(ways)))
    assert simple * (1 - 1e-9) <= wanted < 1.1 * simple
    assert simulate_step(of, streams, times, sends).step_time_s == step.step_time_s
    computes = [e for e in step.events if e.track == "compute" and e.microbatch is not None]
    assert len(computes) == 2 * m * p  # of one step


@pytest.mark.parametrize("of", cases(), ids=str)
def test_what_is_once_a_step_is_in_it(of: Pipeline) -> None:
    times, sends = drawn(of, 2.0)
    streams = build_schedule(of, sends)
    least = max(
        of.num_microbatches * (t.forward_s + t.backward_s) + t.reduce_s + t.optimizer_s
        for t in times
    )
    free = simulate_steady(of, streams, times, dict.fromkeys(sends, 0.0)).step_time_s
    assert free >= least * (1 - 1e-9)
    assert simulate_steady(of, streams, times, sends).step_time_s >= free * (1 - 0.01)


@pytest.mark.parametrize("of", cases(), ids=str)
def test_orders_leave_to_the_next_steps_what_they_say(of: Pipeline) -> None:
    m, p, calls = of.num_microbatches, of.num_stages, 6
    streams = unrolled(build_schedule(of, [*pairwise(range(p))]), m, calls)
    for k, (stream, order) in enumerate(zip(streams, compute_orders(of), strict=True)):
        begun, most, behind = 0, 0, 0
        open_steps = dict[int, int]()  # forwards whose backward is to come, by step
        versions = 0
        for i in stream:
            step = i.microbatch // m
            if i.action is Action.FORWARD:
                begun = step
                open_steps[step] = open_steps.get(step, 0) + 1
            elif i.action is Action.BACKWARD:
                open_steps[step] -= 1
                behind = max(behind, begun - step)
            most = max(most, sum(open_steps.values()))
            versions = max(versions, sum(n > 0 for n in open_steps.values()))
        assert most == in_flight(of, k) == p - k
        assert behind <= of.versions(k) - 1 and versions <= of.versions(k)
        left = [c.microbatch for c in order if c.microbatch < 0]
        assert of.left(k) == p - 1 - k and len(left) == min(m, p - 1 - k)
        ends = [i for i in stream if i.action is Action.REDUCE_GRADIENTS]
        assert [i.microbatch for i in ends] == [m * (n + 1) - 1 for n in range(calls)]
        assert of.late(k) == (1 if of.schedule == LATE[0] else -(-(p - 1 - k) // m))
        assert max(x.active[0] for x in moments(of)[k]) == p - k


@pytest.mark.parametrize("of", [Pipeline("1f1b", 3, 4, 3), *cases()], ids=str)
def test_what_is_left_is_in_flight_in_the_optimizers_step(of: Pipeline) -> None:
    activations = held_weights(of)[:, -1, 0, HELD.index("activation_bytes")]
    last = of.num_stages - 1 if not of.record.flushes else 0
    assert activations.tolist() == [max(0, last - k) for k in range(of.num_stages)]
    waiting = [of.waiting_gradients(k) for k in range(of.num_stages)]
    behind = [divmod(of.left(k), of.num_microbatches)[0] for k in range(of.num_stages)]
    assert waiting == [of.late(k) - calls for k, calls in enumerate(behind)]
    assert min(waiting) >= 0


def test_what_would_come_too_late_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"num_microbatches=1 .*; legal: 2 or more"):
        build_schedule(Pipeline("pipedream_2bw", 3, 1, 3), ())
    with pytest.raises(ScheduleError, match=r"on one device group there is no flush to save"):
        build_schedule(Pipeline("pipedream", 1, 2, 1), ())
