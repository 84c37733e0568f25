"""What the scripts of launches share: runs on all ranks, one after the other, results in a file."""

from __future__ import annotations

import json
import resource
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.executor.ranks import launch
from meshwright.planner.plan.plan import PlanError

Run = Callable[[], dict[str, Any]]


def run_all(work: Mapping[str, Run], folder: Path, name: str) -> None:
    """Do the runs in turn. Rank 0 writes `results{name}.json` after each, so that a crash says
    which it was."""
    results: dict[str, Any] = {}
    for key, run in work.items():
        results[key] = _attempt(run)
        if launch.rank() == 0:
            (folder / f"results{name}.json").write_text(json.dumps(results))


def _attempt(run: Run) -> dict[str, Any]:
    """The result, or why there is none. A failure of all ranks alike does not end the launch; where
    a rank is left out, the others raise when the process group's timeout has passed."""
    try:
        result = run()
    except PlanError as error:  # the same on every rank, before anything is sent
        result = {"refused": str(error)}
    except Exception:  # noqa: BLE001 - whatever it is belongs to this run
        traceback.print_exc()  # others may wait for this rank, and never hear of it
        result = {"failed": traceback.format_exc()}
    failed: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(failed, result.get("failed"))
    return {"failed": next(filter(None, failed))} if any(failed) else result


def on_ranks(main: Callable[..., None]) -> None:
    """Run `main(folder, *arguments)` as one rank of a launch."""
    torch.set_num_threads(1)
    # every plan makes process groups of its own, and torch's DTensor caches forbid to destroy them
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    warnings.simplefilter("ignore", FutureWarning)
    with launch.distributed("gloo"):
        main(Path(sys.argv[1]), *sys.argv[2:])
