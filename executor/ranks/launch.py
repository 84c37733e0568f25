"""Process group of a run: start under torchrun, broadcast of decisions, orderly shutdown."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # dist declares neither
    PrefixStore,
    Store,  # torch.distributed does not declare it
    TCPStore,
)
from torch.distributed import distributed_c10d as c10d

from meshwright.executor.errors import StateError
from meshwright.executor.ranks import background, joining
from meshwright.executor.ranks.joining import StartError
from meshwright.executor.ranks.watchdog import FIRST_STEP_FACTOR, Watchdog, progress, say

T = TypeVar("T")

TIMEOUT_S = 300.0  # a rank that makes no progress stops all after this long
TIMEOUT_VARIABLE = "MESHWRIGHT_TIMEOUT_S"  # overrides it
INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended

_watchdog: Watchdog | None = None  # one per process, as is the process group
_lifelines: Lifelines | None = None
_interrupts: Interrupts | None = None
before_leaving: list[Callable[[], object]] = []  # done when the process group is left
_store: tuple[str, int, str] | None = None  # host and port of the store, the prefix of this start


def under_torchrun() -> bool:
    """Whether torchrun's environment variables are set."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def running() -> bool:
    """Whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def rehearsed() -> bool:
    """Whether this process stands for a rank of a world that is not there (a rehearsal)."""
    return running() and dist.get_backend() == "fake"


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if running() else 1


def local_rank() -> int:
    """This process' number on its host, as torchrun gives it; 0 without."""
    return int(os.environ.get("LOCAL_RANK", 0))


def rank() -> int:
    """This process' rank; 0 without a process group."""
    return dist.get_rank() if running() else 0


def on_gpus() -> bool:
    """Whether the process group's backend is NCCL."""
    return torch.cuda.is_available() and "nccl" in dist.get_backend_config()


def device_here() -> torch.device:
    """The local GPU under NCCL, else the CPU."""
    if on_gpus() if running() else torch.cuda.is_available():
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def timeout_s() -> float:
    """Seconds without progress after which the watchdog ends all ranks. Raises ValueError for an
    illegal `MESHWRIGHT_TIMEOUT_S`."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise StartError(
            f"={text!r:.80}",
            place=TIMEOUT_VARIABLE,
            legal="seconds, more than 0",
            way_out="set it so, or leave it out",
        )
    return seconds


def start(backend: str) -> None:
    """Join the process group that torchrun's environment describes, unless it is already joined,
    and start the watchdog.

    Until the first step is done every phase may take `FIRST_STEP_FACTOR` times the timeout; ranks
    have the timeout to come. Raises RuntimeError where a rank has no GPU for nccl, or where the
    others don't come.
    """
    global _watchdog, _lifelines, _interrupts, _store
    if running() or not under_torchrun():
        return
    if backend == "nccl":
        if local_rank() >= torch.cuda.device_count():
            raise StateError(
                f"the cluster's backend is nccl, but local rank {local_rank()} finds "
                f"{torch.cuda.device_count()} GPUs",
                legal="a GPU for each rank of a host",
                way_out="launch as many ranks as there are GPUs, or use Cluster.local(n, 'cpu') to "
                "run on CPU processes",
            )
        torch.cuda.set_device(local_rank())
    limit_s = timeout_s()
    longest = timedelta(seconds=FIRST_STEP_FACTOR * limit_s)
    me, world = joining.place()
    if world > 1:
        sys.excepthook = _end_by_hook
    shared = joining.connected(me, limit_s=limit_s, timeout=longest)
    prefix = joining.agreed_prefix(shared, me, world, limit_s)
    if world > 1:
        _store = shared.host, shared.port, prefix
        _watchdog = Watchdog(
            _client("watch", longest),
            rank=me,
            world_size=world,
            limit_s=limit_s,
            holder=f"{joining.holder_of_store()}, which holds it,",
            first_step=lambda: _shorten_timeouts(limit_s),
        )
        # a script may just end; a thread that comes back from the store while the interpreter ends
        # would abort the process
        atexit.register(_watchdog.close)
        watched = PrefixStore(f"{prefix}/lifelines", shared)
        _lifelines = Lifelines(watched, shared.host, me, _watchdog.lose)
        _interrupts = Interrupts(_end_interrupted)
    with progress.during("joining the process group", waits=True):
        dist.init_process_group(
            backend, store=PrefixStore(prefix, shared), rank=me, world_size=world, timeout=longest
        )
    if world > 1:
        sys.excepthook = _end_by_hook  # torch has put its own around it, which prints when it ends


def _client(name: str, timeout: timedelta) -> PrefixStore:
    """A connection to the store, which serves one request at a time, under a prefix."""
    assert _store is not None, "the ranks have not come together"
    host, port, prefix = _store
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return PrefixStore(f"{prefix}/{name}", client)


def meeting_store() -> PrefixStore:
    """Store in which replicas wait for each other. Raises StateError where the process group was
    made by someone else."""
    if _store is None:
        raise StateError(
            "the process group is the script's own, and replicas wait for each other in the store "
            "of this package's",
            legal="ranks that auto_parallelize starts",
            way_out="leave out init_process_group, or plan without replicas",
        )
    return _client("watch", timedelta(seconds=timeout_s()))


def _shorten_timeouts(limit_s: float) -> None:
    """Set every process group's timeout to a step's, in place of the first step's."""
    shorten = getattr(c10d, "_set_pg_timeout", None)
    if shorten is None:  # private: without it only the watchdog keeps the limit
        return
    for group in list(c10d._world.pg_map):
        shorten(timedelta(seconds=limit_s), group)


