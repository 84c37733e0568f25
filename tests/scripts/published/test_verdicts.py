"""Published runs that ran, and such as ran out of memory, by the words of our verdicts."""

from collections.abc import Mapping

import pytest

from scripts.experts.rows import fp8_rows, out_of_memory_rows, published_rows
from scripts.published import Unpriced, evaluate_row, read_row
from tests.helpers.tiers import second_tier

ABLATION = "Alpa OSDI22 intra-op"
ALL = second_tier("the change tier has the table that has both, and a few rows of others")


def words(rows: list[dict[str, str]]) -> dict[str, list[Mapping[str, str]]]:
    """Rows by verdict, those that can't be priced left out."""
    found: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        try:
            prediction = evaluate_row(row).prediction
        except Unpriced:
            continue
        verdict = prediction.memory_verdict(read_row(row).cluster)
        found.setdefault(verdict, []).append(row)
    return found


def test_what_ran_out_of_memory_does_not_fit() -> None:
    rows = out_of_memory_rows()
    assert len(rows) == 4
    found = words(rows)
    assert found == {"does not fit": rows}


@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=ALL)])
def test_what_ran_is_told_otherwise(part: str) -> None:
    rows = (published_rows() + fp8_rows())[::5]
    if part == "some":
        rows = published_rows(ABLATION) + rows[::24]
    found = words(rows)
    assert sum(map(len, found.values())) > 0.9 * len(rows)
    assert set(found) == {"fits", "tight"}
