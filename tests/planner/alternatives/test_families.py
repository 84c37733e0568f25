"""A family's line is as good as what forcing the family finds, and nothing beats the choice."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from meshwright.costmodel.targets import target_named
from meshwright.planner.alternatives.alternatives import Alternative, alternatives
from meshwright.planner.alternatives.families import RUNS_HERE, WITHOUT
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.search import Search
from meshwright.planner.search.taste import TIE
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import cluster, large_gpt2, linears, problem_of
from tests.helpers.tiers import tiered

AS_FORCED = 1.02  # a family's line over what forcing it finds, at most
FAR, FAR_OFF = 1.5, 1.1  # of families that take so many times the best step, this is enough


CASES: dict[str, tuple[Any, Cluster, int, str]] = {
    "fast wires": (lambda: linears(256, 4, 16, 64), cluster(4, bandwidth=1e11), 16, "eager"),
    "slow wires": (lambda: linears(256, 4, 16, 64), cluster(4, bandwidth=2e8), 16, "eager"),
    "two nodes": (
        lambda: linears(512, 6, 16, 64), cluster(4, nodes=2, node_bandwidth=1e9), 16, "eager"
    ),
    "two nodes, megatron": (
        lambda: linears(512, 6, 16, 64), cluster(4, nodes=2, node_bandwidth=1e9), 16, "megatron"
    ),
    "gpt2": (large_gpt2, Cluster.from_catalog("dgx-h100", num_nodes=2), 64, "eager"),
    "gpt2, v100": (
        large_gpt2, Cluster.from_catalog("p3.16xlarge", num_nodes=1), 64, "eager"
    ),
}  # fmt: skip
NAMES = tiered(
    CASES,
    lambda name: name.endswith("wires"),
    "a search for each family of more clusters; two clusters stay",
)


def forced(family: str) -> dict[str, Any]:
    """The override that asks for a family."""
    without = {name: {axis: 1} for axis, name in WITHOUT.items()}
    plain: dict[str, dict[str, Any]] = {
        **without,
        "equal meshes": {"forbid": ["unequal_meshes"]},
        "no pipeline": {"pp": 1},
        "pipeline inside the node": {"placement": "tp,pp,dp"},
        "no recompute": {"recompute": "none"},
        "full recompute": {"recompute": "full"},
    }
    if family in plain:
        return plain[family]
    if family.startswith("ZeRO-"):
        return {"zero": int(family.removeprefix("ZeRO-"))}
    if "=" in family:
        axis, degree = family.split("=")
        return {axis: int(degree)}
    return {"schedule": family}


@cache
def searched(name: str, objective: str) -> tuple[Search, SearchResult, tuple[Alternative, ...]]:
    make, on, batch, target = CASES[name]
    problem = problem_of(make(), on, target=target_named(target))
    search = Search(problem, batch, Overrides(), objective=objective)
    result = search.run()
    return search, result, alternatives(search, result)


@pytest.mark.parametrize("name", NAMES)
def test_a_line_is_as_good_as_what_forcing_its_family_finds(name: str) -> None:
    search, result, found = searched(name, "fastest")
    for alternative in found:
        if alternative.family == RUNS_HERE:
            continue
        given = Overrides(**forced(alternative.family))
        try:
            best_s = search.again(given).best.step_time_s
        except (InfeasibleError, OverrideError):
            assert alternative.draft is None, alternative.family
            continue
        said = [d.step_time_s for d in (alternative.draft, alternative.instead) if d]
        assert said, f"{alternative.family} fits, in {best_s} s"
        far = best_s > FAR * result.best.step_time_s
        most_s = best_s * (FAR_OFF if far else AS_FORCED)
        assert min(said) <= most_s, f"{alternative.family}: {min(said)}, {best_s}"


@pytest.mark.parametrize("objective", ["fastest", "robust"])
@pytest.mark.parametrize("name", NAMES)
def test_no_line_is_faster_than_the_choice(name: str, objective: str) -> None:
    _, result, found = searched(name, objective)
    tied = 1 + TIE if objective == "robust" else 1.0
    least_s = result.best.step_time_s / tied * (1 - 1e-9)
    for alternative in found:
        for draft in (alternative.draft, alternative.instead):
            assert draft is None or draft.step_time_s >= least_s, alternative.family
