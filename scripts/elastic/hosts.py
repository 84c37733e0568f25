"""Hosts on this machine on which torchrun's agents run, that can be killed as a whole.

A host is a network namespace of `scripts/emulated_cluster`, with a link of its own (needs root), or
only a set of processes. Its processes, torchrun's agent and the ranks that it starts, are known by
a word in their environment, whatever sessions and groups they are in.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "MESHWRIGHT_TRIAL_HOST"
NAMESPACE = "meshwright-cluster-{pid}-{host}"
ADDRESS = "10.77.0.{number}"
PLAIN, EMULATED = "processes", "emulated"
# of torchrun: how soon a host that is gone is noticed, and how long to wait for one more
RENDEZVOUS = "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"


@dataclass(slots=True, kw_only=True)
class Host:
    """One host: the command that enters it, and its address."""

    number: int
    enter: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    word: str = field(default_factory=lambda: uuid.uuid4().hex)
    agent: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start a command; what it prints is added to `log`."""
        own = {**os.environ, **environment, MARK: self.word, "OMP_NUM_THREADS": "1"}
        if self.enter:
            own["GLOO_SOCKET_IFNAME"] = "eth0"
        with log.open("ab") as output:
            self.agent = subprocess.Popen(
                [*self.enter, *command],
                env=own,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL for all of its processes at once, until none is left."""
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        if self.agent is not None:
            self.agent.wait()

    def processes(self) -> list[int]:
        """Ids of those that run."""
        mark, found = f"{MARK}={self.word}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found


@contextmanager
def made_hosts(kind: str, count: int, gbit: float) -> Iterator[list[Host]]:
    """`count` hosts, and before them one for the rendezvous alone; nothing of them is left."""
    with ExitStack() as stack:
        if kind == EMULATED:
            hosts = stack.enter_context(_namespaces(count + 1, gbit))
        else:
            hosts = [Host(number=k) for k in range(count + 1)]
        for host in hosts:
            stack.callback(host.kill)
        yield hosts


@contextmanager
def _namespaces(count: int, gbit: float) -> Iterator[list[Host]]:
    command = [
        str(ROOT / "scripts" / "emulated_cluster"), "--hosts", str(count), "--gbit", f"{gbit:g}",
        "--", "sleep", "infinity",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as keeper:
        try:
            last = NAMESPACE.format(pid=keeper.pid, host=count - 1)
            while last not in _inside_one() and keeper.poll() is None:
                time.sleep(0.1)
            yield [
                Host(
                    number=k,
                    enter=("ip", "netns", "exec", NAMESPACE.format(pid=keeper.pid, host=k)),
                    address=ADDRESS.format(number=k + 1),
                )
                for k in range(count)
            ]
        finally:
            keeper.terminate()


def _inside_one() -> set[str]:
    """Namespaces in which the keeper's command has been started: they are complete."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = re.findall(r"^\S+", listed.stdout, re.MULTILINE)
    return {n for n in names if subprocess.run(
        ["ip", "netns", "pids", n], capture_output=True, check=True).stdout.strip()}  # fmt: skip


def start_store(host: Host, log: Path) -> str:
    """Start the store of a c10d rendezvous on a host that does no training; its endpoint."""
    port = _free_port()
    code = (
        "import time; from torch.distributed import TCPStore; "
        f"store = TCPStore('0.0.0.0', {port}, is_master=True, wait_for_workers=False); "
        "time.sleep(10**6)"
    )
    host.start([sys.executable, "-c", code], {}, log)
    return f"{host.address}:{port}"


def torchrun(endpoint: str, least: int, most: int, host: Host) -> list[str]:
    """The command of an agent with one rank, which takes part in a run of changing hosts."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{least}:{most}",
        "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint,
        "--rdzv-id", "trial", "--rdzv-conf", RENDEZVOUS, "--max-restarts", "20",
        "--local-addr", host.address, "-m",
    ]  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
