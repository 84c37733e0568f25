"""Names, ranks and globs: what they mean, by definition, and their limits."""

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.plan import PlanError, glob
from meshwright.planner.plan.plan import compress_names, compress_ranks
from meshwright.planner.plan.ranges import expand_names, expand_ranks
from meshwright.profiles.inputs.limits import MAX_DEVICES, MAX_NAMES
from tests.helpers.tiers import second_tier
from tests.planner.plan.test_plan import NAMES, RANKS

LATE_S = 10.0


@pytest.mark.parametrize(
    ("expand", "given"),
    [
        (expand_ranks, ["0-99999999999", f"0-{MAX_DEVICES}", "9" * 5000, "0-9999999," * 9 + "0",
                        None, 3, "", "1-0", ",".join(["0-1000000"] * 9),
                        "0," * 2**20 + "0-1000000"]),
        (expand_names, [["h.0-99999999999"], [f"h.0-{MAX_NAMES}"], ["h.0-60000", "g.0-60000"],
                        ["x" * 5000], ["h." + "9" * 5000 + "-" + "9" * 5001],
                        ["a"] * (MAX_NAMES + 1)]),
    ],
)  # fmt: skip
def test_what_is_too_long_is_not_listed(expand: Callable[..., Any], given: list[Any]) -> None:
    for wrong in given:
        before = time.process_time()
        with pytest.raises(PlanError) as caught:
            expand(wrong, "plan: here")
        assert time.process_time() - before < LATE_S
        assert caught.value.place == "plan: here" + ": ranks" * (expand is expand_ranks)
        assert caught.value.legal


def test_as_many_as_may_be_are_listed() -> None:
    assert len(expand_ranks(f"0-{MAX_DEVICES - 1}")) == MAX_DEVICES
    assert len(expand_names([f"h.0-{MAX_NAMES - 1}"])) == MAX_NAMES


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


@second_tier("twenty thousand draws; patterns of shardings and overrides stay")
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


# --- what they mean ------------------------------------------------------------------------------

few = settings(max_examples=25)


@few
@given(st.lists(NAMES, max_size=10))
def test_names_round_trip(names: list[str]) -> None:
    assert list(expand_names(compress_names(names))) == names


def test_names_are_written_as_ranges() -> None:
    names = ["embed", "h.0", "h.1", "h.2", "g.3", "g.5", "head"]
    assert compress_names(names) == ["embed", "h.0-2", "g.3", "g.5", "head"]
    assert expand_names(["h.3-1"]) == ("h.3-1",)  # descending: a name, for the check to refuse


@few
@given(RANKS)
def test_ranks_round_trip_in_order(ranks: tuple[int, ...]) -> None:
    assert expand_ranks(compress_ranks(ranks)) == ranks


def test_ranks_are_written_as_ranges() -> None:
    texts = {(0, 1, 2, 3): "0-3", (5,): "5", (0, 2, 4): "0,2,4", (0, 1, 8, 9): "0-1,8-9"}
    assert {ranks: compress_ranks(ranks) for ranks in texts} == texts
