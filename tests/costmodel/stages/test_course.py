"""Peaks in the course of a step, followed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshwright.costmodel.blocks import Moment
from meshwright.costmodel.memory import Reduction, Trained
from meshwright.costmodel.schedules import Action
from meshwright.costmodel.stages import BlockBytes, Peak, StageBytes, course_peaks

ALONE = Reduction(
    zero=0, weight_bytes=4, summed=False, bucket_bytes=100, alone_bytes=0, received=False
)


def block(
    kept: float, during: float, number: int | None = None, put_off: float = 0.0
) -> BlockBytes:
    """Its backward is one operator, which lets go of all that was kept."""
    moment = Moment(during=during, after=-kept, released=0.0, put_off=put_off)
    parameters = () if number is None else (number,)
    return BlockBytes(kept=kept, passing=0.0, releases=True, course=[(moment, parameters)])


def stage(blocks: Sequence[BlockBytes], numels: Sequence[float] = (), **given: Any) -> StageBytes:
    trained = [Trained(numel=n, shards=1, block=k) for k, n in enumerate(numels)]
    own = StageBytes(
        fixed=1000.0, optimizer=0.0, blocks=blocks, leaving=0.0, sent={}, received={},
        trained=trained, reduction=ALONE,
    )  # fmt: skip
    return replace(own, **given)


def peak(own: StageBytes, num_microbatches: int) -> float:
    (found,) = course_peaks(
        [own], schedule="1f1b", num_microbatches=num_microbatches, num_devices=1, edges=frozenset()
    )
    return found.nbytes


def test_gradients_come_as_activations_go() -> None:
    """Two blocks keep 100 and 200; weights' gradients are 400 and 80 bytes."""
    own = stage([block(100, 10, 0), block(200, 20, 1)], [100, 20])
    assert peak(own, 1) == 1000 + max(300 + 20 + 80, 100 + 10 + 80 + 400, 480)
    # from the second micro-batch on all gradients are there
    assert peak(own, 2) == 1000 + max(300 + 20 + 80 + 480, 100 + 10 + 400 + 480)


def test_the_optimizer_may_be_the_highest_point() -> None:
    own = stage([block(100, 10, 0)], [100], optimizer=5000.0)
    (found,) = course_peaks(
        [own], schedule="1f1b", num_microbatches=1, num_devices=1, edges=frozenset()
    )
    assert found == Peak(nbytes=1000 + 400 + 5000)


def test_the_highest_point_is_named() -> None:
    """The first block's backward is the highest of the second micro-batch's: all gradients."""
    own = stage([block(100, 500, 0), block(200, 20, 1)], [100, 20])
    (found,) = course_peaks(
        [own], schedule="1f1b", num_microbatches=2, num_devices=1, edges=frozenset()
    )
    assert (found.action, found.stage, found.block) == (Action.BACKWARD, 0, 0)
    assert found.nbytes == 1000 + 100 + 500 + 400 + 480


@pytest.mark.parametrize(("microbatches", "in_flight"), [(1, 1), (2, 2), (8, 2)])
def test_messages_and_what_leaves_a_stage(microbatches: int, in_flight: int) -> None:
    """The first of two stages under 1F1B: the last message, an output or a gradient, is held beside
    what is kept, the gradient that was received by the last block's moments (here 7, of which it is
    a part), and two receives more are posted."""
    first = stage([block(100, 7)], leaving=5.0, sent={1: 5.0})
    second = stage([block(60, 9)], received={0: 5.0})
    found = course_peaks(
        [first, second],
        schedule="1f1b",
        num_microbatches=microbatches,
        num_devices=2,
        edges=frozenset({(0, 1)}),
    )
    posted = 5 * max(0, min(microbatches - 1, 2))
    assert found[0].nbytes == 1000 + in_flight * 100 + 5 + 7 + posted
    left = 5 if microbatches == 8 else 0  # the gradient before is on its way
    assert found[1].nbytes == 1000 + 60 + 9 + posted + left


def test_a_split_backward_keeps_what_its_second_half_needs() -> None:
    """ZB-H1 on two devices: after the first half 30 of 100 are left, and a gradient of 40."""
    own = stage([block(100, 20, 0, put_off=30)], [10], sent={1: 0.0}, received={0: 0.0})
    found = course_peaks(
        [own, own], schedule="zb_h1", num_microbatches=1, num_devices=2, edges=frozenset({(0, 1)})
    )
    assert [x.nbytes for x in found] == [1000 + 120, 1000 + 120]
    late = replace(own, blocks=[block(10, 0, 0, put_off=300)])
    (first, _) = course_peaks(
        [late, late], schedule="zb_h1", num_microbatches=1, num_devices=2, edges=frozenset({(0, 1)})
    )
    assert first.nbytes == 1000 + 300 + 40


@pytest.mark.parametrize(
    ("releases", "nbytes"), [(True, 100 + 30 + 45 - 40), (False, 100 + 30 + 45)]
)
def test_what_is_made_again_is_held_and_what_was_kept_is_let_go(
    releases: bool, nbytes: float
) -> None:
    moment = Moment(during=45, after=0.0, released=40, put_off=0.0)
    made = BlockBytes(kept=100, passing=30, releases=releases, course=[(moment, ())])
    assert peak(stage([made]), 1) == 1000 + nbytes


def test_a_second_half_holds_what_is_made_again_for_it() -> None:
    own = replace(block(10, 0, 0, put_off=300), late=25)
    late = stage([own], [10], sent={1: 0.0}, received={0: 0.0})
    found = course_peaks(
        [late, late], schedule="zb_h1", num_microbatches=1, num_devices=2, edges=frozenset({(0, 1)})
    )
    assert [x.nbytes for x in found] == [1000 + 300 + 25 + 40] * 2


def test_gradients_are_whole_until_the_last_backward() -> None:
    """Of virtual stages: those of one are there while another's backwards run, though ZeRO-1 leaves
    a shard of them in the end. So the peak is that of ranks that scatter nothing."""
    scattered = replace(ALONE, zero=1, summed=True)
    edges = frozenset((k, k + 1) for k in range(7))

    def peaks(shards: int) -> list[float]:
        own = [
            stage(
                [block(100, 10, 0)],
                sent={k + 1: 0.0},
                received={k - 1: 0.0},
                trained=[Trained(numel=100, shards=shards, block=0)],
                reduction=scattered,
            )
            for k in range(8)
        ]
        found = course_peaks(
            own, schedule="interleaved_1f1b", num_microbatches=16, num_devices=4, edges=edges
        )
        return [x.nbytes for x in found]

    assert peaks(shards=4) == peaks(shards=1)
