"""The way out where nothing fits, against searches of what is relaxed."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import pytest

from meshwright.planner.overrides.dropped import each_dropped
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.plan import RUNS
from meshwright.planner.search.relaxations import MOST
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import SUMMED, cluster, linears, problem_of
from tests.models.models import Traced

BATCH = 8


def wide() -> Traced:
    """Mostly weights."""
    return linears(512, 4, BATCH)


def limited(memory_bytes: float, *, nodes: int = 1, devices: int = 2) -> Cluster:
    return cluster(devices, nodes=nodes, memory_bytes=memory_bytes)


def searching(on: Cluster, of: Traced, *, executable: bool = False, **given: Any) -> Search:
    overrides = Overrides(**given)
    return Search(problem_of(of, on, target=SUMMED), BATCH, overrides, executable=executable)


def failing(on: Cluster, of: Traced, **given: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        searching(on, of, **given).run()
    return caught.value


@cache
def states_bytes() -> int:
    return 18 * wide().graph.num_parameters()


def test_the_fewest_nodes_are_found() -> None:
    memory_bytes = states_bytes() / 5
    error = failing(limited(memory_bytes), wide())
    (wider,) = [r for r in error.relaxations if r.more_nodes]
    nodes = 1 + wider.more_nodes
    assert nodes > 2 and wider.what == f"{nodes} nodes"
    assert searching(limited(memory_bytes, nodes=nodes), wide()).run().best.fits
    for fewer in range(2, nodes):
        failing(limited(memory_bytes, nodes=fewer), wide())


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"forbid": ["zero"], "tp": 1, "pp": 1}, {"allow zero", "leave tp free", "leave pp free"}),
        ({"zero": 0, "tp": 1, "pp": 1}, {"leave zero free", "leave tp free", "leave pp free"}),
    ],
)
def test_every_override_that_helps_is_named(given: dict[str, Any], what: set[str]) -> None:
    error = failing(limited(states_bytes() * 0.8), wide(), **given)
    dropped = {r.what for r in error.relaxations if not r.more_nodes}
    assert dropped == what
    for one in each_dropped(Overrides(**given)):
        left = one.left.given()
        assert searching(limited(states_bytes() * 0.8), wide(), **left).run().best.fits


def test_recompute_is_a_way_out() -> None:
    of, others = linears(64, 4, BATCH, 512), {"forbid": ["tp", "pp"], "num_microbatches": 2}
    kept = searching(limited(2.0**40), of, recompute="none", **others).run().best
    peak_bytes = max(kept.evaluation.prediction.peak_memory_bytes)
    error = failing(limited(peak_bytes * 0.9), of, recompute="none", **others)
    ways = {r.what for r in error.relaxations}
    assert {"leave recompute free", "leave num_microbatches free"} <= ways


def test_the_cheapest_comes_first_and_all_are_said() -> None:
    error = failing(limited(states_bytes() * 0.8), wide(), zero=0, tp=1, pp=1)
    keys = [(r.more_nodes, r.step_time_s) for r in error.relaxations]
    assert keys == sorted(keys) and len(keys) >= 3
    assert f"Way out: {error.relaxations[0].what} (" in str(error)
    for relaxation in error.relaxations:
        assert str(relaxation) in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.relaxations) == (str(error), error.relaxations)


def test_what_can_only_be_planned_is_a_way_out_of_what_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RUNS, "zero", (0, 1))
    given = {"forbid": ["tp", "pp", "recompute"]}
    on = limited(states_bytes() * 0.45, devices=4)
    error = failing(on, wide(), executable=True, **given)
    assert any("executable=False" in r.what for r in error.relaxations)
    assert searching(on, wide(), **given).run().best.plan.stages[0].zero > 1


def test_nothing_helps_a_model_beyond_any_cluster() -> None:
    error = failing(limited(1000, devices=1), linears(512, 2, BATCH))
    assert error.relaxations == ()
    assert f"Nothing was found with up to {MOST} times as many nodes" in str(error)


def test_each_override_and_each_forbidden_name_is_dropped_alone() -> None:
    given = Overrides(tp=2, zero=1, forbid=("pp", "full"))
    found = {one.what: one.left for one in each_dropped(given)}
    assert found == {
        "leave tp free": Overrides(zero=1, forbid=("pp", "full")),
        "leave zero free": Overrides(tp=2, forbid=("pp", "full")),
        "allow pp": Overrides(tp=2, zero=1, forbid=("full",)),
        "allow full": Overrides(tp=2, zero=1, forbid=("pp",)),
    }
