"""Blocks placed on devices: together in stages, or neighbours on different devices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from meshwright.costmodel.schedules import Pipeline, StageTimes, build_schedule, simulate
from scripts.drawing.svg import COLOURS, Axis, Picture, curve, frame, legend

BLOCKS, DEVICES, MICROBATCHES = 32, 4, 16
RUNS = (1, 2, 4, 8)  # runs of neighbours on each device; 8: no two neighbours together
SENDS = (0.0, 0.05, 0.2, 0.5)  # seconds of a send, in those of a block's forward and backward
FORWARD_S, BACKWARD_S = 1 / 3, 2 / 3  # of a block


def placed(runs: int, schedule: str | None = None) -> Pipeline:
    """The pipeline of that many runs of blocks on each device."""
    name = schedule or ("1f1b" if runs == 1 else "interleaved_1f1b")
    return Pipeline(name, DEVICES * runs, MICROBATCHES, DEVICES)


def step_s(runs: int, send_s: float) -> float:
    """Seconds of a step; every edge between stages takes `send_s` each way."""
    of = placed(runs)
    edges = dict.fromkeys(pairwise(range(of.num_stages)), send_s)
    blocks = BLOCKS / of.num_stages
    stage = StageTimes(
        forward_s=FORWARD_S * blocks,
        backward_s=BACKWARD_S * blocks,
        weight_s=BACKWARD_S * blocks / 2,
        reduce_s=0.0,
        optimizer_s=0.0,
    )
    return simulate(build_schedule(of, edges), [stage] * of.num_stages, edges).pipeline_s


def _slower(send_s: float) -> Iterator[tuple[float, float]]:
    ideal_s = MICROBATCHES * BLOCKS / DEVICES * (FORWARD_S + BACKWARD_S)
    for runs in RUNS:
        yield runs, step_s(runs, send_s) / ideal_s - 1


def runs_of_blocks() -> str:
    """Seconds beyond an ideal step over the runs of blocks on each device, by seconds of a send."""
    title = f"Step beyond the ideal one: {BLOCKS} blocks on {DEVICES} devices, {MICROBATCHES}"
    picture = Picture(690, 330, f"{title} micro-batches")
    picture.text(12, 20, picture.title)
    x = Axis(low=1, high=8, start=62, end=440, ticks=[(k, str(k)) for k in RUNS], logarithmic=True)
    ticks = [(k / 10, f"{k / 10:.0%}") for k in range(5)]
    y = Axis(low=0, high=0.4, start=280, end=58, ticks=ticks)
    frame(picture, x, y, ("runs of blocks on a device", "slower"))
    for k, send_s in enumerate(SENDS):
        curve(picture, x, y, _slower(send_s), stroke=COLOURS[k])
    words = {f"a send takes {send_s:g} of a block": COLOURS[k] for k, send_s in enumerate(SENDS)}
    legend(picture, 456, 66, words)
    return picture.svg()
