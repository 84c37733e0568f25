"""Prices of generation beside published numbers, to which nothing is fitted."""

import statistics

from scripts.validate_serving import ROWS, predicted
from tests.helpers.tiers import second_tier


@second_tier("prices by hand are kept; this is all models beside published numbers")
def test_published_numbers_are_near() -> None:
    errors = [predicted(row) / row.value - 1 for row in ROWS]
    assert statistics.median(map(abs, errors)) < 0.12
    assert all(-0.45 < error < 0.3 for error in errors)
    of_few = [e for row, e in zip(ROWS, errors, strict=True) if row.tp < 8]
    assert max(map(abs, of_few)) < 0.27
