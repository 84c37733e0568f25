"""What fits, and where nothing does: ways out, against searches of what is relaxed."""

import pickle
from typing import Any

import pytest

from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.overrides.overrides import Overrides, each_dropped
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


def states_bytes() -> int:
    return 18 * wide().graph.num_parameters()


# --- in the course of a step ---------------------------------------------------------------------


def following(
    memory_bytes: float,
    target: Target = EAGER,
    devices: int = 4,
    forbid: tuple[str, ...] = ("tp", "pp", "offload"),
) -> Search:
    on = cluster(devices, bandwidth=1e9, memory_bytes=memory_bytes)
    return Search(problem_of(wide(), on, target=target), BATCH, Overrides(forbid=forbid))


@pytest.mark.parametrize("share", [1.0, 0.6, 0.45, 0.37])
def test_what_is_chosen_fits(share: float) -> None:
    memory_bytes = share * states_bytes()
    prediction = following(memory_bytes).run().best.evaluation.prediction
    assert max(prediction.peak_memory_bytes) <= memory_bytes


@pytest.mark.parametrize("share", [0.30, 0.285])
def test_a_larger_space_loses_no_plan_that_fits(share: float) -> None:
    """Different meshes draft no plan in place of others like it."""
    for forbid in (("pp",), ()):
        assert following(share * states_bytes(), forbid=forbid).run().best.fits


# --- ways out ------------------------------------------------------------------------------------


def limited(memory_bytes: float, *, nodes: int = 1, devices: int = 2) -> Cluster:
    return cluster(devices, nodes=nodes, memory_bytes=memory_bytes)


def searching(on: Cluster, of: Traced, *, executable: bool = False, **given: Any) -> Search:
    overrides = Overrides(**given)
    return Search(problem_of(of, on, target=SUMMED), BATCH, overrides, executable=executable)


def failing(on: Cluster, of: Traced, **given: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        searching(on, of, **given).run()
    return caught.value


def test_the_fewest_nodes_are_found() -> None:
    memory_bytes = states_bytes() / 5
    error = failing(limited(memory_bytes), wide())
    (wider,) = [r for r in error.relaxations if r.more_nodes]
    nodes = 1 + wider.more_nodes
    assert nodes > 2 and wider.what == f"{nodes} nodes"
    assert searching(limited(memory_bytes, nodes=nodes), wide()).run().best.fits
    for fewer in range(2, nodes):
        failing(limited(memory_bytes, nodes=fewer), wide())


def test_every_override_that_helps_is_named_the_cheapest_first() -> None:
    on, given = limited(states_bytes() * 0.8), {"forbid": ["zero"], "tp": 1, "pp": 1}
    error = failing(on, wide(), **given)
    dropped = {r.what for r in error.relaxations if not r.more_nodes}
    assert dropped == {"allow zero", "leave tp free", "leave pp free"}
    for one in each_dropped(Overrides(**given)):
        assert searching(on, wide(), **one.left.given()).run().best.fits
    keys = [(r.more_nodes, r.step_time_s) for r in error.relaxations]
    assert keys == sorted(keys)
    assert f"Way out: {error.relaxations[0].what} (" in str(error)
    assert all(str(relaxation) in str(error) for relaxation in error.relaxations)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.relaxations) == (str(error), error.relaxations)
    assert again.shortfall_bytes == error.shortfall_bytes


def test_recompute_is_a_way_out() -> None:
    of = linears(64, 4, BATCH, 512)
    given = {"recompute": "none", "forbid": ["tp", "pp"], "num_microbatches": 2}
    kept = searching(limited(2.0**40), of, **given).run().best
    peak_bytes = max(kept.evaluation.prediction.peak_memory_bytes)
    ways = {r.what for r in failing(limited(peak_bytes * 0.9), of, **given).relaxations}
    assert {"leave recompute free", "leave num_microbatches free"} <= ways


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
