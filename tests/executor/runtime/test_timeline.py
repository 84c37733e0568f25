"""A measured step reads like the simulated one: the same tracks, the same names in the same order,
on one clock; and it is a training step as any other."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright import Cluster, auto_parallelize
from meshwright.cli import main
from meshwright.costmodel.schedules.schedule import Action, Instruction, build_schedule
from meshwright.costmodel.schedules.simulate import StageTimes as Prices
from meshwright.costmodel.schedules.simulate import simulate
from meshwright.executor.runtime.timeline import Span, StepTimes, rank_events, step_times
from meshwright.executor.stages.pipeline import Phase
from tests.executor.runtime.timeline_worker import CELLS, CLOCK_S, WORLD
from tests.helpers.launching import Launch, launch
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import store

TIMEOUT_S = 300
PHASES = (Phase.REFRESH.value, Phase.DELIVER.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The results of a launch and its traces."""

    run: Launch
    folder: Path
    results: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        found = self.results.get(name, {"failed": self.run.tail()})
        assert "failed" not in found, found["failed"]
        return found

    def trace(self, cell: Cell, kind: str) -> Any:
        self[cell.name]
        return json.loads((self.folder / f"{cell.name}.{kind}").read_text())


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("timeline")
    store(folder, CELLS)
    worker = Path(__file__).with_name("timeline_worker.py")
    run = launch(worker, str(folder), ranks=WORLD, timeout_s=TIMEOUT_S)
    written = folder / "results-timeline.json"
    results = json.loads(written.read_text()) if written.exists() else {}
    return Launched(run=run, folder=folder, results=results)


Tracks = dict[tuple[str, str], list[dict[str, Any]]]


def tracks(trace: Mapping[str, Any]) -> dict[int, Tracks]:
    """Per process, events by (process name, thread name) in the order of their starts."""
    named = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M"
    }
    found: dict[int, Tracks] = defaultdict(lambda: defaultdict(list))
    for event in sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=_start):
        pid, thread = event["pid"], named["thread_name", event["pid"], event["tid"]]
        assert event["cat"] == thread
        found[pid][named["process_name", pid, 0], thread].append(event)
    return found


def _start(event: Mapping[str, Any]) -> float:
    return event["ts"]


def names(of: Tracks) -> dict[tuple[str, str], list[str]]:
    """Names per track, without what only one of the two kinds of trace has."""
    return {
        track: [e["name"] for e in events if not e["name"].startswith(("optimizer", *PHASES))]
        for track, events in of.items()
    }


# --- on ranks -------------------------------------------------------------------------------------


def test_every_rank_ends_in_order(launched: Launched) -> None:
    assert launched.run.ok, launched.run.tail()


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_tracks_and_names_are_the_simulated_ones(launched: Launched, cell: Cell) -> None:
    measured = tracks(launched.trace(cell, "measured"))
    simulated = tracks(launched.trace(cell, "simulated"))
    assert len(measured) == WORLD
    by_name = {next(iter(of))[0]: names(of) for of in simulated.values()}
    assert {next(iter(of))[0] for of in measured.values()} == set(by_name)
    for of in measured.values():
        assert names(of) == by_name[next(iter(of))[0]]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_track_does_one_thing_at_a_time(launched: Launched, cell: Cell) -> None:
    for of in tracks(launched.trace(cell, "measured")).values():
        for events in of.values():
            for before, after in pairwise(events):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3  # µs: rounding


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_phases_surround_the_computation_once_per_rank(launched: Launched, cell: Cell) -> None:
    for of in tracks(launched.trace(cell, "measured")).values():
        (computed,) = (events for (_, thread), events in of.items() if thread == "compute")
        shown = [e["name"] for e in computed]
        assert (shown[0], shown[-1]) == PHASES
        assert not set(shown[1:-1]) & set(PHASES)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_timed_step_is_a_step(launched: Launched, cell: Cell) -> None:
    found = launched[cell.name]
    timed, plain = found["losses"]
    assert timed == pytest.approx(plain, rel=1e-6)
    assert found["gradient"][0] <= 1e-6, "delivered once, as by any step"
    assert found["steps"] == 3


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_ranks_are_put_on_one_clock(launched: Launched, cell: Cell) -> None:
    assert 0 < launched[cell.name]["step_s"] < CLOCK_S / 2


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_bubbles_are_told_beside_the_predicted_ones(launched: Launched, cell: Cell) -> None:
    found = launched[cell.name]
    assert found["bubbles"].keys() == found["predicted"].keys()
    assert all(0 <= share < 1 for share in found["bubbles"].values())
    assert all(name in found["text"] for name in found["bubbles"])


def test_an_unwritable_path_is_said_on_every_rank_before_the_step(launched: Launched) -> None:
    found = launched["unwritable"]
    assert "trace.json" in found["error"]
    assert found["steps"] == 0


# --- one device -----------------------------------------------------------------------------------


def planned(example: tuple[torch.Tensor, ...]) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return auto_parallelize(
        model,
        Cluster.local(1),
        example_inputs=example,
        global_batch_size=8,
        loss_fn=nn.functional.mse_loss,
        precision="fp32",
        profile=False,
    )


def test_example_inputs_are_repeated_where_no_batch_is_given(tmp_path: Path) -> None:
    example = torch.randn(3, 4), torch.randn(3, 2)
    result = planned(example)
    timed = result.timeline(tmp_path / "trace.json")
    again = torch.arange(8) % 3
    expected = result.train_step((example[0][again], example[1][again]))
    assert float(timed.loss) == pytest.approx(float(expected), rel=1e-6)
    assert step_times(json.loads((tmp_path / "trace.json").read_text())) == timed.measured


def test_examples_without_values_ask_for_a_batch(tmp_path: Path) -> None:
    result = planned((torch.empty(4, 4, device="meta"), torch.empty(4, 2, device="meta")))
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
    events = rank_events(spans, shift_s, taken)[:sent]
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
    events = rank_events(spans, 0.5, {})
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
    streams = build_schedule(
        schedule,
        num_stages=stages,
        num_devices=devices,
        num_microbatches=rounds * devices,
        edges=[(k, k + 1) for k in range(stages - 1)],
    )
    prices = [
        Prices(
            forward_s=1.0 + k, backward_s=2.0 + k, weight_s=1.0, reduce_s=0.5,
            optimizer_s=optimizer_s,
        )
        for k in range(stages)
    ]  # fmt: skip
    timeline = simulate(streams, prices, {(k, k + 1): 0.25 for k in range(stages - 1)})
    found = step_times(timeline.chrome_trace())
    assert found.pipeline_s == pytest.approx(timeline.pipeline_s)
    assert list(found.busy_s.values()) == pytest.approx(list(timeline.busy_s))
    assert math.isclose(found.bubble_fraction, timeline.bubble_fraction, abs_tol=1e-9)
    assert found.step_s <= timeline.step_time_s + 1e-9


def test_bubbles_are_what_computation_leaves() -> None:
    times = StepTimes(step_s=9.0, pipeline_s=8.0, busy_s={"stage 0": 6.0, "stage 1": 2.0})
    assert times.bubbles == {"stage 0": 0.25, "stage 1": 0.75}
    assert times.bubble_fraction == 0.5
