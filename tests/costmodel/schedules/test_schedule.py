"""Schedules: every stream against what any legal schedule must be, and published bounds."""

import operator
from collections import defaultdict
from itertools import accumulate, pairwise
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
from tests.costmodel.schedules.pipelines import Shape, chain, counts, edges_of, shapes

F, B = Action.FORWARD, Action.BACKWARD
I, W = Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT
COMPUTES = (F, B, I, W)
ONE_STAGE = [name for name, schedule in SCHEDULES.items() if schedule.stages_per_device == 1]


def computes(stream: tuple[Instruction, ...]) -> list[Instruction]:
    return [each for each in stream if each.action in COMPUTES]


# --- streams ---------------------------------------------------------------------------------


def test_the_streams_of_a_small_1f1b_read_as_drawn() -> None:
    streams = build_schedule("1f1b", num_stages=2, num_microbatches=2)
    assert [" ".join(map(str, stream)) for stream in streams] == [
        "F0 sendF0->1 F1 sendF1->1 recvB0<-1 B0 recvB1<-1 B1 reduce",
        "recvF0<-0 F0 B0 sendB0->0 recvF1<-0 F1 B1 sendB1->0 reduce",
    ]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # Figure 3 of the zero bubble paper, top and bottom, four stages
        (
            Shape(name="zb_h1", p=4, v=1, m=5),
            [
                "F0 F1 F2 F3 I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4",
                "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4",
                "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4",
                "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4",
            ],
        ),
        (
            Shape(name="zb_h2", p=2, v=1, m=4),
            ["F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3", "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"],
        ),
        (
            Shape(name="eager_1f1b", p=2, v=1, m=4),
            ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else "",
)
def test_small_schedules_compute_as_drawn(shape: Shape, expected: list[str]) -> None:
    assert [" ".join(map(str, computes(stream))) for stream in shape.streams()] == expected


def test_an_interleaved_device_takes_rounds_of_p_microbatches_through_its_stages() -> None:
    first, second = (computes(s) for s in Shape(name="interleaved_1f1b", p=2, v=2, m=4).streams())
    forwards = [(each.stage, each.microbatch) for each in first if each.action is F]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    backwards = [(each.stage, each.microbatch) for each in second if each.action is B]
    assert backwards == [(3, 0), (3, 1), (1, 0), (1, 1), (3, 2), (3, 3), (1, 2), (1, 3)]
    assert [str(each)[0] for each in first] == [*"FFFFF", *"BFBFBF", *"BBBBB"]
    assert [str(each)[0] for each in second] == [*"FFF", *"BFBFBFBFBF", *"BBB"]


def test_a_small_dualpipe_v_computes_as_drawn() -> None:
    """Stage after the colon, F&B in brackets; the turn of the V starts with an F and a B apart."""

    def drawn(stream: tuple[Instruction, ...]) -> str:
        words = [f"{each}:{each.stage}" for each in computes(stream)]
        marks = [each.overlapped for each in computes(stream)]
        for at in (n for n, overlapped in enumerate(marks) if overlapped):
            words[at], words[at + 1] = f"[{words[at]}", f"{words[at + 1]}]"
        return " ".join(words)

    first, second = map(drawn, Shape(name="dualpipe_v", p=2, v=2, m=4, paired=True).streams())
    assert first == (
        "F0:0 F1:0 F2:0 F0:3 I0:3 W0:3 F1:3 [F3:0 B1:3] [F2:3 B0:0] B2:3 [F3:3 B1:0] "
        "B3:3 I2:0 W2:0 I3:0 W3:0"
    )
    assert second == (
        "F0:1 F0:2 F1:1 F1:2 F2:1 B0:2 [F2:2 B0:1] [F3:1 B1:2] [F3:2 B1:1] "
        "B2:2 B2:1 I3:2 I3:1 W3:2 W3:1"
    )


@given(shape=shapes(names=("dualpipe_v",), m=st.integers(1, 12)))
def test_overlapped_are_a_forward_of_one_stage_and_an_older_backward_of_the_other(
    shape: Shape,
) -> None:
    for stream in shape.streams():
        for each, following in pairwise(computes(stream)):
            if each.overlapped:
                assert (each.action, following.action) == (F, B)
                assert each.stage != following.stage
                assert each.microbatch > following.microbatch


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


