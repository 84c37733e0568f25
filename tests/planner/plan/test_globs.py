"""Globs against a matcher that tries everything, and their time."""

from __future__ import annotations

import functools
import random
import time

import pytest

from meshwright.planner.plan import PlanError, glob


def matches(pattern: str, name: str) -> bool:
    """By its definition: every place of every wildcard, remembered."""
    tokens = [t for part in pattern.split("**") for t in (*part, "**")][:-1]

    @functools.cache
    def rest(i: int, j: int) -> bool:
        if i == len(tokens):
            return j == len(name)
        token, here = tokens[i], name[j : j + 1]
        inside = bool(here) and here not in ".:"
        if token == "**":
            return rest(i + 1, j) or (bool(here) and rest(i, j + 1))
        if token == "*":
            return rest(i + 1, j) or (inside and rest(i, j + 1))
        return (inside if token == "?" else here == token) and rest(i + 1, j + 1)

    return rest(0, 0)


def test_globs_are_as_defined() -> None:
    draw, agreed = random.Random(0), 0
    for _ in range(20_000):
        pattern = "".join(draw.choices(["a", "b", ".", "*", "**", "?", ":"], k=draw.randrange(9)))
        name = "".join(draw.choices("aab.:", k=draw.randrange(12)))
        # three stars are two and one, in whatever order
        pattern = pattern.replace("****", "**").replace("***", "**")
        found = bool(glob.__wrapped__(pattern).match(name))
        assert found == matches(pattern, name), (pattern, name)
        agreed += found
    assert agreed > 1000


@pytest.mark.parametrize(
    "pattern",
    ["*" * 60, "*" * 999, "*a" * 30, "**a" * 30, "*a**b" * 30 + "c", "**a*" * 100, "?*" * 300],
)
@pytest.mark.parametrize("name", ["a" * 1000, "a." * 500, "ab" * 500, "layers.0.up" * 90])
def test_globs_take_little_time(pattern: str, name: str) -> None:
    before = time.process_time()
    glob.__wrapped__(pattern).match(name)
    assert time.process_time() - before < 1.0


def test_a_long_pattern_is_refused() -> None:
    with pytest.raises(PlanError, match="too long"):
        glob("a" * 10**6)
