"""Recompute per block against all choices there are, and the bound that the search relies on."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.stages.sums import Sums
from meshwright.planner.stages.recompute import choose_policies
from tests.helpers.planning import sums_of

LEGAL = ("none", "selective", "full")
COUNTS = st.integers(0, 12)


@st.composite
def made(draw: st.DrawFn) -> Sums:
    """A block of whole seconds and bytes, so that sums are exact in any order."""
    saved = draw(st.integers(1, 20))
    return sums_of(
        backward_s=draw(COUNTS),
        backward_host_s=draw(COUNTS),
        saved_bytes=saved,
        input_bytes=draw(st.integers(0, 3)),
        full=(draw(COUNTS), 0, draw(COUNTS), saved),
        selective=(draw(COUNTS), 0, draw(COUNTS), draw(st.integers(0, saved))),
    )


@st.composite
def chains(draw: st.DrawFn) -> list[Sums]:
    """Up to four blocks of up to three classes, in any order."""
    classes = draw(st.lists(made(), min_size=1, max_size=3))
    return draw(st.lists(st.sampled_from(classes), min_size=1, max_size=4))


def seconds(blocks: Sequence[Sums], policies: Sequence[str], device: str = "cuda") -> float:
    pairs = list(zip(blocks, policies, strict=True))
    busy = sum(float(own.backward_s + own.recompute(p).seconds) for own, p in pairs)
    host = sum(float(own.backward_host_s + own.recompute(p).host_s) for own, p in pairs)
    return max(busy, host) if device == "cuda" else busy + host


def freed(blocks: Sequence[Sums], policies: Sequence[str]) -> float:
    pairs = zip(blocks, policies, strict=True)
    return sum(float(own.recompute(p).freed_bytes) for own, p in pairs)


def used(blocks: Sequence[Sums], policies: Sequence[str]) -> float:
    kept = sum(float(own.saved_bytes + own.input_bytes) for own in blocks)
    return kept - freed(blocks, policies)


@given(
    chains(),
    st.floats(0, 1.1),
    st.sampled_from(["cuda", "cpu"]),
    st.sampled_from([LEGAL, ("none", "full"), ("full",), ("selective", "full"), ("none",)]),
)
def test_no_choice_that_fits_is_faster(
    blocks: list[Sums], part: float, device: str, legal: tuple[str, ...]
) -> None:
    room = float(round(part * used(blocks, ["none"] * len(blocks))))
    fitting = [
        seconds(blocks, policies, device)
        for policies in itertools.product(legal, repeat=len(blocks))
        if used(blocks, policies) <= room
    ]
    found = choose_policies(blocks, legal, room_bytes=room, device=device)
    if found is None:
        assert not fitting
        return
    assert set(found) <= set(legal)
    assert used(blocks, found) <= room
    assert seconds(blocks, found, device) == min(fitting)


def divided_s(blocks: list[Sums], needed: float) -> float:
    """Seconds at which blocks that may be divided free so many bytes: cheapest per byte first. For
    blocks of which selective recompute frees more per second than the rest of full."""
    steps = []
    for own in blocks:
        few, all_ = (
            [float(found.seconds), float(found.freed_bytes)]
            for found in (own.recompute("selective"), own.recompute("full"))
        )
        steps += [few, [all_[0] - few[0], all_[1] - few[1]]]
    total = 0.0
    for cost, nbytes in sorted(steps, key=lambda step: step[0] / step[1]):
        part = min(1.0, max(0.0, needed / nbytes))
        total, needed = total + part * cost, needed - part * nbytes
    return total


def test_deep_stages_of_one_class_reach_their_bound() -> None:
    """120 layers: where the bytes come out even, the bound is the answer."""
    layer = sums_of(backward_s=20, saved_bytes=100, full=(10, 0, 0, 100), selective=(1, 0, 0, 40))
    blocks = [layer] * 120
    found = choose_policies(blocks, LEGAL, room_bytes=12_000 - 40 * 75)
    assert found is not None and found.count("selective") == 75 and found.count("none") == 45
    assert divided_s(blocks, 3000.0) == pytest.approx(75)


@pytest.mark.parametrize("part", [0.91, 0.57, 0.23])
def test_many_classes_come_within_a_block_of_the_bound(part: float) -> None:
    """What divided blocks could reach at best, and no more than the smallest block above it."""
    sizes = np.random.default_rng(0).uniform(0.5, 2.0, 5)
    classes = [
        sums_of(
            backward_s=2 * s,
            saved_bytes=100 * s,
            full=(s**1.1, 0.0, 0.0, 100 * s),
            selective=(0.2 * s**0.9, 0.0, 0.0, 40 * s),
        )
        for s in sizes
    ]
    blocks = [classes[k % 5] for k in range(50)]
    room = part * used(blocks, ["none"] * 50)
    found = choose_policies(blocks, LEGAL, room_bytes=room)
    assert found is not None and used(blocks, found) <= room
    needed = used(blocks, ["none"] * 50) - room
    bound = divided_s(blocks, needed)
    added = seconds(blocks, found) - seconds(blocks, ["none"] * 50)
    assert bound - 1e-9 <= added <= bound + sizes.min() ** 1.1
