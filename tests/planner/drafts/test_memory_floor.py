"""No plan is lost with a mesh that is refused before it is priced."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.drafts import equal_stages
from meshwright.planner.drafts.combinations import Combination, MeshChoice
from meshwright.planner.drafts.equal_stages import overfull
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import Traced, large_gpt2, large_llama, linears, problem_of
from tests.helpers.tiers import second_tier

GIB = 2.0**30
LINEARS = partial(linears, 2048, 6, 16, 512)


def search_with(of: Traced, gib: float) -> Search:
    node = Cluster.from_catalog("dgx-h100", num_nodes=1)
    device = replace(node.device, memory_bytes=int(gib * GIB), reserved_bytes=0)
    return Search(problem_of(of, replace(node, device=device)), 256, Overrides())


def keys(combinations: Iterable[Combination]) -> set[tuple[Any, ...]]:
    return {(c.setup.sharing.zero, c.setup.chain.mode, c.pipeline) for c in combinations}


@second_tier("whole searches; devices that are overfull, by enumeration, stay")
@pytest.mark.parametrize(
    ("make", "gib"),
    [(large_gpt2, 12), (large_llama, 24), (LINEARS, 0.5), (LINEARS, 1)],
    ids=["gpt2", "llama", "linears", "linears with ample memory"],
)
def test_what_is_refused_has_no_plan_that_fits(
    make: Callable[[], Traced], gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole meshes, and combinations of others."""
    search = search_with(make(), gib)
    space, offered = search.space, {}
    for m in (1, 4, 32, 256):
        for groups in space.stage_counts():
            for mesh in space.meshes(8 // groups, m):
                choice = MeshChoice(mesh=mesh, num_microbatches=m, groups=groups, bound_s=0.0)
                allowed = search.equal.floor.allows(mesh, m, groups)
                offered[choice] = keys(search.equal.combinations(choice)) if allowed else set()
    monkeypatch.setattr(equal_stages, "overfull", lambda *given: False)
    free, refused = search.like(), 0
    for choice, kept in offered.items():
        for one in free.equal.combinations(choice):
            if not keys([one]) <= kept:
                refused += 1
                assert free.equal.solve(one, math.inf) is None, (choice, one.pipeline)
    assert refused or gib == 1


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 30),
)
def test_devices_are_overfull_only_where_no_placement_fits(
    blocks: list[tuple[int, int]], groups: int, room: int
) -> None:
    """Against every cut of blocks that hold some bytes each, and pass some as the last one."""
    loads, passing = (np.array(own, dtype=float) for own in zip(*blocks, strict=True))
    fits = any(
        all(
            sum(load for load, _ in own) + own[-1][1] <= room
            for a, b in itertools.pairwise((0, *ends, len(blocks)))
            if (own := blocks[a:b])
        )
        for ends in itertools.combinations_with_replacement(range(len(blocks) + 1), groups - 1)
    )
    assert not (fits and overfull(float(loads.sum()), passing, float(room), groups))
    least = (loads.sum() + (groups - 1) * passing.min() + passing[-1]) / groups
    assert overfull(float(loads.sum()), passing, float(least) - 1, groups)
