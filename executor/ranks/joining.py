"""Rendezvous of the ranks of one start, before there is a process group.

The store is rank 0's, or that of torchrun's agent. The agent may keep one for all restarts of its
ranks, with the keys of the dead in it, and the number of restarts differs between agents. So the
ranks of one start agree on a key prefix that no other start has: each writes a random word, and
rank 0 answers each word with its own, and says under it that all are there, or why they won't be.

Nothing tells a rank that died from one that is late, but who waits says for whom after `NOTICE_S`,
and gives up after the timeout: in one line each, before any library times out in its own words.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore  # dist declares neither of them

from meshwright.executor.errors import StateError
from meshwright.executor.ranks.watchdog import LINGER_S, SHOWN, say
from meshwright.profiles.inputs import shown
from meshwright.profiles.inputs.limits import MAX_DEVICES

NOTICE_S = 10.0  # of waiting
OWN_STORES = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"  # each start has a store of its own
)
POLL_S = 0.05


class StartError(StateError):
    """Ranks that do not come together; one line says why, without a traceback."""

    CODE = "MW302"
    PLACE = "environment of the ranks"
    LEGAL = "what torchrun sets, on hosts that reach each other"
    WAY_OUT = "launch with torchrun; each rank's own output says why it is not there"


def agent_holds_store() -> bool:
    """Whether the store is that of torchrun's agent, not rank 0's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def holder_of_store() -> str:
    """Holder of the store, for messages."""
    return "the first node's torchrun" if agent_holds_store() else "rank 0"


def place() -> tuple[int, int]:
    """This rank and the number of ranks, from torchrun's environment."""
    me, world = _number("RANK"), _number("WORLD_SIZE")
    if me >= world:
        raise StartError(
            f"={me} of WORLD_SIZE={world}",
            place="start: RANK",
            legal="0 to WORLD_SIZE - 1, as torchrun sets them",
            way_out="launch with torchrun",
        )
    return me, world


def connected(rank: int, *, limit_s: float, timeout: timedelta) -> TCPStore:
    """The store of this start, which waits for a key for `timeout`. Raises StartError where nobody
    holds it within `limit_s`."""
    host, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", most=65535)
    if not host:
        raise StartError(
            " is not set", place="start: MASTER_ADDR", way_out="launch with torchrun, which sets it"
        )
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise StartError(
            f"={shown(host)} can't be a host ({error})",
            place="start: MASTER_ADDR",
            legal="a name or address that all ranks reach",
            way_out="launch with torchrun",
        ) from error
    holds = rank == 0 and not agent_holds_store()
    if not holds:
        _await_listener(host, port, rank, limit_s)
    try:
        return TCPStore(
            host, port, is_master=holds, wait_for_workers=False, timeout=timeout, multi_tenant=holds
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise StartError(
            f"no store at MASTER_ADDR={host}, MASTER_PORT={port}: {reason}",
            place="start",
            legal="a free port of a host that all ranks reach",
        ) from error


def _await_listener(host: str, port: int, rank: int, limit_s: float) -> None:
    """Wait until somebody listens there: a store's own attempts fill the screen."""
    absent = f"{holder_of_store()} at MASTER_ADDR={host}, MASTER_PORT={port}"
    if agent_holds_store():
        absent += f" (after a host was lost torchrun may keep its address: set {OWN_STORES})"
    wait = _Wait(limit_s, speaks=rank == 1 or os.environ.get("LOCAL_RANK") == "0")
    while True:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=max(1.0, wait.left_s)).close()
            return
        wait.go_on(rank, absent)


def agreed_prefix(store: Store, me: int, world: int, limit_s: float) -> str:
    """A key prefix that all ranks of this start share, and no other start. Raises StartError after
    `limit_s`, on every rank that is there."""
    try:
        return _answers(store, me, world, limit_s) if me == 0 else _answer(store, me, limit_s)
    except StartError:
        raise
    except RuntimeError as error:  # of the store
        raise StartError(
            f"{holder_of_store()}, which holds the store, was killed or has left before all "
            "ranks were there",
            place="start",
            way_out="its own output says why",
        ) from error


def _answer(store: Store, me: int, limit_s: float) -> str:
    """The prefix as rank 0 tells it, once all have it."""
    word, wait = uuid.uuid4().hex, _Wait(limit_s, speaks=False)
    patience_s = 2 * LINGER_S  # rank 0 gives up first, and says for whom

    def wait_for(key: str) -> str:
        while not store.check([key]):
            if wait.is_long:
                wait.speaks = not any(store.check([f"meshwright/word/{r}"]) for r in range(1, me))
            wait.go_on(me, "rank 0", patience_s)
        return str(store.get(key).decode())

    store.set(f"meshwright/word/{me}", word)
    prefix = wait_for(f"meshwright/answer/{word}")
    store.set(f"{prefix}/here/{me}", "")
    wait.said = True  # rank 0 is there, and says more than this one knows
    if why_not := wait_for(f"{prefix}/all"):
        raise StartError(why_not)
    return prefix


def _answers(store: Store, me: int, world: int, limit_s: float) -> str:
    """Rank 0's prefix, once all others have it."""
    prefix, wait = f"meshwright/{uuid.uuid4().hex}", _Wait(limit_s, speaks=True)
    absent = list(range(1, world))
    while absent:
        for r in absent:  # a word of an earlier start is answered too, and read by nobody
            if store.check([f"meshwright/word/{r}"]):
                theirs = store.get(f"meshwright/word/{r}").decode()
                store.set(f"meshwright/answer/{theirs}", prefix)
        absent = [r for r in absent if not store.check([f"{prefix}/here/{r}"])]
        if absent:
            try:
                wait.go_on(me, _listed(absent))
            except StartError as error:
                store.set(f"{prefix}/all", str(error))
                time.sleep(LINGER_S)  # this rank may hold the store
                raise
    store.set(f"{prefix}/all", "")
    return prefix


class _Wait:
    """A wait of at most `limit_s` for other ranks, which says once that it is long."""

    def __init__(self, limit_s: float, *, speaks: bool) -> None:
        self.limit_s = limit_s
        self.speaks = speaks
        self.since_s = time.monotonic()
        self.said = False

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.since_s)

    @property
    def is_long(self) -> bool:
        return not self.said and self.limit_s - self.left_s > NOTICE_S

    def go_on(self, rank: int, absent: str, patience_s: float = 0.0) -> None:
        """Sleep a little. Raises StartError where the wait is over for whom is `absent`."""
        if self.left_s < -patience_s:
            raise StartError(
                f"no word from {absent} within {self.limit_s:g} s: killed, failed before "
                "the start, or not launched",
                place="start",
                way_out="its own output says which. Way out: mend that, or set "
                "MESHWRIGHT_TIMEOUT_S to more seconds where ranks are only slow to come",
            )
        if self.is_long:
            self.said = True
            if self.speaks:
                say(
                    f"rank {rank} waits at the start: no word from {absent} for {NOTICE_S:g} s; "
                    f"it gives up after {self.limit_s:g} s"
                )
        time.sleep(POLL_S)


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    listed = ", ".join(map(str, ranks[:SHOWN]))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{more}"


def _number(name: str, most: int = MAX_DEVICES) -> int:
    text = os.environ.get(name, "")
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) > most:
        raise StartError.refused(
            f"start: {name}",
            text,
            legal=f"a whole number from 0 to {most}, as torchrun sets it",
            way_out="launch with torchrun",
        )
    return int(text)
