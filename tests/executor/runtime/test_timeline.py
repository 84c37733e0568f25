"""A measured step reads like the simulated one: the same tracks, the same names in the same order,
on one clock; and it is a training step as any other."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright import ParallelModel
from meshwright.cli import main
from meshwright.costmodel.schedules import Action, Instruction, Pipeline, build_schedule
from meshwright.costmodel.schedules.simulate import StageTimes as Prices
from meshwright.costmodel.schedules.simulate import simulate
from meshwright.executor.ranks import launch
from meshwright.executor.runtime import timeline
from meshwright.executor.runtime.timeline import MeasuredStep, Span, StepTimes
from meshwright.executor.stages.pipeline import Phase
from tests.executor.trained_cells import planned
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.models.models import CASES
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import difference

WORLD = 2
CLOCK_S = 1e4
CELLS = tuple(map(Cell.parse, ("mlp pp2 zb_h1 m4", "mlp pp2 zb_v m4", "mlp dp2 m2 zero1")))
PHASES = (Phase.REFRESH.value, Phase.DELIVER.value)

Tracks = dict[tuple[str, str], list[dict[str, Any]]]


def tracks(trace: Mapping[str, Any]) -> dict[int, Tracks]:
    """Per process, events by (process name, thread name) in the order of their starts."""
    every = trace["traceEvents"]
    named = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in every if e["ph"] == "M"}
    found: dict[int, Tracks] = defaultdict(lambda: defaultdict(list))
    for event in sorted((e for e in every if e["ph"] == "X"), key=itemgetter("ts")):
        pid, thread = event["pid"], named["thread_name", event["pid"], event["tid"]]
        assert event["cat"] == thread
        found[pid][named["process_name", pid, 0], thread].append(event)
    return found


def names(of: Tracks) -> dict[tuple[str, str], list[str]]:
    """Names per track, without what only one of the two kinds of trace has."""
    return {
        track: [e["name"] for e in events if not e["name"].startswith(("optimizer", *PHASES))]
        for track, events in of.items()
    }


# --- on ranks -------------------------------------------------------------------------------------


def measures(cell: Cell, folder: Path) -> None:
    """Time a step on the example inputs, after one that is not timed, and repeat it untimed: a
    timed step is a step, and the predicted bubbles are told beside the measured ones. The clock of
    rank 1 is wrong, as the clocks of two hosts are."""
    result = planned(cell)
    batch = CASES[cell.case].batch(cell.rows, 0)
    right = time.perf_counter
    wrong_s = CLOCK_S * launch.rank()
    with mock.patch.object(time, "perf_counter", lambda: right() + wrong_s):
        result.train_step(batch)
        _zero_grad(result)
        timed = result.timeline(folder / "measured")
    gradients = result.runtime.full_gradients()
    _zero_grad(result)
    assert float(timed.loss) == pytest.approx(float(result.train_step(batch)), rel=1e-6)
    assert difference(gradients, result.runtime.full_gradients())[0] <= 1e-6  # delivered once
    assert result.runtime.steps == 3
    assert 0 < timed.measured.step_s < CLOCK_S / 2
    assert timed.measured.bubbles.keys() == timed.predicted.bubbles.keys()
    assert all(0 <= share < 1 for share in timed.measured.bubbles.values())
    assert all(name in str(timed) for name in timed.measured.bubbles)
    if launch.rank() == 0:
        result.report.trace(folder / "simulated")


def _zero_grad(result: ParallelModel) -> None:
    for parameter in result.parameters():
        parameter.grad = None


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_tracks_and_names_are_the_simulated_ones(cell: Cell, tmp_path: Path) -> None:
    """A track does one thing at a time; phases surround the computation once per rank."""
    plan_of(cell)
    on_ranks(WORLD, measures, cell, tmp_path)
    measured, simulated = (
        tracks(json.loads((tmp_path / kind).read_text())) for kind in ("measured", "simulated")
    )
    assert len(measured) == WORLD
    by_name = {next(iter(of))[0]: names(of) for of in simulated.values()}
    assert {next(iter(of))[0] for of in measured.values()} == set(by_name)
    for of in measured.values():
        assert names(of) == by_name[next(iter(of))[0]]
        for events in of.values():
            for before, after in pairwise(events):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3  # µs: rounding
        (computed,) = (events for (_, thread), events in of.items() if thread == "compute")
        shown = [e["name"] for e in computed]
        assert (shown[0], shown[-1]) == PHASES
        assert not set(shown[1:-1]) & set(PHASES)


def unwritable(folder: Path) -> None:
    """What every rank is told before the step where the file can't be written."""
    result = planned(CELLS[0])
    with pytest.raises(OSError, match=r"trace\.json"):
        result.timeline(folder / "missing" / "trace.json")
    assert result.runtime.steps == 0


