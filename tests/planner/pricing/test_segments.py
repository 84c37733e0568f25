"""Segments of blocks: seconds, kept bytes and those held while they run again."""

import itertools

import numpy as np
import pytest

from meshwright.costmodel.stages.sums import LATER, Sums
from meshwright.planner.plan.plan import segments_of
from meshwright.planner.pricing.segment_costs import SegmentBlock, segment_recompute
from tests.helpers.planning import sums_of
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import cut, net

INPUT, SAVED, FORWARD = 2.0, 34.0, 1.0  # of a Transformer layer, sbh


def block(policy: str, *, first: bool) -> SegmentBlock:
    sums = sums_of(
        forward_s=FORWARD, saved_bytes=SAVED - INPUT, input_bytes=INPUT, blocks=1.0,
        zero3_gather_s=0.5, full=(0.9, 0.0, 0.0, SAVED - INPUT),
    )  # fmt: skip
    return SegmentBlock(
        sums=sums, policy=policy, inside=0.0 if first else INPUT, leaving=INPUT * (not first)
    )


def segment(policy: str, size: int) -> list[SegmentBlock]:
    return [block(policy, first=k == 0) for k in range(size)]


@pytest.mark.parametrize("size", [2, 8])
def test_inputs_of_blocks_inside_are_held_while_they_run_again(size: int) -> None:
    found = segment_recompute(segment("full", size))
    assert found.seconds == pytest.approx(size * (FORWARD + 0.9))
    assert found.freed_bytes == size * SAVED - INPUT
    assert found.excess[LATER] == (size - 1) * INPUT + (SAVED - INPUT) + INPUT
    assert found.gather_s == (size - 1) * 0.5  # the last one's are there


def test_blocks_inside_may_keep_all() -> None:
    full, none = (segment_recompute(segment(policy, 4)) for policy in ("full", "none"))
    assert none.seconds == 4 * FORWARD < full.seconds
    assert none.freed_bytes == full.freed_bytes
    assert none.excess[LATER] == 4 * SAVED > full.excess[LATER]


def test_equal_blocks_are_estimated_from_their_sums() -> None:
    """As the search does, for n blocks in n/k segments."""
    count = 16
    whole = Sums(np.array(block("full", first=True).sums.times(count).array))
    for policy, size in itertools.product(("full", "none"), (2, 4, 8)):
        estimate = whole.recompute(f"{policy}/{size}")
        exact = segment_recompute(segment(policy, size))
        assert estimate.seconds == pytest.approx(count / size * exact.seconds)
        assert estimate.freed_bytes == pytest.approx(count / size * exact.freed_bytes)
        assert estimate.excess[LATER] == pytest.approx(exact.excess[LATER], abs=INPUT)
        assert estimate.gather_s == pytest.approx(count / size * exact.gather_s)


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (2, [(0, 2), (2, 4)]),
        (3, [(0, 3)]),
        pytest.param(8, [(0, 4)], marks=second_tier("sizes that divide and do not divide stay")),
        pytest.param(1, [], marks=second_tier("sizes that make segments stay")),
    ],
)
def test_segments_are_neighbours(size: int, found: list[tuple[int, ...]]) -> None:
    """Two at least; the head's backward follows its forward at once."""
    graph = cut(net())[0]
    assert segments_of(graph.blocks, size, graph.loss) == [range(*ends) for ends in found]
