"""The fit of what FSDP hides: its loss, and that its constant moves prices the way it says."""

from __future__ import annotations

import pytest

from scripts.fits.fit_devices import BROAD
from scripts.fits.fit_fsdp import loss, residuals, rows_of


def test_far_residuals_weigh_by_their_size() -> None:
    assert loss(0.0) == 0 and loss(-0.05) == loss(0.05) == pytest.approx(0.05**2 / 2)
    assert loss(0.5) - loss(0.4) == pytest.approx(0.1 * BROAD)


def test_the_more_is_hidden_the_faster_a_step() -> None:
    rows = rows_of(None)
    assert {row.fitted for row in rows} == {True, False}
    assert {row.setup.cluster.device.name.startswith("a100") for row in rows} == {True, False}
    far = max(rows, key=lambda row: row.setup.dp)
    slow, middle, fast = (residuals(part, [far])[0] for part in (0.0, 0.5, 1.0))
    assert slow > middle > fast
