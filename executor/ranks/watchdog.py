"""Watchdog: ends all ranks when one of them fails or hangs, and says which and where.

A process group tells a rank little of the others: under gloo a killed peer raises at once, a frozen
one after the group's timeout, and some waits never raise. So every rank has two threads that wake
once per `POLL_S`. The *listener* asks the store whether a rank has failed. The *clock* checks how
long this rank has been in the same phase of a step (an instruction of the pipeline, a reduction, a
checkpoint); it asks nobody, so that it runs on where the store is frozen. User code between steps
is no phase: it may take as long as it likes.

A failure goes through the store in three keys:

    failures   the number of ranks that failed; the one that finds it at zero speaks for all
    heard/<r>  what rank r is doing: the roll call. A rank that does not answer was killed, or is
               frozen
    cause      one line, which every other rank prints before it ends

A rank that lowers the plan for another shape of batches waits for all others to do so. After
`GRACE_S` it asks whether they do:

    asked      the step it is in
    passed     that step, and a rank that is in it, or beyond, and has not lowered for it

Ranks that others go on without (`Progress.dispensable`) end alone:

    lost       there is one
    lost/<r>   rank r is one
    left/<r>   rank r has left in order

A rank that hears of a failure has `GRACE_S` to raise by itself, then its listener ends it. Where
the store is gone, so is the rank (or the torchrun agent) that held it, and the next phase ends this
rank. Where the interpreter's lock is never released, no thread can run: then faulthandler's timer,
which the clock rewinds whenever it wakes, ends the process without it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._distributed_c10d import Store  # torch.distributed does not declare it

POLL_S = 1.0
ROLL_CALL_POLL_S = 0.1  # once, after a failure
GRACE_S = 5.0  # for the answers of ranks that are busy, and to come out of a lost step
FIRST_STEP_FACTOR = 4  # compilation and first connections: this many times the timeout
LINGER_S = 1.0  # this rank may hold the store: the others read the cause before it goes
SHOWN = 8  # ranks named in a line; there may be thousands
PREPARING, EVALUATING = "preparing the step", "evaluating a batch"  # until it is known by all
INTERRUPTED = "interrupted (Ctrl-C)"  # begins the cause where a person ended the run
_STDERR = 2
PEERS = "phases"  # by rank, those that it has begun, of ranks whose replicas train apart
SAME = (
    "every rank gives the same batch, or with local=True rows of the same sizes; pad to the same "
    "length on all of them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The phase of a rank's main thread since `since_s` (seconds of the monotonic clock).

    `phase` is None in user code; `waits` says that the phase can only end with other ranks' help,
    so that staying in it is another rank's fault. `raised` describes the phase that an exception
    ended; `waits` is then that phase's.
    """

    steps_done: int
    phase: str | None
    stage: int | None
    microbatch: int | None
    waits: bool
    raised: str | None
    since_s: float

    def __str__(self) -> str:
        if self.raised is not None:
            return self.raised
        if self.phase is None:
            return f"user code after step {self.steps_done}"
        parts = [self.phase if self.stage is None else f"{self.phase} of stage {self.stage}"]
        if self.microbatch is not None:
            parts.append(f"micro-batch {self.microbatch}")
        return ", ".join([*parts, f"step {self.steps_done + 1}"])


