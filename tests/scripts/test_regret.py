"""Plans that are chosen by price, against measured ones: bounds on what was reached."""

import statistics

from scripts.experts.rows import later_rows, published_rows
from scripts.experts.sweeps import sweeps
from tests.helpers.tiers import second_tier


@second_tier("three minutes: hundreds of published plans are priced")
def test_plans_chosen_by_price_are_near_the_best_measured() -> None:
    found = list(sweeps([*published_rows(), *later_rows()]))
    lost = [sweep.regret for sweep in found]
    assert len(found) >= 90
    assert statistics.mean(lost) < 0.022
    assert max(lost) < 0.27 and sum(own > 0.1 for own in lost) <= 7
    assert statistics.median(sweep.rank for sweep in found) >= 0.9