def test_an_unwritable_path_is_said_on_every_rank_before_the_step(tmp_path: Path) -> None:
    on_ranks(WORLD, unwritable, tmp_path)


# --- one device -----------------------------------------------------------------------------------


def on_one_device(example: tuple[torch.Tensor, ...]) -> ParallelModel:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    loss_fn = nn.functional.mse_loss
    return tiny.planned(model, example_inputs=example, loss_fn=loss_fn, profile=False)


def test_example_inputs_are_repeated_where_no_batch_is_given(tmp_path: Path) -> None:
    example = torch.randn(3, 4), torch.randn(3, 2)
    result = on_one_device(example)
    timed = result.timeline(tmp_path / "trace.json")
    again = torch.arange(8) % 3
    expected = result.train_step((example[0][again], example[1][again]))
    assert float(timed.loss) == pytest.approx(float(expected), rel=1e-6)
    assert timeline.step_times(json.loads((tmp_path / "trace.json").read_text())) == timed.measured


def test_examples_without_values_ask_for_a_batch(tmp_path: Path) -> None:
    result = on_one_device((torch.empty(4, 4, device="meta"), torch.empty(4, 2, device="meta")))
    with pytest.raises(ValueError, match="batch="):
        result.timeline(tmp_path / "trace.json")


def test_run_writes_the_timeline_of_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("timed_target.py").write_text(
        "import torch\n"
        "def make():\n"
        "    batch = torch.randn(4, 3), torch.randn(4, 1)\n"
        "    return torch.nn.Linear(3, 1), batch, torch.nn.functional.mse_loss\n"
    )
    arguments = ["run", "timed_target:make", "--batch", "4", "--precision", "fp32"]
    assert main([*arguments, "--steps", "2", "--timeline", "trace.json"]) == 0
    assert "step without optimizer" in capsys.readouterr().err
    (of,) = tracks(json.loads(Path("trace.json").read_text())).values()
    assert names(of) == {("stage 0", "compute"): ["F0", "B0"], ("stage 0", "reduce"): ["reduce"]}


# --- spans to events ------------------------------------------------------------------------------


def send(k: int) -> Instruction:
    return Instruction(action=Action.SEND_ACTIVATION, stage=0, microbatch=k, peer=1)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6),
    st.floats(-10, 10),
)
def test_a_send_ends_when_all_receivers_have_it(
    steps: list[tuple[float, float]], shift_s: float
) -> None:
    """Posted and taken in order: it starts when it is posted or the one before is taken."""
    posted_s, taken_s = 0.0, 0.0
    spans, taken, expected = [], {}, []
    for k, (wait_s, late_s) in enumerate(steps):
        posted_s += wait_s
        start_s = max(posted_s, taken_s)
        taken_s = start_s + late_s
        spans.append(Span(what=send(k), start_s=posted_s, end_s=posted_s, targets=(2, 3)))
        received = Instruction(action=Action.RECV_ACTIVATION, stage=1, microbatch=k, peer=0)
        taken |= {(2, received): start_s + shift_s, (3, received): taken_s + shift_s}
        expected.append((start_s + shift_s, taken_s + shift_s))
    sent = len(spans)
    reduction = Instruction(action=Action.REDUCE_GRADIENTS, stage=0, microbatch=sent - 1)
    spans += [Span(what=w, start_s=posted_s, end_s=posted_s) for w in (reduction, Phase.REDUCE)]
    events = timeline.rank_events(spans, shift_s, taken)[:sent]
    assert [e.name for e in events] == [str(span.what) for span in spans[:sent]]
    for event, (start_s, end_s) in zip(events, expected, strict=True):
        assert event.start_s == pytest.approx(start_s, abs=1e-9)
        assert event.end_s == pytest.approx(end_s, abs=1e-9)


