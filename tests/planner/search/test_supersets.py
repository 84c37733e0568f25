"""More freedom never makes a plan slower: what a subset of the space holds, the whole one finds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.enumeration import limited
from tests.helpers.planning import cluster, gpt2, problem_of
from tests.helpers.tiers import tiered

TOLERANCE = 0.005  # written out, whole blocks are recomputed; the stage DP stops at a gap
CHOICES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "zero": (0, 1, 3),
    "num_microbatches": (1, 4, 6, 12, 24),
    "schedule": ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v"),
    "recompute": ("none", "full"),
    "forbid": (("zb_h1", "zb_v"), ("tp",), ("interleaved_1f1b",), ("eager_1f1b", "gpipe")),
}


def small_cluster(seed: int) -> Cluster:
    """Eight devices on one or two nodes, with ample memory or little."""
    nodes = 1 + seed % 2
    whole = cluster(8 // nodes, nodes=nodes, flops=5e13, bandwidth=5e10, node_bandwidth=5e9)
    return limited(whole, (2.0**40, 4 * 2.0**30)[seed % 4 > 1])


def drawn(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(sorted(CHOICES), rng.choice((1, 2, 2, 3)))
    return {name: rng.choice(CHOICES[name]) for name in names}


def fastest_s(search: Search, given: dict[str, Any]) -> float | None:
    try:
        return search.again(Overrides(**given)).best.step_time_s
    except (OverrideError, InfeasibleError):
        return None


@pytest.mark.parametrize(
    "seed", tiered(range(3), lambda seed: seed == 2, "more draws; those of one seed stay")
)
def test_a_superset_never_loses_to_its_subset(seed: int) -> None:
    """Random overrides, each in all its subsets of one less: no restriction makes a plan faster."""
    rng = random.Random(seed)
    search = Search(
        problem_of(gpt2(10, 1024, 16, 50257, 512), small_cluster(seed)), 24, Overrides()
    )
    free_s = search.run().best.step_time_s
    compared = 0
    for _ in range(4):
        given = drawn(rng)
        own_s = fastest_s(search, given)
        if own_s is None:
            continue
        assert free_s <= own_s * (1 + TOLERANCE), given
        for name in given:
            wider = {key: value for key, value in given.items() if key != name}
            wider_s = fastest_s(search, wider) if wider else free_s
            assert wider_s is not None, (wider, given)
            assert wider_s <= own_s * (1 + TOLERANCE), (wider, given)
            compared += 1
    assert compared > 2
