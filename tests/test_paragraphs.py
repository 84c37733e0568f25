"""Formulas in the paragraphs of docs/systems/ against the price, the simulator, torch's own code,
brute force."""

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest

from meshwright.cli import parser_of
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules import Pipeline, build_schedule, simulate
from meshwright.costmodel.schedules.schedule import SENDS
from meshwright.costmodel.sharding import FactorTable
from meshwright.planner.plan import Plan, PlanError
from meshwright.planner.plan.check import check_plan
from meshwright.planner.pricing.segment_costs import segment_recompute
from meshwright.shell.override_flags import overrides_of
from scripts.drawing.queues import Queues
from scripts.drawing.systems import FOLDER
from tests.costmodel.schedules.pipelines import times
from tests.helpers.formulas import formulas, tabled, value
from tests.helpers.tiny import cut, net, plan_for
from tests.planner.pricing.test_segments import FORWARD, segment
from tests.test_systems import NUMEL, N, one_process, segmented, sent, states

Symbols = Mapping[str, float]


def table(name: str, heading: str) -> dict[str, list[str]]:
    return tabled((FOLDER / f"{name}.md").read_text(encoding="utf-8"), heading)


def read(cell: str, symbols: Symbols) -> float:
    """A cell's formula, or its number."""
    (formula,) = formulas(cell) or [cell]
    return value(formula, symbols)


# --- segments -------------------------------------------------------------------------------------

# blocks for which the best size is a whole number: K is 17 A
BEST = {"none": (272, 4), "full": (64, 8)}


@pytest.mark.parametrize("policy", BEST)
def test_segments_hold_least_at_the_root(policy: str) -> None:
    (again, nbytes, at, least) = table("memory", "Recompute at √n")[f"`{policy}`"]
    blocks, best = BEST[policy]
    held = dict[int, float]()
    for size in (k for k in range(2, blocks + 1) if blocks % k == 0):
        symbols, (held[size],) = segmented(size, policy, blocks)
        assert read(nbytes, symbols) == pytest.approx(held[size])
        seconds = float(segment_recompute(segment(policy, size)).seconds)
        assert seconds / (size * FORWARD) == pytest.approx(read(again, {}), abs=0.11)
    assert min(held, key=held.__getitem__) == best == pytest.approx(read(at, symbols))
    assert held[best] == pytest.approx(read(least, symbols))


def test_powers_of_two_lose_at_most_six_percent() -> None:
    for blocks in range(2, 400):
        best = min(blocks / k + k for k in (2.0**j for j in range(1, 7)))
        assert best <= 1.061 * 2 * math.sqrt(blocks)


# --- nn.DataParallel ------------------------------------------------------------------------------


def test_one_process_exchanges_and_holds_what_the_table_says() -> None:
    rows = table("data", "One process for all devices: nn.DataParallel")
    symbols, (rings, first, others), copies = one_process()
    ranks, (reduced,) = sent(3, zero=0)
    on_ranks = states(0, weight_bytes=4)[1][0] / NUMEL * symbols["Psi"]
    measured = {
        "sent by a device, by NCCL's rings": [rings, reduced],
        "over the first device's links, by copies without NCCL": [copies.moved],
        "states of the first device": [first, on_ranks],
        "states of the others": [others, on_ranks],
        "elements of logits on the first device, the loss outside": [
            copies.gathered, copies.gathered / N,
        ],
    }  # fmt: skip
    assert rows.keys() == measured.keys()
    for words, cells in rows.items():
        for k, (cell, number) in enumerate(zip(filter(None, cells), measured[words], strict=True)):
            of = ranks if number is reduced and k else symbols
            assert read(cell, of) == pytest.approx(number, rel=3e-3), words


# --- placements -----------------------------------------------------------------------------------


def edges_between(placement: tuple[int, ...]) -> int:
    """Neighbours on different devices."""
    return sum(a != b for a, b in pairwise(placement))


def is_legal(plan: Plan, graph: Graph, factors: FactorTable) -> bool:
    try:
        check_plan(plan, graph, factors)
    except PlanError:
        return False
    return True


def test_plans_place_neighbours_together() -> None:
    """Of all placements of a net's blocks, the plans that are accepted."""
    rows = table("planners", "Operators placed one by one")
    graph, factors = cut(net())
    names = [block.name for block in graph.blocks]
    plan = plan_for(graph, stages=2, dp=1, tp=1)
    accepted, every = 0, [*itertools.product((0, 1), repeat=len(names))]
    for placement in every:
        runs = [[n for n, d in zip(names, placement, strict=True) if d == k] for k in (0, 1)]
        stages = [
            dataclasses.replace(stage, blocks=tuple(run))
            for stage, run in zip(plan.stages, runs, strict=True)
        ]
        legal = is_legal(dataclasses.replace(plan, stages=tuple(stages)), graph, factors)
        assert not legal or edges_between(placement) == 1
        accepted += legal
    symbols = {"l": len(names), "p": 2, "m": 1}
    assert read(rows["one run of neighbours on each device"][0], symbols) == accepted > 1
    assert read(rows["any block on any device"][0], symbols) == len(every)
    most = 2 * max(edges_between(placement) for placement in every)
    assert read(rows["any block on any device"][1], symbols) == most


