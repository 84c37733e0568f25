"""No plan is lost with a mesh that is refused before it is priced."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from meshwright.planner.drafts.combinations import MeshChoice
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import Traced, large_gpt2, large_llama, linears, problem_of

GIB = 2.0**30
CASES = {
    "gpt2": (large_gpt2, (6, 12, 80)),
    "llama": (large_llama, (24, 80)),
    "linears": (lambda: linears(2048, 6, 16, 512), (0.5, 1)),
}


@cache
def traced(name: str) -> Traced:
    return CASES[name][0]()


@pytest.mark.parametrize(
    ("name", "gib"), [(name, gib) for name, (_, sizes) in CASES.items() for gib in sizes]
)
def test_on_a_refused_mesh_no_plan_fits(name: str, gib: float) -> None:
    node = Cluster.from_catalog("dgx-h100", num_nodes=1)
    device = replace(node.device, memory_bytes=int(gib * GIB), reserved_bytes=0)
    cluster = replace(node, device=device)
    search = Search(problem_of(traced(name), cluster), 256, Overrides())
    space, equal, refused = search.space, search.equal, 0
    for m in (1, 4, 32, 256):
        for groups in space.stage_counts():
            for mesh in space.meshes(cluster.num_devices // groups, m):
                if equal.floor.allows(mesh, m, groups):
                    continue
                refused += 1
                choice = MeshChoice(mesh=mesh, num_microbatches=m, groups=groups, bound_s=0.0)
                for one in equal.combinations(choice):
                    assert equal.solve(one, math.inf) is None, (choice, one.schedule)
    assert refused or gib == max(CASES[name][1]), "nothing was refused"
