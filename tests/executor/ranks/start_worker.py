"""A rank that ends before there is a process group, or waits in one to be interrupted.

start_worker.py <fault> <rank> <folder>
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from meshwright.executor.ranks import joining, launch


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("no such thing here")


def is_killed_when_awaited() -> None:
    def says_its_word(store: dist.Store, me: int, _: float) -> str:
        store.set(f"meshwright/word/{me}", "the last")
        is_killed()
        return ""

    joining._answer = says_its_word


FAULTS: dict[str, Callable[[], object]] = {
    "kill": is_killed,
    "raise": raises,
    "exit": lambda: sys.exit(3),
    "group": lambda: setattr(dist, "init_process_group", raises),  # the others are about to join
    "word": is_killed_when_awaited,
}


def interrupted(folder: Path) -> None:
    """Rank 0 waits inside of a library, where Python can't raise; the others run Python."""
    rank = dist.get_rank()
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    if rank == 0:
        dist.recv(torch.zeros(1), 1)
    while True:
        time.sleep(0.1)


if __name__ == "__main__":
    faults, folder = sys.argv[1:]
    if fault := json.loads(faults).get(os.environ["RANK"]):
        FAULTS[fault]()
    with launch.distributed("gloo"):
        if folder:
            interrupted(Path(folder))
