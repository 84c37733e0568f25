"""A rank that fails takes the others down with it, soon, and says which it was.

Run as a script, this file is the rank: it trains an MLP under a plan of two ranks and fails as its
first argument says.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import Launch, launch
from models import CASES, GLOBAL_BATCH, make_plan, parallelize, traced

from executor import launch as process_group

GRACE_S = 60.0  # of a busy machine; the process group's own timeout is five minutes
FAILING_RANK = 1
MESHES = {"dp2": (1, 2, 1), "pp2": (2, 1, 1), "dp4": (1, 4, 1)}


class InjectedError(Exception):
    """What the failing rank raises."""


def _run(fault: str, mesh: str) -> Launch:
    return launch(Path(__file__), fault, mesh, ranks=2, timeout_s=180, grace_s=GRACE_S)


def _all_ended_by_themselves(run: Launch) -> bool:
    return not any(rank.killed or rank.children_left for rank in run.ranks)


@pytest.mark.parametrize("mesh", ["dp2", "pp2"])
def test_rank_that_raises_stops_all(mesh: str) -> None:
    run = _run("raise", mesh)
    assert _all_ended_by_themselves(run), run.tail()
    assert all(rank.returncode not in (0, None) for rank in run.ranks)
    said = run.ranks[FAILING_RANK].stderr
    assert f"rank {FAILING_RANK} failed: InjectedError: broken on purpose" in said
    assert "in forward" in said  # the traceback leads to the place


def test_killed_rank_stops_all() -> None:
    run = _run("kill", "dp2")
    assert _all_ended_by_themselves(run), run.tail()
    assert run.ranks[FAILING_RANK].returncode == -signal.SIGKILL
    assert run.ranks[0].returncode not in (0, None)
    assert "rank 0 failed:" in run.ranks[0].stderr


def test_too_few_ranks_are_told_how_to_launch() -> None:
    run = _run("none", "dp4")
    assert _all_ended_by_themselves(run), run.tail()
    for k, rank in enumerate(run.ranks):
        assert rank.returncode == 1
        assert f"rank {k} failed: PlanError: " in rank.stderr
        assert "made for 4 ranks, but 2 are running" in rank.stderr
        assert "torchrun --nproc-per-node 4" in rank.stderr


def test_launcher_ends_what_does_not_end(tmp_path: Path) -> None:
    """The launcher itself: a rank that hangs and a child that outlives its rank are both ended."""
    script = tmp_path / "hang.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600) if rank else sys.exit(3)\n"
    )
    run = launch(script, ranks=2, timeout_s=60, grace_s=1.0)
    assert run.wall_s < 30
    assert [rank.killed for rank in run.ranks] == [False, True]
    assert run.ranks[0].returncode == 3
    assert run.ranks[0].children_left
    for rank in run.ranks:
        assert _ends(int(rank.stdout), within_s=10.0)


def _ends(pid: int, within_s: float) -> bool:
    """Whether a process that was sent its last signal is gone soon."""
    deadline = time.monotonic() + within_s
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _runs(pid)


def _runs(pid: int) -> bool:
    """Whether a process is alive (one that is dead but not yet collected is not)."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


# --- the rank -------------------------------------------------------------------------------------


def _main(fault: str, mesh: str) -> None:
    case = CASES["mlp"]
    pp, dp, tp = MESHES[mesh]
    of = traced(case, GLOBAL_BATCH // 2)
    plan = make_plan(of.graph, pp=pp, dp=dp, tp=tp, num_microbatches=2, shardings={})
    runtime = parallelize(case.model(), plan, of)
    runtime.train_step(case.batch(GLOBAL_BATCH, 0))

    def fail(*_: object) -> None:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise InjectedError("broken on purpose")

    if process_group.rank() == FAILING_RANK:
        runtime.stage.program.blocks[-1].module.register_forward_pre_hook(fail)
    for step in range(1, 100):
        runtime.train_step(case.batch(GLOBAL_BATCH, step))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group.distributed("gloo"):
        _main(*sys.argv[1:])