def agree_on(decide: Callable[[], T]) -> T:
    """`decide()` of rank 0, or its error, broadcast to all ranks.

    A plan is solved, and a profile measured, on one rank only: so no two can disagree. Ranks that
    are apart decide for themselves.
    """
    if world_size() == 1 or progress.apart:
        return decide()
    box: list[Any] = [None]
    if rank() == 0:
        try:
            box = [(decide(), None)]
        except Exception as error:  # noqa: BLE001 - the others wait for this rank, whatever happens
            box = [(None, error)]
    dist.broadcast_object_list(box, src=0)
    decided: tuple[T, Exception | None] = box[0]
    if decided[1] is not None:
        raise decided[1]
    return decided[0]


def stop() -> None:
    """Destroy the process group when all ranks are done. The watchdog ends this process where that
    takes longer than the timeout."""
    global _watchdog, _lifelines, _interrupts
    if not running():
        return
    with progress.during("leaving the process group", waits=True):
        background.finish_all()  # it may need the group
        while before_leaving:
            before_leaving.pop()()
        if progress.dispensable and _watchdog is not None:
            _watchdog.leave()
        else:
            dist.barrier()
    if _lifelines is not None:
        _lifelines.close()
        _lifelines = None
    if _watchdog is not None:
        atexit.unregister(_watchdog.close)
        _watchdog.close()
        _watchdog = None
    if _interrupts is not None:
        _interrupts.close()
        _interrupts = None
    dist.destroy_process_group()
    gc.collect()
    time.sleep(0.3)  # gloo's threads must be gone before the interpreter is
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def distributed(backend: str = "gloo") -> Iterator[None]:
    """A process group inside; an error of one rank is reported and ends all ranks.

    Without `os._exit` the other ranks would wait for this one until the process group's timeout.
    `sys.exit()` and `sys.exit(0)` leave in order, when the other ranks do.
    """
    try:
        start(backend)
        try:
            yield
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
            stop()
            raise
        stop()
    except BaseException as error:
        if world_size() == 1 and not _ends_in_a_line(error):
            raise
        _end(error)


