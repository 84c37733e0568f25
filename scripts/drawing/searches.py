"""Searches drawn: the best step for each amount of memory; peaks of a plan by what holds them."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding import analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import Plan
from meshwright.planner.search import Search
from meshwright.planner.tracing import trace
from meshwright.profiles.cluster import Cluster
from scripts.drawing.svg import COLOURS, Axis, Picture, frame, legend
from scripts.planning.cases import gpt

GIB = 2**30
ROOMS = (76, 64, 48, 40, 32, 24, 20, 16, 14, 12, 10, 9, 8)  # GiB of a device
ROWS = 64
STAGES = ("#cc79a7", "#0072b2", "#009e73", "#d55e00")  # by ZeRO stage


@cache
def problem() -> Problem:
    """A GPT of 2.7 B parameters on 8 A100."""
    model = gpt(32, 2560, 32, 50304, 2048)
    graph = trace(model.module, model.batch, precision="bf16")
    table = analyse(graph)
    return Problem(
        graph=cut_blocks(graph, table),
        factors=table,
        cluster=Cluster.from_catalog("a100-80gb", num_nodes=1),
        precision="bf16",
        optimizer="adamw_fused",
    )


def best_plans() -> list[tuple[float, float, Plan]]:
    """GiB that a device may fill, seconds of the best plan of one stage, and that plan."""
    overrides, of = Overrides(pp=1, forbid=("offload",)), problem()
    whole, programs, best = of.cluster.device.memory_bytes / GIB, None, []
    for room in ROOMS:
        search = Search(of, ROWS, overrides, memory_margin=1 - room / whole, programs=programs)
        programs, chosen = search.programs, search.run().best
        best.append((room, chosen.step_time_s, chosen.plan))
    return best


def frontier() -> str:
    """The plans as points, seconds over GiB."""
    plans = best_plans()
    title = "Step of the best plan by the memory that it may fill: GPT of 2.7 B on 8 A100"
    picture = Picture(640, 380, title)
    picture.text(12, 20, title)
    rooms = [(gib, f"{gib} GiB") for gib in (8, 12, 16, 24, 32, 48, 76)]
    x = Axis(low=7.5, high=82, start=62, end=620, ticks=rooms, logarithmic=True)
    times = [(seconds, f"{seconds:g} s") for seconds in (2, 2.5, 3, 3.5)]
    y = Axis(low=1.6, high=4.0, start=330, end=58, ticks=times)
    frame(picture, x, y, ("memory of a device", "seconds a step"))
    steps = [(x(room), y(seconds)) for room, seconds, _ in plans]
    corners = [p for a, b in pairwise(steps) for p in (a, (a[0], b[1]))]
    picture.path([*corners, steps[-1]], class_="line", stroke_dasharray="4 3")
    for (room, seconds, plan), (a, b) in zip(plans, steps, strict=True):
        (stage,) = plan.stages
        mesh = f"dp {stage.dp}, tp {stage.tp}, ZeRO-{stage.zero}"
        words = f"{room} GiB, {seconds:.2f} s: {mesh}, {plan.num_microbatches} micro-batches"
        picture.dot(a, b, words, fill=STAGES[stage.zero])
        if stage.tp > 1:
            picture.text(a + 7, b - 6, f"tp {stage.tp}", font_size=10)
    for k, colour in enumerate(STAGES):
        picture.dot(470, 80 + 18 * k, f"ZeRO-{k}", fill=colour)
        picture.text(480, 84 + 18 * k, f"ZeRO-{k}")
    return picture.svg()


PIPELINE = Overrides(
    pp=4, dp=2, tp=1, zero=1, schedule="1f1b", num_microbatches=16, recompute="none",
    virtual_stages=1, forbid=("offload",),
)  # fmt: skip
PARTS = ("weights", "gradients", "optimizer", "activations", "transient")


def peaks() -> str:
    """Peak bytes of each stage of a pipeline by what holds them."""
    search = Search(problem(), ROWS, PIPELINE)
    evaluation = search.run().best.evaluation
    title = "Peaks of four stages under 1F1B: GPT of 2.7 B, pp 4, dp 2, 16 micro-batches, ZeRO-1"
    picture = Picture(720, 190, title)
    picture.text(12, 20, title)
    ticks = [(gib * GIB, f"{gib} GiB") for gib in (0, 20, 40, 60, 80)]
    x = Axis(low=0, high=80 * GIB, start=72, end=500, ticks=ticks)
    frame(picture, x, Axis(low=0, high=1, start=160, end=36, ticks=()), ("", ""))
    named = {**dict(zip(PARTS, COLOURS, strict=False)), "reserved, buffers": COLOURS[-1]}
    for k, (peak, stage) in enumerate(
        zip(evaluation.prediction.peaks, evaluation.plan.stages, strict=True)
    ):
        y, before, parts = 40 + 30 * k, 0.0, peak.by_part
        held = [parts[name] for name in PARTS]
        picture.text(12, y + 15, f"stage {k}")
        for nbytes, colour in zip([*held, peak.nbytes - sum(held)], named.values(), strict=True):
            picture.box(x(before), y, x(before + nbytes) - x(before), 22, fill=colour)
            before += nbytes
        words = f"{len(stage.blocks)} blocks, {before / GIB:.1f} GiB"
        picture.text(x(before) + 6, y + 15, words, font_size=10)
    legend(picture, 590, 40, named)
    return picture.svg()
