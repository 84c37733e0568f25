"""Refusals as data: under a heading for each check, what is given and all that the error says.

# Overrides
{'tp': 0} => override tp=0; legal: an integer from 1 to 1000000, or None to leave it free
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from meshwright.profiles.inputs import MeshwrightError


def refusals(file: Path, heading: str) -> list[Any]:
    """Parameters (given, message) of a test, from the cases under a heading."""
    _, _, part = f"\n{file.read_text()}".partition(f"\n# {heading}\n")
    cases = [line.split(" => ", 1) for line in part.partition("\n# ")[0].splitlines()]
    assert cases, f"{file} has no cases under {heading!r}"
    return [pytest.param(ast.literal_eval(given), says, id=given) for given, says in cases]


@contextmanager
def refused(error: type[MeshwrightError], message: str) -> Iterator[None]:
    """What runs in here raises the error: this text, which says what is legal and what to do."""
    with pytest.raises(error) as caught:
        yield
    assert str(caught.value) == message
    assert caught.value.place and caught.value.legal and caught.value.way_out
