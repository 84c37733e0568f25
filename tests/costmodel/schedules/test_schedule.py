"""Schedules: every stream against what any legal one must be, and published bounds; nothing but
their table names them, and estimates rest on its records."""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.schedules import (
    SCHEDULES,
    Action,
    Instruction,
    Moment,
    Pipeline,
    backward_follows_forward,
    build_schedule,
    fills,
    in_flight,
    least_in_flight,
    moments,
    stages_of_devices,
)
from meshwright.costmodel.schedules.fills import PipelineShape
from tests.costmodel.schedules.pipelines import Shape, edges_of, run, shapes, times
from tests.helpers.source_files import PRODUCT, files_in

F, B = Action.FORWARD, Action.BACKWARD
I, W = Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT
COMPUTES = (F, B, I, W)


def computes(stream: tuple[Instruction, ...]) -> list[Instruction]:
    return [each for each in stream if each.action in COMPUTES]


def test_the_streams_of_a_small_1f1b_read_as_drawn() -> None:
    streams = Shape(name="1f1b", p=2, v=1, m=2).streams()
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
def test_stages_compute_every_microbatch_in_turn(data: st.DataObject, shape: Shape) -> None:
    for stages, stream in zip(
        shape.pipeline.placed, shape.streams(data.draw(edges_of(shape))), strict=True
    ):
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
def test_messages_lie_beside_their_compute(data: st.DataObject, shape: Shape) -> None:
    edges = sorted(data.draw(edges_of(shape)))
    for stages, stream in zip(shape.pipeline.placed, shape.streams(edges), strict=True):
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


def test_stages_are_placed_and_impossible_instructions_refused() -> None:
    assert stages_of_devices("1f1b", num_stages=3, num_devices=3) == ((0,), (1,), (2,))
    assert stages_of_devices("zb_v", num_stages=6, num_devices=3) == ((0, 5), (1, 4), (2, 3))
    placed = stages_of_devices("interleaved_1f1b", num_stages=6, num_devices=2)
    assert placed == ((0, 2, 4), (1, 3, 5))
    with pytest.raises(ValueError, match="schedule='zigzag'; legal: gpipe, 1f1b"):
        in_flight(Pipeline("zigzag", 2, 2, 2), 0)
    with pytest.raises(ValueError, match="stage=2"):
        in_flight(Pipeline("1f1b", 2, 2, 2), 2)
    for change, message in (
        ({"action": Action.SEND_GRADIENT}, "peer=None"),
        ({"action": F, "peer": 1}, "peer=1"),
        ({"action": B, "overlapped": True}, "backward on stage 0 has overlapped=True"),
    ):
        with pytest.raises(ValueError, match=message):
            Instruction(**{"stage": 0, "microbatch": 0, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "zigzag"}, "'zigzag'.*gpipe, 1f1b"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_devices": 0}, "num_devices=0"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"num_devices": 1}, "1 stages on each.*num_stages=2 on num_devices=1"),
        ({"schedule": "zb_v", "num_stages": 3}, "2 stages on each.*num_stages=3 on num_devices=2"),
        ({"edges": [(1, 0)]}, r"edge \(1, 0\)"),
        ({"edges": [(0, 2)]}, r"edge \(0, 2\).*< 2"),
    ],
)
def test_a_schedule_that_cannot_be_says_why(change: dict[str, Any], message: str) -> None:
    edges = change.pop("edges", [(0, 1)])
    with pytest.raises(ValueError, match=message):
        build_schedule(Pipeline("gpipe", 2, 2, 2)._replace(**change), edges)


def held(stream: Iterable[Instruction], kept: Mapping[int, int], late: Mapping[int, int]) -> int:
    """Peak of what stages hold that keep and put off so much, from a stream alone."""
    changes = (
        ((e.action is F) - (e.action in (B, I))) * kept.get(e.stage, 0)
        + ((e.action is I) - (e.action is W)) * late.get(e.stage, 0)
        for e in stream
    )
    return max(accumulate(changes))


def at(one: Moment, stages: Sequence[int], kept: Mapping[int, int], late: Mapping[int, int]) -> int:
    return sum(
        n * kept[k] + off * late[k]
        for k, n, off in zip(stages, one.active, one.put_off, strict=True)
    )


