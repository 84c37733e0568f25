"""One rank of a world that takes cases until its parent closes the connection.

rank_loop.py <path of the parent's socket>
"""

import os
import pickle
import random
import resource
import sys
import traceback
import warnings
from multiprocessing.connection import Client

import numpy as np
import torch
import torch.distributed as dist

from meshwright.executor.ranks import launch


def serve(address: str) -> None:
    torch.set_num_threads(1)
    # every plan makes process groups of its own, and torch's DTensor caches forbid to destroy them
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    warnings.simplefilter("ignore", FutureWarning)
    os.environ[launch.TIMEOUT_VARIABLE] = "36000"  # the parent has limits of its own, and stops us
    with launch.distributed("gloo"), Client(address) as parent:
        parent.send(launch.rank())
        while True:
            try:
                work = parent.recv_bytes()
            except EOFError:
                return
            dist.barrier()
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            try:
                function, arguments = pickle.loads(work)
                answer = (True, function(*arguments))
            except Exception:  # noqa: BLE001 - whatever it is belongs to the case
                answer = (False, traceback.format_exc())
            parent.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    serve(sys.argv[1])
