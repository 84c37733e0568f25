"""The second estimate of a step: by hand, and on clusters where one thing alone takes time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.executor.prices import Prices
from meshwright.executor.rehearsal import Estimate, Priced, Rehearsal
from meshwright.executor.rehearsal.estimate import estimate
from meshwright.executor.rehearsal.events import Event, Kind, RankLog
from meshwright.planner.pricing import evaluate
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.curve import FULL
from tests.executor.rehearsal.rehearsal_runs import checked
from tests.helpers.tiers import tiered

FREE = 1e30
GROUP = ("data", (0, 1))


def cluster(ranks: int, *, flops: float = FREE, link: float = FREE) -> Cluster:
    """FLOPs a second of products and bytes a second between ranks; all else is free."""
    base = Cluster.local(ranks, measure=False)
    device = replace(
        base.device,
        peak_flops={"fp32": flops},
        memory_bandwidth=FREE,
        matmul_efficiency=FULL,
        attention_efficiency=FULL,
        memory_efficiency=FULL,
        tiles=(),
        launch_overhead_s=0.0,
        host_overhead_s=0.0,
    )
    between = replace(
        base.intra_link, latency_s=0.0, bandwidth=link, efficiency=FULL, group_efficiency=FULL
    )
    return replace(base, device=device, intra_link=between, inter_link=between)


def rehearsed(line: str, on: Cluster) -> tuple[Rehearsal, float]:
    """A cell rehearsed with prices on a cluster, and its step at the plan's price there."""
    found = checked(line).rehearse(priced=Priced(prices=Prices(cluster=on)))
    return found, evaluate(*checked(line).priced_on(on)).prediction.step_time_s


PRODUCTS = (
    "gpt2_deep pp2 1f1b m8 full", "mlp pp2 gpipe m4", "gpt2_untied tp2 1f1b m2",
    "gpt2_tied 1 1f1b m2", "gpt2_deep 1 1f1b m8 full", "gpt2_untied pp2 gpipe m4",
    "gpt2_deep pp4 1f1b m4", "gpt2_deep pp2xdp2 interleaved_1f1b m4 v2",
)  # fmt: skip
LINKS = ("gpt2_untied dp2 1f1b m2", "llama tp2 1f1b m2 full", "gpt2_tied tp2 1f1b m2")
MORE = "the change tier has pipelines, the tensor and the data axis, with and without recompute"


@pytest.mark.parametrize("line", tiered(PRODUCTS, PRODUCTS[:3].__contains__, MORE))
def test_where_products_alone_take_time_both_estimates_are_one(line: str) -> None:
    """Bubbles and repeated micro-batches included: the price simulates the schedule, the estimate
    replays what the executor did."""
    found, step_s = rehearsed(line, cluster(8, flops=1e9))
    assert found.estimate is not None and not found.mismatches
    assert found.estimate.step_s == pytest.approx(step_s, rel=1e-3)
    busiest = max(sum(log.flops.values()) for log in found.logs.values())
    assert found.estimate.step_s >= busiest / 1e9 * (1 - 1e-6)


@pytest.mark.parametrize("line", tiered(LINKS, LINKS[:2].__contains__, MORE))
def test_where_links_alone_take_time_both_estimates_are_one(line: str) -> None:
    found, step_s = rehearsed(line, cluster(2, link=1e6))
    assert found.estimate is not None
    assert found.estimate.step_s == pytest.approx(step_s, rel=1e-3)
    parts = found.estimate.parts
    assert parts["communication"] == pytest.approx(found.estimate.step_s, rel=1e-3)


# --- by hand -------------------------------------------------------------------------------------


def work(seconds: float, where: str = "forward") -> Event:
    return Event(kind=Kind.WORK, device_s=seconds, where=where)


def reduce(nbytes: int) -> Event:
    return Event(kind=Kind.COLLECTIVE, operation="allreduce_", group=GROUP, nbytes=nbytes)


def message(kind: Kind, peer: int) -> Event:
    group = ("forward", (0, 1))
    return Event(kind=kind, operation="send", group=group, nbytes=4, peer=peer)


def estimated(*ranks: list[Event], blocking: bool = False) -> Estimate:
    logs = {
        rank: RankLog(rank=rank, events=tuple(events), step=(0, len(events)))
        for rank, events in enumerate(ranks)
    }
    on = Prices(cluster=cluster(2, link=1.0))  # an all-reduce of two ranks takes its bytes' seconds
    return estimate(logs, {rank: rank for rank in logs}, on, blocking=blocking)


def test_a_collective_runs_beside_until_it_is_awaited() -> None:
    after = Event(kind=Kind.AWAIT, group=GROUP)
    both = [work(1.0), reduce(5), work(3.0, "backward"), after, work(1.0, "user code")]
    assert estimated(both, both).step_s == 1 + 5 + 1
    assert estimated(both, both, blocking=True).step_s == 1 + 5 + 3 + 1
    parts = estimated(both, both).parts
    assert parts == {
        "forward": 1.0,
        "backward": 3.0,
        "optimizer": 1.0,
        "beside": 0.0,
        "communication": 2.0,
        "waits": 0.0,
    }


def test_a_wait_leaves_the_last_collectives_under_way() -> None:
    all_but_one = Event(kind=Kind.AWAIT, group=GROUP, count=1)
    both = [reduce(2), reduce(7), all_but_one, work(1.0)]
    assert estimated(both, both).step_s == 2 + 1


def test_a_collective_begins_when_all_are_at_it() -> None:
    late, early = [work(9.0), reduce(2)], [work(1.0), reduce(2)]
    found = estimated(early, late, blocking=True)
    assert found.step_s == 9 + 2
    # of the rank that is named, the first of those that end last
    assert found.parts["forward"] == 1.0
    assert found.parts["communication"] == 2.0
    assert found.parts["waits"] == 8.0


def test_a_receiver_waits_until_the_message_is_there() -> None:
    wait = Event(kind=Kind.WAIT, count=1)
    sender = [work(2.0), message(Kind.SEND, 1), message(Kind.SEND, 1), work(1.0)]
    receive = message(Kind.RECEIVE, 0)
    found = estimated(sender, [receive, receive, wait, work(1.0), wait, work(1.0)])
    # four bytes at a time: there after 6 and 10 seconds
    assert found.step_s == 11.0
    assert found.parts["forward"] == 2.0


def test_what_is_apart_is_named() -> None:
    price = Estimate(step_s=2.0, seconds={"forward": 1.0, "backward": 1.0})
    near = Estimate(step_s=2.02, seconds={"forward": 1.0, "backward": 1.02})
    far = Estimate(step_s=2.5, seconds={"forward": 1.1, "backward": 1.0, "optimizer": 0.4})
    assert near.beside(price) == "step 2020 ms by what ran, 2000 ms by price (+1.0%)"
    assert "+25.0%: most by optimizer, 400 ms, 0 ms by price" in far.beside(price)
