"""Who is told of an end: that of a process without a goodbye, and no other."""

from __future__ import annotations

import json
import os
import socket
import threading
from queue import Queue

import torch.distributed as dist

from meshwright.executor.ranks.lifelines import KEY, Lifelines

LATE_S = 30.0
HOST = "127.0.0.1"


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
