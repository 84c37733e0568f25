"""Lifelines: a connection of every rank to rank 0, which the kernel closes when the process ends.

A killed rank says nothing, and those that don't wait for it just then hear of it from nobody. Its
end of the connection closes at once, though, be it busy, in user code or out of memory; a beat in
the store would not tell a killed rank from one that holds the interpreter's lock for long. A rank
that leaves in order writes `GOODBYE` before. A host that loses its power or its network closes
nothing: that is for the timeout.

Rank 0 listens on a port of its own, says it in the store with a random word, and takes those who
know the word. Where no connection can be made, there is none, and the timeout stays.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from torch._C._distributed_c10d import Store  # torch.distributed does not declare it

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
