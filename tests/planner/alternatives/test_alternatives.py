"""Alternatives: what a family is; what it lacks, in bytes, against searches restricted to it."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.alternatives.alternatives import Alternative, alternatives
from meshwright.planner.alternatives.families import RUNS_HERE, families, runs_here
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.enumeration import SERIAL
from tests.helpers.planning import cluster, linears, problem_of

BATCH = 8
ON = {
    "fast wires": cluster(4, bandwidth=1e11),
    "slow wires": cluster(4, bandwidth=2e8),
    "two nodes": cluster(2, nodes=2, node_bandwidth=2e8),
}
WITHIN = {
    "no tensor parallelism": {"forbid": ["tp"]},
    "tp=2": {"tp": 2},
    "pp=2": {"pp": 2},
    "pp=4": {"pp": 4},
}


def searching(
    on: Cluster, *, executable: bool = False, target: Target = EAGER, **given: Any
) -> Search:
    of = linears(256, 4, BATCH, 64)
    return Search(
        problem_of(of, on, target=target), BATCH, Overrides(**given), executable=executable
    )


@cache
def searched(name: str) -> tuple[Search, SearchResult, tuple[Alternative, ...]]:
    search = searching(ON[name])
    result = search.run()
    return search, result, alternatives(search, result)


def with_memory(on: Cluster, memory_bytes: float) -> Cluster:
    return dataclasses.replace(
        on, device=dataclasses.replace(on.device, memory_bytes=int(memory_bytes))
    )


@pytest.mark.parametrize("name", ON)
def test_every_family_but_those_of_the_chosen_plan_has_an_answer(name: str) -> None:
    search, result, found = searched(name)
    names = [a.family for a in found]
    assert len(set(names)) == len(names)
    for family in families(search, result):
        assert family.has(result.best.plan) != (family.name in names)
    assert {"full recompute"} <= set(names)


@pytest.mark.parametrize("name", ON)
def test_a_plan_belongs_to_its_family_and_fits(name: str) -> None:
    search, result, found = searched(name)
    belongs = {family.name: family.has for family in families(search, result)}
    for alternative in found:
        assert alternative.draft is not None, alternative.family  # memory is ample
        assert alternative.draft.fits
        assert belongs[alternative.family](alternative.draft.plan), alternative.family
        assert alternative.draft.step_time_s >= result.bound_s


def test_what_runs_here_is_offered_unless_nothing_else_was_searched() -> None:
    for n in ON:
        here = {a.family: a.draft for a in searched(n)[2]}.get(RUNS_HERE)
        assert here is None or runs_here(here.plan)
    search = searching(ON["two nodes"], executable=True)
    result = search.run()
    assert runs_here(result.best.plan)
    assert RUNS_HERE not in {a.family for a in alternatives(search, result)}


def test_what_does_not_fit_lacks_as_much_as_makes_it_fit() -> None:
    free = searching(ON["fast wires"], target=SERIAL).run().best.evaluation.prediction
    tight = with_memory(ON["fast wires"], max(free.peak_memory_bytes) * 0.6)
    search = searching(tight, target=SERIAL, forbid=["recompute"])
    found = alternatives(search, search.run())
    lacking = {a.family: a.shortfall_bytes for a in found if a.shortfall_bytes}
    own = sorted(WITHIN.keys() & lacking.keys())
    assert len(own) >= 3
    for family in own:
        given, short = WITHIN[family], lacking[family]
        given = {**given, "forbid": [*given.get("forbid", []), "recompute", "unequal_meshes"]}
        room = tight.device.memory_bytes
        enough, little = (with_memory(tight, room + more) for more in (short * 1.01 + 1, short / 2))
        assert searching(enough, target=SERIAL, **given).run().best.fits
        with pytest.raises(InfeasibleError):
            searching(little, target=SERIAL, **given).run()


def test_out_of_time_nothing_new_is_explored() -> None:
    search, result, _ = searched("slow wires")
    found = alternatives(search, dataclasses.replace(result, complete=False))
    assert any(a.bound_s is not None for a in found)
    for a in found:
        if a.draft is None:
            assert a.shortfall_bytes is None and a.bound_s is not None
        else:
            assert any(a.draft is draft for draft in result.drafts)
