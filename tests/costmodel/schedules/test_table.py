"""The table of schedules: nothing else names them, and estimates rest on their records."""

from __future__ import annotations

import ast
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given

from meshwright.costmodel.schedules import fills
from meshwright.costmodel.schedules.fills import PipelineShape
from meshwright.costmodel.schedules.schedule import (
    SCHEDULES,
    backward_follows_forward,
    least_in_flight,
)
from tests.costmodel.schedules.pipelines import Shape, run, shapes, times
from tests.helpers.source_files import PRODUCT, files_in

HOMES = (
    "costmodel/schedules/table.py",
    "costmodel/targets.py",  # what frameworks can't run
    "planner/published/setup.py",  # the schedules of published runs
)


def names_of_schedules(tree: ast.Module) -> list[str]:
    """Literals that are a schedule's name, with their lines."""
    return [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in SCHEDULES
    ]


def test_only_the_table_names_schedules() -> None:
    assert names_of_schedules(ast.parse('if plan.schedule != "gpipe": pass')) == ["line 1: 'gpipe'"]
    named = {f.path: names_of_schedules(f.tree) for f in files_in(*PRODUCT) if f.path not in HOMES}
    assert {path: found for path, found in named.items() if found} == {}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_stages_that_are_offered_are_legal(name: str) -> None:
    schedule = SCHEDULES[name]
    for each in schedule.offered(None):
        assert schedule.stages_per_device in (None, each)
        assert schedule.offered(each) == (each,)
    fixed = schedule.stages_per_device is not None
    assert schedule.offered(7) == (() if fixed else (7,))


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
        (Shape(name="eager_1f1b", p=3, v=1, m=4), 2, True),
        (Shape(name="gpipe", p=3, v=1, m=4), 2, False),
        (Shape(name="gpipe", p=3, v=1, m=1), 2, True),
        (Shape(name="interleaved_1f1b", p=2, v=2, m=3), 3, True),
        (Shape(name="interleaved_1f1b", p=2, v=2, m=3), 1, False),
        (Shape(name="dualpipe_v", p=2, v=2, m=4), 3, False),
    ],
)
def test_the_backward_of_a_last_stage_follows_its_forward(
    shape: Shape, stage: int, follows: bool
) -> None:
    found = backward_follows_forward(
        shape.name,
        stage=stage,
        num_stages=shape.num_stages,
        num_microbatches=shape.m,
        num_devices=shape.p,
    )
    assert found == follows


@pytest.mark.parametrize(
    ("fill", "f", "b", "w", "shape", "seconds"),
    [
        (fills.fill_whole, 2, 4, 1, PipelineShape(8, 4), 6),
        (fills.fill_interleaved, 2, 4, 1, PipelineShape(8, 4, 2), 6),
        (fills.fill_interleaved, 2, 4, 1, PipelineShape(6, 4, 3), 6 + 2 * 2 / 3 * 4),  # lacks two
        (fills.fill_interleaved, 2, 4, 1, PipelineShape(3, 4, 2), 6 + 1 / 3 * 6),
        (fills.fill_less_weights, 2, 4, 1, PipelineShape(8, 4), 6 - 2),
        (fills.fill_less_weights, 2, 4, 1, PipelineShape(2, 4), 6 - 1 - 1 / 3),
        (fills.fill_less_weights, 1, 2, 2, PipelineShape(8, 4), 0),
        (fills.fill_v_shaped, 2, 4, 1, PipelineShape(8, 4), 3 + 1 / 2),
        (fills.fill_v_shaped, 2, 4, 1, PipelineShape(1, 4), 2 * 5),
        (fills.fill_v_shaped, 2, 4, 1, PipelineShape(2, 4), 3.5 + 2 / 3 * (10 - 3.5)),
        (fills.fill_less_weights_twice, 2, 4, 1, PipelineShape(8, 4), 6 - 3),
        (fills.fill_less_weights_twice, 2, 4, 1, PipelineShape(3, 4), 6 - 1 - 2 / 3),
        (fills.fill_less_weights_twice, 2, 4, 2, PipelineShape(8, 4), 2),
        (fills.fill_chimera, 2, 4, 1, PipelineShape(8, 4), 2 * (2 + 2 * 2) / 3),
        (fills.fill_chimera, 2, 4, 1, PipelineShape(9, 4), 2 * (2 + 3 * 2) / 3),
        (fills.fill_chimera, 4, 2, 1, PipelineShape(9, 4), 2 * 4 / 3),
        (fills.fill_dualpipe, 2, 4, 1, PipelineShape(8, 6), 2 * 4 / 5),
    ],
)
def test_fills_by_hand(
    fill: Callable[..., fills.Floats],
    f: float,
    b: float,
    w: float,
    shape: PipelineShape,
    seconds: float,
) -> None:
    found = fill(*(np.array([x, x], dtype=float) for x in (f, b, w)), shape)
    assert found.tolist() == pytest.approx([seconds] * 2)


def test_bounds_by_hand() -> None:
    """Of two devices with 2 micro-batches: of work 12, 12 / (1 - 1/4), or twice the slowest."""
    assert fills.bound_of_chain(12.0, 6.0, 2, 2) == pytest.approx(16)
    assert fills.bound_of_chain(12.0, 9.0, 2, 2) == fills.bound_of_slowest(12.0, 9.0, 2, 2) == 18
    assert fills.bound_of_chain(12.0, 6.0, 1, 2) == 12


def test_what_each_schedule_asks_and_takes() -> None:
    """One line each: its copies, stages on a device, ZeRO, counts, recompute, offers."""
    split = {name for name, own in SCHEDULES.items() if own.splits_backward}
    assert split == {"zb_h1", "zb_h2", "zb_v", "dualpipe_v", "dualpipe"}
    assert {n for n, own in SCHEDULES.items() if own.on_request} == {
        "dualpipe_v", "chimera", "dualpipe",
    }  # fmt: skip
    assert {n for n, own in SCHEDULES.items() if own.staggered} == {"zb_h2", "zb_v"}
    assert {n for n, own in SCHEDULES.items() if own.standard} == {
        "gpipe", "1f1b", "interleaved_1f1b",
    }  # fmt: skip
    assert {n for n, own in SCHEDULES.items() if not own.hides_sends} == {"1f1b", "chimera"}
    for name, own in SCHEDULES.items():
        two = name in ("chimera", "dualpipe")
        highest = 1 if name in split else 2 if two else 3
        assert [own.divides(zero) for zero in range(4)] == [zero <= highest for zero in range(4)]
        assert own.recomputed == (("none", "regather") if name in split else None)
        assert own.pipelines(8) == ((range(4), range(4, 8)) if two else (range(8),))
        assert [own.runs(m, p) for m, p in ((4, 2), (3, 2), (4, 3))] == [True, not two, not two]
        assert own.unequal_meshes == (own.stages_per_device == 1)


def test_the_least_that_is_in_flight_on_any_stage_of_a_device() -> None:
    """Of a V the last stage has fewer than the first on device 0, and as many at its turn."""
    for name, stages, m, expected in (
        ("1f1b", 3, 8, (3, 2, 1)),
        ("1f1b", 3, 2, (2, 2, 1)),
        ("interleaved_1f1b", 4, 4, (2, 1)),
        ("zb_v", 4, 8, (1, 2)),
    ):
        devices = len(expected)
        found = least_in_flight(name, num_stages=stages, num_microbatches=m, num_devices=devices)
        assert found == expected, name
