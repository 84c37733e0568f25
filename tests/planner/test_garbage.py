"""How often garbage is collected while a plan is searched."""

import gc

import pytest

from meshwright.planner.garbage import SELDOM, seldom_collected


@pytest.mark.parametrize("threshold", [(700, 10, 10), (0, 10, 10), (90_000, 10, 30)])
def test_collections_are_rare_inside_and_as_before_afterwards(
    threshold: tuple[int, int, int],
) -> None:
    before = gc.get_threshold()
    gc.set_threshold(*threshold)
    try:
        with pytest.raises(ValueError, match="ends"), seldom_collected():
            rare = tuple(map(max, SELDOM, threshold)) if threshold[0] else threshold
            assert gc.get_threshold() == rare
            first, second = seldom_collected(), seldom_collected()  # of two threads, say
            first.__enter__()
            second.__enter__()
            first.__exit__(None, None, None)
            assert gc.get_threshold() == rare
            second.__exit__(None, None, None)
            raise ValueError("ends")
        assert gc.get_threshold() == threshold
    finally:
        gc.set_threshold(*before)
