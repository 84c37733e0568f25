"""Bounds on pipelines against simulated steps and against choices enumerated one by one."""

import itertools
import math
import operator
import random

import numpy as np
import pytest

from meshwright.costmodel.schedules import (
    SCHEDULES,
    Pipeline,
    StageTimes,
    build_schedule,
    in_flight,
    least_in_flight,
    moments,
    simulate,
)
from meshwright.costmodel.targets import target_named
from meshwright.planner import bounds
from meshwright.planner.bounds import Bounds
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.search.search import Search
from tests.helpers.planning import cluster, linears, odd_cluster, problem_of
from tests.helpers.tiers import tiered

AMPLE = 1e12


def work(cost_s: list[list[float]], used: list[list[float]], room: float) -> bounds.Work:
    """Blocks, one of each kind, that hold bytes per micro-batch alone."""
    active = np.array(used)
    return bounds.Work(
        cost_s=np.array(cost_s), static_bytes=np.zeros_like(active), active_bytes=active,
        block_part=np.ones_like(active), room=room,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", sorted(n for n, s in SCHEDULES.items() if s.copies == 1 and s.flushes)
)
def test_no_simulated_step_is_below_the_bounds(name: str) -> None:
    rng = random.Random(name)
    schedule = SCHEDULES[name]
    for _ in range(60):
        p, m = rng.randint(2, 5), rng.randint(1, 9)
        each = rng.choice(schedule.offered(None)[:3])
        f = [rng.choice([0.2, 1.0, 3.0]) for _ in range(p * each)]
        b = [x * rng.uniform(1.0, 3.0) for x in f]
        w = [x * 0.4 if schedule.splits_backward else 0.0 for x in b]
        sent = rng.choice([0.0, 0.3, 2.0])
        edges = {(k, k + 1): sent for k in range(p * each - 1)}
        pipeline = Pipeline(name, p * each, m, p)
        streams = build_schedule(pipeline, frozenset(edges))
        times = [
            StageTimes(forward_s=x, backward_s=y, weight_s=z, reduce_s=0.0, optimizer_s=0.0)
            for x, y, z in zip(f, b, w, strict=True)
        ]
        step = simulate(streams, times, edges).step_time_s * (1 + 1e-9)
        passes = [[x + y] for x, y in zip(f, b, strict=True)]
        early = [[x + y - z] for x, y, z in zip(f, b, w, strict=True)]
        free = [[0.0] for _ in passes]
        whole = bounds.devices_of(work(passes, free, AMPLE), np.ones(p), 0.0)
        first = bounds.devices_of(work(early, free, AMPLE), np.ones(p), 0.0)
        before = np.concatenate([[0.0], np.cumsum(sorted(f)[: p - 1])])
        assert bounds.balanced_s(whole, m, before, 0.0) <= step
        if each == 1:
            assert bounds.filled_s(first, m, bounds.theta(m, p, 1.0), 0.0, 0.0) <= step
            part = min(x / y[0] for x, y in zip(f, passes, strict=True))
            assert bounds.filled_s(whole, m, bounds.theta(m, p, part), 0.0, 0.0) <= step
        held, places = in_flight(pipeline, 0), pipeline.device_of
        crossing = sum(s for (i, j), s in edges.items() if places[i] != places[j])
        assert bounds.filled_s(first, m, held / m, 2 * crossing, 0.0) <= step
        assert sum(x[0] for x in early) + (m - 1) * max(f) <= step


def test_the_bounds_of_equal_stages_are_near_their_step() -> None:
    """1F1B with as many stages as blocks: of the p - 1 turns of fill nearly half is proven."""
    m, p = 32, 4
    devices = bounds.devices_of(work([[3.0]] * p, [[0.0]] * p, AMPLE), np.ones(p), 0.0)
    found = bounds.filled_s(devices, m, bounds.theta(m, p, 1.0), 0.0, 0.0)
    assert 3.0 * (m + (p - 1) / 2.5) <= found <= 3.0 * (m + p - 1)


