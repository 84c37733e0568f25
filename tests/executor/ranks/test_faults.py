"""A rank that is lost takes the others down with it, soon, and all say which it was, and why: while
they train, and before they have come together. Ctrl-C ends all ranks with one line; signals ask a
run to save.

The ranks of `fault_worker` fail on purpose; here it is read how each of them ended.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.executor.ranks import StopRequests, joining, stop_requests, watchdog
from meshwright.executor.ranks import launch as process_group
from meshwright.executor.ranks.joining import StartError, agreed_prefix
from meshwright.executor.ranks.launch import KEY, Interrupts, Lifelines
from meshwright.executor.ranks.object_collectives import WAITING
from meshwright.executor.ranks.watchdog import Progress, is_out_of_memory, memory_advice
from tests.executor.ranks.fault_worker import APART, FEWER, OPTIMIZER, SAVING, SHAPE, STEPS
from tests.helpers.launching import ROOT, Launch, free_port, launch
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import ROWS, batch, net, planned

KILLED = -signal.SIGKILL
TIMEOUT_S = 15
END_S = 300.0  # at most, of a launch on a busy machine
WORKER = Path(__file__).with_name("fault_worker.py")
ADVICE = r"out of memory: the plan expects a peak of [\d.]+ GiB here; .*more micro-batches, .*ZeRO"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What one rank of two does wrong in a phase; lines that it and the other say, in which CAUSE
    is the line that one of them begins with."""

    fault: str
    rank: int
    phase: str
    exits: int | None = None  # with this code
    says: str = ""
    other_says: str = ""
    bare: bool = False


FAULTS: Mapping[str, Fault] = {
    "raises in forward": Fault(
        fault="raise", rank=1, phase="forward",
        says=r"rank 1 \(stage 1\) failed in forward of stage 1, micro-batch 0, step 3: Injected",
        other_says=r"rank 0 \(stage 0\) stops: CAUSE$",
    ),
    "out of memory in user code": Fault(
        fault="memory", rank=0, phase=OPTIMIZER, bare=True,
        says=r"rank 0 \(stage 0\) failed in user code after step 3: RuntimeError: ",
        other_says=r"rank 1 \(stage 1\) stops: CAUSE$",
    ),
    "killed in backward": Fault(
        fault="kill", rank=1, phase="backward", exits=KILLED,
        other_says=r"rank 0 \(stage 0\) failed in (recv_gradient|send_activation) of stage 0.*"
        r"no word from rank 1 \(stage 1\): killed, or frozen$",
    ),
    "killed while nobody waits for it": Fault(
        fault="kill", rank=1, phase=APART, exits=KILLED,
        other_says=r"rank 0 \(stage 0\) stops: rank 1 \(stage 1\) ended without a word: killed",
    ),
    "the store's holder killed in a save": Fault(
        fault="kill", rank=0, phase=SAVING, exits=KILLED,
        other_says=rf"rank 1 \(stage 1\) failed in {WAITING}.*"
        r"the store is gone: rank 0, which holds it, was killed",
    ),
    "the store's holder frozen in a receive": Fault(
        fault="freeze", rank=0, phase="recv_gradient",
        other_says=r"rank 1 \(stage 1\) failed in .*"
        r"the store does not answer: rank 0, which holds it, is frozen",
    ),
    "hangs in a send": Fault(
        fault="hang", rank=1, phase="send_gradient",
        says=r"rank 1 \(stage 1\) failed in send_gradient of stage 1, micro-batch 0.*no progress ",
        other_says=r"rank 0 \(stage 0\) stops: .*CAUSE$",
    ),
    "hangs in user code": Fault(
        fault="hang", rank=1, phase=OPTIMIZER,
        says=r"rank 1 \(stage 1\) stops: CAUSE; it was in user code after step 3, at$",
        other_says=r"rank 0 \(stage 0\) failed in .*"
        r"rank 1 \(stage 1\) has been in user code after step 3 for \d+ s$",
    ),
    "leaves with an exit code": Fault(
        fault="exit", rank=1, phase=OPTIMIZER, exits=3,
        says=r"rank 1 \(stage 1\) failed in user code after step 3: SystemExit: 3$",
        other_says=r"rank 0 \(stage 0\) stops: CAUSE$",
    ),
}  # fmt: skip
FIRST = ("the store's holder killed in a save",)
MORE = "one kill stays in the change tier, and what the parts say of the others"


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", str(TIMEOUT_S))


