"""Corrections from measured steps: known factors are found again, and plans that no factor has seen
are predicted better."""

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
from tests.profiles.test_store import step

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
    made[STEP] = {name: sum(parts.get(name, 0.0) for parts in made.values()) for name in TRUE}
    taken = {t: times * random.gauss(1, noise) * (REST_S + total(made[t], TRUE)) for t in made}
    return [row(plan, term, parts, taken[term], samples) for term, parts in made.items()]


def row(
    plan: str, term: str, parts: Mapping[str, float], measured_s: float, samples: int = 15
) -> StepTiming:
    predicted_s = REST_S + sum(parts.values())
    return step(
        plan, term=term, measured_s=measured_s, predicted_s=predicted_s, parts=parts,
        samples=samples,
    )  # fmt: skip


def total(parts: Mapping[str, float], factors: Mapping[str, float]) -> float:
    return sum(factors.get(name, 1.0) * seconds for name, seconds in parts.items())


def runs(seed: int, plans: int, **changes: float) -> list[StepTiming]:
    random = Random(seed)
    return [row for k in range(plans) for row in run(random, f"{seed}.{k}", **changes)]


def errors(rows: Sequence[StepTiming], factors: Mapping[str, float]) -> list[float]:
    return [
        abs((REST_S + total(row.parts, factors)) / row.measured_s - 1)
        for row in rows
        if row.term == STEP
    ]


def test_true_factors_are_found_and_believed_by_their_samples() -> None:
    found = fitted(runs(1, 8)).by_component
    assert {name: own.factor for name, own in found.items()} == pytest.approx(TRUE, rel=0.2)
    assert {(own.plans, own.samples) for own in found.values()} == {(8, 8 * 15)}
    wrong = run(Random(5), "wrong", times=6.0)
    found = fitted([*runs(3, 6), *wrong])
    assert {name: found.factor(name) for name in TRUE} == pytest.approx(TRUE, rel=0.25)
    lines = fitted(runs(9, 3)).lines()
    assert lines[0].startswith("forward compute × 1.") and lines[0].endswith("3 plans, 45 steps")
    few, many, more = (
        fitted(rows).factor(TENSOR)
        for rows in (runs(4, 1, samples=1), runs(4, 1, samples=200), runs(4, 8, samples=200))
    )
    assert 1 <= few < many < more < 1.1 * TRUE[TENSOR]


@pytest.mark.parametrize(("plans", "left"), [(1, 0.6), (5, 0.5)])
def test_held_out_plans_are_predicted_better(plans: int, left: float) -> None:
    held_out = runs(99, 30)
    found = fitted(runs(2, plans))
    before, after = (
        sum(errors(held_out, factors)) / 30
        for factors in ({}, {name: found.factor(name) for name in COMPONENTS})
    )
    assert after < left * before


def test_components_that_nothing_tells_apart() -> None:
    parts = {FORWARD: 1.0, TENSOR: 1e-3}
    rows = (row("only", term, parts, 2 * total(parts, {})) for term in ("forward", STEP))
    found = fitted(rows)
    assert list(found.by_component) == [FORWARD]
    assert found.factor(TENSOR) == 1.0 and found.factor(BACKWARD) == 1.0
    parts = {FORWARD: 1.0, TENSOR: 1.0}
    rows = [row("only", term, parts, 4.0) for term in ("forward", STEP)]
    found = fitted(rows)
    assert found.factor(FORWARD) == pytest.approx(found.factor(TENSOR))
    assert found.factor(FORWARD) == pytest.approx(2.0, rel=0.1)
    # A term that is below its compute leaves of a small part of it less, not nothing
    parts = {FORWARD: 1.0, TENSOR: 0.1}
    rows = [row(f"{k}", term, parts, 0.9) for k in range(2) for term in ("forward", STEP)]
    found = fitted(rows)
    assert found.factor(TENSOR) > 0.8 and found.factor(FORWARD) < 0.9


def test_nothing_and_exact_prices_correct_nothing() -> None:
    assert fitted([]) == NO_CORRECTIONS and not NO_CORRECTIONS
    assert all(NO_CORRECTIONS.factor(name) == 1.0 for name in COMPONENTS)
    without_step = [each for each in runs(6, 3) if each.term != STEP]
    assert fitted(without_step) == NO_CORRECTIONS
    exact = [replace(each, measured_s=each.predicted_s) for each in runs(7, 4)]
    assert fitted(exact).by_component
    assert all(own.factor == pytest.approx(1.0) for own in fitted(exact).by_component.values())
    for times in (1e-6, 1e6):  # no factor is beyond all reason
        wild = [replace(each, measured_s=times * each.measured_s) for each in runs(8, 3)]
        assert all(1 / 16 <= own.factor <= 16.0 for own in fitted(wild).by_component.values())
