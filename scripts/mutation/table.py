"""Mutants of the product, as records: read from `mutants.txt`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("mutants.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A defect: `text`, a unique piece of a line of `file`, becomes `change`."""

    name: str
    kind: str
    file: str
    text: str
    change: str
    breaks: str

    def matches(self, text: str) -> bool:
        return text in (self.name, self.kind) or text in self.file

    def applied(self, source: str) -> str:
        """`source` with the defect.

        Raises `ValueError` where the text does not stand exactly once in it, or where what it
        makes is no Python.
        """
        if (times := source.count(self.text)) != 1:
            raise ValueError(
                f"mutant {self.name}: {self.file} has {self.text!r} {times} times; legal: once; "
                "whoever moves a line moves its mutants"
            )
        changed = source.replace(self.text, self.change)
        try:
            ast.parse(changed)
        except SyntaxError as error:
            raise ValueError(
                f"mutant {self.name}: {self.file} becomes no Python: {error}"
            ) from None
        return changed


def read_mutants(table: Path = TABLE) -> tuple[Mutant, ...]:
    """All mutants, in the order of the table."""
    return tuple(_mutants(table.read_text().splitlines()))


def _mutants(lines: list[str]) -> Iterator[Mutant]:
    kind = file = name = breaks = text = ""
    start = next(k for k, line in enumerate(lines) if line.startswith("["))
    for line in lines[start:]:
        sign, rest = line[:2], line[2:]
        if line.startswith("["):
            kind = line.strip("[]")
        elif sign == "@ ":
            file = rest
        elif sign == "- ":
            text = rest
        elif sign == "+ ":
            yield Mutant(name=name, kind=kind, file=file, text=text, change=rest, breaks=breaks)
        elif line:
            name, _, breaks = line.partition(": ")
