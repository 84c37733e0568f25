"""Schedules: every stream against what any legal schedule must be, and published bounds."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.schedules.schedule import (
    SCHEDULES,
    Action,
    Instruction,
    build_schedule,
    in_flight,
    peak_activation,
    stages_of_devices,
)
from tests.costmodel.schedules.pipelines import Shape, edges_of, shapes

F, B = Action.FORWARD, Action.BACKWARD
I, W = Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT
COMPUTES = (F, B, I, W)


def computes(stream: tuple[Instruction, ...]) -> list[Instruction]:
    return [each for each in stream if each.action in COMPUTES]


# --- streams ---------------------------------------------------------------------------------


def test_the_streams_of_a_small_1f1b_read_as_drawn() -> None:
    streams = build_schedule("1f1b", num_stages=2, num_microbatches=2)
    assert [" ".join(map(str, stream)) for stream in streams] == [
        "F0 sendF0->1 F1 sendF1->1 recvB0<-1 B0 recvB1<-1 B1 reduce",
        "recvF0<-0 F0 B0 sendB0->0 recvF1<-0 F1 B1 sendB1->0 reduce",
    ]


DRAWN = {  # the computes of each device; of several stages a device has, which after the colon
    ("1f1b", 3, 1, 4): [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ],
    ("eager_1f1b", 3, 1, 6): [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ],
    ("interleaved_1f1b", 2, 2, 3): [  # rounds of two: the second one lacks a micro-batch
        "F0:0 F1:0 F0:2 F1:2 F2:0 B0:2 B1:2 F2:2 B0:0 B1:0 B2:2 B2:0",
        "F0:1 F1:1 F0:3 B0:3 F1:3 B1:3 F2:1 B0:1 B1:1 F2:3 B2:3 B2:1",
    ],
    ("zb_h1", 4, 1, 5): [  # figure 3 of the zero bubble paper, top
        "F0 F1 F2 F3 I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4",
        "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4",
        "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4",
        "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4",
    ],
    ("zb_h2", 3, 1, 6): [  # and bottom
        "F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5",
        "F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5",
        "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5",
    ],
    ("zb_v", 2, 2, 4): [
        "F0:0 F1:0 F2:0 F0:3 I0:3 W0:3 F1:3 I1:3 W1:3 F3:0 I0:0 W0:0 F2:3 I2:3 W2:3 I1:0 W1:0 "
        "F3:3 I3:3 W3:3 I2:0 W2:0 I3:0 W3:0",
        "F0:1 F0:2 F1:1 F1:2 I0:2 W0:2 F2:1 I0:1 W0:1 F2:2 I1:2 W1:2 F3:1 I1:1 W1:1 F3:2 I2:2 "
        "W2:2 I2:1 I3:2 I3:1 W2:1 W3:2 W3:1",
    ],
    ("dualpipe_v", 2, 2, 4): [  # F&B in brackets; the turn of the V starts with both apart
        "F0:0 F1:0 F2:0 F0:3 I0:3 W0:3 F1:3 [F3:0 B1:3] [F2:3 B0:0] B2:3 [F3:3 B1:0] "
        "B3:3 I2:0 W2:0 I3:0 W3:0",
        "F0:1 F0:2 F1:1 F1:2 F2:1 B0:2 [F2:2 B0:1] [F3:1 B1:2] [F3:2 B1:1] "
        "B2:2 B2:1 I3:2 I3:1 W3:2 W3:1",
    ],
    ("chimera", 4, 2, 8): [  # two units of four; the second copy has stages 4 to 7
        "F0:0 F1:0 F4:7 B4:7 F5:7 B5:7 B0:0 F2:0 B1:0 F3:0 F6:7 B6:7 F7:7 B7:7 B2:0 B3:0",
        "F0:1 F4:6 F1:1 F5:6 B4:6 B0:1 B5:6 B1:1 F2:1 F6:6 F3:1 F7:6 B6:6 B2:1 B7:6 B3:1",
        "F4:5 F0:2 F5:5 F1:2 B0:2 B4:5 B1:2 B5:5 F6:5 F2:2 F7:5 F3:2 B2:2 B6:5 B3:2 B7:5",
        "F4:4 F5:4 F0:3 B0:3 F1:3 B1:3 B4:4 F6:4 B5:4 F7:4 F2:3 B2:3 F3:3 B3:3 B6:4 B7:4",
    ],
    ("dualpipe", 4, 2, 8): [
        "F0:0 F1:0 F2:0 F4:7 I4:7 W4:7 F5:7 [F3:0 B5:7] [F6:7 B0:0] B6:7 [F7:7 B1:0] "
        "B7:7 I2:0 W2:0 I3:0 W3:0",
        "F0:1 F4:6 F1:1 F5:6 F2:1 B4:6 [F6:6 B0:1] [F3:1 B5:6] [F7:6 B1:1] "
        "B6:6 B2:1 I7:6 I3:1 W7:6 W3:1",
        "F4:5 F0:2 F5:5 F1:2 F6:5 B0:2 [F2:2 B4:5] [F7:5 B1:2] [F3:2 B5:5] "
        "B2:2 B6:5 I3:2 I7:5 W3:2 W7:5",
        "F4:4 F5:4 F6:4 F0:3 I0:3 W0:3 F1:3 [F7:4 B1:3] [F2:3 B4:4] B2:3 [F3:3 B5:4] "
        "B3:3 I6:4 W6:4 I7:4 W7:4",
    ],
}


@pytest.mark.parametrize("of", DRAWN, ids=lambda of: of[0])
def test_small_schedules_compute_as_drawn(of: tuple[str, int, int, int]) -> None:
    name, p, v, m = of

    def drawn(stream: tuple[Instruction, ...]) -> str:
        words = [f"{each}:{each.stage}" if v > 1 else f"{each}" for each in computes(stream)]
        marks = [each.overlapped for each in computes(stream)]
        for at in (n for n, overlapped in enumerate(marks) if overlapped):
            words[at], words[at + 1] = f"[{words[at]}", f"{words[at + 1]}]"
        return " ".join(words)

    streams = Shape(name=name, p=p, v=v, m=m, paired=True).streams()
    assert [drawn(stream) for stream in streams] == DRAWN[of]


@given(data=st.data(), shape=shapes())
def test_each_stage_computes_every_microbatch_once_and_in_turn(
    data: st.DataObject, shape: Shape
) -> None:
    placed = stages_of_devices(shape.name, num_stages=shape.num_stages, num_devices=shape.p)
    for stages, stream in zip(placed, shape.streams(data.draw(edges_of(shape))), strict=True):
        assert {each.stage for each in stream} == set(stages)
        for stage in stages:
            order = [(c.action, c.microbatch) for c in computes(stream) if c.stage == stage]
            ks = list(shape.microbatches(stage))
            assert [k for action, k in order if action is F] == ks
            assert [k for action, k in order if action in (B, I)] == ks
            assert [k for action, k in order if action in (B, W)] == ks
            for k in ks:
                split = (I, k) in order
                assert split <= SCHEDULES[shape.name].splits_backward
                at = [order.index((action, k)) for action in ((F, I, W) if split else (F, B))]
                assert at == sorted(at)
        ends = {each.stage: at for at, each in enumerate(computes(stream))}
        assert [(e.action, e.stage) for e in stream[-len(stages) :]] == [
            (Action.REDUCE_GRADIENTS, stage) for stage in sorted(ends, key=ends.__getitem__)
        ]


@given(data=st.data(), shape=shapes())
def test_inputs_arrive_just_before_and_results_leave_just_after_their_compute(
    data: st.DataObject, shape: Shape
) -> None:
    edges = sorted(data.draw(edges_of(shape)))
    placed = stages_of_devices(shape.name, num_stages=shape.num_stages, num_devices=shape.p)
    for stages, stream in zip(placed, shape.streams(edges), strict=True):
        sources = {s: [i for i, j in edges if j == s and i not in stages] for s in stages}
        destinations = {s: [j for i, j in edges if i == s and j not in stages] for s in stages}
        expected: list[tuple[Any, ...]] = []
        receives, middle, sends = [], [], []
        for each in computes(stream):
            s, k = each.stage, each.microbatch
            middle += [(each.action, s, k, None)]
            if each.action is F:
                receives += [(Action.RECV_ACTIVATION, s, k, i) for i in sources[s]]
                sends += [(Action.SEND_ACTIVATION, s, k, j) for j in destinations[s]]
            elif each.action in (B, I):
                receives += [(Action.RECV_GRADIENT, s, k, j) for j in destinations[s]]
                sends += [(Action.SEND_GRADIENT, s, k, i) for i in sources[s]]
            if not each.overlapped:
                expected += [*receives, *middle, *sends]
                receives, middle, sends = [], [], []
        found = [(each.action, each.stage, each.microbatch, each.peer) for each in stream]
        assert found[: -len(stages)] == expected


# --- placement -------------------------------------------------------------------------------


def test_stages_are_placed() -> None:
    """On as many devices as the schedule asks for by itself."""
    assert stages_of_devices("1f1b", num_stages=3) == ((0,), (1,), (2,))
    assert stages_of_devices("zb_v", num_stages=6) == ((0, 5), (1, 4), (2, 3))
    placed = stages_of_devices("interleaved_1f1b", num_stages=6, num_devices=2)
    assert placed == ((0, 2, 4), (1, 3, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "zigzag"}, "'zigzag'.*gpipe, 1f1b"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_devices": 0}, "num_devices=0"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"num_devices": 1}, "1 stages on each.*num_stages=2 on num_devices=1"),
        ({"name": "interleaved_1f1b"}, "needs num_devices"),
        ({"name": "interleaved_1f1b", "num_devices": 3}, "num_stages=2 on num_devices=3"),
        ({"name": "zb_v", "num_stages": 3}, "2 stages on each.*num_stages=3 on num_devices=1"),
        ({"name": "zb_v", "num_stages": 1}, "2 stages on each"),
        ({"edges": [(1, 0)]}, r"edge \(1, 0\)"),
        ({"edges": [(0, 0)]}, r"edge \(0, 0\)"),
        ({"edges": [(0, 2)]}, r"edge \(0, 2\).*< 2"),
    ],
)
def test_a_schedule_that_cannot_be_says_why(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"name": "gpipe", "num_stages": 2, "num_microbatches": 2}
    with pytest.raises(ValueError, match=message):
        build_schedule(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": Action.SEND_GRADIENT}, "peer=None"),
        ({"action": F, "peer": 1}, "peer=1"),
        ({"action": B, "overlapped": True}, "backward on stage 0 has overlapped=True"),
    ],
)
def test_only_messages_have_a_peer_and_only_forwards_overlap(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Instruction(**{"stage": 0, "microbatch": 0, **change})


# --- memory ----------------------------------------------------------------------------------


def held(stream: Iterable[Instruction], sizes: Mapping[int, int]) -> int:
    """Peak of what stages of these sizes hold, from a stream alone."""
    changes = ((e.action is F) - (e.action in (B, W)) for e in stream)
    own = (change * sizes.get(e.stage, 0) for change, e in zip(changes, stream, strict=True))
    return max(accumulate(own))


@given(data=st.data(), shape=shapes())
def test_peaks_are_those_of_walking_the_stream(data: st.DataObject, shape: Shape) -> None:
    """Of each stage by itself, and of all stages of a device together."""
    n, streams = shape.num_stages, shape.streams()
    for stage in range(n):
        given_ = {"num_stages": n, "num_microbatches": shape.m, "num_devices": shape.p}
        found = in_flight(shape.name, stage=stage, **given_)
        assert found == max(held(stream, {stage: 1}) for stream in streams)
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n) | st.just([2] * n))
    peaks = peak_activation(
        shape.name, num_microbatches=shape.m, bytes_per_stage=sizes, num_devices=shape.p
    )
    assert peaks == tuple(held(stream, dict(enumerate(sizes))) for stream in streams)


PUBLISHED = {  # (p, v, device) -> stages' micro-batches held once there are enough of them
    "1f1b": lambda p, v, d: p - d,
    "eager_1f1b": lambda p, v, d: 2 * (p - d) - 1,
    "interleaved_1f1b": lambda p, v, d: p * v + p - 1 - 2 * d,
    "zb_h1": lambda p, v, d: p,
    "zb_h2": lambda p, v, d: 2 * p - 1,
    "zb_v": lambda p, v, d: 2 * p,
    "dualpipe_v": lambda p, v, d: 2 * p + 1,
    "chimera": lambda p, v, d: p // 2 + 1 + min(d, p - 1 - d),
    "dualpipe": lambda p, v, d: p + 1,
}


@given(shape=shapes(names=tuple(PUBLISHED), m=st.integers(1, 24)))
def test_memory_is_what_was_published_and_never_more(shape: Shape) -> None:
    p, v, m = shape.p, shape.v, shape.m
    bounds = tuple(PUBLISHED[shape.name](p, v, d) for d in range(p))
    most = peak_activation(
        shape.name, num_microbatches=m, bytes_per_stage=[1] * shape.num_stages, num_devices=p
    )
    assert all(n <= bound for n, bound in zip(most, bounds, strict=True))
    if m > 2 * p:
        assert most == bounds


def test_in_flight_rejects_unknown_names_and_stages() -> None:
    with pytest.raises(ValueError, match="schedule='zigzag'; legal: gpipe, 1f1b"):
        in_flight("zigzag", stage=0, num_stages=2, num_microbatches=2)
    with pytest.raises(ValueError, match="stage=2"):
        in_flight("1f1b", stage=2, num_stages=2, num_microbatches=2)