class Progress:
    """The activity of this rank's main thread, written by the runtime, read by the watchdog.

    `stages` are those of every rank of the plan, by rank: of one replica, of so many ranks, where
    there are several (`replica_size`). `replica` is a prefix of what is compared within one, and
    where each `tells_phases`, others may ask how many it has begun. `dispensable` are the ranks
    that the others go on without, and `lost` those of them that are known to have ended. Where
    ranks are `apart` each traces and prices for itself.
    """

    def __init__(self) -> None:
        self.stages: Mapping[int, Sequence[int]] = {}
        self.dispensable: frozenset[int] = frozenset()
        self.lost: frozenset[int] = frozenset()
        self.apart = False
        self.replica, self.replica_size = "", 0
        self.tells_phases, self.phases_begun = False, 0
        self.predicted_peak_bytes: int | None = None
        self.lowered: int | None = None  # the last step that met another shape of batches
        self.lowering_s: float | None = None  # since when it lowers for that
        self.activity = Activity(
            steps_done=0,
            phase=None,
            stage=None,
            microbatch=None,
            waits=False,
            raised=None,
            since_s=time.monotonic(),
        )

    def enter(
        self,
        phase: str,
        *,
        stage: int | None = None,
        microbatch: int | None = None,
        waits: bool = False,
    ) -> None:
        """The main thread begins another phase; to be called inside `during`."""
        self.phases_begun += 1
        self.activity = Activity(
            steps_done=self.activity.steps_done,
            phase=phase,
            stage=stage,
            microbatch=microbatch,
            waits=waits,
            raised=None,
            since_s=time.monotonic(),
        )

    def wait_anew(self) -> None:
        """The phase goes on, and its time begins again: others that it waits for go on. It is no
        other phase, or two ranks that wait for each other would do so forever."""
        self.activity = replace(self.activity, since_s=time.monotonic())

    @contextmanager
    def during(self, phase: str, *, waits: bool = False, is_step: bool = False) -> Iterator[None]:
        """A phase inside: the watchdog ends a rank that is longer than the timeout in it, or
        between two calls of `enter`."""
        self.enter(phase, waits=waits)
        try:
            yield
        except BaseException as error:
            self._leave(raised=str(self.activity), waits=self.activity.waits)
            self.advise(error)
            raise
        self._leave(steps=int(is_step))

    @contextmanager
    def on_its_own(self) -> Iterator[None]:
        """Context in which this rank decides for itself, as others may not be in it."""
        apart, self.apart = self.apart, True
        try:
            yield
        finally:
            self.apart = apart

    @contextmanager
    def lowering(self) -> Iterator[None]:
        """A phase, inside of a step, in which the plan is lowered for another shape of batches."""
        if not self.apart:  # else nobody else need lower for it
            self.lowered, self.lowering_s = self.activity.steps_done, time.monotonic()
        self.enter("lowering the plan for another shape of batches", waits=True)
        try:
            yield
        finally:
            self.lowering_s = None

    def _leave(self, *, steps: int = 0, raised: str | None = None, waits: bool = False) -> None:
        self.activity = Activity(
            steps_done=self.activity.steps_done + steps,
            phase=None,
            stage=None,
            microbatch=None,
            waits=waits,
            raised=raised,
            since_s=time.monotonic(),
        )

    def advise(self, error: BaseException) -> None:
        """Add a note to an out-of-memory error on how to need less, once."""
        if is_out_of_memory(error):
            advice = memory_advice(self.predicted_peak_bytes)
            if advice not in getattr(error, "__notes__", ()):
                error.add_note(advice)

    @property
    def seconds(self) -> float:
        """Seconds that the main thread has been in its phase."""
        return time.monotonic() - self.activity.since_s

    def allowed_s(self, limit_s: float) -> float:
        """Seconds that a phase may take: more until the first step is done."""
        return limit_s if self.activity.steps_done else FIRST_STEP_FACTOR * limit_s

    def is_stuck(self, limit_s: float) -> bool:
        """Whether the phase exceeds the timeout. A rank that waits gets `GRACE_S` more, so that the
        rank it waits for reports first."""
        patience_s = GRACE_S if self.activity.waits else 0.0
        in_phase = self.activity.phase is not None
        return in_phase and self.seconds > self.allowed_s(limit_s) + patience_s

    def has_passed(self, step: int) -> bool:
        """Whether the main thread has begun the step after so many, and not lowered for it."""
        at = self.activity
        within = at.phase not in (None, PREPARING, EVALUATING)
        return self.lowered != step and at.steps_done >= step + (not within)

    def name(self, rank: int) -> str:
        """E.g. `rank 3 (stages 0, 7)`."""
        stages = self.stages.get(rank % self.replica_size if self.replica_size else rank, ())
        if not stages:
            return f"rank {rank}"
        return f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))})"


