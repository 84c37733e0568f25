"""A rank of a plan with parameter servers, one worker of which fails in its third step (or one
of two servers: `server`).

    served_worker.py <fault> <staleness> <folder>

Each rank writes what came of it to a file of the folder.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from meshwright.executor.ranks import launch
from meshwright.executor.runtime.served import ServerEnd
from tests.executor.runtime.test_served import Run, runtime_of

STEPS, FAILING = 6, 2


def fails(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raise":
        raise RuntimeError("broken on purpose")


def train(fault: str, staleness: int, folder: Path) -> None:
    servers = 2 if fault == "server" else 1
    run = Run(servers=servers, workers=4 - servers, staleness=staleness, steps=STEPS)
    result, optimizer = run.start()
    end = runtime_of(result).end
    if isinstance(end, ServerEnd):
        end.record = []
    for step in range(STEPS):
        if launch.rank() == (1 if fault == "server" else FAILING) and step == 2:
            fails("kill" if fault == "server" else fault)
        result.train_step(run.batch(step), optimizer=optimizer)
    loss = float(result.eval_step(run.batch(0)))
    state = {name: x.tolist() for name, x in result.full_state_dict().items()}
    record = end.record if isinstance(end, ServerEnd) else None
    found = {"loss": loss, "state": state, "record": record}
    (folder / f"{launch.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if given[0] == "unstopped":  # a script that starts ranks, and doesn't stop them
        launch.start("gloo")
        train(*given)
    else:
        with launch.distributed("gloo"):
            train(*given)