def _end_by_hook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """`sys.excepthook` for a script without `distributed`: an error of one rank ends all ranks."""
    if _watchdog is None and not _ends_in_a_line(error):
        sys.__excepthook__(kind, error, trace)
    else:
        _end(error)


def _ends_in_a_line(error: BaseException) -> bool:
    """Whether an error before the process group says all in a line."""
    if _watchdog is not None:
        return True
    among_ranks = under_torchrun() and os.environ["WORLD_SIZE"] != "1"
    return among_ranks and isinstance(error, StartError | KeyboardInterrupt)


def _end(error: BaseException) -> NoReturn:
    """Report what this rank raised, and end its process."""
    name = f"rank {os.environ.get('RANK', rank())}"
    if isinstance(error, KeyboardInterrupt):
        _end_interrupted()
    if _watchdog is not None:
        _watchdog.report(error)
    elif isinstance(error, StartError):
        say(f"{name} failed: {error.with_code()}")
    else:  # the process group is the user's own
        say(f"{name} failed: {''.join(traceback.format_exception(error))}")
    code = error.code if isinstance(error, SystemExit) else 1
    _leave(code if isinstance(code, int) else 1)


def _end_interrupted() -> NoReturn:
    """End this process after Ctrl-C, with one line of all ranks."""
    if _watchdog is not None:
        _watchdog.interrupt()
    elif os.environ.get("RANK", "0") == "0":
        say("interrupted (Ctrl-C) before the ranks had come together: all end")
    _leave(INTERRUPTED)


def _leave(code: int) -> NoReturn:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


# --- interrupts -----------------------------------------------------------------------------------

# Ctrl-C in a rank: Python raises KeyboardInterrupt when its main thread runs bytecode again, which
# a rank that waits for others inside of a library may never do.
#
# The C handler of a signal writes to a descriptor at once, whatever the main thread does. A thread
# reads there, and where the interrupt is not raised within `PATIENCE_S` it ends the rank. Code that
# catches KeyboardInterrupt has all the time that it wants.


PATIENCE_S = 3.0


class Interrupts:
    """Calls `ends` where SIGINT does not become a KeyboardInterrupt; nothing where the process
    handles the signal in a way of its own, or this is not its main thread."""

    def __init__(self, ends: Callable[[], None]) -> None:
        self.ends = ends
        self.raised = threading.Event()
        self.installed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if not self.installed:
            return
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # somebody else listens
            signal.set_wakeup_fd(before)
            self.installed = False
            return
        signal.signal(signal.SIGINT, self._raise)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._listen, name="meshwright-interrupts", daemon=True).start()

    def close(self) -> None:
        """Handle the signal as before."""
        if not self.installed:
            return
        self.installed = False
        with suppress(ValueError):  # not the main thread
            if signal.getsignal(signal.SIGINT) == self._raise:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            descriptor = signal.set_wakeup_fd(-1)
            if descriptor not in (-1, self.writer.fileno()):
                signal.set_wakeup_fd(descriptor)
        self.writer.close()  # ends the thread

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.raised.set()
        signal.default_int_handler(number, frame)

    def _listen(self) -> None:
        with self.reader:
            while numbers := self.reader.recv(64):
                if signal.SIGINT not in numbers or signal.getsignal(signal.SIGINT) != self._raise:
                    continue
                if not self.raised.wait(PATIENCE_S) and self.installed:
                    self.ends()
                self.raised.clear()


def _forget() -> None:
    """In a forked process: its signals are not this one's."""
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


# --- lifelines ------------------------------------------------------------------------------------

# Lifelines: a connection of every rank to rank 0, which the kernel closes when the process ends.
#
# A killed rank says nothing, and those that don't wait for it just then hear of it from nobody. Its
# end of the connection closes at once, though, be it busy, in user code or out of memory; a beat in
# the store would not tell a killed rank from one that holds the interpreter's lock for long. A rank
# that leaves in order writes `GOODBYE` before. A host that loses its power or its network closes
# nothing: that is for the timeout.
#
# Rank 0 listens on a port of its own, says it in the store with a random word, and takes those who
# know the word. Where no connection can be made, there is none, and the timeout stays.


