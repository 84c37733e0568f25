"""The table of schedules: nothing else names them, and estimates rest on their records."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields

import numpy as np
import pytest
from hypothesis import given

from meshwright.costmodel.schedules.fills import PipelineShape
from meshwright.costmodel.schedules.schedule import (
    SCHEDULES,
    backward_follows_forward,
    peak_activation,
)
from meshwright.costmodel.schedules.simulate import StageTimes
from meshwright.costmodel.schedules.table import Schedule
from tests.costmodel.schedules.pipelines import Shape, run, shapes
from tests.helpers.source_files import PRODUCT, SourceFile, files_in

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


@pytest.mark.parametrize(
    "file", [f for f in files_in(*PRODUCT) if f.path not in HOMES], ids=lambda file: file.path
)
def test_only_the_table_names_schedules(file: SourceFile) -> None:
    assert names_of_schedules(file.tree) == []


def test_names_of_schedules_are_found() -> None:
    assert names_of_schedules(ast.parse('if plan.schedule != "gpipe": pass')) == ["line 1: 'gpipe'"]
    assert names_of_schedules(ast.parse('"""Like 1f1b."""')) == []


def test_no_field_of_a_record_can_be_left_out() -> None:
    for each in fields(Schedule):
        assert (each.default, each.default_factory) == (MISSING, MISSING), each.name


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_stages_that_are_offered_are_legal(name: str) -> None:
    schedule = SCHEDULES[name]
    for each in schedule.offered(None):
        assert schedule.stages_per_device in (None, each)
        assert schedule.offered(each) == (each,)
    fixed = schedule.stages_per_device is not None
    assert schedule.offered(7) == (() if fixed else (7,))


@given(shape=shapes())
def test_no_step_of_equal_stages_undercuts_the_bound(shape: Shape) -> None:
    """F = 2, B = 4, W = 2 seconds, transfers free."""
    stage = StageTimes(forward_s=2, backward_s=4, weight_s=2, reduce_s=0, optimizer_s=0)
    step_s = run(shape, [stage] * shape.num_stages).step_time_s
    work_s = 6.0 * shape.num_stages / len(shape.pipelines)
    bound_s = SCHEDULES[shape.name].bound_s(work_s, work_s / shape.p, shape.m, shape.p)
    assert bound_s <= step_s * (1 + 1e-9)


@given(shape=shapes())
def test_ideal_time_and_fill_are_the_step_of_equal_stages(shape: Shape) -> None:
    """F = 2, B = 4, W = 2 or 1.2 seconds, transfers free; never too high, so that a search ordered
    by them misses nothing."""
    schedule = SCHEDULES[shape.name]
    weight_s = np.array([2.0, 1.2]) * schedule.splits_backward
    own = PipelineShape(shape.m, shape.p, shape.v)
    fill_s = schedule.fill_s(np.full(2, 2.0), np.full(2, 4.0), weight_s, own)
    for w, fill in zip(weight_s, fill_s, strict=True):
        stage = StageTimes(forward_s=2, backward_s=4, weight_s=w, reduce_s=0, optimizer_s=0)
        step_s = run(shape, [stage] * shape.num_stages).step_time_s
        estimate_s = shape.m * shape.v * 6.0 / schedule.copies + (shape.p - 1) * fill
        assert estimate_s <= step_s * (1 + 1e-9)
        if not schedule.on_request:
            assert estimate_s >= 0.85 * step_s


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


@pytest.mark.parametrize("name", [n for n, s in SCHEDULES.items() if s.in_flight_together])
@pytest.mark.parametrize("each", [1, 2, 3, 5])
def test_what_a_device_holds_together_is_what_its_order_holds(name: str, each: int) -> None:
    together = SCHEDULES[name].in_flight_together
    assert together is not None
    for p in (1, 2, 3, 4, 6):
        for m in (p, 2 * p, 5 * p):
            # of stages that don't weigh alike the order is counted
            weights = [1.0 + 1e-9 * k for k in range(p * each)]
            counted = peak_activation(
                name, num_microbatches=m, bytes_per_stage=weights, num_devices=p
            )
            shape = PipelineShape(m, p, each)
            assert [round(held) for held in counted] == [together(d, shape) for d in range(p)]