progress = Progress()


class Watchdog:
    """The threads that end this rank when another one failed, or when it makes no progress itself.

    `store` must be a connection of its own: a client serves one request at a time. `holder` names,
    for messages, the process that keeps it. `first_step` is called once, when the first step is
    done.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        limit_s: float,
        holder: str,
        first_step: Callable[[], None],
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.limit_s = limit_s
        self.holder = holder
        self.first_step = first_step
        self.main = threading.get_ident()
        self.closing = threading.Event()  # the rank leaves in order
        self.failing = threading.Event()  # the rank is about to end with an error of its own
        self.cause: str | None = None  # the first failed rank's message, once read
        self.threads = [_thread(self._clock), _thread(self._listen)]

    def close(self) -> None:
        """End the threads; the timer runs on, for the rest of the shutdown."""
        self.closing.set()
        for thread in self.threads:
            thread.join(timeout=GRACE_S)
        self._rewind_timer()

    def report(self, error: BaseException) -> None:
        """Announce an exception of this rank to the others, and print it."""
        progress.advise(error)
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        self._fail(reason, "".join(traceback.format_exception(error)))

    def interrupt(self) -> None:
        """Announce that Ctrl-C ended this rank; one rank says so for all."""
        self.failing.set()
        speaker = _thread(self._announce_interrupt)
        speaker.join(timeout=GRACE_S)
        time.sleep(LINGER_S)

    def lose(self, rank: int) -> None:
        """Announce a rank that ended without a word, unless who waits for it does so first."""
        if rank in progress.dispensable:
            with suppress(RuntimeError):
                if not self.store.check(["failures"]):  # then all end
                    self._go_on_without(rank, "killed, or left by os._exit")
            return
        if self.closing.wait(GRACE_S) or self.failing.is_set():
            return
        with suppress(RuntimeError):  # of the store: lost with it, which the listener sees
            if self.store.add("failures", 1) == 1:
                cause = f"{progress.name(rank)} ended without a word: killed, or left by os._exit"
                self.store.set("cause", cause)

    # --- the threads ---

    def _clock(self) -> None:
        starting = True
        while not self.closing.wait(POLL_S) and not self.failing.is_set():
            self._rewind_timer()
            if starting and progress.activity.steps_done:
                self.first_step()
                starting = False
            if progress.is_stuck(self.limit_s):
                self._fail(f"no progress for {progress.seconds:.0f} s", self._stack())
                os._exit(1)

    def _stack(self) -> str:
        return "".join(traceback.format_stack(sys._current_frames()[self.main]))

    def _rewind_timer(self) -> None:
        after_s = progress.allowed_s(self.limit_s) + 4 * GRACE_S
        faulthandler.dump_traceback_later(after_s, exit=True, file=_STDERR)

    def _listen(self) -> None:
        try:
            while not self.closing.wait(POLL_S):
                if self.store.check(["failures"]):
                    self._follow()
                    return
                if progress.dispensable and self.store.check(["lost"]):
                    ended = {r for r in progress.dispensable if self.store.check([f"lost/{r}"])}
                    progress.lost |= ended
                if progress.tells_phases:
                    self.store.set(f"{PEERS}/{self.rank}", str(progress.phases_begun))
                self._compare_shapes()
        except RuntimeError:  # of the store: nothing else in here raises it
            self._follow_lost_store()

    def _compare_shapes(self) -> None:
        """Ask, or tell, who was given a batch of another shape, and end a rank that was alone."""
        activity = progress.activity
        since_s, within = progress.lowering_s, progress.replica
        asked, passed = f"{within}asked", f"{within}passed"
        if since_s is not None and time.monotonic() - since_s > GRACE_S:
            self.store.set(asked, str(activity.steps_done))
            if self.store.check([passed]):
                step, said = json.loads(self.store.get(passed))
                if step == activity.steps_done:
                    reason = f"the batch has a shape that is new here, and not on {said}: {SAME}"
                    self._fail(reason, self._stack())
                    os._exit(1)
        elif self.store.check([asked]):
            step = int(self.store.get(asked))
            if progress.has_passed(step):
                said = f"{progress.name(self.rank)}, which is in {activity}"
                self.store.set(passed, json.dumps([step, said]))

    def _follow(self) -> None:
        """Another rank failed: answer the roll call, and end this one unless it ends itself."""
        stuck = not progress.activity.waits and progress.seconds > GRACE_S
        self._answer()
        self.cause = self._read_cause()
        if self.failing.wait(GRACE_S):
            return
        place = f"; it was in {progress.activity}, at\n{self._stack()}" if stuck else ""
        self._stop(place)
        time.sleep(LINGER_S)
        os._exit(1)

    def _follow_lost_store(self) -> None:
        """The store is lost: end this rank in its next phase. User code needs no store."""
        lost_s = time.monotonic()
        while not self.closing.wait(POLL_S) and not self.failing.is_set():
            if progress.activity.phase is not None and time.monotonic() - lost_s > GRACE_S:
                say(f"{progress.name(self.rank)} stops in {progress.activity}: {self._lost()}")
                os._exit(1)

    def _go_on_without(self, rank: int, why: str) -> None:
        """Tell the others that a rank ended, which they don't wait for."""
        if self.closing.is_set() or self.store.check([f"lost/{rank}"]):
            return
        say(f"{progress.name(rank)} ended ({why}); the others go on without it")
        progress.lost |= {rank}
        self.store.set(f"lost/{rank}", "")
        self.store.set("lost", "")

    def leave(self) -> None:
        """Leave without those that are lost, rank 0, which may hold the store, as the last one."""
        self.store.set(f"left/{self.rank}", "")
        while self.rank == 0 and any(self._is_there(r) for r in range(1, self.world_size)):
            time.sleep(ROLL_CALL_POLL_S)

    def _is_there(self, rank: int) -> bool:
        return rank not in progress.lost and not self.store.check([f"left/{rank}"])

    # --- messages ---

    def _fail(self, reason: str, details: str) -> None:
        """Announce the end of this rank within `2 · GRACE_S`, also where the store is frozen."""
        self.failing.set()
        speaker = _thread(lambda: self._announce(reason, details))
        speaker.join(timeout=2 * GRACE_S)
        if speaker.is_alive():
            say(f"{self._failed(reason)}; the store does not answer: {self.holder} is frozen")
        time.sleep(LINGER_S)

    def _announce(self, reason: str, details: str) -> None:
        """Print this failure with details if it is the first, else the first one's in a line."""
        try:
            if self.rank in progress.dispensable and self.cause is None:
                say(f"{self._failed(reason)}\n{details}")
                self._go_on_without(self.rank, reason)
                return
            if self.cause is None:
                self._answer()
                if self.store.add("failures", 1) > 1:
                    self.cause = self._read_cause()
            if self.cause is not None:
                self._stop()
                return
            cause = self._failed(reason) + self._roll_call()
            self.store.set("cause", cause)
            say(f"{cause}\n{details}")
        except RuntimeError:
            say(f"{self._failed(reason)}; {self._lost()}")

    def _announce_interrupt(self) -> None:
        with suppress(RuntimeError):  # of the store: then others have ended already
            if self.cause is None and self.store.add("failures", 1) == 1:
                where = f"{progress.name(self.rank)} was in {progress.activity}"
                self.store.set("cause", f"{INTERRUPTED}: all ranks end; {where}")
                say(f"{INTERRUPTED}: all ranks end; {where}")

    def _stop(self, place: str = "") -> None:
        """Say why this rank ends with another; of Ctrl-C that one has said enough."""
        if self.cause is not None and not self.cause.startswith(INTERRUPTED):
            say(f"{progress.name(self.rank)} stops: {self.cause}{place}")

    def _failed(self, reason: str) -> str:
        return f"{progress.name(self.rank)} failed in {progress.activity}: {reason}"

    def _lost(self) -> str:
        return f"the store is gone: {self.holder} was killed, or has left"

    def _answer(self) -> None:
        activity = progress.activity
        answer = [progress.name(self.rank), str(activity), progress.seconds, activity.waits]
        self.store.set(f"heard/{self.rank}", json.dumps(answer))

    def _read_cause(self) -> str:
        deadline_s = time.monotonic() + 1.5 * GRACE_S
        while not self.store.check(["cause"]):
            if time.monotonic() > deadline_s:
                return "another rank failed, and ended before it could say why"
            time.sleep(ROLL_CALL_POLL_S)
        return str(self.store.get("cause").decode())

    def _roll_call(self) -> str:
        """The ranks that do not answer, those in a phase of their own for longer than `GRACE_S`
        while this rank waits for them, or that wait elsewhere; text to append to the cause."""
        others = [r for r in range(self.world_size) if r != self.rank]
        deadline_s = time.monotonic() + GRACE_S
        while not self.store.check([f"heard/{r}" for r in others]):
            if time.monotonic() > deadline_s:
                break
            time.sleep(ROLL_CALL_POLL_S)
        silent = [r for r in others if not self.store.check([f"heard/{r}"])]
        text = ""
        if silent:
            more = f" and {len(silent) - SHOWN} more" if len(silent) > SHOWN else ""
            listed = ", ".join(map(progress.name, silent[:SHOWN]))
            text = f"; no word from {listed}{more}: killed, or frozen"
        if not progress.activity.waits:
            return text
        answers = [json.loads(self.store.get(f"heard/{r}")) for r in others if r not in silent]
        busy = [a for a in answers if not a[3] and a[2] > GRACE_S]
        for name, activity, seconds, _ in sorted(busy, key=lambda a: -a[2])[:SHOWN]:
            text += f"; {name} has been in {activity} for {seconds:.0f} s"
        return text if busy else text + waits_elsewhere(str(progress.activity), answers, SHOWN)