def test_reductions_follow_one_another() -> None:
    first, second = (
        Instruction(action=Action.REDUCE_GRADIENTS, stage=k, microbatch=3) for k in (0, 3)
    )
    spans = [
        Span(what=first, start_s=1.0, end_s=1.1), Span(what=second, start_s=2.0, end_s=2.1),
        Span(what=Phase.REDUCE, start_s=3.0, end_s=4.0),
    ]  # fmt: skip
    events = timeline.rank_events(spans, 0.5, {})
    assert [(e.stage, e.track, e.start_s, e.end_s) for e in events] == [
        (0, "reduce", 1.5, 2.5), (3, "reduce", 2.5, 4.5),
    ]  # fmt: skip


@given(
    st.sampled_from(("gpipe", "1f1b", "zb_h1", "interleaved_1f1b")),
    st.integers(2, 4),
    st.integers(1, 4),
    st.floats(0.1, 1),
)
def test_times_of_a_simulated_trace_are_the_simulation_s(
    schedule: str, devices: int, rounds: int, optimizer_s: float
) -> None:
    stages = devices * (2 if schedule == "interleaved_1f1b" else 1)
    edges = [(k, k + 1) for k in range(stages - 1)]
    streams = build_schedule(Pipeline(schedule, stages, rounds * devices, devices), edges)
    price = Prices(
        forward_s=1.0, backward_s=2.0, weight_s=1.0, reduce_s=0.5, optimizer_s=optimizer_s
    )
    prices = [replace(price, forward_s=1.0 + k, backward_s=2.0 + k) for k in range(stages)]
    simulated = simulate(streams, prices, dict.fromkeys(edges, 0.25))
    found = timeline.step_times(simulated.chrome_trace())
    assert found.pipeline_s == pytest.approx(simulated.pipeline_s)
    assert list(found.busy_s.values()) == pytest.approx(list(simulated.busy_s))
    assert math.isclose(found.bubble_fraction, simulated.bubble_fraction, abs_tol=1e-9)
    assert found.step_s <= simulated.step_time_s + 1e-9


def test_a_group_is_as_busy_as_its_busiest_rank() -> None:
    """What is no micro-batch's is no computation; the optimizer is no part of the step."""

    def event(name: str, pid: int, track: str, start_s: float, for_s: float) -> dict[str, Any]:
        args = {"microbatch": 0} if name == "F0" else {}
        span = {"ts": start_s * 1e6, "dur": for_s * 1e6}
        return {"name": name, "ph": "X", "pid": pid, "cat": track, "args": args, **span}

    named = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": "stage 0"}}
        for pid in (0, 1)
    ]
    events = [
        event("refresh", 0, "compute", 1, 1), event("F0", 0, "compute", 2, 3),
        event("F0", 1, "compute", 2, 2), event("F0", 1, "compute", 4.5, 2),
        event("reduce", 0, "reduce", 7, 1), event("optimizer", 0, "optimizer", 0, 20),
    ]  # fmt: skip
    found = timeline.step_times({"traceEvents": [*named, *events]})
    assert found == StepTimes(step_s=7.0, pipeline_s=5.5, busy_s={"stage 0": 4.0})
    assert found.bubbles == {"stage 0": 1.5 / 5.5}
    told = MeasuredStep(loss=torch.zeros(()), measured=found, predicted=found)
    assert str(told).startswith(
        "step without optimizer: 7e+03 ms, predicted 7e+03 ms\nbubble: 27.3%"
    )


def test_the_fastest_round_trip_gives_a_clocks_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the other's clock had been read in its middle."""
    trips = [(10.0 * k, 10.0 * k + took) for k, took in enumerate((5, 4, 3, 2, 3, 4, 5, 6))]
    read = iter([100 + asked + 0.75 for asked, _ in trips])
    sent: list[float] = []
    talk = SimpleNamespace(
        get_rank=lambda group: 0,
        get_world_size=lambda group: 2,
        send=lambda x, rank, group: sent.append(float(x)),
        recv=lambda x, rank, group: x.fill_(next(read)),
    )
    monkeypatch.setattr(timeline, "dist", talk)
    clock = iter([t for trip in trips for t in trip])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert timeline._offset_s("group") == 0.0  # type: ignore[arg-type]
    assert len(sent) == len(trips) + 1
    assert sent[-1] == 31.0 - 130.75
