"""What ranks see of a run: the same loss, rates of the global batch, one log."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import data_loader
from meshwright.executor.ranks import all_gather_object, gloo_group, launch
from meshwright.monitor import TensorBoardLogger
from meshwright.monitor.deviation import TERMS
from meshwright.monitor.metrics import TELL_AFTER
from meshwright.shell import progress_shown
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered
from tests.meshwright.data.feeding import (
    LENGTH,
    RANKS,
    ROWS,
    Tokens,
    batch_of,
    plain_losses,
    planned,
)

STEPS = TELL_AFTER + 1


class Said(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Writer:
    """What a writer of the user is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if name == "meshwright/loss":
            self.steps.append(step)

    def flush(self) -> None:
        pass


def watch(plan: str, folder: Path) -> list[dict[str, Any]]:
    """Of every rank its metrics, what it wrote and said; of rank 0 the log."""
    result, board, said = planned(plan), Writer(), Said()
    logger = logging.getLogger("meshwright.monitor")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    own = folder / f"{launch.rank()}.jsonl"
    result.log_to(own)
    result.log_to(TensorBoardLogger(board), every=10)
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    batch = batch_of(range(ROWS))
    for step in range(STEPS):
        optimizer.zero_grad()
        result.train_step(batch)
        if step == 2 and launch.rank() == 0:
            result.metrics()  # alone
        if step == 3:
            result.metrics(grad_norm=True)
        optimizer.step()
    found = result.metrics()
    result.monitor.close()
    logger.removeHandler(said)
    logger.setLevel(logging.NOTSET)
    logged = [json.loads(line) for line in own.read_text().splitlines()] if own.exists() else []
    told = str(result.monitor.told)
    seen = {"metrics": found, "logged": logged, "board": board.steps, "said": said.lines}
    return all_gather_object(gloo_group(), {**seen, "told": told})


@pytest.mark.parametrize(
    "plan",
    tiered(
        ("dp4", "dp2×tp2", "pp4"),
        lambda plan: plan == "pp4",
        "stages, of which few have a loss; other tests of ranks' shares are data's",
    ),
)
def test_ranks_see_one_global_step_and_rank_0_alone_says_it(plan: str, tmp_path: Path) -> None:
    ranks = on_ranks(RANKS, watch, plan, tmp_path)
    of_ranks = [seen["metrics"] for seen in ranks]
    assert len({m["loss"] for m in of_ranks}) == 1 and {m["step"] for m in of_ranks} == {STEPS}
    for m in of_ranks:
        assert all(math.isfinite(x) for x in m.values())
        assert m["step_time_s"] == pytest.approx(m["train_step_s"] + m["between_s"])
        assert m["rows_per_s"] == pytest.approx(ROWS / m["step_time_s"])
        assert m["tokens_per_s"] == pytest.approx(ROWS * LENGTH / m["step_time_s"])
        assert m["peak_memory_bytes"] > 1e6
        assert {f"predicted_{n}" for n in ("between_s", "step_time_s", *TERMS)} <= m.keys()
    first, *others = ranks
    logged = first["logged"]
    assert [row["loss"] for row in logged][:1] == pytest.approx(plain_losses([range(ROWS)]))
    assert len({frozenset(row.keys() - {*TERMS, "grad_norm"}) for row in logged}) == 1
    for row in logged[5:20]:
        assert sum(row[name] for name in TERMS) == pytest.approx(row["train_step_s"])
    assert [row["step"] for row in logged] == [*range(1, STEPS + 1)]
    assert first["board"] == [10, 20]
    assert "grad_norm" in logged[3] and "grad_norm" not in logged[2]
    assert [line for line in first["said"] if line == first["told"]] == [first["told"]]
    for seen in others:
        assert seen["logged"] == seen["board"] == seen["said"] == []
        assert "after 20 steps: " in seen["told"]


def wait_for_input() -> None:
    """Steps whose rows a loader of each rank gives: its time is between them."""
    result = planned("dp2×tp2")
    found = []
    for batch in data_loader(Tokens(size=2 * ROWS), result, shuffle=False):
        result.train_step(batch, local=True)
        found.append(result.metrics())
    assert [m["step"] for m in found] == [1, 2]
    assert 0 < found[1]["input_s"] < found[1]["between_s"]
    assert found[1]["rows_per_s"] == pytest.approx(ROWS / found[1]["step_time_s"])


def test_what_a_loader_takes_is_between_the_steps() -> None:
    on_ranks(RANKS, wait_for_input)


def move_bytes(folder: Path) -> None:
    """Rank 0 says what a checkpoint's saving and loading has done; steps go on counting."""
    result, said = planned("dp4"), Said()
    progress = logging.getLogger("meshwright.progress")
    progress.addHandler(said)
    progress.setLevel(logging.DEBUG)
    batch = batch_of(range(ROWS))
    for _ in range(3):
        result.train_step(batch)
    result.save_checkpoint(folder / "checkpoint")
    other = planned("pp4")
    other.load_checkpoint(folder / "checkpoint")
    progress.removeHandler(said)
    progress.setLevel(logging.NOTSET)
    with progress_shown():
        other.load_weights(folder / "checkpoint")
    other.train_step(batch)
    assert other.metrics()["step"] == 4
    for what in ("writing", "reading"):
        lines = [line for line in said.lines if line.startswith(f"{what} a checkpoint: ")]
        if launch.rank():
            assert not lines
            continue
        moved, whose = lines[-1].removeprefix(f"{what} a checkpoint: ").split(" (")
        done, total = moved.split(" of ")
        assert done == total and whose == "rank 0 of 4)"


def test_bytes_moved_are_said_by_rank_0_and_steps_go_on_counting(tmp_path: Path) -> None:
    on_ranks(RANKS, move_bytes, tmp_path)