def _run(folder: Path, of: Fault) -> Launch:
    """Two ranks of which one fails; the other must have ended by itself, with an error, and nothing
    may be left."""
    arguments = ("bare" if of.bare else "once", of.fault, str(of.rank), of.phase, str(folder))
    frozen = of.fault == "freeze"  # a stopped process can't end itself
    grace_s = 1.0 if frozen else END_S / 2
    run = launch(WORKER, *arguments, ranks=2, timeout_s=END_S, grace_s=grace_s)
    assert (folder / "struck").exists(), run.tail()
    other = run.ranks[1 - of.rank]
    assert not other.killed, run.tail()
    assert run.ranks[of.rank].killed == frozen
    assert other.returncode not in (0, None)
    assert not any(rank.children_left for rank in run.ranks)
    return run


@pytest.mark.parametrize("name", tiered(FAULTS, FIRST.__contains__, MORE))
def test_a_fault_of_a_rank_ends_both_and_is_named(tmp_path: Path, name: str) -> None:
    of = FAULTS[name]
    run = _run(tmp_path, of)
    first, other = (run.ranks[k].stderr for k in (of.rank, 1 - of.rank))
    assert of.exits in (None, run.ranks[of.rank].returncode)
    causes = re.findall(r"^rank \d \(stage \d\) failed in .*$", f"{first}\n{other}", re.MULTILINE)
    cause = causes[0] if causes else "no rank failed"
    for text, said in ((first, of.says), (other, of.other_says)):
        wanted = f"^{said.replace('CAUSE', re.escape(cause))}"
        assert len(re.findall(wanted, text, re.MULTILINE)) == 1, (wanted, text)
    if of.fault == "raise":
        assert (first.count("Traceback"), other.count("Traceback")) == (1, 0)
        assert "in raises" in first  # it leads to the place
    if of.fault == "hang":
        assert "in hangs" in first  # where it hangs
    if of.fault == "memory":
        assert re.search(ADVICE, first)


@second_tier(MORE)
def test_rank_that_has_fewer_batches(tmp_path: Path) -> None:
    """Each waits for the other, elsewhere: whoever notices first says where both are, and why."""
    run = _run(tmp_path, Fault(fault="none", rank=1, phase=FEWER))
    said = "".join(rank.stderr for rank in run.ranks)
    assert "waits in " in said and "leaving the process group, step 3" in said
    assert "other numbers of batches wait for each other so" in said


@second_tier("who has begun a step without lowering for it stays among the parts")
def test_rank_with_a_batch_of_another_shape(tmp_path: Path, monkeypatch: Any) -> None:
    """It waits for the other to lower for it, too, which says that it is in the step already: both
    end long before the timeout."""
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", "600")
    of = Fault(fault="none", rank=1, phase=SHAPE)
    rank = _run(tmp_path, of).ranks[1]
    assert re.search(
        r"rank 1 \(stage 1\) failed in .*, step 4: "
        r"the batch has a shape that is new here, and not on rank 0 \(stage 0\), which is in .*, "
        r"step 4: every rank gives the same batch",
        rank.stderr,
    )


