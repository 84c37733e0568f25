"""A rank that trains a small model, and fails where and how it is told to.

    fault_worker.py once|bare <fault> <rank> <phase> <folder> [resumes]
    fault_worker.py start <fault by rank, as JSON> <folder>

It fails on one rank in its third step, when the runtime says that it enters the phase: in the midst
of the real thing; `bare` does so outside `distributed`. One that `resumes` saves after every step
and, started again by torchrun, goes on from there, and fails no more. At the `start` it fails
before there is a process group, or waits in one to be interrupted.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from meshwright.executor.ranks import joining, launch
from meshwright.executor.ranks.watchdog import progress
from meshwright.planner.overrides.overrides import Overrides
from tests.helpers.tiny import ROWS, batch, net, planned

PIPELINE = Overrides(pp=2, num_microbatches=2, schedule="1f1b")
HEALTHY_STEPS, STEPS = 2, 4
OPTIMIZER = "optimizer step"  # the user's own code: to the runtime it is no phase
APART = "user code, while the others are in theirs"  # nobody waits for the one that fails
SAVING = "saving a checkpoint"
FEWER = "fewer batches on the failing rank, which ends its loop before the others"
SHAPE = "longer rows on the failing rank, after those that are compared before a step"


class InjectedError(Exception):
    """What a failing rank raises."""


def raises(*_: object, **__: object) -> NoReturn:
    raise InjectedError("broken on purpose")


def runs_out_of_memory() -> NoReturn:
    torch.empty(2**60)
    raise AssertionError("an allocation of 4 EiB succeeded")


def hangs() -> None:
    time.sleep(600)


def is_killed_when_awaited() -> None:
    def says_its_word(store: dist.Store, me: int, _: float) -> str:
        store.set(f"meshwright/word/{me}", "the last")
        FAULTS["kill"]()
        return ""

    joining._answer = says_its_word


FAULTS: dict[str, Callable[[], object]] = {
    "raise": raises,
    "memory": runs_out_of_memory,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hangs,
    "exit": lambda: sys.exit(3),
    "group": lambda: setattr(dist, "init_process_group", raises),  # the others are about to join
    "word": is_killed_when_awaited,
}


def strike_at(phase: str, fault: Callable[[], object]) -> None:
    """Let the fault happen when the runtime enters the phase."""
    enter = progress.enter

    def entering(name: str, **details: Any) -> None:
        enter(name, **details)
        if name == phase:
            fault()

    progress.enter = entering  # type: ignore[method-assign]


def train(fault: str, failing_rank: str, phase: str, folder: str, resumes: str = "") -> None:
    result = planned(net(), 2, overrides=PIPELINE)
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    struck, last = Path(folder, "struck"), Path(folder, "last")
    if resumes and last.exists():
        result.load_checkpoint(last, optimizer)

    def strikes() -> None:
        struck.touch()
        FAULTS[fault]()

    for step in range(result.runtime.steps, STEPS):
        failing = step == HEALTHY_STEPS and launch.rank() == int(failing_rank)
        failing = failing and not struck.exists()
        if failing and phase == FEWER:
            struck.touch()
            return
        if failing:
            strike_at(phase, strikes)
        given = batch(ROWS, step)
        if phase == SHAPE and step == STEPS - 1 and launch.rank() == int(failing_rank):
            struck.touch()
            given = tuple(x.repeat(1, 2) for x in given)
        optimizer.zero_grad()
        loss = result.train_step(given).item()
        if failing and phase in (OPTIMIZER, APART):
            strikes()
        elif phase == APART and step == HEALTHY_STEPS:
            hangs()
        optimizer.step()
        if resumes or phase == SAVING:
            result.save_checkpoint(last, optimizer)
        if resumes:
            with Path(folder, f"losses.{launch.rank()}").open("a") as file:
                file.write(f"{step} {loss}\n")
    if resumes:
        sys.exit(0)  # leaves in order


def start(faults: str, folder: str) -> None:
    """Rank 0 waits inside of a library, where Python can't raise; the others run Python."""
    if fault := json.loads(faults).get(os.environ["RANK"]):
        FAULTS[fault]()
    with launch.distributed("gloo"):
        if not folder:
            return
        rank = dist.get_rank()
        Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
        if rank == 0:
            dist.recv(torch.zeros(1), 1)
        while True:
            time.sleep(0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, *arguments = sys.argv[1:]
    if mode == "start":
        start(*arguments)
    elif mode == "bare":
        train(*arguments)
    else:
        with launch.distributed("gloo"):
            train(*arguments)
