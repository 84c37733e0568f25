"""A rank that ends before its save does: `checkpoint_worker.py unfinished|killed <folder>`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from meshwright.executor.files import dcp_writes
from meshwright.executor.ranks import launch
from tests.executor.checkpoint.checkpoint_runs import GPT2, start


def unfinished(folder: Path) -> None:
    """Nobody waits for the save."""
    start(GPT2, "alone").save(folder / "unfinished", asynchronous=True)


def killed(folder: Path) -> None:
    """Rank 1 dies while it writes; what was saved before must survive."""
    run = start(GPT2, "dp2")
    run.steps(0, 1)
    run.save(folder / "precious")
    state = run.state()
    if launch.rank() == 0:
        torch.save(state, folder / "precious.expected")
    run.steps(1, 1)
    if launch.rank() == 1:

        def die(*_: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        dcp_writes.ChunkPlanner.lookup_object = die  # type: ignore[method-assign]
    run.save(folder / "precious")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with launch.distributed("gloo"):
        {"unfinished": unfinished, "killed": killed}[sys.argv[1]](Path(sys.argv[2]))
