"""A rank of two replicas that train apart, of which the second is slow, or is lost.

replica_worker.py slow|killed <seconds>
"""

import os
import signal
import sys
import time

import torch

from meshwright import Overrides
from meshwright.executor.ranks import launch
from tests.helpers.tiny import ROWS, batch, net, planned

STEPS = 4


def main(fault: str, seconds: str) -> None:
    result = planned(net(), 2, overrides=Overrides(replicas=2, sync_every=STEPS))
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    for step in range(STEPS + 1):
        if launch.rank() == 1 and step:
            time.sleep(float(seconds))
            if fault == "killed" and step == STEPS - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        result.train_step(batch(ROWS, step), optimizer=optimizer)
    print(f"met at {result.meetings.met_at}")


if __name__ == "__main__":
    with launch.distributed("gloo"):
        main(*sys.argv[1:])
