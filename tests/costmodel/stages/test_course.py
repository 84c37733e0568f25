"""Peaks in the course of a step, followed by hand; what stages hold there, and whether it fits."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.blocks import Moment
from meshwright.costmodel.memory import Reduction, Trained
from meshwright.costmodel.schedules import Action, Pipeline, moments
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.costmodel.stages import BlockBytes, Peak, StageBytes, device_peaks, walked
from meshwright.costmodel.stages.peak import (
    HELD,
    InFlight,
    fits,
    held_weights,
    room_bytes,
    stage_bytes,
    used_bytes,
)
from meshwright.costmodel.stages.stage import StageCosts
from meshwright.planner.pricing.course import placed
from meshwright.profiles.cluster import Cluster
from tests.costmodel.schedules.pipelines import Shape, shapes
from tests.helpers.planning import cluster

ALONE = Reduction(
    sharing=UNSHARED, weight_bytes=4, kept_bytes=4, bucket_bytes=100, alone_bytes=0, received=False
)


def block(
    kept: float, during: float, number: int | None = None, put_off: float = 0.0
) -> BlockBytes:
    """Its backward is one operator, which lets go of all that was kept."""
    moment = Moment(during=during, after=-kept, released=0.0, put_off=put_off)
    parameters = () if number is None else (number,)
    return BlockBytes(kept=kept, passing=0.0, releases=True, course=[(moment, parameters)])


def stage(blocks: Sequence[BlockBytes], numels: Sequence[float] = (), **given: Any) -> StageBytes:
    trained = [Trained(numel=n, holders=1, shards=1, block=k) for k, n in enumerate(numels)]
    own = StageBytes(
        fixed=1000.0, weights=600.0, optimizer=0.0, blocks=blocks, seeds=0.0, trained=trained,
        reduction=ALONE,
    )  # fmt: skip
    return replace(own, **given)


def peaks_of(
    stages: Sequence[StageBytes], schedule: str, m: int, devices: int, sizes: Any = None
) -> list[Peak]:
    split = schedule.startswith("zb")
    walks = [walked(own, m, split=split) for own in stages]
    none = {each.name: 0.0 for each in fields(StageCosts)}
    found = device_peaks(
        [StageCosts(**none | walk.memory) for walk in walks],
        Pipeline(schedule, len(stages), m, devices), messages=sizes,
    )  # fmt: skip
    return [placed(each, walks[each.stage]) for each in found]


def highest(own: StageBytes, m: int) -> Peak:
    return peaks_of([own], "1f1b", m, 1)[0]


def split_peaks(own: StageBytes) -> list[float]:
    """Of two such stages under ZB-H1, and one micro-batch."""
    return [each.nbytes for each in peaks_of([own, own], "zb_h1", 1, 2, {(0, 1): (0.0, 0.0)})]


def test_gradients_come_as_activations_go_and_the_highest_point_is_named() -> None:
    """Two blocks keep 100 and 200; weights' gradients are 400 and 80 bytes."""
    own = stage([block(100, 10, 0), block(200, 20, 1)], [100, 20])
    assert highest(own, 1).nbytes == 1000 + max(300 + 20 + 80, 100 + 10 + 80 + 400, 480)
    # from the second micro-batch on all gradients are there
    assert highest(own, 2).nbytes == 1000 + max(300 + 20 + 80 + 480, 100 + 10 + 400 + 480)
    own = stage([block(100, 10, 0)], [100], optimizer=5000.0)
    found = highest(own, 1)
    assert (found.nbytes, found.action, found.block) == (1000 + 400 + 5000, None, None)
    # the first block's backward is the highest of the second micro-batch's: all gradients
    own = stage([block(100, 500, 0), block(200, 20, 1)], [100, 20])
    found = highest(own, 2)
    assert (found.action, found.stage, found.block) == (Action.BACKWARD, 0, 0)
    assert found.nbytes == 1000 + 100 + 500 + 400 + 480
    parts = {"weights": 600, "optimizer": 400, "activations": 300, "gradients": 880}
    assert found.parts == parts | {"buffers": 0, "reserved": 0}


