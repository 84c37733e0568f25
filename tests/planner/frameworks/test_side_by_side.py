"""A configuration run by its own software, and by the plan that it means here."""

from pathlib import Path

import pytest

from scripts.exports.side_by_side import CASES, THEIRS, compared
from tests.helpers.tiers import second_tier

pytestmark = [
    second_tier("values of configurations, and parity of plans, stay"),
    pytest.mark.skipif(not THEIRS.exists(), reason="scripts/setup_exports was not run"),
]


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_same(name: str, tmp_path: Path) -> None:
    theirs, ours = compared(name, tmp_path)
    assert theirs[-1] < theirs[0] and ours == pytest.approx(theirs, abs=2e-6)