def test_flags_that_place_blocks_are_legal() -> None:
    """Letters stand for numbers; flags named alone take a glob, too."""
    page = (FOLDER / "planners.md").read_text(encoding="utf-8")
    section = page.partition("What is asked for, and holds")[2].partition("\n## ")[0]
    spans = re.findall(r"`(--[^`]+)`", section)
    assert len(spans) == 10
    values = {"--recompute": "full"}
    parser = parser_of(["plan"])
    for span in spans:
        flags = shlex.split(re.sub(r" v$", " 2", span))
        if len(flags) == 1:
            flags.append(f"layers.0-11={values.get(span, 2)}")
        given = parser.parse_args(["plan", "module:model", "--batch", "8", *flags])
        assert overrides_of(given).given(), span


@pytest.mark.parametrize(("row", "runs"), [
    ("one run of neighbours on each device", 1), ("$v$ runs on each, in turn", 3),
    ("no two neighbours together, in turn", 6),
])  # fmt: skip
def test_runs_of_neighbours_send_and_wait_as_simulated(row: str, runs: int) -> None:
    devices, m, blocks = 4, 16, 24
    schedule = "1f1b" if runs == 1 else "interleaved_1f1b"
    of = Pipeline(schedule, devices * runs, m, devices)
    edges = dict.fromkeys(pairwise(range(of.num_stages)), 0.0)
    streams = build_schedule(of, edges)
    part = blocks / of.num_stages
    step = simulate(streams, [times(part, 2 * part)] * of.num_stages, edges)
    ideal_s = m * 3 * blocks / devices
    symbols = {"p": devices, "l": blocks, "m": m, "v": runs}
    _, sends, bubble = table("planners", "Operators placed one by one")[row]
    assert read(sends, symbols) == sum(one.action in SENDS for s in streams for one in s)
    assert read(bubble, symbols) == pytest.approx(step.pipeline_s / ideal_s - 1)


# --- AMPNet ---------------------------------------------------------------------------------------

ARRIVAL = table("pipeline", "In order of arrival: AMPNet")
SECONDS, HELD, BETWEEN, OF_GROUP, AGAINST, STABLE = ARRIVAL


@pytest.mark.parametrize("under_way", [1, 3, 4, 6, 9])
def test_a_queue_has_the_period_and_the_updates_of_its_formulas(under_way: int) -> None:
    p, f, b, count = 4, 1.0, 2.0, 120
    queues = Queues(forward_s=[f] * p, backward_s=[b] * p, under_way=under_way)
    passes = queues.run(count)
    ends = [each.end_s for each in passes if each.backward and each.group == 0]
    symbols = {"p": p, "q": under_way, "F": f, "B": b}
    period_s = (ends[100] - ends[40]) / 60
    assert period_s == pytest.approx(read(*ARRIVAL[SECONDS], symbols))
    late = [
        {x.updates for x in passes if x.group == k and x.backward and 40 < x.microbatch < 100}
        for k in range(p)
    ]
    assert late[0] == {read(*ARRIVAL[BETWEEN], symbols)}
    if under_way == p:
        for group, updates in enumerate(late):
            assert updates == {read(*ARRIVAL[OF_GROUP], {**symbols, "i": group})}
    points = sorted((x.end_s, 1 if not x.backward else -1) for x in passes if x.group == 0)
    held = max(itertools.accumulate(change for _, change in points))
    assert held == read(*ARRIVAL[HELD], symbols)


def test_updates_by_several_backwards_are_rarer() -> None:
    passes = Queues(forward_s=[1.0] * 4, backward_s=[2.0] * 4, under_way=4, every=3).run(60)
    late = {x.updates for x in passes if x.group == 0 and 20 < x.microbatch < 50}
    assert late == {0, 1}


@pytest.mark.parametrize("m", [4, 16])
def test_what_a_queue_gains_is_the_bubble(m: int) -> None:
    p, f, b = 4, 1.0, 2.0
    of = Pipeline("1f1b", p, m, p)
    edges = dict.fromkeys(pairwise(range(p)), 0.0)
    step = simulate(build_schedule(of, edges), [times(f, b)] * p, edges)
    passes = Queues(forward_s=[f] * p, backward_s=[b] * p, under_way=p).run(40 + m)
    ends = [each.end_s for each in passes if each.backward and each.group == 0]
    wanted = read(*ARRIVAL[AGAINST], {"p": p, "m": m})
    assert step.pipeline_s / (ends[20 + m] - ends[20]) == pytest.approx(wanted)


@pytest.mark.parametrize("late", [0, 1, 3, 7])
def test_delayed_descent_diverges_beyond_the_largest_step(late: int) -> None:
    """Of w[t+1] = w[t] - a c w[t-late], the roots of z^(late+1) - z^late + a c."""
    curvature = 0.7
    symbols = {"lambda": curvature, "tau": late, "pi": math.pi}
    largest = read(*ARRIVAL[STABLE], symbols)

    def radius(step: float) -> float:
        polynomial = np.zeros(late + 2)
        polynomial[0], polynomial[-1] = 1.0, step * curvature
        polynomial[1] += -1.0
        return float(np.abs(np.roots(polynomial)).max())

    assert radius(0.999 * largest) < 1.0 < radius(1.001 * largest)
    if late == 3:
        assert f"{2 / curvature / largest:.1f} times less" in (FOLDER / "pipeline.md").read_text(
            encoding="utf-8"
        )
