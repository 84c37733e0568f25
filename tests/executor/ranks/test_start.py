"""Ranks that end before they have come together are named soon, in the first line that others say;
Ctrl-C ends all ranks with one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.executor.ranks import joining
from meshwright.executor.ranks.interrupts import Interrupts
from meshwright.executor.ranks.joining import StartError, agreed_prefix
from tests.helpers.launching import ROOT, Launch, free_port, launch
from tests.helpers.tiers import second_tier

WORKER = Path(__file__).with_name("start_worker.py")
TIMEOUT_S = 10
END_S = 300.0  # at most, of a launch on a busy machine


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", str(TIMEOUT_S))


def _run(faults: Mapping[int, str], *, ranks: int) -> Launch:
    """Ranks of which some have a fault; the others must end by themselves."""
    run = launch(WORKER, json.dumps(faults), "", ranks=ranks, timeout_s=END_S, grace_s=END_S / 2)
    assert not any(rank.killed or rank.children_left for rank in run.ranks), run.tail()
    assert all(rank.returncode != 0 for rank in run.ranks)
    return run


@second_tier("threads that wait for ranks, and name who is missing, stay in the change tier")
def test_ranks_that_end_before_the_group_are_named() -> None:
    """Killed, failed in an import, left with a code, killed while they are awaited; and rank 0."""
    run = _run({1: "kill", 2: "raise", 4: "exit", 5: "word"}, ranks=6)
    for k in (0, 3):
        (line,) = run.ranks[k].stderr.splitlines()  # and nothing of any library
        start = f"rank {k} failed: start: no word from ranks 1, 2, 4, 5 within {TIMEOUT_S} s"
        assert line.startswith(start), line
        assert "MESHWRIGHT_TIMEOUT_S" in line
    run = _run({0: "kill"}, ranks=2)
    (line,) = run.ranks[1].stderr.splitlines()
    assert line.startswith("rank 1 failed: start: no word from rank 0 at MASTER_ADDR="), line


def test_rank_that_cannot_join_the_group_says_why_to_all() -> None:
    run = _run({1: "group"}, ranks=3)
    cause = "rank 1 failed in joining the process group, step 1: RuntimeError: no such backend here"
    assert run.ranks[1].stderr.startswith(cause)
    for k in (0, 2):
        assert run.ranks[k].stderr.splitlines()[0] == f"rank {k} stops: {cause}"


# --- the parts ------------------------------------------------------------------------------------


def _in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except StartError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_who_waits_long_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank may come late: a warning ends nothing."""
    monkeypatch.setattr(joining, "NOTICE_S", 0.2)
    store = dist.HashStore()
    first, found = _in_thread(lambda: agreed_prefix(store, 0, 3, 60.0))
    said = ""
    while not said:
        time.sleep(0.1)
        said = capsys.readouterr().err
    others = [_in_thread(lambda r=r: agreed_prefix(store, r, 3, 60.0)) for r in (1, 2)]
    for thread in (first, *(thread for thread, _ in others)):
        thread.join(timeout=60)
    assert len({str(one) for one in (*found, *others[0][1], *others[1][1])}) == 1
    assert not capsys.readouterr().err and said.count("\n") == 1
    assert said.startswith("rank 0 waits at the start: no word from ranks 1, 2 for 0.2 s")


def test_ranks_that_are_there_hear_who_is_missing() -> None:
    store = dist.HashStore()
    threads = [_in_thread(lambda r=r: agreed_prefix(store, r, 4, 2.0)) for r in (0, 2)]
    for thread, found in threads:
        thread.join(timeout=60)
        (error,) = found
        assert str(error).startswith("start: no word from ranks 1, 3 within 2 s")


def test_missing_rank_0_is_named() -> None:
    with pytest.raises(StartError, match=r"no word from rank 0 within 0\.1 s"):
        agreed_prefix(dist.HashStore(), 1, 2, 0.1)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(
            StartError,
            match=rf"no store at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: .*a free port",
        ),
    ):
        joining.connected(0, limit_s=1.0, timeout=timedelta(seconds=1))


# --- Ctrl-C ---------------------------------------------------------------------------------------


def test_an_interrupt_that_python_raises_ends_nothing() -> None:
    ended: list[None] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist's workers ignore it
    try:
        interrupts = Interrupts(lambda: ended.append(None))
        try:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
        finally:
            interrupts.close()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not ended
    assert signal.set_wakeup_fd(-1) == -1


def test_handlers_of_the_user_stay() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert not Interrupts(lambda: None).installed
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@second_tier("that an interrupt is Python's where Python runs stays in the change tier")
def test_ctrl_c_under_torchrun_ends_all_ranks_with_a_line(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
        str(free_port()), str(WORKER), "{}", str(tmp_path),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    files = [tmp_path / f"{k}.pid" for k in range(2)]
    try:
        deadline_s = time.monotonic() + END_S
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline_s and agent.poll() is None
            time.sleep(0.1)
        time.sleep(1.0)  # rank 0 is inside of its receive
        agent.send_signal(signal.SIGINT)
        _, said = agent.communicate(timeout=END_S)
    finally:
        agent.kill()
        left = [_killed(int(file.read_text())) for file in files if file.exists()]
    assert left == [False, False], said
    ours = [line for line in said.splitlines() if "rank " in line and "agent" not in line]
    (line,) = (line for line in ours if "interrupted" in line)
    assert line.startswith("interrupted (Ctrl-C): all ranks end; rank ")
    assert "Traceback" not in said.split(line)[0]
    assert said.count("Traceback") <= 1  # the agent's own


def _killed(pid: int) -> bool:
    """Whether a process was there to be killed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"RANK": "first"}, "start: RANK.*torchrun"),
        ({"WORLD_SIZE": "-2"}, "start: WORLD_SIZE.*torchrun"),
        ({"MASTER_PORT": ""}, "start: MASTER_PORT.*torchrun"),
        ({"MASTER_ADDR": ""}, "start: MASTER_ADDR.*torchrun"),
        ({"RANK": "2"}, "RANK=2 of WORLD_SIZE=2; legal: 0 to WORLD_SIZE - 1"),
        ({"RANK": "9" * 5000}, "legal: a whole number from 0 to"),
        ({"MASTER_PORT": "70000"}, "legal: a whole number from 0 to 65535"),
        ({"MASTER_ADDR": "a" * 300}, "can't be a host"),
    ],
)
def test_nonsense_in_the_environment_is_told_at_once(
    given: Mapping[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, text in (right | given).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(StartError, match=says) as caught:
        joining.place()
        joining.connected(1, limit_s=60.0, timeout=timedelta(seconds=60))
    assert all((caught.value.place, caught.value.legal, caught.value.way_out))
