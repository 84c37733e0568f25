"""Intervals of measured over predicted: what they promise, they hold."""

from __future__ import annotations

import random
import statistics

import pytest

from scripts.experts.residuals import Residual, coverage, quantiles, table


def drawn(seed: int, models: int, rows: int = 8) -> list[Residual]:
    """Rows of models that have an error of their own each."""
    rng = random.Random(seed)
    own = {f"model {k}": rng.lognormvariate(0.1, 0.15) for k in range(models)}
    return [
        Residual(m, x * rng.lognormvariate(0, 0.05)) for m, x in own.items() for _ in range(rows)
    ]


@pytest.mark.parametrize(("models", "most"), [(12, 0.97), (30, 0.9), (100, 0.89)])
def test_rows_of_a_new_model_lie_within_as_often_as_is_said(models: int, most: float) -> None:
    within = []
    for seed in range(200):
        known, new = drawn(seed, models), drawn(1000 + seed, 1)
        low, high = quantiles(known)
        within += [low <= r.ratio <= high for r in new]
    assert 0.78 < statistics.mean(within) < most


def test_coverage_is_of_models_left_out() -> None:
    assert 0.7 < coverage(drawn(1, 40)) < 0.95
    alike = [Residual(f"model {k}", 1.0) for k in range(6)]
    assert coverage([*alike, Residual("other", 2.0)]) == pytest.approx(6 / 7)


def test_models_count_alike_however_many_rows_they_have() -> None:
    few = [Residual(f"model {k}", 1.0 + k / 100) for k in range(20)]
    assert quantiles([*few, *[Residual("model 19", 1.19)] * 500]) == quantiles(few)


def test_of_few_models_the_interval_reaches_to_the_last_row() -> None:
    assert quantiles([Residual("a", 0.9), Residual("b", 1.0), Residual("c", 1.3)]) == (0.9, 1.3)


def test_groups_of_few_rows_have_none_but_all() -> None:
    found = table({"all": drawn(0, 3, rows=2), "few": drawn(1, 3), "many": drawn(2, 6)})
    assert found.keys() == {"all", "many"}
    assert (found["many"]["rows"], found["many"]["models"]) == (48, 6)
