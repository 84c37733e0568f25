"""Alternatives: what a family is; what it lacks, in bytes, against searches restricted to it."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER, target_named
from meshwright.planner.alternatives.alternatives import Alternative, alternatives
from meshwright.planner.alternatives.families import RUNS_HERE, WITHOUT, families, runs_here
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.search import Search
from meshwright.planner.search.taste import TIE
from meshwright.profiles.cluster import Cluster
from tests.helpers.enumeration import SERIAL
from tests.helpers.planning import Traced, cluster, large_gpt2, linears, problem_of
from tests.helpers.tiers import tiered

AS_FORCED = 1.02  # a family's line over what forcing it finds, at most
FAR, FAR_OFF = 1.5, 1.1  # of families that take so many times the best step, this is enough
BATCH = 8


def small() -> Traced:
    return linears(256, 4, BATCH, 64)


ON = {
    "fast wires": cluster(4, bandwidth=1e11),
    "slow wires": cluster(4, bandwidth=2e8),
    "two nodes": cluster(2, nodes=2, node_bandwidth=2e8),
}
LARGER: dict[str, tuple[Any, Cluster, int, str]] = {
    "two nodes of four": (
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
CASES = {name: (small, on, BATCH, "eager") for name, on in ON.items()} | LARGER
NAMES = tiered(
    CASES, ON.__contains__, "a search for each family of larger clusters; three small ones stay"
)


def searching(
    on: Cluster, *, executable: bool = False, target: Target = EAGER, **given: Any
) -> Search:
    problem = problem_of(small(), on, target=target)
    return Search(problem, BATCH, Overrides(**given), executable=executable)


@cache
def searched(
    name: str, objective: str = "fastest"
) -> tuple[Search, SearchResult, tuple[Alternative, ...]]:
    make, on, batch, target = CASES[name]
    problem = problem_of(make(), on, target=target_named(target))
    search = Search(problem, batch, Overrides(), objective=objective)
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
    own = sorted({"tp=2", "pp=2", "pp=4", "no tensor parallelism"} & lacking.keys())
    assert len(own) >= 3
    for family in own:
        given, short = forced(family), lacking[family]
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


# --- what forcing a family finds ------------------------------------------------------------------


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


@pytest.mark.parametrize("name", NAMES)
def test_a_line_is_as_good_as_what_forcing_its_family_finds(name: str) -> None:
    search, result, found = searched(name)
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
