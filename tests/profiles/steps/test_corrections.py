"""Corrections from measured steps: known factors are found again, and plans that no factor has seen
are predicted better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest

from meshwright.profiles.steps import (
    BACKWARD,
    COMPONENTS,
    DATA_AXIS,
    FORWARD,
    NO_CORRECTIONS,
    STEP,
    TENSOR_AXIS,
    StepTiming,
    fitted,
    linked,
)

TENSOR = linked(TENSOR_AXIS, crosses=False)
DATA = linked(DATA_AXIS, crosses=False)
TRUE = {FORWARD: 1.4, BACKWARD: 0.7, TENSOR: 2.5, DATA: 0.5}
REST_S = 0.01  # of each term, which nothing corrects


def run(
    random: Random, plan: str, *, times: float = 1.0, noise: float = 0.03, samples: int = 15
) -> list[StepTiming]:
    """A plan whose steps take what the true factors say, up to noise, `times` over."""
    forward, tensor, data = random.uniform(0.5, 2), random.uniform(0.1, 1), random.uniform(0, 0.6)
    made = {
        "forward": {FORWARD: forward, TENSOR: tensor},
        "backward": {BACKWARD: 2 * forward, TENSOR: tensor},
        "reduction": {DATA: data},
    }
    made[STEP] = {
        name: sum(parts.get(name, 0.0) for parts in made.values()) for name in TRUE
    }  # fmt: skip
    return [
        row(
            plan,
            term,
            parts,
            measured_s=times * random.gauss(1, noise) * (REST_S + total(parts, TRUE)),
            samples=samples,
        )
        for term, parts in made.items()
    ]


def row(
    plan: str, term: str, parts: Mapping[str, float], *, measured_s: float, samples: int = 15
) -> StepTiming:
    return StepTiming(
        backend="gloo",
        precision="fp32",
        target="eager",
        basis="modelled",
        plan=plan,
        term=term,
        measured_s=measured_s,
        predicted_s=REST_S + sum(parts.values()),
        parts=parts,
        samples=samples,
    )


def total(parts: Mapping[str, float], factors: Mapping[str, float]) -> float:
    return sum(factors.get(name, 1.0) * seconds for name, seconds in parts.items())


def runs(seed: int, plans: int, **changes: float) -> list[StepTiming]:
    random = Random(seed)
    return [row for k in range(plans) for row in run(random, f"{seed}.{k}", **changes)]


def errors(rows: Sequence[StepTiming], factors: Mapping[str, float]) -> list[float]:
    """How far whole steps are off by these factors."""
    return [
        abs((REST_S + total(row.parts, factors)) / row.measured_s - 1)
        for row in rows
        if row.term == STEP
    ]


def test_true_factors_are_found_and_no_others() -> None:
    found = fitted(runs(1, 8)).found
    assert {name: own.factor for name, own in found.items()} == pytest.approx(TRUE, rel=0.2)
    assert {(own.plans, own.samples) for own in found.values()} == {(8, 8 * 15)}


@pytest.mark.parametrize(("plans", "left"), [(1, 0.6), (2, 0.5), (5, 0.5)])
def test_held_out_plans_are_predicted_better(plans: int, left: float) -> None:
    held_out = runs(99, 30)
    found = fitted(runs(2, plans))
    before, after = (
        sum(errors(held_out, factors)) / 30
        for factors in ({}, {name: found.factor(name) for name in COMPONENTS})
    )
    assert after < left * before


def test_one_plan_that_went_wrong_does_not_decide() -> None:
    wrong = run(Random(5), "wrong", times=6.0)
    found = fitted([*runs(3, 6), *wrong])
    assert {name: found.factor(name) for name in TRUE} == pytest.approx(TRUE, rel=0.25)


def test_more_samples_and_more_plans_are_believed_more() -> None:
    few, many, more = (
        fitted(rows).factor(TENSOR)
        for rows in (runs(4, 1, samples=1), runs(4, 1, samples=200), runs(4, 8, samples=200))
    )
    assert 1 <= few < many < more < 1.1 * TRUE[TENSOR]


def test_a_component_that_nothing_tells_stays_as_it_is() -> None:
    parts = {FORWARD: 1.0, TENSOR: 1e-3}
    found = fitted(
        row("only", term, parts, measured_s=2 * total(parts, {}))
        for term in ("forward", STEP)
    )  # fmt: skip
    assert list(found.found) == [FORWARD]
    assert found.factor(TENSOR) == 1.0 and found.factor(BACKWARD) == 1.0


def test_two_components_of_one_proportion_share_what_is_found() -> None:
    parts = {FORWARD: 1.0, TENSOR: 1.0}
    rows = [row("only", term, parts, measured_s=4.0) for term in ("forward", STEP)]
    found = fitted(rows)
    assert found.factor(FORWARD) == pytest.approx(found.factor(TENSOR))
    assert found.factor(FORWARD) == pytest.approx(2.0, rel=0.1)


def test_nothing_stored_corrects_nothing() -> None:
    assert fitted([]) == NO_CORRECTIONS and not NO_CORRECTIONS
    assert all(NO_CORRECTIONS.factor(name) == 1.0 for name in COMPONENTS)
    without_step = [each for each in runs(6, 3) if each.term != STEP]
    assert fitted(without_step) == NO_CORRECTIONS


def test_steps_as_priced_say_that_prices_are_right() -> None:
    exact = [replace(each, measured_s=each.predicted_s) for each in runs(7, 4)]
    assert fitted(exact).found
    assert all(own.factor == pytest.approx(1.0) for own in fitted(exact).found.values())


@pytest.mark.parametrize("times", [1e-6, 1e6])
def test_no_factor_is_beyond_all_reason(times: float) -> None:
    wild = [replace(each, measured_s=times * each.measured_s) for each in runs(8, 3)]
    assert all(1 / 16 <= own.factor <= 16.0 for own in fitted(wild).found.values())


def test_what_a_component_takes_is_not_made_nothing_to_mend_another() -> None:
    """A term that is below its compute leaves of a small part of it less, not nothing."""
    parts = {FORWARD: 1.0, TENSOR: 0.1}
    rows = [
        row(f"{k}", term, parts, measured_s=0.9) for k in range(2) for term in ("forward", STEP)
    ]
    found = fitted(rows)
    assert found.factor(TENSOR) > 0.8 and found.factor(FORWARD) < 0.9


def test_words_say_what_a_factor_rests_on() -> None:
    lines = fitted(runs(9, 3)).lines()
    assert lines[0].startswith("forward compute × 1.") and lines[0].endswith("3 plans, 45 steps")
