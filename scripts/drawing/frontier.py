"""The frontier of a search: the best step for each amount of memory."""

from __future__ import annotations

from itertools import pairwise

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding import analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import Plan
from meshwright.planner.search import Search
from meshwright.planner.tracing import trace
from meshwright.profiles.cluster import Cluster
from scripts.drawing.svg import Axis, Picture, frame
from scripts.planning.cases import gpt

GIB = 2**30
ROOMS = (76, 64, 48, 40, 32, 24, 20, 16, 14, 12, 10, 9, 8)  # GiB of a device
ROWS = 64
COLOURS = ("#cc79a7", "#0072b2", "#009e73", "#d55e00")  # by ZeRO stage


def best_plans() -> list[tuple[float, float, Plan]]:
    """GiB that a device may fill, seconds of the best plan, and that plan: of a GPT of 2.7 B
    parameters, in one stage, on 8 A100."""
    model = gpt(32, 2560, 32, 50304, 2048)
    graph = trace(model.module, model.batch, precision="bf16")
    table = analyse(graph)
    problem = Problem(
        graph=cut_blocks(graph, table),
        factors=table,
        cluster=Cluster.from_catalog("a100-80gb", num_nodes=1),
        precision="bf16",
        optimizer="adamw_fused",
    )
    overrides = Overrides(pp=1, forbid=("offload",))
    whole, programs, best = problem.cluster.device.memory_bytes / GIB, None, []
    for room in ROOMS:
        search = Search(problem, ROWS, overrides, memory_margin=1 - room / whole, programs=programs)
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
        picture.dot(a, b, words, fill=COLOURS[stage.zero])
        if stage.tp > 1:
            picture.text(a + 7, b - 6, f"tp {stage.tp}", font_size=10)
    for k, colour in enumerate(COLOURS):
        picture.dot(470, 80 + 18 * k, f"ZeRO-{k}", fill=colour)
        picture.text(480, 84 + 18 * k, f"ZeRO-{k}")
    return picture.svg()
