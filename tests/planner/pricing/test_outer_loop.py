"""Replicas that train apart by price: meetings against sums by hand, the step, the search's choice,
the plan file and what no plan may have."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from meshwright import Overrides
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.stages import OuterExchange
from meshwright.planner.plan import InfeasibleError
from meshwright.planner.plan.plan import OuterLoop, Plan, PlanError
from meshwright.planner.pricing import Evaluator
from meshwright.profiles.cluster import Cluster, Link
from tests.helpers import tiny
from tests.helpers.tiers import second_tier

ONE = Cluster.from_catalog("h100-sxm", num_nodes=2)
SITES = replace(ONE, num_pools=2, pool_link=Link(name="WAN", latency_s=0.02, bandwidth=1.25e7))
LOOP = OuterLoop(replicas=2, sync_every=50)


def plan_of(loop: OuterLoop | None = LOOP, **changes: Any) -> Plan:
    """dp8 on a node of eight, on each of two with an outer loop."""
    graph, _ = tiny.cut(tiny.net(), precision="bf16")
    plan = tiny.plan_for(
        graph, dp=8, tp=1, global_batch_size=8, num_microbatches=1, precision="bf16"
    )
    plan = plan if loop is None else plan.repeated(loop)
    return replace(plan, **changes)


def evaluator(cluster: Cluster) -> Evaluator:
    graph, factors = tiny.cut(tiny.net(), precision="bf16")
    return Evaluator(Problem(graph=graph, factors=factors, cluster=cluster, precision="bf16"))


@pytest.mark.parametrize(
    ("bits", "fragments", "sent"),
    [(32, 1, 4.0 * 3 * 2 / 4 * 1e6), (8, 1, 3 * (1 + 4 / 256) * 1e6), (32, 4, 6e6)],
)
def test_a_meeting_sends_and_takes_what_sums_by_hand_do(
    bits: int, fragments: int, sent: float
) -> None:
    """Four replicas of 8 ranks in four pools, a million elements a rank, over a link of 0.1 GB/s
    that 8 rings share. The ring goes over as many borders as there are pools."""
    slow = Link(name="WAN", latency_s=0.01, bandwidth=1e8)
    cluster = replace(SITES, num_nodes=4, num_pools=4, pool_link=slow)
    exchange = OuterExchange(
        replicas=4, ranks=8, share=1e6, holders=1, bits=bits, fragments=fragments
    )
    assert exchange.sent_bytes == pytest.approx(sent, rel=1e-12)
    host, device = cluster.host, cluster.device
    assert host is not None
    codec = 25.0 + 4 * 15.0 if bits == 8 else 0.0
    rounds = 1 if bits == 8 else 2
    expected = 8 * sent / 1e8 + fragments * (rounds * 3 * 0.01 + 50 * device.launch_overhead_s)
    expected += 8e6 / host.link_bandwidth + (40 + codec) * 1e6 / (host.memory_bandwidth / 8)
    assert exchange.seconds(cluster) == pytest.approx(expected, rel=1e-9)


def test_a_step_is_a_replicas_and_its_part_of_a_meeting() -> None:
    inner = evaluator(replace(ONE, num_nodes=1)).price(plan_of(None))
    for cluster in (ONE, SITES):
        priced = evaluator(cluster).price(plan_of())
        assert priced.meeting is not None
        meeting_s = priced.meeting.seconds(cluster)
        step_s = inner.prediction.step_time_s + meeting_s / 50
        assert priced.prediction.step_time_s == pytest.approx(step_s, rel=1e-12)
        assert priced.prediction.model_flops == 2 * inner.prediction.model_flops
        assert priced.prediction.peak_memory_bytes == inner.prediction.peak_memory_bytes
        mfu = priced.prediction.model_flops / (16 * 989e12 * step_s)
        assert priced.prediction.mfu == pytest.approx(mfu, rel=1e-2)
    plan = plan_of()
    assert (plan.num_ranks, plan.global_batch_size) == (16, 16)
    assert plan.of_one_replica == plan_of(None)


@pytest.mark.parametrize(
    ("fragments", "met"), [(1, {6: (0,), 12: (0,)}), (3, {2: (1,), 4: (2,), 6: (0,), 8: (1,)})]
)
def test_fragments_meet_at_steps_of_their_own(
    fragments: int, met: dict[int, tuple[int, ...]]
) -> None:
    loop = OuterLoop(replicas=2, sync_every=6, fragments=fragments)
    due = {steps: loop.due(steps) for steps in range(13) if loop.due(steps)}
    assert {steps: due[steps] for steps in due if steps in met or steps < 9} == met


OTHERS = second_tier("where replicas pay, where not, and where they are asked for stays")


@pytest.mark.parametrize(
    ("cluster", "asked", "replicas"),
    [
        (SITES, {"allow": ["replicas"]}, 2),
        pytest.param(SITES, {}, 1, marks=OTHERS),
        (ONE, {"allow": ["replicas"]}, 1),
        (ONE, {"overrides": Overrides(replicas=2, sync_every=9, outer_bits=8)}, 2),
        pytest.param(
            SITES, {"allow": ["replicas"], "overrides": Overrides(replicas=1)}, 1, marks=OTHERS
        ),
    ],
)
def test_the_search_takes_replicas_where_they_pay(
    cluster: Cluster, asked: dict[str, Any], replicas: int
) -> None:
    overrides = asked.get("overrides") or Overrides()
    asked = {**asked, "overrides": replace(overrides, forbid=("pp", "tp", "cp"))}
    result = tiny.planned(
        tiny.net(), cluster=cluster, precision="bf16", global_batch_size=64, profile=False, **asked
    )
    assert result.plan.replicas == replicas
    report = result.report
    text, data = str(report), report.to_dict()
    if replicas == 1:
        assert "replicas" not in text and "meeting_s" not in data["summary"]
        return
    assert result.plan.num_ranks == 16
    assert "2 replicas, meeting every" in text and "over a meeting of the 2 replicas" in text
    assert data["summary"]["meeting_sent_bytes"] > 0
    assert sum(data["components_s"].values()) == pytest.approx(result.prediction.step_time_s)
    assert data["throughput"]["tokens_per_s"] == pytest.approx(
        64 * tiny.SEQUENCE / result.prediction.step_time_s
    )
    assert "meetings of replicas" in data["components_s"]


def test_a_plan_file_has_the_loop_as_one_object() -> None:
    plan = plan_of(OuterLoop(replicas=2, sync_every=50, outer_bits=8, fragments=5))
    data = json.loads(plan.to_json())
    assert data["outer_loop"] == {
        "replicas": 2, "sync_every": 50, "outer_bits": 8, "fragments": 5,
    }  # fmt: skip
    assert Plan.from_json(plan.to_json()) == plan
    assert "outer_loop" not in json.loads(plan_of(None).to_json())
    assert set(json.loads(plan_of().to_json())["outer_loop"]) == {"replicas", "sync_every"}


@pytest.mark.parametrize(
    ("loop", "rows", "said"),
    [
        ({"replicas": 1}, 16, "outer_loop: replicas=1; legal: an integer from 2"),
        ({"replicas": 3}, 16, "=3 does not divide global_batch_size=16; legal: 2, 4, 8, 16"),
        ({"replicas": 4}, 32, "=4 does not divide the cluster's 2 nodes; legal: 2"),
        ({"outer_bits": 4}, 16, "outer_loop: outer_bits=4; legal: 32, 8"),
        ({"fragments": 3}, 16, "fragments=3 with sync_every=50"),
    ],
)
def test_a_loop_that_cannot_be_is_refused(loop: dict[str, int], rows: int, said: str) -> None:
    plan = plan_of(replace(LOOP, **loop), global_batch_size=rows)
    with pytest.raises(PlanError) as caught:
        evaluator(ONE).price(plan)
    assert said in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "an object, or nothing"),
        ({"replicas": 2}, "missing ['sync_every']"),
        ({"replicas": 2, "sync_every": 0}, "sync_every=0"),
        ({"replicas": 2, "sync_every": 5, "lr": 1}, "unknown ['lr']"),
    ],
)
def test_a_malformed_loop_is_named(value: Any, said: str) -> None:
    data = json.loads(plan_of(None).to_json()) | {"outer_loop": value}
    with pytest.raises(PlanError) as caught:
        Plan.from_json(json.dumps(data))
    assert said in str(caught.value)


def test_outer_states_have_room_in_a_device() -> None:
    """The search leaves room for them: every plan that it gives fits its margin, and where no plan
    does beside them, it says so."""
    asked: dict[str, Any] = {"profile": False, "overrides": Overrides(replicas=2)}
    roomy = tiny.planned(tiny.net(), 2, **asked, memory_margin=0.0)
    peak = max(roomy.prediction.peak_memory_bytes) - tiny.host(2).device.reserved_bytes
    given = 0
    for less in (-1000, 100, 20_000):
        cluster = tiny.small_host(2, peak - less)
        try:
            result = tiny.planned(tiny.net(), 2, cluster=cluster, **asked, memory_margin=0.0)
        except InfeasibleError as error:
            assert "of outer weights and momentum" in " ".join(error.__notes__), less
            continue
        given += 1
        assert not any(result.prediction.shortfall_bytes(cluster)), less
        again = tiny.planned(
            tiny.net(), 2, cluster=cluster, plan=result.plan, allow=["replicas"], profile=False
        )
        assert again.plan == result.plan
    assert given == 2


def test_outer_states_have_room_in_a_node() -> None:
    """Beside GPUs they are in the node's host memory, whatever else is there."""
    host = ONE.host
    assert host is not None
    asked: dict[str, Any] = {
        "precision": "bf16", "global_batch_size": 64, "profile": False,
        "overrides": Overrides(replicas=2, forbid=("pp", "tp", "cp")),
    }  # fmt: skip
    roomy = tiny.planned(tiny.net(), cluster=ONE, **asked)
    needed = max(roomy.prediction.host_memory_bytes)
    assert needed > 0
    for room, fits in ((2 * needed, True), (needed // 2, False)):
        cluster = replace(ONE, host=replace(host, memory_bytes=room))
        if fits:
            assert not tiny.planned(tiny.net(), cluster=cluster, **asked).prediction.host_shortfall(
                cluster
            )
            continue
        with pytest.raises(InfeasibleError, match=r"outer weights and momentum.*do not fit"):
            tiny.planned(tiny.net(), cluster=cluster, **asked)
