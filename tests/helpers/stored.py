"""What is made once for all tests, workers, ranks and runs: traced models and references.

    graph = stored("llama", 4, "bf16", make=lambda: traced(...), models=(models,))

An entry is a pickle in a folder of the checkout, named by a digest of its key, of the code that
makes it (`MAKING`, the modules `models` that define what is traced) and of the versions of torch
and transformers: a change of any makes another entry, so that entries live between runs.
"""

import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".pytest_cache" / "stored"
MOST_BYTES = 2**30  # older entries leave
# rooms that trace, cut into blocks and analyse, and those whose values they make
MAKING: tuple[str, ...] = (
    "planner/tracing", "planner/blocks.py", "planner/operators", "planner/batch.py",
    "costmodel", "profiles/inputs",
)  # fmt: skip

_here: dict[str, Any] = {}


def stored(
    *key: object,
    make: Callable[[], T],
    models: tuple[ModuleType, ...] = (),
    rooms: tuple[str, ...] = MAKING,
) -> T:
    """The value of `make()` under `key`, whose parts have a repr that says all of them; from this
    process, or from the folder, or made by the code of `rooms`. It is shared: nobody may change it.
    """
    name = _digest(repr(key), _code_of(rooms), *map(_code, models))
    if name not in _here:
        file = FOLDER / name
        try:
            _here[name] = pickle.loads(file.read_bytes())
        except FileNotFoundError:
            _here[name] = make()
            _write(file, pickle.dumps(_here[name]))
    return _here[name]


def _write(file: Path, content: bytes) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=FOLDER, delete=False) as new:
        new.write(content)
    os.replace(new.name, file)


def clear_old() -> None:
    """Remove the entries longest unread where all take more than `MOST_BYTES`."""
    if not FOLDER.exists():
        return
    files = sorted(FOLDER.iterdir(), key=lambda f: f.stat().st_atime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@cache
def _code_of(rooms: tuple[str, ...]) -> str:
    places = [ROOT / room for room in rooms]
    files = [f for p in places for f in ([p] if p.is_file() else sorted(p.rglob("*.py")))]
    versions = [sys.version, version("torch"), version("transformers")]
    return _digest(*versions, *(file.read_text() for file in files))


@cache
def _code(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text()
