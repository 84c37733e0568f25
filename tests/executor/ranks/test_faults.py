"""A rank that is lost takes the others down with it, soon, and all say which it was, and why.

The ranks of `fault_worker` fail on purpose; here it is read how each of them ended.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.executor.ranks import joining
from meshwright.executor.ranks import launch as process_group
from meshwright.executor.ranks.object_collectives import WAITING
from meshwright.executor.ranks.watchdog import Progress, is_out_of_memory, memory_advice
from tests.executor.ranks.fault_worker import APART, FEWER, OPTIMIZER, SAVING, STEPS
from tests.helpers.launching import ROOT, Launch, launch
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import ROWS, batch, net, planned

KILLED = -signal.SIGKILL
TIMEOUT_S = 15.0
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
        other_says=r"rank 0 \(stage 0\) failed in recv_gradient of stage 0.*"
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
        says=r"rank 1 \(stage 1\) stops: CAUSE$",
        other_says=r"rank 0 \(stage 0\) failed in .*"
        r"rank 1 \(stage 1\) has been in user code after step 3 for \d+ s$",
    ),
    "leaves with an exit code": Fault(
        fault="exit", rank=1, phase=OPTIMIZER, exits=3,
        says=r"rank 1 \(stage 1\) failed in user code after step 3: SystemExit: 3$",
        other_says=r"rank 0 \(stage 0\) stops: CAUSE$",
    ),
}  # fmt: skip
FIRST = ("killed in backward", "the store's holder frozen in a receive")
MORE = "one kill and one freeze stay in the change tier, and what the parts say of the others"


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
        ("recv_activation", True, 1, 10.0 + 5.0),
        ("forward", False, 0, 10.0 * 4),
        (None, False, 1, None),
        (None, False, 0, None),
    ],
)
def test_only_a_phase_can_take_too_long(
    phase: str | None, waits: bool, steps_done: int, allowed_s: float | None
) -> None:
    progress = Progress()
    for spent_s in (1.0, 9.0, 11.0, 16.0, 39.0, 41.0, 1e6):
        progress.activity = replace(
            progress.activity,
            phase=phase,
            waits=waits,
            steps_done=steps_done,
            since_s=time.monotonic() - spent_s,
        )
        expected = allowed_s is not None and spent_s > allowed_s
        assert progress.is_stuck(10.0) == expected, spent_s


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