@given(shape=shapes())
def test_the_orders_of_all_devices_are_part_of_one_legal_sequence(shape: Shape) -> None:
    """F after the F of the stage before, backwards after that of the stage after: no deadlock."""
    orders = [computes(stream) for stream in shape.streams(edges=[])]
    done: set[tuple[bool, int, int]] = set()
    position = [0] * shape.p
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while position[device] < len(order):
                each = order[position[device]]
                if each.action is not W:
                    forward = each.action is F
                    before = each.stage - 1 if forward else each.stage + 1
                    needed = (forward, before, each.microbatch)
                    (own,) = (stages for stages in shape.pipelines if each.stage in stages)
                    if before in own and needed not in done:
                        break
                    done.add((forward, each.stage, each.microbatch))
                position[device] += 1
                moved = True
    assert position == [len(order) for order in orders]


@given(data=st.data(), shape=shapes())
def test_inputs_arrive_just_before_and_results_leave_just_after_their_compute(
    data: st.DataObject, shape: Shape
) -> None:
    edges = sorted(data.draw(edges_of(shape)))
    placed = stages_of_devices(shape.name, num_stages=shape.num_stages, num_devices=shape.p)
    for stages, stream in zip(placed, shape.streams(edges), strict=True):
        sources = {s: [i for i, j in edges if j == s and i not in stages] for s in stages}
        destinations = {s: [j for i, j in edges if i == s and j not in stages] for s in stages}
        expected: list[tuple[Action, int, int, int | None]] = []
        receives: list[tuple[Action, int, int, int | None]] = []
        middle: list[tuple[Action, int, int, int | None]] = []
        sends: list[tuple[Action, int, int, int | None]] = []
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


@given(data=st.data(), shape=shapes())
def test_both_ends_of_a_channel_list_the_same_microbatches_in_the_same_order(
    data: st.DataObject, shape: Shape
) -> None:
    edges = data.draw(edges_of(shape))
    sent: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    received: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for stream in shape.streams(edges):
        for each in stream:
            match each.action:
                case Action.SEND_ACTIVATION | Action.SEND_GRADIENT:
                    forward = each.action is Action.SEND_ACTIVATION
                    sent[each.stage, each.peer, forward].append(each.microbatch)
                case Action.RECV_ACTIVATION | Action.RECV_GRADIENT:
                    forward = each.action is Action.RECV_ACTIVATION
                    received[each.peer, each.stage, forward].append(each.microbatch)
    assert sent == received
    placed = stages_of_devices(shape.name, num_stages=shape.num_stages, num_devices=shape.p)
    crossing = [(i, j) for i, j in edges if not any({i, j} <= set(stages) for stages in placed)]
    assert set(sent) == {(i, j, True) for i, j in crossing} | {(j, i, False) for i, j in crossing}
    assert all(order == list(shape.microbatches(key[0])) for key, order in sent.items())


def test_a_single_stage_only_computes_and_reduces() -> None:
    (stream,) = build_schedule("1f1b", num_stages=1, num_microbatches=2)
    assert " ".join(map(str, stream)) == "F0 B0 F1 B1 reduce"


def test_streams_of_equal_arguments_are_built_once() -> None:
    first = build_schedule("zb_v", num_stages=4, num_microbatches=3, edges=chain(4))
    assert build_schedule("zb_v", num_stages=4, num_microbatches=3, edges=chain(4)[::-1]) is first
    assert build_schedule("zb_v", num_stages=4, num_microbatches=3, edges=[]) is not first


