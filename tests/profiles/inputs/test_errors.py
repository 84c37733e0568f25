"""The fields of errors, and the text that is made of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from meshwright.planner.errors import TraceError
from meshwright.planner.plan import InfeasibleError, PlanError
from meshwright.profiles.inputs import MeshwrightError, shown


def test_the_text_is_made_of_the_fields() -> None:
    error = PlanError("=7", place="plan: zero", legal=(0, 1, 2, 3), way_out="change it")
    assert str(error) == "plan: zero=7; legal: 0, 1, 2, 3; change it"
    assert (error.place, error.legal, error.way_out) == ("plan: zero", "0, 1, 2, 3", "change it")
    assert str(PlanError("is missing", place="head")) == "head: is missing"
    assert isinstance(error, ValueError)


def test_a_legal_value_is_a_way_out() -> None:
    error = MeshwrightError(" is 0", place="tp", legal="1 or more")
    assert error.way_out == "give one of: 1 or more"
    assert str(error) == "tp is 0; legal: 1 or more"


def test_an_error_found_inside_of_a_place_keeps_its_fields() -> None:
    inner = MeshwrightError("=0", place="tp", legal="1 or more", way_out="raise it")
    outer = PlanError.of(inner, "plan: stage 0")
    assert str(outer) == "plan: stage 0: tp=0; legal: 1 or more; raise it"
    assert (type(outer), outer.place) == (PlanError, "plan: stage 0: tp")
    assert str(PlanError.of(ValueError("no"), "plan")) == "plan: no"


def test_fields_of_a_class_are_no_part_of_the_text() -> None:
    error = TraceError("no loss")
    assert str(error) == "no loss"
    assert error.place and error.legal and error.way_out


@pytest.mark.parametrize(
    "error",
    [
        PlanError("=7", place="plan: zero", legal="0", way_out="change it"),
        InfeasibleError("too large", [1.0], []),
        MeshwrightError("plain"),
    ],
)
@pytest.mark.parametrize("way", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_pass_between_ranks(error: MeshwrightError, way: Any) -> None:
    again = way(error)
    assert type(again) is type(error)
    names = ("place", "legal", "way_out")
    assert [str(again), *(getattr(again, n) for n in names)] == [
        str(error),
        *(getattr(error, n) for n in names),
    ]


def test_values_of_any_size_are_shown() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (10**5000, cyclic, deep, "x" * 10**6, {1: list(range(10**5))}, object()):
        assert len(shown(value)) < 200
    assert shown(10**30) == "1" + "0" * 30
