"""Ranks that end before they have come together are named soon, in the first line that others say;
Ctrl-C ends all ranks with one line; signals ask a run to save."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Queue

import pytest
import torch.distributed as dist

from meshwright.executor.ranks import StopRequests, joining, stop_requests
from meshwright.executor.ranks.interrupts import Interrupts
from meshwright.executor.ranks.joining import StartError, agreed_prefix
from meshwright.executor.ranks.lifelines import KEY, Lifelines
from tests.helpers.launching import ROOT, Launch, free_port, launch
from tests.helpers.tiers import second_tier

WORKER = Path(__file__).with_name("start_worker.py")
TIMEOUT_S = 10
HOST = "127.0.0.1"
LATE_S = 30.0
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
    cause = "rank 1 failed in joining the process group, step 1: RuntimeError: no such thing here"
    assert run.ranks[1].stderr.startswith(cause)
    for k in (0, 2):
        assert run.ranks[k].stderr.splitlines()[0] == f"rank {k} stops: {cause}"


# --- the parts ------------------------------------------------------------------------------------


def test_who_waits_long_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank may come late: a warning ends nothing."""
    monkeypatch.setattr(joining, "NOTICE_S", 0.2)
    store, said = dist.HashStore(), ""
    with ThreadPoolExecutor() as pool:
        joins = [pool.submit(agreed_prefix, store, 0, 3, 60.0)]
        while not said:
            time.sleep(0.1)
            said = capsys.readouterr().err
        joins += [pool.submit(agreed_prefix, store, rank, 3, 60.0) for rank in (1, 2)]
    assert len({join.result() for join in joins}) == 1
    assert not capsys.readouterr().err and said.count("\n") == 1
    assert said.startswith("rank 0 waits at the start: no word from ranks 1, 2 for 0.2 s")


def test_ranks_that_are_there_hear_who_is_missing() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        joins = [pool.submit(agreed_prefix, store, rank, 4, 2.0) for rank in (0, 2)]
    for join in joins:
        with pytest.raises(StartError, match=r"^start: no word from ranks 1, 3 within 2 s"):
            join.result()


def test_missing_rank_0_is_named() -> None:
    with pytest.raises(StartError, match=r"no word from rank 0 within 0\.1 s"):
        agreed_prefix(dist.HashStore(), 1, 2, 0.1)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    says = rf"no store at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: .*a free port"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(StartError, match=says):
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
        assert not ended and signal.set_wakeup_fd(-1) == -1
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # handlers of the user stay
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
    files, left = [tmp_path / f"{k}.pid" for k in range(2)], []
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
        for file in files:
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
                left.append(file.name)
    assert not left, said
    ours = [line for line in said.splitlines() if "rank " in line and "agent" not in line]
    (line,) = (line for line in ours if "interrupted" in line)
    assert line.startswith("interrupted (Ctrl-C): all ranks end; rank ")
    assert "Traceback" not in said.split(line)[0]
    assert said.count("Traceback") <= 1  # the agent's own


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


# --- lines that end with a process ----------------------------------------------------------------


def _connect(store: dist.Store, greeting: str) -> socket.socket:
    port, word = json.loads(store.get(KEY))
    end = socket.create_connection((HOST, port), timeout=LATE_S)
    end.sendall(greeting.format(word=word).encode())
    return end


def test_an_end_without_goodbye_is_told_and_no_other() -> None:
    store, lost = dist.HashStore(), Queue[int]()
    zero = Lifelines(store, HOST, 0, lost.put)
    in_order = Lifelines(store, HOST, 1, lost.put)
    while not in_order._ends:
        threading.Event().wait(0.05)
    for stranger in ("", "word 7\n", "{word}\n", "{word} x\n"):
        _connect(store, stranger).close()
    in_order.close()
    _connect(store, "{word} 3\n").close()  # as a kernel closes those of a killed process
    assert lost.get(timeout=LATE_S) == 3
    zero.close()
    assert lost.empty()


def test_a_rank_is_told_of_rank_0_alone() -> None:
    store, lost = dist.HashStore(), Queue[int]()
    with socket.create_server((HOST, 0)) as server:
        store.set(KEY, json.dumps([server.getsockname()[1], "word"]))
        ranks = [Lifelines(store, HOST, rank, lost.put) for rank in (1, 2)]
        ends = [server.accept()[0] for _ in ranks]
    ends[0].send(b".")
    for end in ends:
        end.recv(100)
        end.close()
    assert lost.get(timeout=LATE_S) == 0
    for rank in ranks:
        rank.close()
    assert lost.empty()


def test_a_forked_child_does_not_keep_the_line() -> None:
    store, lost = dist.HashStore(), Queue[int]()
    zero, one = (Lifelines(store, HOST, rank, lost.put) for rank in (0, 1))
    while not one._ends:
        threading.Event().wait(0.05)
    child = os.fork()
    if not child:
        os._exit(0 if not one._ends and zero._server[0].fileno() == -1 else 1)  # type: ignore[index]
    assert os.waitpid(child, 0)[1] == 0
    one.close()
    zero.close()
    assert lost.empty()


def test_without_a_line_the_timeout_stays() -> None:
    store = dist.HashStore()
    store.set(KEY, "[1, 2")
    lost = Queue[int]()
    Lifelines(store, HOST, 1, lost.put).close()
    assert lost.empty()


# --- signals that ask a run to save; among ranks in tests/meshwright/training ---------------------


@pytest.mark.parametrize(
    ("number", "asked"), [(signal.SIGTERM, (True, True)), (signal.SIGUSR1, (False, True))]
)
def test_a_signal_is_acted_on_once_one_step_later(number: int, asked: tuple[bool, bool]) -> None:
    requests, before = StopRequests(), signal.getsignal(number)
    with requests.listening():
        assert requests.agreed() == (False, False)
        os.kill(os.getpid(), number)
        assert requests.agreed() == (False, False)
        assert requests.agreed() == asked
        assert requests.agreed() == (False, False)
    assert signal.getsignal(number) is before


def test_another_thread_than_the_main_one_takes_no_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def listen() -> None:
        with StopRequests().listening():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_rank_that_others_told_to_end_waits_for_its_own_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGTERM comes while it waits; without an agent of its own there is nobody to wait for."""
    waits = []

    def sleep(_: float) -> None:
        waits.append(1)
        if len(waits) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(stop_requests.time, "sleep", sleep)
    requests = StopRequests()
    with requests.listening():
        requests.await_signal()
        assert not waits
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        requests.await_signal()
        assert len(waits) == 3
        requests.await_signal()
        assert len(waits) == 3
    monkeypatch.setattr(stop_requests, "AGENTS_S", 0.1)  # nor for long for a signal
    StopRequests().await_signal()
