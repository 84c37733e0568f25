"""The answer of a command: as data for `--json`, and to read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.planner.document import Document
from meshwright.shell.terminal import show


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


def say(text: str) -> None:
    """Write a line to stderr, beside the answer."""
    sys.stderr.write(text + "\n")
