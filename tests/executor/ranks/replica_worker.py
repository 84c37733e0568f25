"""A rank of two replicas that train apart, of which the second is slow, or is lost.

replica_worker.py slow|evaluates|killed <seconds>
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from meshwright import Overrides
from meshwright.executor.ranks import launch
from tests.helpers.tiny import ROWS, batch, net, planned

STEPS = 4


def batches(seconds: float) -> Iterator[Any]:
    """As many as the steps, which the second replica reads slowly."""
    for number in range(STEPS + 1):
        time.sleep(seconds * (launch.rank() == 1))
        yield batch(ROWS, number)


def main(fault: str, seconds: str) -> None:
    result = planned(net(), 2, overrides=Overrides(replicas=2, sync_every=STEPS))
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    for step in range(STEPS + 1):
        if launch.rank() == 1 and step and fault != "evaluates":
            time.sleep(float(seconds))
            if fault == "killed" and step == STEPS - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        result.train_step(batch(ROWS, step), optimizer=optimizer)
    if fault == "evaluates":
        print(f"{result.evaluate(batches(float(seconds))).batches} batches")
    print(f"met at {result.meetings.met_at}")


if __name__ == "__main__":
    with launch.distributed("gloo"):
        main(*sys.argv[1:])
