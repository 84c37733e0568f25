"""Forks ranks from a process that has torch, transformers and Meshwright imported: a rank is ready
in milliseconds and not in seven seconds.

    rank_server.py <descriptor of a socket>

A request is a JSON `[script, arguments, environment, folder]` with the descriptors of stdout,
stderr and a pipe, on which the rank writes its pid and the server how it ended. The rank leads a
process group of its own and ends as any interpreter does. The server has one thread, no process
group and no device, so that a rank inherits nothing but modules.
"""

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import types
from pathlib import Path

IMPORTED = (
    "tests.parity.parity_checks", "tests.helpers.tiny", "scripts.zoo.models", "meshwright.cli",
    "hypothesis", "peft", "pytest",
)  # fmt: skip
MAX_REQUEST_BYTES = 2**20
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that comes when the parent ends


def serve(control: socket.socket) -> tuple[str, list[str]] | None:
    """Fork a rank per request until the other end is closed; returns in each rank, too, with its
    script and arguments."""
    running: dict[int, int] = {}  # pid -> the pipe that its end is written on
    while True:
        if select.select([control], [], [], 0.02 if running else None)[0]:
            request, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 3)
            if not request:
                return None
            pid = os.fork()
            if not pid:
                control.close()
                return _become_rank(*json.loads(request), descriptors)
            running[pid] = descriptors.pop()
            for descriptor in descriptors:
                os.close(descriptor)
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pipe = running.pop(ended[0])
            os.write(pipe, f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
            os.close(pipe)


def _become_rank(
    script: str, arguments: list[str], environment: dict[str, str], folder: str, pipes: list[int]
) -> tuple[str, list[str]]:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped rank too ends with us
    out, err, status = pipes
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.write(status, f"{os.getpid()}\n".encode())
    for descriptor in pipes:
        os.close(descriptor)
    return script, arguments


def run_as_main(script: str, arguments: list[str]) -> None:
    """As `python -P script *arguments` does."""
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    rank = serve(socket.socket(fileno=int(sys.argv[1])))
    if rank is not None:
        run_as_main(*rank)
