"""Timelines of the pipeline schedules, and activations in flight, as the simulator has them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from meshwright.costmodel.schedules import (
    SCHEDULES,
    Event,
    Pipeline,
    StageTimes,
    Timeline,
    build_schedule,
    simulate,
)
from scripts.drawing.svg import Picture, legend

DEVICES, MICROBATCHES, CHUNKS = 4, 8, 2
# of all blocks of a device, in units of a forward; I and W are half of the backward each
FORWARD, BACKWARD, WEIGHT = 1.0, 2.0, 1.0
UNIT, LANE, LEFT, RIGHT, TOP = 19.0, 22.0, 62.0, 82.0, 34.0  # pixels
LONGEST = (MICROBATCHES + DEVICES - 1) * (FORWARD + BACKWARD)  # of gpipe and 1f1b
# by the first letter of an event, on a device's first stage and on its second
FILLS = {
    "F": ("#4c78a8", "#9ecae9"),
    "B": ("#f58518", "#ffbf79"),
    "I": ("#f58518", "#ffbf79"),
    "W": ("#54a24b", "#a3d39c"),
}
WORDS = {
    "F  forward": FILLS["F"][0],
    "B  backward, or I  of inputs alone": FILLS["B"][0],
    "W  gradients of weights": FILLS["W"][0],
    "light: the device's second stage": FILLS["F"][1],
}
HELD = ("gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")


def pipeline(name: str) -> Pipeline:
    """The pipeline that is drawn of a schedule."""
    each = SCHEDULES[name].stages_per_device or CHUNKS
    return Pipeline(name, DEVICES * each, MICROBATCHES, DEVICES)


def simulated(of: Pipeline) -> Timeline:
    """Its step: stages of one copy of the model share a device's blocks, sends take no time."""
    part = of.record.copies / of.each
    copies = of.record.pipelines(of.num_stages)
    sends = dict.fromkeys((edge for copy in copies for edge in pairwise(copy)), 0.0)
    stage = StageTimes(
        forward_s=FORWARD * part,
        backward_s=BACKWARD * part,
        weight_s=WEIGHT * part,
        reduce_s=0.0,
        optimizer_s=0.0,
    )
    return simulate(build_schedule(of, sends), [stage] * of.num_stages, sends)


def computes(of: Pipeline, step: Timeline, device: int) -> list[Event]:
    """F, B, I and W of a device."""
    stages = of.placed[device]
    own = [e for e in step.events if e.track == "compute" and e.stage in stages]
    return [event for event in own if event.microbatch is not None]


def held(of: Pipeline, step: Timeline, device: int) -> list[tuple[float, float]]:
    """(time, activations) whenever they change, in those of a micro-batch on a whole device: from
    the start of a forward to the end of the backward."""
    part = of.record.copies / of.each
    changes = list[tuple[float, float]]()
    for event in computes(of, step, device):
        if event.name[0] == "F":
            changes.append((event.start_s, part))
        elif event.name[0] in "BW":  # I leaves what W reads
            changes.append((event.end_s, -part))
    total, points = 0.0, [(0.0, 0.0)]
    for time, change in sorted(changes):
        total += change
        points.append((time, total))
    return points


def timeline(name: str) -> str:
    """The simulated step of a schedule, a lane for each device."""
    of = pipeline(name)
    step = simulated(of)
    idle = f"{step.bubble_fraction:.0%} idle"
    title = f"{name}: {step.pipeline_s:g} forwards long, {idle}"
    picture = Picture(LEFT + LONGEST * UNIT + RIGHT, TOP + DEVICES * LANE + 12, title)
    picture.text(LEFT, 20, title)
    picture.text(picture.width - RIGHT + 8, 20, "held at most", class_="dim", font_size=10)
    for device, stages in enumerate(of.placed):
        y = TOP + device * LANE
        picture.text(8, y + 14, f"device {device}")
        picture.box(LEFT, y, step.pipeline_s * UNIT, LANE - 3, class_="idle")
        most = max(total for _, total in held(of, step, device))
        picture.text(picture.width - RIGHT + 8, y + 14, f"{most:g}")
        for event in computes(of, step, device):
            fill = FILLS[event.name[0]][stages.index(event.stage or 0)]
            x, width = LEFT + event.start_s * UNIT, (event.end_s - event.start_s) * UNIT
            picture.box(x, y, width - 0.6, LANE - 3, fill=fill)
            size = 10 if width > 12 else 8
            at, number = (x + width / 2, y + 13), str(event.microbatch)
            picture.text(*at, number, anchor="middle", class_="on", font_size=size)
    return picture.svg()


def timeline_legend() -> str:
    """Colours of the timelines."""
    picture = Picture(260, 86, "Colours of the timelines")
    legend(picture, 12, 8, WORDS)
    return picture.svg()


def in_flight() -> str:
    """Activations that the first device holds over the step, of each schedule."""
    high, gap = 44.0, 16.0
    title = f"Activations on device 0 over the step, {MICROBATCHES} micro-batches on {DEVICES}"
    picture = Picture(118 + LONGEST * UNIT + 60, TOP + len(HELD) * (high + gap), title)
    picture.text(8, 20, title)
    for k, name in enumerate(HELD):
        of = pipeline(name)
        step, y = simulated(of), TOP + k * (high + gap) + high
        points = held(of, step, 0)
        picture.box(118, y - high, step.pipeline_s * UNIT, high, class_="idle")
        area = [*_steps(points), (points[-1][0], 0.0)]
        at = [(118 + time * UNIT, y - total / MICROBATCHES * high) for time, total in area]
        picture.path(at, fill="#4c78a8")
        picture.text(8, y - high / 2 + 4, name)
        picture.text(124 + step.pipeline_s * UNIT, y, f"{max(t for _, t in points):g} at most")
    return picture.svg()


def _steps(points: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """A line that stays until it changes."""
    before = 0.0
    for time, total in points:
        yield time, before
        yield time, total
        before = total
