"""The simulation against an event-by-event reference and against closed forms: the textbook's, the
papers' and those of its docstring; steps that are validated afterwards: which forwards run early.

All times are whole numbers of seconds, so sums are exact and times are compared with ==.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.schedules import SCHEDULES, Action, Instruction, Streams
from meshwright.costmodel.schedules.early import early_parts
from meshwright.costmodel.schedules.orders import Compute
from meshwright.costmodel.schedules.simulate import StageTimes, Timeline, simulate, step_times
from tests.costmodel.schedules.pipelines import (
    Shape,
    edges_of,
    run,
    seconds,
    shapes,
    stage_times,
    times,
)
from tests.helpers.tiers import second_tier

F, B = Action.FORWARD, Action.BACKWARD
I, W = Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT
SENDS = (Action.SEND_ACTIVATION, Action.SEND_GRADIENT)
RECEIVES = (Action.RECV_ACTIVATION, Action.RECV_GRADIENT)
Transfers = dict[tuple[int, int], int]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, list[StageTimes], Transfers]:
    shape = draw(shapes())
    of_stages = [draw(stage_times()) for _ in range(shape.num_stages)]
    return shape, of_stages, {edge: draw(seconds) for edge in draw(edges_of(shape))}


def compute_s(each: Instruction | Compute, of_stages: Sequence[StageTimes]) -> float:
    stage = of_stages[each.stage]
    return {
        F: stage.forward_s - (stage.overlap_s if each.overlapped else 0),
        B: stage.backward_s,
        I: stage.backward_s - stage.weight_s,
        W: stage.weight_s,
    }[each.action]


def played(
    streams: Sequence[Sequence[Instruction]],
    of_stages: Sequence[StageTimes],
    transfers: Mapping[tuple[int, int], int],
) -> dict[tuple[int, str], tuple[float, float]]:
    """(stage, name) -> (start, end) of every event, by turns: whichever device can go on, does."""
    device_of = {each.stage: d for d, stream in enumerate(streams) for each in stream}
    clocks = [0.0] * len(streams)
    free: dict[tuple[int, int], float] = defaultdict(float)  # (source, destination) device
    there: dict[tuple[int, int, bool, int], float] = {}  # (source, destination, forward, k)
    todo = [list(stream) for stream in streams]
    events: dict[tuple[int, str], tuple[float, float]] = {}

    def spend(device: int, stage: int, name: str, duration: float) -> None:
        events[stage, name] = (clocks[device], clocks[device] + duration)
        clocks[device] += duration

    def step(device: int, each: Instruction) -> bool:
        s, k, peer = each.stage, each.microbatch, each.peer
        if each.action in RECEIVES:
            message = (peer, s, each.action is Action.RECV_ACTIVATION, k)
            if message not in there:
                return False
            clocks[device] = max(clocks[device], there[message])
        elif each.action in SENDS:
            assert peer is not None
            forward = each.action is Action.SEND_ACTIVATION
            pair = (device, device_of[peer])
            start = max(clocks[device], free[pair])
            free[pair] = start + transfers[(s, peer) if forward else (peer, s)]
            there[s, peer, forward, k] = free[pair]
            events[s, str(each)] = (start, free[pair])
        elif each.action is Action.REDUCE_GRADIENTS:
            spend(device, s, "reduce", of_stages[s].reduce_s)
            spend(device, s, "optimizer", of_stages[s].optimizer_s)
        else:
            spend(device, s, str(each), compute_s(each, of_stages))
        return True

    while any(todo):
        before = sum(map(len, todo))
        for device, stream in enumerate(todo):
            if stream and step(device, stream[0]):
                del stream[0]
        assert sum(map(len, todo)) < before
    return events


@given(case=cases())
def test_events_are_as_played(case: tuple[Shape, list[StageTimes], Transfers]) -> None:
    shape, of_stages, transfers = case
    streams = shape.streams(list(transfers))
    expected = played(streams, of_stages, transfers)
    timeline = simulate(streams, of_stages, transfers)
    assert {(e.stage, e.name): (e.start_s, e.end_s) for e in timeline.events} == expected
    assert len(timeline.events) == len(expected)
    assert timeline.step_time_s == max(end for _, end in expected.values())
    ends = [end for (_, name), (_, end) in expected.items() if name[0] in "FBIW"]
    assert timeline.pipeline_s == max(ends)
    for device, stream in enumerate(streams):
        spans = [expected[each.stage, str(each)] for each in stream if each.action in (F, B, I, W)]
        last = max(expected[each.stage, "optimizer"][1] for each in stream)
        busy_s = sum(end - start for start, end in spans)
        assert timeline.busy_s[device] == busy_s
        assert timeline.span_s[device] == last - spans[0][0]
    assert timeline.period_s <= timeline.step_time_s
    assert 0 <= timeline.bubble_fraction <= 1


@given(data=st.data(), shape=shapes(paired=st.just(False)))
def test_many_pipelines_at_once_take_what_each_takes(data: st.DataObject, shape: Shape) -> None:
    many = [[data.draw(stage_times()) for _ in range(shape.num_stages)] for _ in range(3)]
    transfers = {edge: data.draw(seconds) for edge in data.draw(edges_of(shape))}
    streams = shape.streams(list(transfers))
    names = ("forward_s", "backward_s", "weight_s", "reduce_s", "optimizer_s")
    columns = {name: np.array([[getattr(k, name) for k in own] for own in many]) for name in names}
    alone = [simulate(streams, own, transfers).step_time_s for own in many]
    assert step_times(streams, **columns, transfer_s=transfers).tolist() == alone


def instruction(action: Action, stage: int, k: int, peer: int | None = None) -> Instruction:
    return Instruction(action=action, stage=stage, microbatch=k, peer=peer)


def sends(stage: int, peer: int, microbatches: list[int]) -> list[Instruction]:
    return [instruction(Action.SEND_ACTIVATION, stage, k, peer) for k in microbatches]


def receives(stage: int, peer: int, microbatches: list[int]) -> list[Instruction]:
    return [instruction(Action.RECV_ACTIVATION, stage, k, peer) for k in microbatches]


def play(*streams: list[Instruction]) -> Timeline:
    return simulate(Streams(map(tuple, streams)), [times(1, 1)] * len(streams), {(0, 1): 0})


def test_a_deadlock_names_who_waits_for_what() -> None:
    first = (Action.RECV_GRADIENT, Action.SEND_ACTIVATION)
    second = (Action.RECV_ACTIVATION, Action.SEND_GRADIENT)
    with pytest.raises(ValueError, match="stage 0 in recvB0<-1, stage 1 in recvF0<-0"):
        play(
            [instruction(action, 0, 0, 1) for action in first],
            [instruction(action, 1, 0, 0) for action in second],
        )


def test_channels_and_streams_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expects recvF1<-0.*micro-batch 0"):
        play(sends(0, 1, [0, 1]), receives(1, 0, [1, 0]))
    with pytest.raises(ValueError, match="never receives sendF1 of stage 0"):
        play(sends(0, 1, [0, 1]), receives(1, 0, [0]))
    with pytest.raises(ValueError, match=r"sendF0->2 of stage 0 names stage 2.*legal: 0..1"):
        play(sends(0, 2, [0]), [instruction(F, 1, 0)])
    with pytest.raises(ValueError, match=r"stages \[0, 0\]"):
        play([instruction(F, 0, 0)], [instruction(F, 0, 1)])
    with pytest.raises(ValueError, match=r"stages \[1\]"):
        play([instruction(F, 1, 0)])


def test_missing_and_impossible_times_are_refused() -> None:
    streams = Shape(name="gpipe", p=2, v=1, m=1).streams()
    with pytest.raises(ValueError, match="1 entries for 2 stages"):
        simulate(streams, [times(1, 1)], {(0, 1): 0})
    with pytest.raises(ValueError, match=r"no entry \(0, 1\).*sendF0->1"):
        simulate(streams, [times(1, 1)] * 2, {})
    with pytest.raises(ValueError, match=r"transfer_s\[0, 1\]=nan"):
        simulate(streams, [times(1, 1)] * 2, {(0, 1): float("nan")})
    with pytest.raises(ValueError, match="backward_s=-1"):
        times(1, -1)
    with pytest.raises(ValueError, match="weight_s=3 is more than backward_s=2"):
        times(1, 2, weight=3)
    with pytest.raises(ValueError, match="overlap_s=2 is more than forward_s=1"):
        StageTimes(forward_s=1, backward_s=1, reduce_s=0, optimizer_s=0, overlap_s=2)


def labels_and_spans(timeline: Timeline) -> tuple[dict[Any, str], list[dict[str, Any]]]:
    trace = json.loads(json.dumps(timeline.chrome_trace()))["traceEvents"]
    labels = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["ph"] == "M"}
    return labels, [e for e in trace if e["ph"] == "X"]


def test_the_chrome_trace_shows_every_event_on_a_named_track_of_its_stage() -> None:
    transfers = {(0, 1): 1, (1, 2): 1, (0, 2): 1}
    timeline = run(Shape(name="1f1b", p=3, v=1, m=4), [times(1, 2, 1, 1)] * 3, transfers)
    labels, spans = labels_and_spans(timeline)
    assert [labels["process_name", s, 0] for s in range(3)] == ["stage 0", "stage 1", "stage 2"]
    assert [
        (e["pid"], labels["thread_name", e["pid"], e["tid"]], e["name"], e["ts"], e["dur"])
        for e in spans
    ] == [
        (e.stage, e.track, e.name, e.start_s * 1e6, (e.end_s - e.start_s) * 1e6)
        for e in timeline.events
    ]
    assert max(e["ts"] + e["dur"] for e in spans) == timeline.step_time_s * 1e6


@pytest.mark.parametrize("name", [n for n, s in SCHEDULES.items() if s.stages_per_device == 2])
def test_the_chrome_trace_names_the_stages_of_a_device(name: str) -> None:
    shape = Shape(name=name, p=2, v=2, m=4)
    first = shape.microbatches(3)[0]
    labels, spans = labels_and_spans(run(shape, [times(1, 2, 1, 1, weight=1)] * 4))
    names = [labels["process_name", d, 0] for d in range(2)]
    assert names == ["device 0: stages 0, 3", "device 1: stages 1, 2"]
    on_first = {e["name"] for e in spans if e["pid"] == 0 and e["cat"] == "compute"}
    assert {"F0 of stage 0", f"F{first} of stage 3", "optimizer of stage 3"} <= on_first
    assert not any(name.endswith("stage 1") for name in on_first)


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


@second_tier("bubbles of every schedule are those of docs/decides (test_systems)")
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


BACKWARD = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)


def period_s(shape: Shape, timeline: Timeline, verdict_s: float = 0.0) -> float:
    return timeline.validated_s(shape.streams(shape.chain), verdict_s)


@given(data=st.data(), shape=shapes())
def test_what_runs_early_waits_for_nothing_later(data: st.DataObject, shape: Shape) -> None:
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