def test_no_choice_of_recompute_that_fits_is_below_the_bound() -> None:
    """Every way to share blocks out to devices, with every policy of each."""
    rng = random.Random(0)
    below = 0
    for _ in range(80):
        p, blocks, m = rng.randint(1, 3), rng.randint(2, 4), rng.randint(1, 6)
        kept = [rng.uniform(1, 4) for _ in range(blocks)]
        cost = [[c, c * rng.uniform(1.05, 1.5)] for c in (rng.uniform(1, 3) for _ in range(blocks))]
        used = [[k, k * rng.uniform(0.1, 0.6)] for k in kept]
        held = np.array([float(min(m, p - d)) for d in range(p)])
        room = rng.uniform(0.4, 1.2) * float(held.mean()) * sum(kept) / p
        own = work(cost, used, room)
        least, price = bounds.shared_s(own, float(held.min()), p)
        bound = m * least
        if np.isfinite(least):
            for nu in (0.0, price):
                bound = bounds.balanced_s(bounds.devices_of(own, held, nu), m, np.zeros(p), bound)
        best = np.inf
        for where in itertools.product(range(p), repeat=blocks):
            for policy in itertools.product((0, 1), repeat=blocks):
                busy, full = [0.0] * p, [0.0] * p
                for k, (d, q) in enumerate(zip(where, policy, strict=True)):
                    busy[d] += cost[k][q]
                    full[d] += held[d] * used[k][q]
                if max(full) <= room:
                    best = min(best, m * max(busy))
        assert bound <= best * (1 + 1e-9)
        below += bound > m * sum(min(c) for c in cost) / p * 1.001 and best < np.inf
    assert below > 10  # memory raises it


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_a_device_holds_no_less_than_the_least_in_flight(name: str) -> None:
    rng = random.Random(1)
    for p, m, each in itertools.product((2, 3), (1, 4, 8), SCHEDULES[name].offered(None)[:2]):
        held = [rng.uniform(0, 2) for _ in range(p * each)]
        pipeline = Pipeline(name, p * each, m, p)
        least, found = least_in_flight(pipeline), moments(pipeline)
        for device, stages in enumerate(pipeline.placed):
            own = [held[k] for k in stages]
            peak = max(sum(map(operator.mul, one.active, own)) for one in found[device])
            assert least[device] * sum(own) <= peak * (1 + 1e-9)


def raised(search: Search, microbatches: tuple[int, ...]) -> int:
    """How many bounds of combinations say more than their meshes'; none more than a plan takes."""
    least, count = Bounds(space=search.space, equal=search.equal), 0
    for choice in itertools.chain(*map(search.equal.mesh_choices, microbatches)):
        for one in search.equal.combinations(choice):
            found = search.equal.solve(one, math.inf)
            draft = search.simulated(found[1], one.pipeline) if found else None
            if draft is not None and draft.fits:
                bound_s = least.of_combination(one)
                assert bound_s <= draft.step_time_s * (1 + 1e-9), (choice, one.pipeline)
                count += bound_s > one.bound_s * 1.001
    return count


@pytest.mark.parametrize("target", ["eager", "megatron"])
@pytest.mark.parametrize("seed", tiered([0, 2, 5], (0).__eq__, "other clusters; one stays"))
def test_no_cut_of_a_combination_is_faster_than_its_bound(seed: int, target: str) -> None:
    of, on = linears(256, 4, 16, 64), odd_cluster(seed, 4)
    search = Search(problem_of(of, on, target=target_named(target)), 16, Overrides())
    assert raised(search, (1, 4, 16)) > 5


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_messages_of_two_copies_pass_side_by_side(schedule: str) -> None:
    on = cluster(1, nodes=4, node_bandwidth=1e7)
    asked = Overrides(pp=4, schedule=schedule)
    search = Search(problem_of(linears(64, 8, 16, 16), on), 16, asked)
    assert raised(search, (2, 4, 8)) > 0