@second_tier("a crash at any operation of a save, and loads of what it leaves, stay")
def test_training_goes_on_after_a_restart(tmp_path: Path) -> None:
    """torchrun starts the ranks again after a death in a step: no finished step is done twice, and
    the losses are those of one device."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "1", str(WORKER), "once", "kill", "1", "backward", str(tmp_path),
        "resumes",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=environment, timeout=END_S, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0 and (tmp_path / "struck").exists(), ended.stderr[-3000:]
    result, wanted = planned(net()), []
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        wanted.append(float(result.train_step(batch(ROWS, step))))
        optimizer.step()
    for rank in range(2):
        done = [line.split() for line in (tmp_path / f"losses.{rank}").read_text().splitlines()]
        assert [int(step) for step, _ in done] == [*range(STEPS)]
        assert [float(loss) for _, loss in done] == pytest.approx(wanted, rel=1e-5)


# --- the parts of faults --------------------------------------------------------------------------


def test_phases_are_named_after_what_runs_in_them_and_left_by_an_exception() -> None:
    """A user may catch it and take their time: a phase that lasts would be taken for a hang."""
    progress = Progress()
    progress.stages = {2: (1, 6), 3: (2,)}
    assert [progress.name(r) for r in (1, 2)] == ["rank 1", "rank 2 (stages 1, 6)"]
    with progress.during("a step", is_step=True):
        assert str(progress.activity) == "a step, step 1"
        progress.enter("forward", stage=6, microbatch=3)
        assert str(progress.activity) == "forward of stage 6, micro-batch 3, step 1"
    assert str(progress.activity) == "user code after step 1"
    with pytest.raises(KeyError), progress.during("a step", is_step=True):
        progress.enter("backward", stage=0, microbatch=1, waits=True)
        raise KeyError
    assert progress.activity.phase is None
    assert progress.activity.steps_done == 1
    assert str(progress.activity) == "backward of stage 0, micro-batch 1, step 2"
    with progress.during("saving"):
        pass
    assert str(progress.activity) == "user code after step 1"


@pytest.mark.parametrize(
    ("phase", "waits", "steps_done", "allowed_s"),
    [
        ("forward", False, 1, 10.0), ("recv_activation", True, 1, 10.0 + 5.0),
        ("forward", False, 0, 10.0 * 4), (None, False, 1, None), (None, False, 0, None),
    ],
)  # fmt: skip
def test_only_a_phase_can_take_too_long(
    phase: str | None, waits: bool, steps_done: int, allowed_s: float | None
) -> None:
    progress = Progress()
    for spent_s in (1.0, 9.0, 11.0, 16.0, 39.0, 41.0, 1e6):
        since_s = time.monotonic() - spent_s
        progress.activity = replace(
            progress.activity, phase=phase, waits=waits, steps_done=steps_done, since_s=since_s
        )
        expected = allowed_s is not None and spent_s > allowed_s
        assert progress.is_stuck(10.0) == expected, spent_s


def test_who_has_begun_a_step_without_lowering_for_it() -> None:
    progress = Progress()

    def passed() -> list[bool]:
        return [progress.has_passed(step) for step in range(3)]

    with progress.during(watchdog.PREPARING, is_step=True):
        assert passed() == [False, False, False]
        progress.enter("starting the step")
        assert passed() == [True, False, False]
    assert passed() == [True, False, False]
    with progress.during(watchdog.PREPARING, is_step=True):
        with progress.lowering():
            assert passed() == [True, False, False]
        progress.enter("starting the step")
        assert passed() == [True, False, False]


def test_who_waits_names_those_that_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_thread", lambda run: None)
    monkeypatch.setattr(watchdog, "progress", progress := Progress())
    store, heard = dist.HashStore(), "recv_activation of stage 0, step 2"
    progress.activity = replace(progress.activity, phase=heard, waits=True)
    dog = watchdog.Watchdog(
        store, rank=0, world_size=4, limit_s=60.0, holder="rank 0", first_step=lambda: None
    )
    answers = [
        ("backward", 30.0, False),
        ("backward", 1.0, False),
        (str(progress.activity), 30.0, True),
    ]
    for rank, (activity, seconds, waits) in enumerate(answers, start=1):
        store.set(f"heard/{rank}", json.dumps([f"rank {rank}", activity, seconds, waits]))
    assert dog._roll_call() == "; rank 1 has been in backward for 30 s"


def test_memory_error_is_known_by_kind_and_text_and_carries_advice_once() -> None:
    progress = Progress()
    progress.predicted_peak_bytes = 3 * 2**29
    with pytest.raises(RuntimeError) as caught, progress.during("a step"):
        torch.empty(2**60)
    progress.advise(caught.value)
    (note,) = caught.value.__notes__
    assert "a peak of 1.50 GiB" in note and "GiB" not in memory_advice(None)
    with pytest.raises(KeyError) as other, progress.during("a step"):
        raise KeyError
    assert not hasattr(other.value, "__notes__")
    for error in (caught.value, torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("text", ["soon", "0", "nan", "inf"])
def test_timeout_must_be_a_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"MESHWRIGHT_TIMEOUT_S='{text}'; legal: seconds"):
        process_group.timeout_s()


LEAVES = """
from meshwright.executor.ranks import launch, watchdog
watchdog.POLL_S = 0.0  # so that a thread is in the store whenever the interpreter ends
launch.start("gloo")
launch.dist.barrier()
"""


@second_tier("ranks of other tests end so, with a thread in the store by chance alone")
def test_a_script_that_just_ends_is_no_failure(tmp_path: Path) -> None:
    """A thread that comes back from the store while the interpreter ends would abort it."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    run = launch(script, ranks=2, timeout_s=END_S)
    assert run.ok, run.tail()