@given(data=st.data(), shape=shapes())
def test_peaks_are_those_of_walking_the_stream(data: st.DataObject, shape: Shape) -> None:
    """Of each stage by itself, and of all stages of a device together."""
    n, streams = shape.num_stages, shape.streams()
    for stage in range(n):
        found = in_flight(shape.pipeline, stage)
        assert found == max(held(stream, {stage: 1}, {stage: 1}) for stream in streams)
    draw = st.lists(st.integers(0, 9), min_size=n, max_size=n) | st.just([2] * n)
    kept, late = (dict(enumerate(data.draw(draw))) for _ in range(2))
    found = moments(shape.pipeline)
    for own, stages, stream in zip(found, shape.pipeline.placed, streams, strict=True):
        assert max(at(one, stages, kept, late) for one in own) == held(stream, kept, late)


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
    most = tuple(
        max(sum((*one.active, *one.put_off)) for one in own) for own in moments(shape.pipeline)
    )
    assert all(n <= bound for n, bound in zip(most, bounds, strict=True))
    if m > 2 * p:
        assert most == bounds


HOMES = (
    "costmodel/schedules/table.py",
    "costmodel/targets.py",  # what frameworks can't run
    "scripts/published/setup.py",  # the schedules of published runs
    # what other software calls them
    *(f"planner/frameworks/{name}.py" for name in ("megatron", "torch_script", "torchtitan")),
)


def names_of_schedules(tree: ast.Module) -> list[str]:
    return [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in SCHEDULES
    ]


def test_only_the_table_names_schedules() -> None:
    assert names_of_schedules(ast.parse('if plan.schedule != "gpipe": pass')) == ["line 1: 'gpipe'"]
    named = {f.path: names_of_schedules(f.tree) for f in files_in(*PRODUCT) if f.path not in HOMES}
    assert {path: found for path, found in named.items() if found} == {}


def test_offered_stages_are_legal_and_bounds_by_hand() -> None:
    for schedule in SCHEDULES.values():
        for each in schedule.offered(None):
            assert schedule.stages_per_device in (None, each)
            assert schedule.offered(each) == (each,)
        fixed = schedule.stages_per_device is not None
        assert schedule.offered(7) == (() if fixed else (7,))
    # of two devices with 2 micro-batches: of work 12, 12 / (1 - 1/4), or twice the slowest
    assert fills.bound_of_chain(12.0, 6.0, 2, 2) == pytest.approx(16)
    assert fills.bound_of_chain(12.0, 9.0, 2, 2) == fills.bound_of_slowest(12.0, 9.0, 2, 2) == 18
    assert fills.bound_of_chain(12.0, 6.0, 1, 2) == 12


@given(shape=shapes())
def test_estimates_of_equal_stages_and_their_step(shape: Shape) -> None:
    """F = 2, B = 4, W = 2 or 1.2 seconds, transfers free; bound and ideal time with its fill
    are never too high, so that a search ordered by them misses nothing."""
    schedule = SCHEDULES[shape.name]
    weight_s = np.array([2.0, 1.2]) * schedule.splits_backward
    own = PipelineShape(shape.m, shape.p, shape.v)
    fill_s = schedule.fill_s(np.full(2, 2.0), np.full(2, 4.0), weight_s, own)
    work_s = shape.v * shape.p * 6.0 / schedule.copies
    for w, fill in zip(weight_s, fill_s, strict=True):
        stage = times(2, 4, weight=w)
        step_s = run(shape, [stage] * shape.num_stages).step_time_s
        estimate_s = shape.m * work_s / shape.p + (shape.p - 1) * fill
        assert estimate_s <= step_s * (1 + 1e-9)
        if not schedule.on_request:
            assert estimate_s >= 0.85 * step_s
        bound_s = schedule.bound_s(work_s, work_s / shape.p, shape.m, shape.p)
        assert bound_s <= step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("shape", "stage", "follows"),
    [
        (Shape(name="1f1b", p=3, v=1, m=4), 2, True),
        (Shape(name="1f1b", p=3, v=1, m=4), 1, False),
        (Shape(name="gpipe", p=3, v=1, m=4), 2, False),
        (Shape(name="gpipe", p=3, v=1, m=1), 2, True),
        (Shape(name="interleaved_1f1b", p=2, v=2, m=3), 3, True),
        (Shape(name="interleaved_1f1b", p=2, v=2, m=3), 1, False),
        (Shape(name="dualpipe_v", p=2, v=2, m=4), 3, False),
    ],
)
def test_the_last_backward_follows_its_forward(shape: Shape, stage: int, follows: bool) -> None:
    assert backward_follows_forward(shape.pipeline, stage) == follows


