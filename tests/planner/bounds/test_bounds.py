"""The bound of a combination, against its cut, simulated."""

from __future__ import annotations

import math

import pytest

from meshwright.costmodel.targets import target_named
from meshwright.planner.bounds.bounds import Bounds
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.search.search import Search
from tests.helpers.planning import linears, odd_cluster, problem_of


@pytest.mark.parametrize("target", ["eager", "megatron"])
@pytest.mark.parametrize("seed", [0, 2, 5])
def test_no_cut_of_a_combination_is_faster_than_its_bound(seed: int, target: str) -> None:
    of, on = linears(256, 4, 16, 64), odd_cluster(seed, 4)
    search = Search(problem_of(of, on, target=target_named(target)), 16, Overrides())
    bounds, raised = Bounds(space=search.space, equal=search.equal), 0
    for m in (1, 4, 16):
        for choice in search.equal.mesh_choices(m):
            for one in search.equal.combinations(choice):
                found = search.equal.solve(one, math.inf)
                draft = search.draft(one, found[1]) if found else None
                if draft is not None and draft.fits:
                    bound_s = bounds.of_combination(one)
                    assert bound_s <= draft.step_time_s * (1 + 1e-9), (choice, one.schedule)
                    raised += bound_s > one.bound_s * 1.001
    assert raised > 5