@pytest.mark.parametrize(("microbatches", "in_flight"), [(1, 1), (2, 2), (8, 2)])
def test_messages_and_what_leaves_a_stage(microbatches: int, in_flight: int) -> None:
    """The first of two stages under 1F1B: the last message, an output or a gradient, is held beside
    what is kept, the gradient that was received by the last block's moments (here 7, of which it is
    a part), and two receives more are posted."""
    found = peaks_of(
        [stage([block(100, 7)]), stage([block(60, 9)])], "1f1b", microbatches, 2, {(0, 1): (5, 5)}
    )
    posted = 5 * max(0, min(microbatches - 1, 2))
    assert found[0].nbytes == 1000 + in_flight * 100 + 5 + 7 + posted
    left = 5 if microbatches == 8 else 0  # the gradient before is on its way
    assert found[1].nbytes == 1000 + 60 + 9 + posted + left


def test_a_split_backward_keeps_what_its_second_half_needs() -> None:
    """After the first half 30 of 100 are left, and a gradient of 40; or 300 are put off, beside
    what is made again for the second half."""
    own = stage([block(100, 20, 0, put_off=30)], [10])
    assert split_peaks(own) == [1000 + 120, 1000 + 120]
    late = block(10, 0, 0, put_off=300)
    assert split_peaks(replace(own, blocks=[late])) == [1000 + 300 + 40] * 2
    again = replace(own, blocks=[replace(late, late=25)])
    assert split_peaks(again) == [1000 + 300 + 25 + 40] * 2


def test_what_a_first_half_leaves_is_there_once() -> None:
    """Of two weights the second one's gradient is put off: 40 of 120 bytes are left by the first
    half, which a further one adds to."""
    own = stage([block(100, 90, 0), block(100, 20, 1, put_off=30)], [10, 20])
    found = walked(own, 4, split=True).memory
    assert (found["begun_bytes"], found["gradient_bytes"]) == (40, 120)
    # the first block's backward is the highest: 100 of 200 are let go, 30 put off
    assert found["first_bytes"] == found["half_bytes"] == 100 + 30 + 90 - 200
    *_, of_last = moments(Pipeline("zb_h2", 4, 8, 4))
    waiting = [one for one in of_last if one.begun[0] and not one.later[0]]
    assert {one.action for one in waiting} == {Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT}
    all_put_off = stage([block(100, 20, 0, put_off=30)], [10])
    assert {walked(all_put_off, m, split=True).memory["begun_bytes"] for m in (1, 2, 4)} == {0}


def test_the_last_backward_scatters_when_fewer_are_in_flight() -> None:
    """The first of two stages: gradients of 400 bytes are whole, and another one's beside two
    micro-batches; what is received, and a shard of 200, beside one."""
    trained = [Trained(numel=100, holders=2, shards=2, block=0)]
    scattered = replace(ALONE, sharing=Sharing(zero=1), received=True)

    def peak(kept: float) -> float:
        own = stage([block(kept, 10, 0)], trained=trained, reduction=scattered)
        return peaks_of([own, own], "1f1b", 8, 2, {(0, 1): (0.0, 0.0)})[0].nbytes

    assert peak(100) == 1000 + 2 * 100 + 10 + 400 + 400 > 1000 + 400 + 400 + 200
    assert peak(50) == 1000 + 400 + 400 + 200


@pytest.mark.parametrize(("releases", "less"), [(True, 40), (False, 0)])
def test_what_is_made_again_is_held_and_what_was_kept_is_let_go(releases: bool, less: int) -> None:
    moment = Moment(during=45, after=0.0, released=40, put_off=0.0)
    made = BlockBytes(kept=100, passing=30, releases=releases, course=[(moment, ())])
    assert highest(stage([made]), 1).nbytes == 1000 + 100 + 30 + 45 - less


def test_gradients_are_whole_until_the_last_backward() -> None:
    """Of virtual stages: those of one are there while another's backwards run, though ZeRO-1 leaves
    a shard of them in the end. So the peak is that of ranks that scatter nothing."""
    scattered = replace(ALONE, sharing=Sharing(zero=1))
    edges = {(k, k + 1): (0.0, 0.0) for k in range(7)}

    def peaks(shards: int) -> list[float]:
        trained = [Trained(numel=100, holders=4, shards=shards, block=0)]
        own = [stage([block(100, 10, 0)], trained=trained, reduction=scattered) for _ in range(8)]
        return [x.nbytes for x in peaks_of(own, "interleaved_1f1b", 16, 4, edges)]

    assert peaks(shards=4) == peaks(shards=1)


