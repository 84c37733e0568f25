"""What ranks really do, written down by the recorder of rehearsals: one rank of a launch."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.executor.ranks import launch
from meshwright.executor.rehearsal import Event, Kind, RankLog, Recorder, run_steps
from meshwright.executor.runtime import RunOptions, Runtime, why_not_evaluable
from meshwright.executor.stages import CheckedPlan
from tests.models.models import CASES, adamw
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_reference import load_graph

RUNS = 4
CELLS = tuple(
    Cell.parse(line)
    for line in (
        "gpt2_tied    dp2xtp2          gpipe m4 mixed sequence",
        "gpt2_tied    dp4              gpipe m4 zero2 shard2 mixed bf16",
        "gpt2_tied    pp2xdp2          zb_h1 m4 zero1 pointwise front spread",
        "gpt2_tied    pp2xtp2          interleaved_1f1b m4 v2 full bare",
        "gpt2_tied    1|dp2|1          1f1b m8 zero2 full front",
        "gpt2_untied  dp4              1f1b m4 zero3",
        "llama        pp2xdp2          1f1b m4 zero3 full",
        "llama        pp2xtp2          zb_v m4",
        "mlp          pp2xdp2          dualpipe_v m4 zero2",
        "llama        tp2              1f1b m2",
        "gpt2_untied  pp2              zb_h1 m4 front",
        "gpt2_untied  pp2xdp2xtp2      1f1b m4 zero1 sequence",
        "gpt2_tied    dp8              1f1b m2 zero3 shard4",
    )
)


def events_of(events: tuple[Event, ...] | list[Event]) -> list[dict[str, Any]]:
    """Events as JSON has them, without waits, and without the number of the step in this
    process."""
    found = []
    for event in events:
        if event.kind is not Kind.WAIT:
            found.append({k: _plain(x) for k, x in asdict(event).items() if k != "where"})
    return found


def _plain(x: Any) -> Any:
    return [_plain(y) for y in x] if isinstance(x, (tuple, list)) else x


def run_cell(folder: Path, cell: Cell) -> dict[str, Any]:
    """Of every rank, from the making of the runtime to an evaluation, the events and the peak
    bytes: the least of several runs, since gloo's threads hold the tensors of a collective for a
    moment after it was awaited, the longer the busier the machine."""
    plan, of = plan_of(cell, load_graph(folder, cell))
    checked = CheckedPlan.of(plan, of.graph, of.table)
    logs = [_log(checked, cell, evaluates=not why_not_evaluable(of.graph)) for _ in range(RUNS)]
    events = events_of(logs[0].events)
    assert all(events_of(log.events) == events for log in logs)
    saved = [str(x) for x in logs[0].saved]
    every: list[Any] = [None] * cell.world
    dist.all_gather_object(every, (events, min(log.peak_bytes for log in logs), saved))
    return {"ranks": every if launch.rank() == 0 else []}


def _log(checked: CheckedPlan, cell: Cell, *, evaluates: bool) -> RankLog:
    case, recorder = CASES[cell.case], Recorder()
    batch = case.batch(cell.rows, 0)
    with recorder.following_resizes(), recorder:
        runtime = Runtime(checked, case.model(), options=RunOptions(device=torch.device("cpu")))
        run_steps(runtime, lambda: batch, adamw, recorder, evaluates=evaluates)
    return recorder.log(launch.rank())


def main(folder: Path) -> None:
    """The plans for as many ranks as these."""
    world = launch.world_size()
    cells = {cell.name: partial(run_cell, folder, cell) for cell in CELLS if cell.world == world}
    run_all(cells, folder, f"-rehearsal-{world}")


if __name__ == "__main__":
    on_ranks(main)