log = logging.getLogger(__name__)
KEY = "lifelines"
GOODBYE = b"."
POLL_S = 0.5
CONNECT_S = 10.0
LONGEST = 100  # bytes of a greeting


class Lifelines:
    """This rank's end. `lost` is called, in a thread of its own, with a rank whose process ended
    without a goodbye; ranks that are not 0 hear of rank 0 alone."""

    def __init__(self, store: Store, host: str, rank: int, lost: Callable[[int], None]) -> None:
        self._store, self._host, self._rank, self._lost = store, host, rank, lost
        self._closing = threading.Event()
        self._server = _listening(store) if rank == 0 else None
        self._ends: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._run, name="meshwright-lifelines", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._drop)  # a child must not hold its parent's end

    def close(self) -> None:
        """Say goodbye."""
        atexit.unregister(self.close)
        self._closing.set()
        self._thread.join(timeout=4 * POLL_S)
        self._drop()

    def _drop(self) -> None:
        for end in (*self._ends, *filter(None, [self._server and self._server[0]])):
            end.close()
        self._ends.clear()

    def _run(self) -> None:
        try:
            if self._rank:
                self._watch([(self._connected(), 0)])
            elif self._server is not None:
                self._watch([])
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: of the store
            log.info("rank %d has no lifeline: %s", self._rank, error)

    def _connected(self) -> socket.socket:
        port, word = json.loads(self._store.get(KEY))
        end = socket.create_connection((self._host, port), timeout=CONNECT_S)
        end.sendall(f"{word} {self._rank}\n".encode())
        return end

    def _watch(self, known: Iterable[tuple[socket.socket, int]]) -> None:
        """Read what arrives until this rank leaves. An end's rank is None until it has greeted."""
        with selectors.DefaultSelector() as selector:
            if self._server is not None:
                selector.register(self._server[0], selectors.EVENT_READ)
            for end, rank in known:
                self._add(selector, end, rank)
            try:
                while not self._closing.is_set():
                    for key, _ in selector.select(POLL_S):
                        self._serve(selector, key)
            finally:
                for end in self._ends:
                    with suppress(OSError):
                        end.send(GOODBYE)

    def _serve(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        end = key.fileobj
        assert isinstance(end, socket.socket)
        if self._server is None or end is not self._server[0]:
            self._read(selector, end, key.data)
            return
        try:
            self._add(selector, end.accept()[0], None)
        except OSError:  # no file is left to open
            self._closing.wait(POLL_S)

    def _add(self, selector: selectors.BaseSelector, end: socket.socket, rank: int | None) -> None:
        end.setblocking(False)
        self._ends.add(end)
        selector.register(end, selectors.EVENT_READ, rank)

    def _read(self, selector: selectors.BaseSelector, end: socket.socket, rank: int | None) -> None:
        said = b""
        with suppress(ConnectionError):  # a killed peer may reset it
            said = end.recv(LONGEST)
        if rank is None and self._server is not None and said:
            word, _, name = said.decode(errors="replace").strip().partition(" ")
            if secrets.compare_digest(word, self._server[1]) and name.isdecimal():
                selector.modify(end, selectors.EVENT_READ, int(name))
                return
        selector.unregister(end)
        self._ends.discard(end)
        end.close()
        if rank is not None and not said:
            threading.Thread(target=self._lost, args=(rank,), daemon=True).start()


def _listening(store: Store) -> tuple[socket.socket, str] | None:
    """A socket that listens on all addresses, and the word; None where there can be none."""
    word = secrets.token_hex(16)
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        log.info("rank 0 has no lifelines: %s", error)
        store.set(KEY, "[]")  # nobody waits for it
        return None
    server.setblocking(False)
    store.set(KEY, json.dumps([server.getsockname()[1], word]))
    return server, word
