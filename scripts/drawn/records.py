"""What was found of numbered cases, in a file of JSON lines: a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def resumed(
    numbers: Iterable[int],
    path: Path | None,
    read: Callable[[Mapping[str, Any]], T],
    found: Callable[[int], T],
) -> Iterator[T]:
    """What was `found` of each case, a dataclass with its `number`: `read` from the file where it
    has the case, else appended to it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    known = {data["number"]: data for data in map(json.loads, lines)}
    for number in numbers:
        if number in known:
            yield read(known[number])
            continue
        new: Any = found(number)
        if path:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(new)) + "\n")
        yield new
