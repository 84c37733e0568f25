"""Stages that share devices against every layout there is, simulated; what their devices repeat."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.targets import target_named
from meshwright.planner.drafts import Combination, PlanDraft
from meshwright.planner.drafts.layouts import SharedDevices
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan import megatron_layout
from meshwright.planner.search.search import Search
from scripts.experts.rows import fp8_rows
from scripts.published import read_row, traced
from tests.helpers.planning import Traced, cluster, cut, problem_of
from tests.helpers.tiers import second_tier

SHAPES = ((2, 2), (3, 3), (2, 1))  # stages on each device, rounds of micro-batches
MEMORY = (None, 1.02, 0.85, 0.7)  # of the least that a plan without recompute needs

pytestmark = second_tier(
    "layouts of searches; moves of blocks, and levels of devices, stay in test_inter_op"
)


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """A first layer, some that are alike or of any size, and a last one that may be heavy."""

    def __init__(self, rng: random.Random, *, alike: bool) -> None:
        super().__init__()
        width, inner = rng.choice([256, 512]), rng.choice([512, 1024])
        sizes = [inner if alike else rng.choice([256, 512, 1024, 2048]) for _ in range(9)]
        self.first = nn.Linear(rng.choice([64, 1024]), width)
        self.layers = nn.ModuleList(Layer(width, size) for size in sizes[: rng.choice([6, 7, 8])])
        self.last = nn.Linear(width, rng.choice([16, 4096]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def drawn(seed: int, rng: random.Random) -> Traced:
    with torch.device("meta"):
        net = Net(rng, alike=seed % 3 > 0)
        batch = (
            torch.empty(2, 64, net.first.in_features),
            torch.empty(2, 64, net.last.out_features),
        )
    return cut(net, batch, F.mse_loss)


def nodes(search: Search) -> list[Combination]:
    (m,) = search.space.microbatch_counts()
    return [one for mesh in search.equal.mesh_choices(m) for one in search.equal.combinations(mesh)]


def every(search: Search, node: Combination) -> Iterator[PlanDraft]:
    """All layouts of a combination with the least recompute, that may fit."""
    layouts, count = search.equal._layouts(node, 0.0), len(search.problem.graph.blocks)
    stages = node.pipeline.num_stages // layouts.copies
    for inner in itertools.combinations(range(1, count), stages - 1):
        cuts = np.array((0, *inner, count))
        judged = layouts.shared.judged(cuts[None])
        if np.isfinite(judged.load_s).all() and not judged.lacks.any():
            chosen = layouts.chosen(cuts)
            stages = search.equal._stages(node, chosen, cuts.tolist())
            yield search.simulated(stages, node.pipeline)


def searches(seed: int) -> Iterator[Search]:
    """Of a net on devices with more and less memory, one schedule and number of micro-batches."""
    rng = random.Random(seed)
    of, devices = drawn(seed, rng), rng.choice([2, 3, 4])
    on = cluster(devices, bandwidth=rng.choice([1e9, 1e10, 1e11]))
    given: dict[str, Any] = {"target": target_named("megatron")} if seed % 2 else {}
    for each, rounds in SHAPES:
        m = rounds * devices + (rounds == 1)
        schedules = ["interleaved_1f1b"] * 2 + ["zb_v", "dualpipe_v"] * (each == 2 and not given)
        schedules += ["chimera"] * (each == 2 and devices % 2 == m % 2 == 0 and not given)
        over = Overrides(
            pp=devices, tp=1, virtual_stages=each, num_microbatches=m,
            schedule=rng.choice(schedules),
        )  # fmt: skip
        if each * devices > len(of.graph.blocks):
            continue
        ample = Search(problem_of(of, on, **given), 2 * m, over)
        least = min(d.evaluation.prediction.fullest_bytes for d in every(ample, nodes(ample)[0]))
        for part in MEMORY:
            size = on.device.memory_bytes if part is None else int(part * least)
            device = dataclasses.replace(on.device, memory_bytes=size)
            small = dataclasses.replace(on, device=device)
            yield Search(problem_of(of, small, **given), 2 * m, over)


@pytest.mark.parametrize("seeds", [range(4), range(4, 24)], ids=str)
def test_the_layout_is_nearly_the_fastest_of_all(seeds: range) -> None:
    excess = []
    for search in (search for seed in seeds for search in searches(seed)):
        for node in nodes(search)[:1]:
            steps = [draft.step_time_s for draft in every(search, node) if draft.fits]
            explorer = search._explorer
            found = explorer.cut(node, math.inf)
            if found is not None:
                explorer.simulate(node, found[1])
            fitting = [draft.step_time_s for draft in explorer.drafts if draft.fits]
            assert bool(fitting) == bool(steps), node.pipeline
            excess += [min(fitting) / min(steps) - 1] if steps else []
    assert len(excess) > 15 and min(excess) >= -1e-9
    assert np.mean([x <= 1e-6 for x in excess]) >= 0.8
    assert np.mean(excess) <= 0.003 and max(excess) <= 0.035


def test_a_device_repeats_no_more_than_it_needs() -> None:
    """With one block less on the higher level it does not fit."""
    tried = 0
    for search in (next(searches(seed)) for seed in range(6)):
        node = nodes(search)[0]
        whole = search.equal._layouts(node, 0.0)
        cuts = whole.starts[0]
        device = np.arange(len(whole.shared.stages))
        runs = whole.shared.index[cuts[:-1], cuts[1:]][whole.shared.stages]
        used = whole.shared.used_bytes(device, whole.shared.held[:, runs])
        for room in np.linspace(used[-1].max(), used[0].max(), 5)[:-1]:
            layouts = search.equal._layouts(node, whole.shared.room_bytes - float(room))
            chosen = layouts.chosen(cuts)
            for k in device.tolist():
                tried += _repeats_least(layouts.shared, k, runs[k], [
                    (int(own.level.flat[0]), float(own.fraction.flat[0]))
                    for own, g in zip(chosen, layouts.groups, strict=True) if g == k
                ], layouts.levels.blocks[runs[k]])  # fmt: skip
    assert tried > 20


def _repeats_least(
    shared: SharedDevices,
    device: int,
    runs: np.ndarray,
    chosen: list[tuple[int, float]],
    blocks: np.ndarray,
) -> bool:
    """Whether a device repeats blocks at all."""
    (level,) = {level for level, _ in chosen}
    counts = np.round([part for _, part in chosen] * blocks)
    low, high = shared.held[level, runs], shared.held[level + bool(counts.any()), runs]

    def used(counts: np.ndarray) -> float:
        held = low + (counts / blocks)[:, None] * (high - low)
        return float(shared.used_bytes(np.array([device]), held[None])[0])

    last = np.flatnonzero(counts)[-1:]  # of the stage with fewest micro-batches in flight
    assert used(counts) <= shared.room_bytes
    assert all(used(counts - (np.arange(len(runs)) == k)) > shared.room_bytes for k in last)
    return bool(level or len(last))


def test_llama_70b_in_fp8_on_64_h100() -> None:
    """NVIDIA's recipe, five stages on each of eight device groups: the layer beside the head is
    better off elsewhere, though the even layout fits, too."""
    row = next(row for row in fp8_rows("26.04.01") if row["params_b"] == "70.6")
    setup = read_row(row)
    graph, table = traced(setup.dims, setup.precision)
    problem = Problem(
        graph=graph, factors=table, cluster=setup.cluster, precision=setup.precision,
        target=setup.framework.target,
    )  # fmt: skip
    m = setup.global_batch // setup.dp // setup.micro_batch
    given: dict[str, Any] = {"tp": setup.tp, "pp": setup.pp, "virtual_stages": setup.chunks}
    names = [block.name for block in graph.blocks]
    ends = [0, *range(3, 80, 2), 82]
    even = [names[i:j] for i, j in itertools.pairwise(ends)]
    free, forced = (
        Search(
            problem, setup.global_batch, Overrides(**given, num_microbatches=m, **more),
            memory_margin=0.05,
        ).run().best
        for more in ({}, {"stages": even})
    )  # fmt: skip
    assert megatron_layout(forced.plan) == "Ett|(tt|)*38ttL"
    assert free.step_time_s <= 0.97 * forced.step_time_s
    sizes = [len(stage.blocks) for stage in free.plan.stages]
    assert sorted(sizes) == [2] * 38 + [3] * 2 and (sizes[0], sizes[-1]) == (3, 2)