def reserving(reserved_bytes: int, memory_bytes: float) -> Cluster:
    on = cluster(2, memory_bytes=memory_bytes)
    return replace(on, device=replace(on.device, reserved_bytes=reserved_bytes))


def costs(fixed_bytes: float, passing_bytes: float, activation_bytes: float) -> StageCosts[float]:
    none = {each.name: 0.0 for each in fields(StageCosts)} | {"several": 1.0}
    passing = dict.fromkeys(("first_bytes", "later_bytes", "half_bytes"), passing_bytes)
    held = {"fixed_bytes": fixed_bytes, "activation_bytes": activation_bytes}
    return StageCosts(**none | passing | held)


def test_what_fits() -> None:
    assert stage_bytes(100.0, 7.0, 3) == 121
    used = stage_bytes(np.array([100.0, 200.0]), np.array([7.0, 5.0]), 3)
    np.testing.assert_array_equal(fits(used, 121.0), [True, False])
    assert room_bytes(reserving(100, 1000)) == 900
    # 1F1B: the first of two stages has two micro-batches in flight, the last one
    stages = [costs(650.0, 50.0, 150.0), costs(650.0, 50.0, 150.5)]
    found = device_peaks(stages, Pipeline("1f1b", 2, 4, 2), reserved=100.0)
    peaks = [each.nbytes for each in found]
    assert peaks == [700 + 2 * 150 + 100, 950.5]
    assert used_bytes(stages[0], InFlight(2)) == 1000
    assert used_bytes(stages[0], InFlight(2), 2) == 2 * (650 + 300) + 50
    with_gradients = replace(stages[0], gradient_bytes=40.0)
    assert used_bytes(with_gradients, InFlight(active=1, first=2)) == 650 + 50 + 300
    halves = replace(stages[0], half_bytes=70.0, put_off_bytes=30.0)
    assert used_bytes(halves, InFlight(1, 2, split=True)) == 650 + 150 + 60 + 70


@given(shape=shapes(paired=st.just(False)), seed=st.integers(0, 2**32 - 1))
def test_weights_of_moments_give_the_peaks(shape: Shape, seed: int) -> None:
    """Whole numbers of bytes, so that the sums are exact."""
    rng = np.random.default_rng(seed)
    names = [each.name for each in fields(StageCosts)]
    drawn = {name: rng.integers(0, 100, shape.num_stages).astype(float) for name in names}
    drawn["communicator_bytes"][:] = 7.0
    late = ("version_bytes", "copied_bytes", "waiting_bytes")  # which go by a stage's place
    for name in ("last_bytes", "end_bytes", *late):  # which are known of blocks alone
        drawn[name][:] = 0.0
    of_stages = [
        StageCosts(**{name: float(drawn[name][k]) for name in names})
        for k in range(shape.num_stages)
    ]
    weights = held_weights(shape.pipeline)
    held = np.stack([drawn[name] for name in HELD], axis=1)
    found = [
        float((own * held[list(stages)]).sum(axis=(1, 2)).max()) + 7
        for own, stages in zip(weights, shape.pipeline.placed, strict=True)
    ]
    assert found == [each.nbytes for each in device_peaks(of_stages, shape.pipeline)]


def test_stages_of_one_device_are_never_in_a_backward_together() -> None:
    stages = [costs(80.0, passing, 0.0) for passing in (10.0, 40.0, 30.0, 20.0)]
    peaks = device_peaks(stages, Pipeline("zb_v", 4, 4, 2))
    assert [each.nbytes for each in peaks] == [160 + 20, 160 + 40]
    # in a later backward, the gradients of both are there
    held = [replace(each, gradient_bytes=2.0**k) for k, each in enumerate(stages)]
    peaks = device_peaks(held, Pipeline("zb_v", 4, 4, 2))
    assert [each.nbytes for each in peaks] == [160 + 20 + 1 + 8, 160 + 40 + 2 + 4]