def test_ranks_of_one_start_agree_on_keys_of_their_own() -> None:
    """Over one store, as torchrun keeps it: three starts of three ranks, before each of which some
    ranks had died waiting."""
    store = dist.HashStore()
    found: set[str] = set()
    for dead in ((), (1,), (1, 2)):
        for rank in dead:
            store.set(f"meshwright/word/{rank}", f"last word of {rank} before start {len(found)}")
        with ThreadPoolExecutor() as pool:
            joins = [pool.submit(joining.agreed_prefix, store, rank, 3, 30.0) for rank in range(3)]
        (prefix,) = {join.result() for join in joins}
        assert prefix not in found | {""}
        found.add(prefix)


# --- starts ---------------------------------------------------------------------------------------


HOST = "127.0.0.1"
LATE_S = 30.0


def _started(faults: Mapping[int, str], *, ranks: int) -> Launch:
    """Ranks of which some have a fault; the others must end by themselves."""
    run = launch(
        WORKER, "start", json.dumps(faults), "", ranks=ranks, timeout_s=END_S, grace_s=END_S / 2
    )
    assert not any(rank.killed or rank.children_left for rank in run.ranks), run.tail()
    assert all(rank.returncode != 0 for rank in run.ranks)
    return run


def _said(run: Launch, k: int) -> list[str]:
    """A rank's own lines: who asks a store whose rank has just ended hears of torch, too."""
    return [line for line in run.ranks[k].stderr.splitlines() if line.startswith("rank ")]


def _without_ranks(said: str) -> str:
    return said.partition(": no word from ")[0]


@second_tier("threads that wait for ranks, and name who is missing, stay in the change tier")
def test_ranks_that_end_before_the_group_are_named() -> None:
    """Killed, failed in an import, left with a code, killed while they are awaited; and rank 0."""
    run = _started({1: "kill", 2: "raise", 4: "exit", 5: "word"}, ranks=6)
    for k in (0, 3):
        *waits, line = _said(run, k)
        late = {f"rank {j} waits at the start" for j in (0, k)}  # k where rank 0 is late, too
        assert {_without_ranks(said) for said in waits} <= late
        start = f"rank {k} failed: start: no word from ranks 1, 2, 4, 5 within {TIMEOUT_S} s"
        assert line.startswith(start), line
        assert "MESHWRIGHT_TIMEOUT_S" in line
    run = _started({0: "kill"}, ranks=2)
    *waits, line = _said(run, 1)
    assert {_without_ranks(said) for said in waits} <= {"rank 1 waits at the start"}
    assert line.startswith("rank 1 failed: start: no word from rank 0 at MASTER_ADDR="), line


@second_tier("threads that wait for ranks, and name who is missing, stay in the change tier")
def test_rank_that_cannot_join_the_group_says_why_to_all() -> None:
    run = _started({1: "group"}, ranks=3)
    cause = "rank 1 failed in joining the process group, step 1: InjectedError: broken on purpose"
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
        str(free_port()), str(WORKER), "start", "{}", str(tmp_path),
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
        time.sleep(0.05)
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
        time.sleep(0.05)
    child = os.fork()
    if not child:
        os._exit(0 if not one._ends and zero._server[0].fileno() == -1 else 1)  # type: ignore[index]
    assert os.waitpid(child, 0)[1] == 0
    one.close()
    zero.close()
    assert lost.empty()


def test_without_a_line_the_timeout_stays() -> None:
    store, lost = dist.HashStore(), Queue[int]()
    store.set(KEY, "[1, 2")
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
    def listen() -> object:
        with StopRequests().listening():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor() as pool:
        assert pool.submit(listen).result() is signal.getsignal(signal.SIGTERM)


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
