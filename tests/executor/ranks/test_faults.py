"""A rank that is lost takes the others down with it, soon, and all say which it was, and why.

The ranks of `fault_worker` fail on purpose; here it is read how each of them ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.executor.ranks import joining
from meshwright.executor.ranks import launch as process_group
from meshwright.executor.ranks.object_collectives import WAITING
from meshwright.executor.ranks.watchdog import (
    FIRST_STEP_FACTOR,
    GRACE_S,
    Progress,
    is_out_of_memory,
    memory_advice,
)
from tests.executor.ranks.fault_worker import APART, FEWER, OPTIMIZER, SAVING, STEPS
from tests.helpers.launching import ROOT, Launch, launch
from tests.helpers.tiny import ROWS, net, planned

TIMEOUT_S = 12.0
PATIENCE = 4  # of a busy machine: what may take a timeout may here take so many
WORKER = Path(__file__).with_name("fault_worker.py")
KILLED = -signal.SIGKILL


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", str(TIMEOUT_S))


def _run(
    folder: Path, fault: str, failing: int, phase: str, *, bare: bool = False, grace_s: float = 60.0
) -> Launch:
    """Two ranks of which one fails; the other must have ended by itself, soon, with an error, and
    nothing may be left."""
    started_s = time.time()
    arguments = ("bare" if bare else "once", fault, str(failing), phase, str(folder))
    run = launch(WORKER, *arguments, ranks=2, timeout_s=240, grace_s=grace_s)
    struck = folder / "struck"
    assert struck.exists(), run.tail()
    other = run.ranks[1 - failing]
    assert not other.killed, run.tail()
    assert other.returncode not in (0, None)
    assert other.wall_s - (struck.stat().st_mtime - started_s) < PATIENCE * TIMEOUT_S
    assert not any(rank.children_left for rank in run.ranks)
    return run


def _line(text: str, start: str) -> str:
    """The one line that starts so."""
    found = [line for line in text.splitlines() if line.startswith(start)]
    assert len(found) == 1, text
    return found[0]


def test_rank_that_raises_in_forward(tmp_path: Path) -> None:
    run = _run(tmp_path, "raise", 1, "forward")
    first, other = (run.ranks[k].stderr for k in (1, 0))
    cause = _line(first, "rank 1 (stage 1) failed")
    assert "failed in forward of stage 1, micro-batch 0, step 3: InjectedError: broken" in cause
    assert first.count("Traceback") == 1
    assert "in raises" in first  # it leads to the place
    assert _line(other, "rank 0 (stage 0) stops: ") == f"rank 0 (stage 0) stops: {cause}"
    assert "Traceback" not in other


def test_rank_out_of_memory_in_user_code_without_distributed(tmp_path: Path) -> None:
    run = _run(tmp_path, "memory", 0, OPTIMIZER, bare=True)
    first, other = (rank.stderr for rank in run.ranks)
    cause = _line(first, "rank 0 (stage 0) failed in user code after step 3: RuntimeError: ")
    assert cause in other
    advice = r"a peak of [\d.]+ GiB here; .*more micro-batches, recompute='full' .*ZeRO"
    assert re.search(f"out of memory: the plan expects {advice}", first)


def test_rank_killed_in_backward(tmp_path: Path) -> None:
    run = _run(tmp_path, "kill", 1, "backward")
    assert run.ranks[1].returncode == KILLED
    said = _line(run.ranks[0].stderr, "rank 0 (stage 0) failed in recv_gradient of stage 0")
    assert said.endswith("no word from rank 1 (stage 1): killed, or frozen")


def test_rank_killed_while_nobody_waits_for_it(tmp_path: Path) -> None:
    run = _run(tmp_path, "kill", 1, APART)
    said = _line(run.ranks[0].stderr, "rank 0 (stage 0) stops: ")
    assert said.startswith("rank 0 (stage 0) stops: rank 1 (stage 1) ended without a word: killed")


def test_rank_that_holds_the_store_killed_in_a_save(tmp_path: Path) -> None:
    run = _run(tmp_path, "kill", 0, SAVING)
    assert run.ranks[0].returncode == KILLED
    said = _line(run.ranks[1].stderr, f"rank 1 (stage 1) failed in {WAITING}")
    assert "the store is gone: rank 0, which holds it, was killed" in said


def test_rank_that_holds_the_store_frozen_in_a_receive(tmp_path: Path) -> None:
    """Nothing raises on the other, and it can ask nobody."""
    run = _run(tmp_path, "freeze", 0, "recv_gradient", grace_s=1.0)
    assert run.ranks[0].killed  # by the launcher: a stopped process can't end itself
    said = run.ranks[1].stderr
    assert "the store does not answer: rank 0, which holds it, is frozen" in said
    assert _line(said, "rank 1 (stage 1) failed in ")


def test_rank_that_hangs_in_a_send(tmp_path: Path) -> None:
    run = _run(tmp_path, "hang", 1, "send_gradient")
    first, other = (run.ranks[k].stderr for k in (1, 0))
    cause = _line(first, "rank 1 (stage 1) failed in send_gradient of stage 1, micro-batch 0")
    assert "no progress for" in cause
    assert "in hangs" in first  # where it hangs
    assert _line(other, "rank 0 (stage 0) stops: ").endswith(cause)


def test_rank_that_hangs_in_user_code(tmp_path: Path) -> None:
    """It is in no phase, so the other notices, and names it; the hung one says where it was."""
    run = _run(tmp_path, "hang", 1, OPTIMIZER)
    cause = _line(run.ranks[0].stderr, "rank 0 (stage 0) failed in ")
    assert re.search(r"rank 1 \(stage 1\) has been in user code after step 3 for \d+ s$", cause)
    said = run.ranks[1].stderr
    assert f"rank 1 (stage 1) stops: {cause}" in said
    assert "in hangs" in said


def test_rank_that_has_fewer_batches(tmp_path: Path) -> None:
    """Each waits for the other, elsewhere: whoever notices first says where both are, and why."""
    run = _run(tmp_path, "none", 1, FEWER)
    said = "".join(rank.stderr for rank in run.ranks)
    assert "waits in " in said and "leaving the process group, step 3" in said
    assert "other numbers of batches wait for each other so" in said


def test_rank_that_leaves_with_an_exit_code(tmp_path: Path) -> None:
    run = _run(tmp_path, "exit", 1, OPTIMIZER)
    assert run.ranks[1].returncode == 3
    said = "rank 1 (stage 1) failed in user code after step 3: SystemExit: 3"
    assert _line(run.ranks[0].stderr, "rank 0 (stage 0) stops: ").endswith(said)


def test_plan_for_another_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line says on every rank, once, what would fit."""
    file = tmp_path / "plan.json"
    planned(net(), 4).plan.save(file)
    monkeypatch.chdir(WORKER.parent)
    arguments = (
        "run",
        "fault_worker:target",
        "--cluster",
        "local:2",
        "--batch",
        str(ROWS),
        "--precision",
        "fp32",
        "--plan",
        str(file),
    )
    run = launch(ROOT / "meshwright" / "cli.py", *arguments, ranks=2, timeout_s=120, grace_s=60)
    for rank in run.ranks:
        assert (rank.returncode, rank.killed) == (1, False), run.tail()
        (said,) = (line for line in rank.stderr.splitlines() if line.startswith("rank "))
        assert "made for 4 ranks" in said
        assert "a plan file for 2 ranks, or plan again" in said