def _thread(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name="meshwright-watchdog", daemon=True)
    thread.start()
    return thread


def say(text: str) -> None:
    """Print to stderr, if it is still open: nothing may keep a failed rank from ending."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text.rstrip("\n") + "\n")
        sys.stderr.flush()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: a GPU's allocator raises torch.OutOfMemoryError, the CPU's a bare
    RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in text for words in ("out of memory", "can't allocate memory", "not enough memory")
    )


def memory_advice(predicted_peak_bytes: int | None) -> str:
    """The plan's expected peak memory of this rank, if known, and how to need less."""
    expected = (
        f"the plan expects a peak of {predicted_peak_bytes / 2**30:.2f} GiB here; "
        if predicted_peak_bytes is not None
        else ""
    )
    return (
        f"out of memory: {expected}way out: plan with more micro-batches, recompute='full' or a "
        "higher ZeRO stage (Overrides), or on more devices"
    )


# --- ranks that fell apart ------------------------------------------------------------------------

# Ranks that wait for each other in different places, as where one was given fewer batches.


OUTSIDE = ("leaving the process group", "checkpoint", "checking the optimizer", "user code")
UNEQUAL = (
    "ranks that were given other numbers of batches wait for each other so: give as many on every "
    "rank (data_loader does)"
)


def waits_elsewhere(here: str, answers: Sequence[Any], shown: int) -> str:
    """Ranks, of the answers (name, activity, seconds in it, whether they wait), that wait elsewhere
    than `here`, `shown` at most; text to append to a cause."""
    apart = [(name, activity) for name, activity, _, waits in answers if waits and activity != here]
    text = "".join(f"; {name} waits in {activity}" for name, activity in apart[:shown])
    unequal = any(_in_step(activity) != _in_step(here) for _, activity in apart)
    return f"{text}; {UNEQUAL}" if unequal else text


def _in_step(activity: str) -> bool:
    """Whether a rank is in a step, which others may have had one less of."""
    return not any(words in activity for words in OUTSIDE)
