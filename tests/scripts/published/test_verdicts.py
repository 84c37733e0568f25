"""Published runs that ran, and such as ran out of memory, by the words of our verdicts."""

from collections.abc import Mapping

import pytest

from scripts.experts.rows import fp8_rows, out_of_memory_rows, published_rows
from scripts.published import Unpriced, evaluate_row, read_row
from tests.helpers.tiers import second_tier

ABLATION = "Alpa OSDI22 intra-op"


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


@second_tier("what lacks memory is refused by plan, and verdicts are test_rehearsing's")
def test_what_ran_out_of_memory_does_not_fit() -> None:
    rows = out_of_memory_rows()
    assert len(rows) == 4
    found = words(rows)
    assert found == {"does not fit": rows}


@second_tier("a published row is priced in test_predict")
@pytest.mark.parametrize("part", ["some", "all"])
def test_what_ran_is_told_otherwise(part: str) -> None:
    rows = (published_rows() + fp8_rows())[::5]
    if part == "some":
        rows = published_rows(ABLATION) + rows[::24]
    found = words(rows)
    assert sum(map(len, found.values())) > 0.9 * len(rows)
    assert set(found) == {"fits", "tight"}
