"""Gradients in the course of backwards, followed by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshwright.costmodel.memory import GradientBytes, Reduction, Trained
from meshwright.costmodel.sharing import Sharing

BUCKET, ALONE = 100, 80  # bytes: parameters of 20 elements and more travel alone


def course(
    numels: Sequence[float], *, shards: int = 2, weight_bytes: int = 4, host: bool = False,
    alone: Sequence[int] = (), first: Trained | None = None, zero: int = 0, **given: Any,
) -> GradientBytes:  # fmt: skip
    """Of parameters on two ranks, but for those that are `alone`, by number."""
    trained = [
        Trained(numel=n, holders=h, shards=min(shards, h), block=k, host=host)
        for k, n in enumerate(numels)
        for h in [1 if k in alone else 2]
    ]
    trained[:1] = [first] if first else trained[:1]
    fixed = {"weight_bytes": weight_bytes, "bucket_bytes": BUCKET, "alone_bytes": ALONE}
    fixed |= {"kept_bytes": 4}
    how: dict[str, Any] = {"sharing": Sharing(zero=zero), "received": False, **given}
    return GradientBytes(trained, Reduction(**fixed, **how))


def backward(own: GradientBytes, *, last: bool = True) -> list[float]:
    """The most at each gradient, the last parameter's first."""
    own.begin(last=last)
    found = [own.take(k) for k in reversed(range(len(own.trained)))]
    own.end()
    return found


def test_what_nobody_sums_stays_where_autograd_left_it() -> None:
    own = course([10, 30], alone=(0, 1))
    assert backward(own, last=False) == [120, 160]
    assert backward(own) == [280, 200]  # a second gradient beside the first, till it is added
    assert own.finish() == 160


def test_buckets_of_gradients_that_are_summed() -> None:
    """10 + 10 elements fill a bucket of 80 bytes, which lies there with the first of them."""
    own = course([10, 10])
    assert backward(own) == [80 + 40, 80 + 40]
    assert own.finish() == 80
    # 12 and 15 elements are 108 bytes: each has a bucket
    own = course([15, 12])
    assert backward(own) == [48 + 48, 48 + 60 + 60]
    assert backward(course([30])) == [120]
    assert backward(course([30], weight_bytes=2)) == [120 + 60]


def test_what_nobody_sums_is_in_no_bucket_of_what_is_summed() -> None:
    """Experts between others: of the 10 and 10 elements around them one bucket of 80 bytes is made,
    and they are let go of as their shards, the experts' 40 bytes are left where they are."""
    own = course([10, 10, 10], alone=[1], zero=2)
    assert backward(own) == [80 + 40, 80 + 40, 80 + 40 + 40]
    assert own.finish() == 40 + 40


@pytest.mark.parametrize(("received", "each"), [(False, 120 + 60), (True, 2 * 120 + 60)])
def test_two_buckets_are_scattered_at_a_time(received: bool, each: float) -> None:
    own = course([30] * 4, zero=1, received=received)
    assert backward(own) == [each, 2 * each, 3 * each, 3 * each + 60]
    assert own.finish() == 4 * 60


@pytest.mark.parametrize(("zero", "first", "second"), [(1, 240, 240), (2, 360, 360 + 60)])
def test_when_stages_scatter(zero: int, first: float, second: float) -> None:
    """ZeRO-1 holds both gradients until then; ZeRO-2 two under way and their shards, in the second
    backward beside the first one's shard."""
    own = course([30, 30], zero=zero)
    backward(own, last=False)
    assert own.live == first
    own.begin(last=False)
    own.take(1)
    assert own.live == second


def test_a_bucket_is_scattered_once_at_a_time() -> None:
    """One bucket of 80 bytes, its shard of 40, and 80 that are received: the next backward's ends
    the one before, of which the shard stays."""
    own = course([10, 10], zero=2, received=True)
    live = list[float]()
    for _ in range(3):
        backward(own, last=False)
        live.append(own.live)
    assert live == [80 + 40 + 80, 40 + 200, 40 + 200]
    assert own.finish() == 40


def test_third_stage_and_host_hold_gradients_in_passing() -> None:
    """16-bit gradients of 60 bytes, the fp32 copy of 120 that is scattered, for which a shard of 60
    is left; then the next block's, while the copy is there until its own is made."""
    own = course([30, 30], zero=3, weight_bytes=2)
    assert backward(own) == [60 + 120, (120 + 60) + 60]
    assert own.live == 120  # the last one's copy goes with the end of the backward
    assert backward(own) == [120 + 60 + 120, 120 + 120 + 60]
    assert own.finish() == 120
    # as autograd made them where nobody sums them, else their shards
    alone = course([30] * 4, alone=range(4), host=True)
    assert backward(alone) == [120, 240, 360, 360]
    scattered = course([30] * 4, zero=2, host=True)
    assert backward(scattered) == [180, 360, 540, 600]
    assert alone.finish() == scattered.finish() == 0


def test_what_is_stepped_in_the_backward_is_let_go() -> None:
    """Beside 120 bytes of one gradient, the optimizer makes 2 for each of its 30 elements; of what
    is summed two buckets are under way, and the third's parameter is stepped beside them."""
    stepping = {"stepping": lambda numel: 2 * numel}
    own = course([30] * 3, alone=range(3), **stepping)
    assert backward(own) == [120 + 60] * 3
    assert own.live == own.finish() == 0
    own = course([30] * 4, **stepping)
    assert backward(own) == [120, 240, 360 + 60, 360 + 60]
    assert own.live == 240
    assert own.finish() == 0
    halves = course([30], alone=[0], weight_bytes=2, **stepping)
    assert backward(halves) == [120 + 60]


@pytest.mark.parametrize(("zero", "left"), [(0, 120), (3, 60)])
def test_a_gradient_of_several_readers_waits_for_the_first_of_them(zero: int, left: int) -> None:
    """30 elements, tied, in 16 bits: the last reader's part of 60 bytes waits beside the second
    block's gradient, of 20 elements, until the first reader's is added to it."""
    tied = Trained(numel=30, holders=2, shards=2, block=-1 if zero == 3 else 0, readers=2)
    own = course([30, 20], zero=zero, weight_bytes=2, first=tied)
    own.begin(last=True)
    assert own.take(0) == 60
    if zero == 3:  # the copy of 80 bytes is let go when the other one is scattered
        assert [own.take(1), own.take(0)] == [60 + 40 + 80, 60 + 40 + 80 + 60]
        own.end()
    else:
        assert [own.take(1), own.take(0)] == [60 + 80 + 40, 80 + 120 + 60]
    assert own.live == left + (40 if zero == 3 else 80)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_block_is_scattered_when_all_its_gradients_are_made(order: tuple[int, int]) -> None:
    """10 and 20 elements in 16 bits: copies of 120 bytes, shards of 60, whichever comes last."""
    own = course([10, 20], zero=3, weight_bytes=2)
    own = GradientBytes([replace(p, block=0) for p in own.trained], own.reduction)
    for shards in (0, 60):
        own.begin(last=True)
        assert max(own.take(k) for k in order) == shards + 60 + 120
        own.end()
        assert own.live == 60