@pytest.mark.parametrize(
    ("fill", "times", "shape", "seconds"),
    [
        (fills.fill_whole, (2, 4, 1), PipelineShape(8, 4), 6),
        (fills.fill_interleaved, (2, 4, 1), PipelineShape(8, 4, 2), 6),
        (fills.fill_interleaved, (2, 4, 1), PipelineShape(6, 4, 3), 6 + 2 * 2 / 3 * 4),  # lacks two
        (fills.fill_interleaved, (2, 4, 1), PipelineShape(3, 4, 2), 6 + 1 / 3 * 6),
        (fills.fill_less_weights, (2, 4, 1), PipelineShape(8, 4), 6 - 2),
        (fills.fill_less_weights, (2, 4, 1), PipelineShape(2, 4), 6 - 1 - 1 / 3),
        (fills.fill_less_weights, (1, 2, 2), PipelineShape(8, 4), 0),
        (fills.fill_v_shaped, (2, 4, 1), PipelineShape(8, 4), 3 + 1 / 2),
        (fills.fill_v_shaped, (2, 4, 1), PipelineShape(1, 4), 2 * 5),
        (fills.fill_v_shaped, (2, 4, 1), PipelineShape(2, 4), 3.5 + 2 / 3 * (10 - 3.5)),
        (fills.fill_less_weights_twice, (2, 4, 1), PipelineShape(8, 4), 6 - 3),
        (fills.fill_less_weights_twice, (2, 4, 1), PipelineShape(3, 4), 6 - 1 - 2 / 3),
        (fills.fill_less_weights_twice, (2, 4, 2), PipelineShape(8, 4), 2),
        (fills.fill_chimera, (2, 4, 1), PipelineShape(9, 4), 2 * (2 + 3 * 2) / 3),
        (fills.fill_chimera, (4, 2, 1), PipelineShape(9, 4), 2 * 4 / 3),
        (fills.fill_dualpipe, (2, 4, 1), PipelineShape(8, 6), 2 * 4 / 5),
    ],
)
def test_fills_by_hand(
    fill: Callable[..., fills.Floats], times: tuple[int, ...], shape: PipelineShape, seconds: float
) -> None:
    found = fill(*(np.array([x, x], dtype=float) for x in times), shape)
    assert found.tolist() == pytest.approx([seconds] * 2)


def test_what_each_schedule_asks_and_takes() -> None:
    split = {name for name, own in SCHEDULES.items() if own.splits_backward}
    assert split == {"zb_h1", "zb_h2", "zb_v", "dualpipe_v", "dualpipe"}
    assert {n for n, own in SCHEDULES.items() if own.on_request} == {
        "dualpipe_v", "chimera", "dualpipe",
    }  # fmt: skip
    assert {n for n, own in SCHEDULES.items() if own.staggered} == {"zb_h2", "zb_v"}
    assert {n for n, own in SCHEDULES.items() if own.standard} == {
        "gpipe", "1f1b", "interleaved_1f1b",
    }  # fmt: skip
    assert {n for n, own in SCHEDULES.items() if not own.hides_sends} == {
        "1f1b", "chimera", "pipedream_2bw", "pipedream",
    }  # fmt: skip
    for name, own in SCHEDULES.items():
        two = name in ("chimera", "dualpipe")
        late = name in ("pipedream_2bw", "pipedream")
        assert own.flushes is not late
        assert own.gathers == (name not in split and not two and not late)
        assert own.recomputed == (("none", "regather") if name in split else None)
        assert own.pipelines(8) == ((range(4), range(4, 8)) if two else (range(8),))
        assert [own.runs(m, p) for m, p in ((4, 2), (3, 2), (4, 3))] == [True, not two, not two]
        assert own.unequal_meshes == (own.stages_per_device == 1)


def test_the_least_that_is_in_flight_on_any_stage_of_a_device() -> None:
    """Of a V the last stage has fewer than the first on device 0, and as many at its turn."""
    for name, stages, m, expected in (
        ("1f1b", 3, 8, (3, 2, 1)),
        ("1f1b", 3, 2, (1, 1, 1)),  # behind a first backward
        ("interleaved_1f1b", 4, 4, (2, 1)),
        ("zb_v", 4, 8, (1, 2)),
    ):
        found = least_in_flight(Pipeline(name, stages, m, len(expected)))
        assert found == expected, name
