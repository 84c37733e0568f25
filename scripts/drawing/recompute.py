"""Recompute drawn: what segments of blocks hold at the peak of a step, by their size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from meshwright.planner.overrides import Overrides
from meshwright.planner.pricing import Evaluator
from meshwright.planner.search import Search
from scripts.drawing.searches import problem
from scripts.drawing.svg import COLOURS, Axis, Picture, curve, frame, legend

GIB = 2**30
ROWS = 64
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
ONE_STAGE = Overrides(
    pp=1, dp=8, tp=1, zero=1, num_microbatches=8, recompute="full", segments=1, forbid=("offload",)
)
PANELS = {"full": "inputs of blocks inside kept (full)", "none": "all inside kept (none)"}


@cache
def held(policy: str) -> Mapping[int, float]:
    """Bytes of activations and of a backward's tensors at the priced peak, by blocks in a
    segment."""
    plan, evaluator = Search(problem(), ROWS, ONE_STAGE).run().best.plan, Evaluator(problem())
    (stage,) = plan.stages
    found = {}
    for size in SIZES:
        again = stage.repeating([policy] * len(stage.blocks), size)
        (peak,) = evaluator.price(replace(plan, stages=(again,))).prediction.peaks
        found[size] = peak.by_part["activations"] + peak.by_part["transient"]
    return found


@cache
def layer() -> tuple[int, float, float]:
    """Layers, bytes of one's input, bytes that it keeps with its input."""
    plan = Search(problem(), ROWS, ONE_STAGE).run().best.plan
    (priced,) = Evaluator(problem()).price(plan).priced
    middle = priced.blocks[len(priced.blocks) // 2]
    alike = [other for other in priced.blocks if other.block.class_id == middle.block.class_id]
    entering, made = float(middle.sums.input_bytes), float(middle.sums.saved_bytes)
    return len(alike), entering, made + entering


def formula(policy: str, size: float) -> float:
    """Inputs of segments, and what a segment's blocks keep while it runs again."""
    count, entering, whole = layer()
    inside = size * whole if policy == "none" else (size - 1) * entering + whole
    return count * entering / size + inside


def best_size(policy: str) -> float:
    """Blocks in a segment at which the formula is least."""
    count, entering, whole = layer()
    return math.sqrt(count * entering / whole if policy == "none" else count)


def segments() -> str:
    """Points by price, lines by formula, for either policy inside of segments."""
    title = "Activations at the peak of a step, GPT of 2.7 B on an A100, by blocks in a segment"
    picture = Picture(760, 330, title)
    picture.text(12, 20, title)
    sizes = [(k, str(k)) for k in (1, 2, 4, 8, 16, 32)]
    highest = {"full": (1.3, 1.65, (1.3, 1.4, 1.5, 1.6)), "none": (0.0, 36.0, (0, 10, 20, 30))}
    for j, (policy, words) in enumerate(PANELS.items()):
        low, high, marks = highest[policy]
        left = 66 + 370 * j
        x = Axis(low=1, high=32, start=left, end=left + 300, ticks=sizes, logarithmic=True)
        ticks = [(gib, f"{gib} GiB") for gib in marks]
        y = Axis(low=low, high=high, start=280, end=58, ticks=ticks)
        frame(picture, x, y, ("blocks in a segment", words))
        points, best = held(policy), max(best_size(policy), 1.0)
        beside = points[2] - formula(policy, 2)  # of a block's backward
        line = [2 ** (k / 8) for k in range(0 if policy == "full" else 4, 41)]
        curve(
            picture, x, y, [(k, (formula(policy, k) + beside) / GIB) for k in line], stroke="#888"
        )
        picture.path([(x(best), y.start), (x(best), y.end)], stroke="#888", stroke_dasharray="4 3")
        for size, nbytes in points.items():
            said = f"{size} blocks: {nbytes / GIB:.2f} GiB"
            picture.dot(x(size), y(nbytes / GIB), said, fill=COLOURS[j])
    legend(picture, 124, 66, {"the formula, and a block's backward": "#888"})
    return picture.svg()
