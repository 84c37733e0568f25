"""Overrides: what each may be, which contradict each other, and what they do to the search."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
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
from tests.helpers.tiny import cut, net, slow_host

ROWS = 16


@cache
def model() -> tuple[Graph, FactorTable]:
    return cut(net())


def search(devices: int = 4, **given: Any) -> SearchResult:
    graph, factors = model()
    problem = Problem(graph=graph, factors=factors, cluster=slow_host(devices), precision="fp32")
    overrides = Overrides(**given)
    return Search(problem, ROWS, overrides).run()


# --- one override --------------------------------------------------------------------------------


DEGREES = ("tp", "dp", "cp", "ep", "pp", "dp_shard", "hpz", "virtual_stages", "microbatch_size")


@pytest.mark.parametrize("name", [*DEGREES, "num_microbatches"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, [2]])
def test_degrees_are_integers_from_one(name: str, value: Any) -> None:
    with pytest.raises(OverrideError, match=rf"override {name}=.*legal: an integer from 1"):
        Overrides(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("schedule", "1b1f", "1f1b"),
        ("schedule", True, "gpipe"),
        ("schedule", {"head": "gpipe"}, "gpipe"),
        ("zero", 4, "0, 1, 2, 3"),
        ("zero", True, "0, 1, 2, 3"),
        ("zero", 1.0, "0, 1, 2, 3"),
        ("zero", "1", "0, 1, 2, 3"),
        ("recompute", "some", re.escape(", ".join(RECOMPUTE))),
        ("recompute", False, "none, regather, selective"),
        ("placement", "pp,tp,dp", "tp,dp,pp, tp,pp,dp"),
    ],
)
def test_choices_name_what_is_legal(name: str, value: Any, legal: str) -> None:
    with pytest.raises(OverrideError, match=rf"override {name}={value!r}; legal: .*{legal}"):
        Overrides(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp", {"layers.*": 0}),
        ("tp", {"layers.*": 2, "head": "2"}),
        ("dp_shard", {"**": True}),
        ("zero", {"head": 4}),
        ("recompute", {"head": "some"}),
        ("recompute", {}),
        ("cp", {"": 2}),
        ("ep", {3: 2}),
        ("pp", {"head": 2}),
    ],
)
def test_values_by_block_are_checked_like_one_for_all(name: str, value: Any) -> None:
    with pytest.raises(OverrideError, match=rf"override {name}=\{{.*legal: .*or None") as caught:
        Overrides(**{name: value})
    assert ("glob over block names" in str(caught.value)) == (name != "pp")


def test_everything_that_can_be_decided_can_be_forbidden() -> None:
    assert set(FORBIDS) == {
        "tp", "dp", "pp", "cp", "ep", "virtual_stages", "zero", "recompute", "placement",
        "dp_shard", "hpz", "quantized", "segments", "zero-1", "zero-2", "zero-3", *RECOMPUTE[1:],
        *SCHEDULES,
    }  # fmt: skip
    assert Overrides(forbid=FORBIDDABLE[:3]).forbid == ("tp", "dp", "pp")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"forbid": ["tpp"]}, "forbid='tpp'; legal: .*did you mean 'tp'"),
        ({"forbid": ["quantum"]}, "forbid='quantum'; legal: tp, dp, pp"),
        ({"forbid": [None]}, "forbid=None; legal"),
        ({"forbid": "tp"}, r"forbid='tp'; legal: a list of names, e.g. forbid=\['tp'\]"),
        ({"stages": []}, r"stages=\[\]; legal: a list of block names per stage"),
        ({"stages": "embed"}, "stages='embed'; legal"),
        ({"stages": ["embed", "head"]}, r"stages\[0\]='embed'; legal"),
        ({"stages": [["embed"], []]}, r"stages\[1\]=\[\]; legal"),
        ({"stages": [["embed"], [1]]}, r"stages\[1\]=\[1\]; legal"),
        ({"shardings": [("head", "colwise")]}, "shardings=.*legal: a dict of glob: decision"),
        ({"shardings": {"head": 1}}, "shardings=.*legal: a dict"),
        ({"shardings": {1: "colwise"}}, "shardings=.*legal: a dict"),
    ],
)
def test_collections_are_checked(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OverrideError, match=says):
        Overrides(**given)


def test_only_what_is_set_is_given() -> None:
    assert Overrides().given() == {}
    assert Overrides(shardings={}, forbid=[]).given() == {}
    assert Overrides(tp=2, zero=0, forbid=["pp"]).given() == {"tp": 2, "zero": 0, "forbid": ["pp"]}


# --- two overrides -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "both"),
    [
        ({"tp": 2, "forbid": ["tp"]}, ("tp=2", "forbid='tp'")),
        ({"dp": 4, "forbid": ["pp", "dp"]}, ("dp=4", "forbid='dp'")),
        ({"pp": 2, "forbid": ["pp"]}, ("pp=2", "forbid='pp'")),
        ({"zero": 1, "forbid": ["zero"]}, ("zero=1", "forbid='zero'")),
        ({"recompute": "full", "forbid": ["recompute"]}, ("'full'", "forbid='recompute'")),
        ({"schedule": "gpipe", "forbid": ["gpipe"]}, ("schedule='gpipe'", "forbid='gpipe'")),
        ({"pp": 3, "stages": [["a"], ["b"]]}, ("pp=3", "stages= with 2 stages")),
        ({"forbid": ["pp"], "stages": [["a"], ["b"]]}, ("forbid='pp'", "stages= with 2 stages")),
        ({"pp": 2, "virtual_stages": 2, "stages": [["a"], ["b"]]}, ("pp=2", "virtual_stages=2")),
        ({"pp": 2, "schedule": "1f1b", "stages": [["a"]] * 4}, ("pp=2", "stages= with 4 stages")),
        ({"schedule": "zb_v", "stages": [["a"]] * 3}, ("'zb_v'", "stages= with 3 stages")),
        ({"cp": 2, "forbid": ["cp"]}, ("cp=2", "forbid='cp'")),
        ({"ep": {"a": 1, "b": 2}, "forbid": ["ep"]}, ("ep={'b': 2}", "forbid='ep'")),
        ({"recompute": {"a": "full"}, "forbid": ["full"]}, ("{'a': 'full'}", "forbid='full'")),
        ({"recompute": "selective", "forbid": ["selective"]}, ("recompute=", "forbid='selective'")),
        ({"zero": 3, "forbid": ["zero-3"]}, ("zero=3", "forbid='zero-3'")),
        ({"zero": {"a": 2}, "forbid": ["zero"]}, ("zero={'a': 2}", "forbid='zero'")),
        ({"dp_shard": 4, "forbid": ["dp_shard"]}, ("dp_shard=4", "forbid='dp_shard'")),
        ({"placement": "tp,pp,dp", "forbid": ["placement"]}, ("'tp,pp,dp'", "forbid='placement'")),
        ({"virtual_stages": 2, "forbid": ["pp"]}, ("virtual_stages=2", "forbid='pp'")),
        ({"virtual_stages": 2, "forbid": ["virtual_stages"]}, ("virtual_stages=2", "forbid=")),
        ({"schedule": "gpipe", "virtual_stages": 2}, ("schedule='gpipe'", "virtual_stages=2")),
        ({"schedule": "zb_v", "virtual_stages": 3}, ("schedule='zb_v'", "virtual_stages=3")),
        ({"schedule": "zb_v", "forbid": ["pp"]}, ("schedule='zb_v'", "forbid='pp'")),
        (
            {"schedule": "interleaved_1f1b", "forbid": ["virtual_stages"]},
            ("schedule='interleaved_1f1b'", "forbid='virtual_stages'"),
        ),
        ({"zero": 0, "dp_shard": 4}, ("zero=0", "dp_shard=4")),
        ({"zero": 2, "hpz": 4}, ("zero=2", "hpz=4", "ZeRO-3")),
        ({"zero": {"a": 0, "b": 1}, "dp_shard": 4}, ("zero={'a': 0}", "dp_shard=4")),
        ({"zero": 0, "dp_shard": {"a": 4}}, ("zero=0", "dp_shard={'a': 4}")),
        ({"tp": {"a": 4, "b": 2}, "forbid": ["unequal_meshes"]}, ("tp={", "'unequal_meshes'")),
        ({"dp": {"a": 4, "b": 2}, "microbatch_size": 1}, ("dp={", "microbatch_size=1")),
    ],
    ids=str,
)
def test_a_contradiction_names_both(given: dict[str, Any], both: tuple[str, str]) -> None:
    with pytest.raises(OverrideError) as caught:
        Overrides(**given)
    assert all(part in str(caught.value) for part in (*both, "drop one of the two"))


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
    ("given", "says"),
    [
        ({"tp": 3}, "override tp=3: 3 does not divide the cluster's 8 devices; legal: 1, 2, 4, 8;"),
        ({"tp": 4, "dp": 4}, "tp=4, dp=4: the product 16 does not divide the cluster's 8 devices"),
        ({"tp": 2, "dp": 2, "pp": 1}, "the product 4 is not the cluster's 8 devices; legal: 8;"),
        ({"tp": 4, "pp": 3}, "tp=4, pp=3: needs at least 12 devices"),
        ({"pp": 6}, "pp=6: the model has 5 blocks; legal: 1 to 5"),
        ({"forbid": ["tp", "dp", "pp"]}, r"tp=1 \(forbid='tp'\), dp=1 .*is not the cluster's 8"),
        ({"num_microbatches": 5}, "num_microbatches=5: 5 does not divide global_batch_size=16"),
        ({"dp": 8, "microbatch_size": 4}, "dp=8, microbatch_size=4: the product 32 does not"),
        (
            {"pp": 3, "virtual_stages": 1, "stages": [["a"]] * 6},
            "pp=3 contradicts stages= with 6 stages",
        ),
        ({"stages": [["a"]] * 6}, "pp=6: the model has 5 blocks"),
        ({"tp": {"a": 16}}, r"tp=\{'a': 16\}: more than the cluster's 8 devices"),
        (
            {"dp": 2, "microbatch_size": 2, "num_microbatches": 2},
            "the product 8 is not global_batch_size=16; legal: 16;",
        ),
    ],
)
def test_what_cannot_fit_says_why(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OverrideError, match=says):
        check_overrides(
            Overrides(**given),
            num_devices=8,
            global_batch_size=ROWS,
            num_blocks=5,
            executable=True,
            sequences=False,
        )


def test_context_and_virtual_stages_count_where_they_may_be_had() -> None:
    def check(**given: Any) -> None:
        check_overrides(Overrides(**given), num_devices=8, global_batch_size=ROWS, num_blocks=5)

    check(tp=2, dp=2, pp=1)  # cp=2 is left to choose
    check(tp=2, cp=2, dp=2)
    check(pp=2, virtual_stages=2)
    for given, says in (
        ({"tp": 2, "dp": 2, "pp": 1, "forbid": ["cp"]}, "product 4 is not the cluster's 8"),
        ({"tp": 2, "cp": 4, "dp": 2}, "tp=2, cp=4, dp=2: the product 16 does not divide"),
        ({"tp": 3, "cp": {"a": 2}}, "tp=3: 3 does not divide"),
        ({"pp": 3, "virtual_stages": 2}, "pp=3, virtual_stages=2: the model has 5 blocks"),
        ({"pp": 3, "schedule": "zb_v"}, "pp=3, virtual_stages=2: the model has 5 blocks"),
    ):
        with pytest.raises(OverrideError, match=says):
            check(**given)


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
