"""A rank that ends before its save does, for which nobody waits: checkpoint_worker.py <folder>."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.executor.ranks import launch
from tests.executor.checkpoint.checkpoint_runs import GPT2, start

if __name__ == "__main__":
    with launch.distributed("gloo"):
        start(GPT2, "alone").save(Path(sys.argv[1], "unfinished"), asynchronous=True)
