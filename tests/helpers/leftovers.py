"""What a run of tests may not leave behind: child processes, open files and sockets, temporary
files. While it lasts, temporary files of the run and of what it starts have a folder of their own.
"""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# what others leave, and how it ends: torchrun's folder of logs and torch's of compiled code, with
# the machine's temporary files; Python's tracker of shared memory, with this process
OF_OTHERS = ("torchelastic_", "torchinductor_", "multiprocessing.resource_tracker")
WAIT_S = 10.0  # a process that was told to end, ends


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield


def seen() -> set[str]:
    """Descriptors and temporary files there are before the run."""
    return {*_descriptors(), *_files()}


def since(before: set[str]) -> list[str]:
    """What there is beyond `before`, and every child process, after a moment's wait."""
    deadline = time.monotonic() + WAIT_S
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _left(before: set[str]) -> list[str]:
    found = [x for x in (*_descriptors(), *_files()) if x not in before]
    found += [f"process {pid}: {line}" for pid, line in _children()]
    return [x for x in found if not any(other in x for other in OF_OTHERS)]


def _descriptors() -> Iterable[str]:
    """Open files and sockets by what they are: `socket:[123]`, a path."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that listed the folder
            continue
        if target.startswith("socket:") or (target.startswith("/") and _counts(target)):
            yield target


def _counts(path: str) -> bool:
    return not path.startswith(("/dev/", "/proc/", "/memfd:")) and "pytest" not in path


def _files() -> Iterable[str]:
    return map(str, Path(tempfile.gettempdir()).iterdir())


def _children() -> Iterable[tuple[int, str]]:
    me = str(os.getpid())
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = status.read_text()
            state, parent = text.rpartition(")")[2].split()[:2]
            if parent == me and state != "Z":
                line = status.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()
                yield int(status.parent.name), line
        except OSError:  # it has ended meanwhile
            continue
