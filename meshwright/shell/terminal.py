"""Results of commands on stdout, with colour and drawn tables where it is a terminal and rich is
installed (extra `meshwright[terminal]`)."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from meshwright.planner.document import Document, Table

HEADINGS = {r"(?m)^[A-Z].*$": "bold"}
STYLES = {
    r"\bdoes not fit\b": "bold red",
    r"\btight\b|\ba tie\b": "yellow",
    r"\bfits\b|\bCHOSEN by \w+": "green",
    r"\+\d[\d.]*%|\+\d[\d.]* (?:µs|ms|s)\b": "red",
    r"(?<=[( ])-\d[\d.]*%|^-\d[\d.]*%|(?<= )-\d[\d.]* (?:µs|ms|s)\b": "green",
    r"`[^`]+`": "cyan",
}
NUMBER = re.compile(r"[-+]?[\d.,]+(?:%| ?[A-Za-zµ]{1,3})?")  # a cell that has one alone


def show(result: str | Document, *, colour: bool = True) -> None:
    """Write a result. Pipes, files and `NO_COLOR` get plain text."""
    terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if colour and terminal and find_spec("rich"):
        _draw(result if isinstance(result, Document) else Document((result,)))
    else:
        sys.stdout.write(str(result).rstrip("\n") + "\n")


def _draw(document: Document) -> None:
    """Write to a terminal, by rich."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    last: str | Table | None = None
    for part in document.parts:
        if isinstance(part, Table):
            console.print(_drawn(part))
        elif part or not isinstance(last, Table):  # tables have a line below them
            text = wrapped(part.rstrip("\n"), console.width)
            console.print(_styled(text, HEADINGS | STYLES), soft_wrap=True)
        last = part


def wrapped(text: str, width: int) -> str:
    """Lines broken between words, what follows indented by two; lines of a command stay whole."""
    lines = list[str]()
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapper = textwrap.TextWrapper(
            width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += [line] if line.endswith("\\") or not line.strip() else wrapper.wrap(line)
    return "\n".join(lines)


def _styled(text: str, styles: dict[str, str]) -> Any:
    from rich.text import Text

    styled = Text(text)
    for pattern, style in styles.items():
        styled.highlight_regex(pattern, style)
    return styled


def _drawn(part: Table) -> Any:
    """The table as rich draws it: numbers to the right and whole, text in as many lines as it
    takes."""
    from rich import box
    from rich.table import Table as Drawn

    drawn = Drawn(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column, head in enumerate(part.heads):
        cells = [row[column] for row in part.rows]
        number = any(cells) and all(NUMBER.fullmatch(cell) for cell in cells if cell)
        drawn.add_column(
            head, justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    for row in part.rows:
        drawn.add_row(*(_styled(cell, STYLES) for cell in row))
    return drawn


@contextmanager
def stdout_is_the_result() -> Iterator[None]:
    """Send to stderr what libraries write to the process' stdout by themselves (a solver's banner),
    so that a result can be read by the next program. Where stdout was replaced in Python nothing
    has to be done."""
    stdout, replaced = sys.stdout, sys.stdout is not sys.__stdout__
    if replaced:
        yield
        return
    stdout.flush()
    result = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(result, "w", encoding=stdout.encoding or "utf-8", closefd=False) as stream:
            sys.stdout = stream
            yield
    finally:
        sys.stdout = stdout
        os.dup2(result, 1)
        os.close(result)


# --- answers --------------------------------------------------------------------------------------

# The answer of a command: as data for `--json`, and to read.


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Data of an answer, or its JSON, and the same as text or tables, each made when it is asked
    for; `code` is the exit status."""

    data: Callable[[], Any]
    text: Callable[[], str | Document]
    code: int = 0

    def show(self, *, as_json: bool) -> None:
        """Write it to stdout."""
        if as_json:
            data = self.data()
            show(data if isinstance(data, str) else json.dumps(data, indent=2), colour=False)
        else:
            show(self.text())


def listed(title: str, items: Iterable[object]) -> list[str]:
    """Lines of a title and the items under it; none without items."""
    lines = [f"  - {item}" for item in items]
    return [title, *lines] if lines else []


def say(text: str) -> None:
    """Write a line to stderr, beside the answer."""
    sys.stderr.write(text + "\n")
