"""Lock of a run's folder, so that no two jobs write into one.

The lock is the kernel's, on `.run.lock` (`filelock`): it ends with its process, however that ends.
`.run.owner` says for readers who holds it. A job that was started anew on another host, by the name
that torchrun or Slurm gives it, does not wait until a file server notices that the first is lost.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from meshwright.executor.ranks import launch
from meshwright.profiles.inputs import MeshwrightError

log = logging.getLogger(__name__)

LOCK, OWNER = ".run.lock", ".run.owner"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context of a run that writes into `folder`; rank 0 holds the lock. Raises ValueError on all
    ranks where another run does. Collective."""
    lock = FileLock(folder / LOCK, timeout=0)
    launch.agree_on(lambda: _take(folder, lock))
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                (folder / OWNER).unlink()
            lock.release()


def _take(folder: Path, lock: FileLock) -> None:
    here = _here()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        other = _owner(folder)
        anew = here["job"] and here["job"] == other.get("job") and here["host"] != other.get("host")
        if not anew:
            raise MeshwrightError(
                f" is written to by {_words(other)}",
                place=f"fit: folder {str(folder)!r}",
                legal="a folder of its own for each run",
                way_out="give another folder, or wait until that run has ended",
            ) from None
        log.warning("fit: %s goes on in %s, without its lock", _words(other), folder)
    except (OSError, NotImplementedError) as error:
        log.warning(
            "fit: %s can't be locked, so that another job may write to it: %s", folder, error
        )
        return
    with suppress(OSError):
        (folder / OWNER).write_text(json.dumps(here), encoding="utf-8")


def _here() -> dict[str, Any]:
    """This process; `job` where torchrun or Slurm names it."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "begun": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": None if job == "none" else job,
    }


def _owner(folder: Path) -> dict[str, Any]:
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _words(owner: dict[str, Any]) -> str:
    if not owner:
        return "another run"
    job = f"job {owner['job']}, " if owner.get("job") else ""
    return f"{job}process {owner.get('pid')} on {owner.get('host')}, begun at {owner.get('begun')}"
