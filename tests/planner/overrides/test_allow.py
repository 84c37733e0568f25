"""What changes a training's numbers is left out unless it is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.costmodel.quantized import QUANTIZED
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.restrictions import restrict
from meshwright.planner.overrides.values import ALLOWABLE, OverrideError, check_allow
from tests.helpers.refusals import assert_says, refusals
from tests.planner.overrides.test_restrictions import REFUSED, layers


@pytest.mark.parametrize("given", [{}, {"allow": ["quantized"], "precision": "fp16"}], ids=str)
def test_what_is_not_allowed_is_left_out(given: dict[str, Any]) -> None:
    assert restrict(Overrides(), layers(), **given).quantizations == ("none",)
    assert restrict(Overrides(quantized="none"), layers(), **given).quantized == ("none",) * 8


@pytest.mark.parametrize(("given", "says"), refusals(REFUSED, "restrict in fp16"))
def test_what_a_scaled_loss_can_not_have_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OverrideError) as caught:
        restrict(Overrides(**given), layers(), allow=["quantized"], precision="fp16")
    assert_says(caught.value, says)


def test_what_is_allowed_is_left() -> None:
    assert restrict(Overrides(), layers(), allow=ALLOWABLE).quantizations == QUANTIZED
    assert check_allow(["quantized", "quantized"]) == ("quantized",)


@pytest.mark.parametrize("wrong", ["quantized", ["fp4"], None, [1]])
def test_only_names_are_allowed(wrong: Any) -> None:
    with pytest.raises(OverrideError) as caught:
        check_allow(wrong)
    assert_says(
        caught.value,
        f"allow={wrong!r}; legal: a list of quantized, post_validation, e.g. allow=['quantized']",
    )
