"""What was found of numbered cases, in a file of JSON lines: a run that was stopped goes on."""

from __future__ import annotations

import argparse
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


def asked_for(doc: str | None, cases: int) -> argparse.ArgumentParser:
    """A parser of which cases to draw, `cases` of them unless told, and where their record is."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=cases, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (%(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="JSON lines, appended")
    return parser
