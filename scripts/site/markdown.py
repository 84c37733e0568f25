"""Markdown of generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`+[^`]*`+|^(?: {4}|\t).*$)", re.MULTILINE)
_SPECIAL = re.compile(r"([<>$*_|{}\[\]])")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """A table; columns of `numbers` are set to the right."""
    marks = ["--:" if head in numbers else "---" for head in heads]
    lines = [heads, marks, *([cell.replace("\n", " ") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def prose(text: str) -> str:
    """Plain text with code in backticks, so that nothing else in it is taken for Markdown; lines
    that begin with four blanks are code."""
    parts = _CODE.split(text)
    return "".join(part if k % 2 else _SPECIAL.sub(r"\\\1", part) for k, part in enumerate(parts))


def cell(text: str) -> str:
    """Prose in a table."""
    parts = _CODE.split(text.strip().replace("\n", " "))
    kept = (
        part.replace("|", r"\|") if k % 2 else _SPECIAL.sub(r"\\\1", part)
        for k, part in enumerate(parts)
    )
    return "".join(kept)


def code(text: str, language: str = "text") -> str:
    ticks = "````" if "```" in text else "```"
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}\n"


def directive(name: str, argument: str, body: str, depth: int = 3) -> str:
    """A directive, with more colons than those inside of it."""
    fence = ":" * depth
    return f"{fence}{{{name}}} {argument}\n{body.strip()}\n{fence}\n"
