"""A rank that trains a small model, and fails where and how it is told to.

    fault_worker.py once|bare <fault> <rank> <phase> <folder>
    fault_worker.py restarted <folder>

`once` fails on one rank in its third step, when the runtime says that it enters the phase: in the
midst of the real thing; `bare` does so outside `distributed`. `restarted` saves after every step
and is killed twice, once in a save and once in a step; started again by torchrun, it goes on from
the last checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from meshwright import ParallelModel
from meshwright.executor.files import atomic_folder
from meshwright.executor.ranks import launch
from meshwright.executor.ranks.watchdog import progress
from meshwright.planner.overrides.overrides import Overrides
from tests.helpers.tiny import ROWS, batch, loss, net, planned

RANKS = 2
PIPELINE = Overrides(pp=2, num_microbatches=2, schedule="1f1b")
HEALTHY_STEPS = 2
STEPS = 4
OPTIMIZER = "optimizer step"  # the user's own code: to the runtime it is no phase
APART = "user code, while the others are in theirs"  # nobody waits for the one that fails
SAVING = "saving a checkpoint"
FEWER = "fewer batches on the failing rank, which ends its loop before the others"


class InjectedError(Exception):
    """What a failing rank raises."""


# --- ways to fail ---------------------------------------------------------------------------------


def raises() -> NoReturn:
    raise InjectedError("broken on purpose")


def runs_out_of_memory() -> NoReturn:
    torch.empty(2**60)
    raise AssertionError("an allocation of 4 EiB succeeded")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freezes() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hangs() -> None:
    time.sleep(600)


def exits() -> NoReturn:
    sys.exit(3)


FAULTS: dict[str, Callable[[], None]] = {
    "raise": raises, "memory": runs_out_of_memory, "kill": is_killed, "freeze": freezes,
    "hang": hangs, "exit": exits,
}  # fmt: skip


def strike_at(phase: str, fault: Callable[[], None]) -> None:
    """Let the fault happen when the runtime enters the phase."""
    enter = progress.enter

    def entering(name: str, **details: Any) -> None:
        enter(name, **details)
        if name == phase:
            fault()

    progress.enter = entering  # type: ignore[method-assign]


# --- trainings ------------------------------------------------------------------------------------


def once(fault: str, failing_rank: str, phase: str, folder: str) -> None:
    result = planned(net(), RANKS, overrides=PIPELINE)
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)

    def strikes() -> None:
        Path(folder, "struck").touch()
        FAULTS[fault]()

    for step in range(STEPS):
        if phase == FEWER and step == HEALTHY_STEPS and launch.rank() == int(failing_rank):
            Path(folder, "struck").touch()
            return
        failing = step == HEALTHY_STEPS and launch.rank() == int(failing_rank)
        if failing:
            strike_at(phase, strikes)
        optimizer.zero_grad()
        result.train_step(batch(ROWS, step))
        if failing and phase in (OPTIMIZER, APART):
            strikes()
        elif phase == APART and step == HEALTHY_STEPS:
            hangs()
        optimizer.step()
        if phase == SAVING:
            result.save_checkpoint(Path(folder, "last"), optimizer)


def restarted(folder: str) -> None:
    """Train to the end over two deaths; then once more without any, and write down both."""
    result, optimizer = _resumed(Path(folder, "last"))
    losses = Path(folder, f"losses.{launch.rank()}")
    while result.runtime.steps < STEPS:
        step = result.runtime.steps
        _maybe_die(Path(folder), step)
        with losses.open("a") as file:
            file.write(f"{step} {_step(result, optimizer, step)}\n")
        result.save_checkpoint(Path(folder, "last"), optimizer)
    straight, optimizer = _resumed(Path(folder, "nothing here"))
    undisturbed = [_step(straight, optimizer, step) for step in range(STEPS)]
    Path(folder, f"undisturbed.{launch.rank()}").write_text(json.dumps(undisturbed))
    sys.exit(0)  # leaves in order


def _resumed(path: Path) -> tuple[ParallelModel, torch.optim.Optimizer]:
    result = planned(net(), RANKS, overrides=PIPELINE)
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    with suppress(FileNotFoundError):
        result.load_checkpoint(path, optimizer)
    return result, optimizer


def _step(result: ParallelModel, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = float(result.train_step(batch(ROWS, step)))
    optimizer.step()
    return loss


def _maybe_die(folder: Path, step: int) -> None:
    """Rank 0 is killed in the save after step 1, when the old checkpoint has given up its name and
    the new one has not got it; rank 1 in the backward of step 2. Each once."""
    died = Path(folder, f"died.{step}")
    if died.exists():
        return
    if step == 1 and launch.rank() == 0:
        rename = atomic_folder._rename

        def renaming(source: Path, target: Path) -> None:
            rename(source, target)
            died.touch()
            is_killed()

        atomic_folder._rename = renaming
    if step == 2 and launch.rank() == 1:

        def dying() -> None:
            died.touch()
            is_killed()

        strike_at("backward", dying)


def target() -> tuple[Any, ...]:
    """For the command line."""
    return net(), batch(4), loss


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, *arguments = sys.argv[1:]
    if mode == "bare":
        once(*arguments)
    with launch.distributed("gloo"):
        {"once": once, "restarted": restarted}[mode](*arguments)
