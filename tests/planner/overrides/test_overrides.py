"""Overrides: what each may be, which contradict each other, and what they do to the search."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshwright.costmodel.blocks.policies import RECOMPUTE
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.operators.problem import Problem
from meshwright.costmodel.schedules.schedule import SCHEDULES
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.planner.overrides.fitting import check_overrides
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.values import FORBIDDABLE, FORBIDS, OverrideError
from meshwright.planner.search.result import SearchResult
from meshwright.planner.search.search import Search
from tests.helpers.refusals import assert_says, refusals
from tests.helpers.tiny import cut, net, slow_host

ROWS = 16
REFUSED = Path(__file__).with_name("refused.txt")


@cache
def model() -> tuple[Graph, FactorTable]:
    return cut(net())


def search(devices: int = 4, **given: Any) -> SearchResult:
    graph, factors = model()
    problem = Problem(graph=graph, factors=factors, cluster=slow_host(devices), precision="fp32")
    overrides = Overrides(**given)
    return Search(problem, ROWS, overrides).run()


# --- one override --------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "says"), refusals(REFUSED, "Overrides"))
def test_what_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    """Values by themselves, by block, and two that contradict each other."""
    with pytest.raises(OverrideError) as caught:
        Overrides(**given)
    assert_says(caught.value, says)


def test_everything_that_can_be_decided_can_be_forbidden() -> None:
    assert set(FORBIDS) == {
        "tp", "dp", "pp", "cp", "ep", "virtual_stages", "zero", "recompute", "placement",
        "dp_shard", "hpz", "quantized", "segments", "zero-1", "zero-2", "zero-3", *RECOMPUTE[1:],
        *SCHEDULES,
    }  # fmt: skip
    assert Overrides(forbid=FORBIDDABLE[:3]).forbid == ("tp", "dp", "pp")


def test_only_what_is_set_is_given() -> None:
    assert Overrides().given() == {}
    assert Overrides(shardings={}, forbid=[]).given() == {}
    assert Overrides(tp=2, zero=0, forbid=["pp"]).given() == {"tp": 2, "zero": 0, "forbid": ["pp"]}


# --- two overrides -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 1, "forbid": ["tp"]},
        {"zero": 0, "recompute": {"a": "none"}, "forbid": ["zero", "recompute"]},
        {"zero": {"a": 0}, "dp_shard": {"b": 4}},
        {"dp_shard": {"a": 2}, "zero": {"a": 3, "b": 0}},
        {"schedule": "interleaved_1f1b", "virtual_stages": 1},
        {"schedule": "zb_v", "pp": 2, "stages": [["a"]] * 4},
        {"schedule": "interleaved_1f1b", "pp": 2, "stages": [["a"]] * 6},
        {"tp": {"a": 2, "b": 2}, "forbid": ["unequal_meshes"]},
        {"dp": {"a": 2}, "microbatch_size": 2},
        {"virtual_stages": 1, "forbid": ["pp", "virtual_stages"]},
        {"placement": "tp,dp,pp", "forbid": ["placement"]},
    ],
    ids=str,
)
def test_what_can_hold_together_is_taken(given: dict[str, Any]) -> None:
    assert Overrides(**given).given() == given


def test_forbidding_leaves_the_value_that_does_without() -> None:
    found = Overrides(forbid=["tp", "zero", "recompute"], dp=2)
    values = [found.everywhere(name) for name in ("tp", "dp", "pp", "zero", "recompute")]
    assert values == [1, 2, None, 0, "none"]
    assert Overrides(tp=1, forbid=["tp"]).everywhere("tp") == 1
    assert Overrides(tp={"head": 2}).everywhere("tp") is None
    assert Overrides(forbid=["full", "zero-2"]).left("recompute") == RECOMPUTE[:-1]


def equal_stages_exist(tp: int | None, dp: int | None, pp: int | None, devices: int) -> bool:
    """Whether stages of (tp, dp), or of any mesh where one is free, can use all devices."""
    sizes = [
        t * d
        for t in ([tp] if tp else range(1, devices + 1))
        for d in ([dp] if dp else range(1, devices + 1))
    ]
    reachable = {0: {0}}  # stages -> devices used
    for count in range(1, (pp or devices) + 1):
        reachable[count] = {used + s for used in reachable[count - 1] for s in sizes}
    return any(devices in reachable[n] for n in ([pp] if pp else range(1, devices + 1)))


def test_degrees_must_fit_the_devices() -> None:
    choices = (None, 1, 2, 3, 4, 6)
    for devices, tp, dp, pp in product((1, 4, 6), choices, choices, choices):
        overrides = Overrides(tp=tp, dp=dp, pp=pp)
        try:
            check_overrides(
                overrides,
                num_devices=devices,
                global_batch_size=12,
                num_blocks=9,
                executable=True,
                sequences=False,
            )
            refused = ""
        except OverrideError as error:
            refused = str(error)
        assert bool(refused) != equal_stages_exist(tp, dp, pp, devices), (tp, dp, pp, devices)
        for name, value in (("tp", tp), ("dp", dp)):
            assert not refused or value is None or f"{name}={value}" in refused


@pytest.mark.parametrize(
    ("sequences", "given", "says"),
    [(True, *case.values) for case in refusals(REFUSED, "check_overrides")]
    + [(False, *case.values) for case in refusals(REFUSED, "check_overrides without sequences")],
)
def test_what_cannot_fit_says_why(sequences: bool, given: dict[str, Any], says: str) -> None:
    with pytest.raises(OverrideError) as caught:
        check_overrides(
            Overrides(**given), num_devices=8, global_batch_size=ROWS, num_blocks=5,
            sequences=sequences,
        )  # fmt: skip
    assert_says(caught.value, says)


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 2, "dp": 2, "pp": 1},  # cp=2 is left to choose
        {"tp": 2, "cp": 2, "dp": 2},
        {"pp": 2, "virtual_stages": 2},
        {"dp": 8, "microbatch_size": 2, "num_microbatches": 1},
        {"dp_shard": 8, "hpz": {"a": 8}},
    ],
    ids=str,
)
def test_context_and_virtual_stages_count_where_they_may_be_had(given: dict[str, Any]) -> None:
    check_overrides(Overrides(**given), num_devices=8, global_batch_size=ROWS, num_blocks=5)


# --- in the search -------------------------------------------------------------------------------


def test_the_search_takes_the_stages() -> None:
    found = search(stages=[["embed", "layers.0"], ["layers.1-2", "head"]])
    for candidate in found.candidates:
        assert [s.blocks for s in candidate.plan.stages] == [
            ("embed", "layers.0"),
            ("layers.1", "layers.2", "head"),
        ]


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 2},
        {"dp": 4},
        {"pp": 2, "schedule": "gpipe"},
        {"microbatch_size": 2},
        {"num_microbatches": 4, "forbid": ["tp"]},
        {"zero": 0, "recompute": "full"},
        {"forbid": ["tp", "pp", "zero"]},
    ],
    ids=str,
)
def test_every_candidate_keeps_the_overrides(given: dict[str, Any]) -> None:
    wanted = Overrides(**given)
    for candidate in search(**given).candidates:
        plan = candidate.plan
        assert wanted.everywhere("pp") in (None, len(plan.devices))
        assert wanted.num_microbatches in (None, plan.num_microbatches)
        assert wanted.schedule in (None, plan.schedule)
        for stage in plan.stages:
            for name in ("tp", "dp", "zero"):
                assert wanted.everywhere(name) in (None, getattr(stage, name))
            assert wanted.microbatch_size in (None, plan.microbatch_rows // stage.dp)
            assert wanted.recompute is None or set(stage.policies) == {wanted.recompute}


def test_shardings_reach_every_repeat() -> None:
    graph, _ = model()
    found = search(2, tp=2, pp=1, shardings={"layers.*.up": "rowwise", "layers.1.up": "replicate"})
    (assignments,) = found.best.assignments
    chosen = {
        op.key: assignments[block.name].strategies[op.name].name
        for block in graph.blocks
        for op in block.ops
    }
    assert [chosen[f"layers.{i}.up:linear"] for i in range(3)] == [
        "rowwise",
        "replicate",
        "rowwise",
    ]


def test_a_sharding_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"override shardings: sharding 'layer\.\*\.up'.*nearest"):
        search(shardings={"layer.*.up": "colwise"})


def test_a_degree_that_a_sharding_excludes_is_left_out() -> None:
    # a vocabulary of 24 divides by 2, 4 and 8, not by 16
    found = search(16, pp=1, shardings={"head": "colwise"})
    assert {stage.tp for c in found.candidates for stage in c.plan.stages} <= {1, 2, 4, 8}


def test_a_sharding_that_no_degree_allows_is_refused() -> None:
    with pytest.raises(OverrideError, match=r"override shardings: .*'colwize'.*mean 'colwise'"):
        search(shardings={"head": "colwize"})