def test_training_goes_on_after_restarts(tmp_path: Path) -> None:
    """torchrun starts the ranks again after each of two deaths. No finished checkpoint is lost: no
    step is done twice but the one whose save was broken off; and the losses are those of a run
    that nothing disturbed."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "2", str(WORKER), "restarted", str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=environment, timeout=300, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert {path.name for path in tmp_path.glob("died.*")} == {"died.1", "died.2"}
    for rank in range(2):
        done = [line.split() for line in (tmp_path / f"losses.{rank}").read_text().splitlines()]
        undisturbed = json.loads((tmp_path / f"undisturbed.{rank}").read_text())
        assert [int(step) for step, _ in done] == [0, 1, *range(1, STEPS)]
        assert all(float(loss) == undisturbed[int(step)] for step, loss in done)


# --- the parts ------------------------------------------------------------------------------------


def test_phases_are_named_after_what_runs_in_them() -> None:
    progress = Progress()
    progress.stages = {2: (1, 6), 3: (2,)}
    assert [progress.name(r) for r in (1, 2, 3)] == [
        "rank 1", "rank 2 (stages 1, 6)", "rank 3 (stage 2)",
    ]  # fmt: skip
    assert str(progress.activity) == "user code after step 0"
    with progress.during("a step", is_step=True):
        assert str(progress.activity) == "a step, step 1"
        progress.enter("forward", stage=6, microbatch=3)
        assert str(progress.activity) == "forward of stage 6, micro-batch 3, step 1"
    assert str(progress.activity) == "user code after step 1"


def test_exception_leaves_its_phase_and_is_found_there() -> None:
    """A user may catch it and take their time: a phase that lasts would be taken for a hang."""
    progress = Progress()
    with pytest.raises(KeyError), progress.during("a step", is_step=True):
        progress.enter("backward", stage=0, microbatch=1, waits=True)
        raise KeyError
    assert progress.activity.phase is None
    assert progress.activity.steps_done == 0
    assert str(progress.activity) == "backward of stage 0, micro-batch 1, step 1"
    with progress.during("saving"):
        pass
    assert str(progress.activity) == "user code after step 0"


@pytest.mark.parametrize(
    ("phase", "waits", "steps_done", "allowed_s"),
    [
        ("forward", False, 1, 10.0),
        ("recv_activation", True, 1, 10.0 + GRACE_S),
        ("forward", False, 0, 10.0 * FIRST_STEP_FACTOR),
        (None, False, 1, None),
        (None, False, 0, None),
    ],
)
def test_only_a_phase_can_take_too_long(
    phase: str | None, waits: bool, steps_done: int, allowed_s: float | None
) -> None:
    progress = Progress()
    for spent_s in (1.0, 9.0, 11.0, 16.0, 39.0, 41.0, 1e6):
        progress.activity = dataclasses.replace(
            progress.activity,
            phase=phase,
            waits=waits,
            steps_done=steps_done,
            since_s=time.monotonic() - spent_s,
        )
        expected = allowed_s is not None and spent_s > allowed_s
        assert progress.is_stuck(10.0) == expected, spent_s


def test_memory_error_of_a_step_carries_advice_once() -> None:
    progress = Progress()
    progress.predicted_peak_bytes = 2**30
    with pytest.raises(RuntimeError) as caught, progress.during("a step"):
        torch.empty(2**60)
    progress.advise(caught.value)
    (note,) = caught.value.__notes__
    assert "a peak of 1.00 GiB" in note
    with pytest.raises(KeyError) as other, progress.during("a step"):
        raise KeyError
    assert not hasattr(other.value, "__notes__")


def test_memory_errors_are_known_by_kind_and_text() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert "a peak of 1.50 GiB" in memory_advice(3 * 2**29)
    assert "GiB" not in memory_advice(None)


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf"])
def test_timeout_must_be_a_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"MESHWRIGHT_TIMEOUT_S='{text}'; legal: seconds"):
        process_group.timeout_s()


def test_ranks_of_one_start_agree_on_keys_of_their_own() -> None:
    """Over one store, as torchrun keeps it: three starts of three ranks, before each of which some
    ranks had died waiting."""
    store = dist.HashStore()
    found: set[str] = set()
    for dead in ((), (1,), (1, 2)):
        for rank in dead:
            store.set(f"meshwright/word/{rank}", f"last word of {rank} before start {len(found)}")
        prefixes = dict.fromkeys(range(3), "")

        def join(rank: int, into: dict[int, str] = prefixes) -> None:
            into[rank] = joining.agreed_prefix(store, rank, 3, 30.0)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert len(set(prefixes.values())) == 1, prefixes
        assert prefixes[0] not in found | {""}
        found.add(prefixes[0])


# --- the launcher ---------------------------------------------------------------------------------


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
