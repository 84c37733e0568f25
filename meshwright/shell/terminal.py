"""What commands write to stdout: the result alone, in colour where it is a terminal and rich is
installed (extra `meshwright[terminal]`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STYLES = {
    r"(?m)^[A-Z].*$": "bold",
    r"\bdoes not fit\b": "bold red",
    r"\btight\b|\ba tie\b": "yellow",
    r"\bfits\b|\bCHOSEN by \w+": "green",
    r"\+\d[\d.]*%|\+\d[\d.]* (?:µs|ms|s)\b": "red",
    r"(?<=[( ])-\d[\d.]*%|(?<= )-\d[\d.]* (?:µs|ms|s)\b": "green",
    r"`[^`]+`": "cyan",
}


def show(text: str, *, colour: bool = True) -> None:
    """Write a result. Pipes, files and `NO_COLOR` get plain text."""
    text = text.rstrip("\n")
    if colour and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        try:
            from rich.console import Console
            from rich.text import Text
        except ImportError:
            pass
        else:
            styled = Text(text)
            for pattern, style in STYLES.items():
                styled.highlight_regex(pattern, style)
            Console(file=sys.stdout, highlight=False).print(styled, soft_wrap=True)
            return
    sys.stdout.write(text + "\n")


@contextmanager
def stdout_is_the_result() -> Iterator[None]:
    """Send to stderr what libraries write to the process' stdout by themselves (a solver's banner),
    so that a result can be read by the next program. Where stdout was replaced in Python nothing
    has to be done."""
    own, replaced = sys.stdout, sys.stdout is not sys.__stdout__
    if replaced:
        yield
        return
    own.flush()
    result = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(result, "w", encoding=own.encoding or "utf-8", closefd=False) as stream:
            sys.stdout = stream
            yield
    finally:
        sys.stdout = own
        os.dup2(result, 1)
        os.close(result)