# --- placement -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_stages", "num_devices", "expected"),
    [
        ("1f1b", 3, None, ((0,), (1,), (2,))),
        ("interleaved_1f1b", 6, 2, ((0, 2, 4), (1, 3, 5))),
        ("zb_v", 6, None, ((0, 5), (1, 4), (2, 3))),
        ("dualpipe_v", 4, 2, ((0, 3), (1, 2))),
    ],
)
def test_stages_are_placed(
    name: str, num_stages: int, num_devices: int | None, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert stages_of_devices(name, num_stages=num_stages, num_devices=num_devices) == expected


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


def test_only_sends_and_receives_have_a_peer() -> None:
    with pytest.raises(ValueError, match="peer=None"):
        Instruction(action=Action.SEND_GRADIENT, stage=1, microbatch=0)
    with pytest.raises(ValueError, match="peer=1"):
        Instruction(action=F, stage=0, microbatch=0, peer=1)


def test_only_forwards_are_marked_as_overlapped() -> None:
    with pytest.raises(ValueError, match="backward on stage 1 has overlapped=True"):
        Instruction(action=B, stage=1, microbatch=0, overlapped=True)


# --- memory ----------------------------------------------------------------------------------


def walked(shape: Shape, stage: int) -> int:
    """Peak of what `stage` holds, from its stream alone."""
    changes = [
        (each.action is F) - (each.action in (B, W))
        for stream in shape.streams()
        for each in stream
        if each.stage == stage
    ]
    return max(accumulate(changes))


@given(shape=shapes())
def test_in_flight_is_the_peak_of_walking_the_stream(shape: Shape) -> None:
    for stage in range(shape.num_stages):
        assert walked(shape, stage) == in_flight(
            shape.name,
            stage=stage,
            num_stages=shape.num_stages,
            num_microbatches=shape.m,
            num_devices=shape.p,
        )


@given(data=st.data(), shape=shapes())
def test_peak_activation_is_the_peak_of_all_stages_of_a_device_together(
    data: st.DataObject, shape: Shape
) -> None:
    sizes = data.draw(
        st.lists(st.integers(0, 9), min_size=shape.num_stages, max_size=shape.num_stages)
    )
    peaks = []
    for stream in shape.streams():
        held = (((e.action is F) - (e.action in (B, W))) * sizes[e.stage] for e in stream)
        peaks.append(max(accumulate(held, operator.add)))
    assert tuple(peaks) == peak_activation(
        shape.name, num_microbatches=shape.m, bytes_per_stage=sizes, num_devices=shape.p
    )


PUBLISHED = {  # (p, v, device) -> stages' micro-batches held once there are enough of them
    "1f1b": lambda p, v, d: p - d,
    "eager_1f1b": lambda p, v, d: 2 * (p - d) - 1,
    "interleaved_1f1b": lambda p, v, d: p * v + p - 1 - 2 * d,
    "zb_h1": lambda p, v, d: p,
    "zb_h2": lambda p, v, d: 2 * p - 1,
    "zb_v": lambda p, v, d: 2 * p,
    "dualpipe_v": lambda p, v, d: 2 * p + 1,
}


@given(shape=shapes(names=tuple(PUBLISHED), m=st.integers(1, 24)))
def test_memory_is_what_was_published_and_never_more(shape: Shape) -> None:
    p, v, m = shape.p, shape.v, shape.m
    bounds = tuple(PUBLISHED[shape.name](p, v, d) for d in range(p))
    held = peak_activation(
        shape.name, num_microbatches=m, bytes_per_stage=[1] * shape.num_stages, num_devices=p
    )
    assert all(n <= bound for n, bound in zip(held, bounds, strict=True))
    if m > 2 * p:
        assert held == bounds


@given(name=st.sampled_from(ONE_STAGE), p=counts, m=counts)
def test_gpipe_holds_everything_and_nobody_more(name: str, p: int, m: int) -> None:
    sizes: dict[str, Any] = {"num_microbatches": m, "bytes_per_stage": [3.0] * p}
    assert peak_activation("gpipe", **sizes) == (3.0 * m,) * p
    assert max(peak_activation(name, **sizes)) <= 3.0 * m


def test_in_flight_rejects_unknown_names_and_stages() -> None:
    with pytest.raises(ValueError, match="schedule='zigzag'; legal: gpipe, 1f1b"):
        in_flight("zigzag", stage=0, num_stages=2, num_microbatches=2)
    with pytest.raises(ValueError, match="stage=2"):
        in_flight("1f1b", stage=2, num_stages=2, num_microbatches=2)
