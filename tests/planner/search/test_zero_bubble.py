"""Zero-bubble schedules in the search: chosen where they pay and fit, and left where they don't."""

from __future__ import annotations

from typing import Any

from tests.helpers.enumeration import limited
from tests.helpers.planning import linears
from tests.planner.search.test_search import BATCH, CLUSTERS, search


def test_zb_h2_is_chosen_where_its_activations_fit() -> None:
    """It has a smaller bubble than ZB-H1, hides sends that 1F1B waits for, and holds more."""
    asked: dict[str, Any] = {"batch": 16, "pp": 4, "tp": 1, "forbid": ["virtual_stages"]}
    on, of = CLUSTERS["slow wires"], linears(512, 8, BATCH, 64)
    ample = search(on, of, **asked).best
    assert ample.plan.schedule == "zb_h2"
    assert ample.evaluation.in_flight == (7,) * 4
    asked["forbid"] = [*asked["forbid"], "zb_h2"]
    without = search(on, of, **asked).best
    assert without.step_time_s > 1.05 * ample.step_time_s
    peak = max(ample.evaluation.prediction.peak_memory_bytes)
    asked["forbid"] = ["virtual_stages"]
    tight = search(limited(on, peak - 1), of, **asked).best
    assert tight.plan.schedule != "zb_h2"
    assert ample.step_time_s < tight.step_time_s <= without.step_time_s * (1 + 1e-9)
