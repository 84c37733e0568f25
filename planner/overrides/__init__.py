"""Overrides: what the user fixed, as restrictions of the search."""

from meshwright.planner.overrides.of_target import check_plan_for
from meshwright.planner.overrides.overrides import (
    OverrideError,
    Overrides,
    check_allow,
    check_overrides,
    each_dropped,
    making_logits,
    without,
)
from meshwright.planner.overrides.pinned import (
    allowed_without_effect,
    plan_overrides,
    without_effect,
)
from meshwright.planner.overrides.restrictions import Restrictions, restrict
