"""What changes a training's numbers is left out unless it is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.costmodel.quantized import QUANTIZED
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.restrictions import restrict
from meshwright.planner.overrides.values import ALLOWABLE, OverrideError, check_allow
from tests.planner.overrides.test_restrictions import layers


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, r"'both'\}: numbers change with it.*legal: none; .*allow=\[.quantized.\]"),
        ({"allow": ["quantized"], "precision": "fp16"}, r"fp16's scaled loss .*train in bf16"),
    ],
    ids=str,
)
def test_what_changes_numbers_needs_consent(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OverrideError, match=says):
        restrict(Overrides(quantized={"head": "both"}), layers(), **given)
    assert restrict(Overrides(), layers(), **given).quantizations == ("none",)
    assert restrict(Overrides(quantized="none"), layers(), **given).quantized == ("none",) * 8


def test_what_is_allowed_is_left() -> None:
    assert restrict(Overrides(), layers(), allow=ALLOWABLE).quantizations == QUANTIZED
    assert check_allow(["quantized", "quantized"]) == ("quantized",)
    for wrong in ("quantized", ["fp4"], None, [1]):
        with pytest.raises(
            OverrideError, match=r"allow=.*legal: a list of quantized, post_validation"
        ):
            check_allow(wrong)
