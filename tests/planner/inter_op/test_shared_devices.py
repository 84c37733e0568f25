"""Devices with several stages evened out, against every cut."""

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.inter_op.shared_devices import even_out

DEVICES = np.array([0, 1, 0, 1])
LEVELS = np.zeros(4, dtype=np.int64)


def table(costs: list[float]) -> np.ndarray:
    """(1, C+1, C+1): sums over runs of blocks."""
    ends = np.concatenate([[0.0], np.cumsum(costs)])
    runs = ends[None, :] - ends[:, None]
    runs[np.tril_indices(len(ends))] = np.inf
    return runs[None]


def busiest(runs: np.ndarray, cuts: tuple[int, ...]) -> float:
    own = [runs[0, i, j] for i, j in pairwise(cuts)]
    return max(own[0] + own[2], own[1] + own[3])


@given(st.lists(st.integers(1, 5), min_size=4, max_size=8), st.data())
def test_moves_never_make_a_device_slower_or_too_full(
    costs: list[int], data: st.DataObject
) -> None:
    time_s, held = table([float(c) for c in costs]), table([1.0] * len(costs))
    every = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), 3)]
    cuts = data.draw(st.sampled_from(every))
    room = float(data.draw(st.integers(2, len(costs))))
    found, seconds = even_out(cuts, time_s, held, LEVELS, DEVICES, room)
    assert seconds == busiest(time_s, found) <= busiest(time_s, cuts)
    assert busiest(held, found) <= max(room, busiest(held, cuts))
    assert seconds >= min(busiest(time_s, own) for own in every)


def test_a_long_stage_is_made_up_for_by_a_short_one() -> None:
    """The last block takes three: its device's other stage gives one away."""
    time_s, held = table([1.0] * 7 + [3.0]), table([1.0] * 8)
    found, seconds = even_out((0, 2, 4, 6, 8), time_s, held, LEVELS, DEVICES, 100.0)
    assert (busiest(time_s, (0, 2, 4, 6, 8)), seconds) == (6.0, 5.0)
    assert len(found) == 5
