"""The price of parameter servers, by its own formulas; and the words on stragglers, simulated."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from meshwright.costmodel.kernels import collective_time, group_for, p2p_time
from meshwright.costmodel.operators.setting import Problem
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.servers import server_of
from meshwright.planner.pricing.evaluate import Evaluation, Evaluator
from meshwright.profiles.cluster import Cluster
from tests.helpers import tiny

ROWS = 48


@cache
def problem(nodes: int = 5) -> Problem:
    graph, factors = tiny.cut(tiny.net())
    cluster = Cluster.from_catalog("local-host", num_nodes=nodes, devices_per_node=1)
    return Problem(graph=graph, factors=factors, cluster=cluster, precision="fp32")


def plan(servers: int, workers: int, staleness: int = 0) -> Plan:
    graph, _ = tiny.cut(tiny.net())
    alone = tiny.plan_for(graph, dp=1, tp=1, global_batch_size=ROWS // workers)
    return alone.served_by(servers, workers, staleness)


def priced(servers: int = 1, staleness: int = 0) -> Evaluation:
    return Evaluator(problem()).price(plan(servers, 5 - servers, staleness))


@pytest.mark.parametrize("servers", [1, 2])
def test_links_of_a_server_carry_all_pushes_and_replies(servers: int) -> None:
    found, graph = priced(servers).served, problem().graph
    assert found is not None
    of = server_of(graph, servers)
    sizes = [sum(graph.values[v].numel for v, j in of.items() if j == k) for k in range(servers)]
    workers, total, most = 5 - servers, 4 * sum(sizes), 4 * max(sizes)
    assert abs(sizes[0] - sizes[-1]) <= max(graph.values[v].numel for v in of)
    assert found.link_bytes == workers * 2 * most
    if servers == 1:
        assert found.link_bytes == (5 - 1) * (total + total)
    sent = 2 * workers * p2p_time(most, problem().cluster, crosses_node=True, concurrent=1)
    assert sent <= found.exchange_s < sent * 1.01 + 1e-3
    ring = group_for(problem().cluster, size=5, stride=1)
    assert found.ring_s == collective_time("all_reduce", total, ring, problem().cluster)
    assert found.ring_bytes == 2 * 4 / 5 * total


def test_late_gradients_hide_behind_others_compute_and_nothing_else_does() -> None:
    together, late = priced(2), priced(2, staleness=3)
    assert together.served is not None
    assert late.served is not None
    passes = together.plan.passes
    (costs,) = together.stages
    compute = passes * (costs.forward_s + costs.backward_s)
    served = together.served
    copied = served.sent.seconds - served.exchange_s
    assert together.prediction.step_time_s == pytest.approx(
        compute + copied + served.exchange_s + served.step_s
    )
    busy = late.served.exchange_s + late.served.step_s
    assert late.served.step_s == pytest.approx(3 * served.step_s)  # a push of each worker
    wanted = max(busy, compute + copied + busy / 3)
    assert late.prediction.step_time_s == pytest.approx(wanted)


def test_workers_have_no_optimizer_states_and_servers_their_part() -> None:
    whole = Evaluator(replace(problem(1), optimizer="adamw")).price(plan(1, 1).of_worker)
    one, two = (priced(k).prediction for k in (1, 2))
    states = 8 * problem().graph.num_parameters()
    assert whole.stages[0].fixed_bytes - priced().stages[0].fixed_bytes == states
    assert one.server_bytes - two.server_bytes > states / 2 * 0.9
    assert one.fullest_bytes == max(one.server_bytes, *one.peak_memory_bytes)


def test_a_server_has_room_for_what_others_send_it_in_a_drain() -> None:
    """With many servers each has a small part of its own, and takes all of it at a drain."""
    many = plan(4, 1)
    found = Evaluator(replace(problem(), optimizer="sgd")).price(many).prediction.server_bytes
    total = 4 * problem().graph.num_parameters()
    (costs,) = Evaluator(problem()).price(many).stages
    assert found - costs.fixed_bytes - problem().cluster.device.reserved_bytes >= total


def test_a_plan_without_servers_is_priced_as_before() -> None:
    graph, _ = tiny.cut(tiny.net())
    found = Evaluator(problem()).price(tiny.plan_for(graph, dp=4, tp=1))
    assert found.served is None
    assert found.prediction.server_bytes == 0
    assert "servers" not in found.plan.to_json()
    assert "staleness" not in found.plan.to_json()


@pytest.mark.parametrize(("workers", "staleness"), [(4, 0), (16, 0), (8, 1), (8, 4), (16, 8)])
def test_words_on_stragglers_hold_for_pauses(workers: int, staleness: int) -> None:
    """Of docs/reference/servers.md, for exponential steps of mean 1."""
    steps, rng = 4000, np.random.default_rng(0)
    seconds, done = rng.exponential(1, (steps, workers)), np.zeros((steps + 1, workers))
    for c in range(steps):
        gate = done[c - staleness].max() if c > staleness else 0.0
        done[c + 1] = np.maximum(done[c], gate) + seconds[c]
    mean = done[-1].max() / steps
    harmonic = sum(1 / i for i in range(1, workers + 1))
    said = 1 + (harmonic - 1) / (staleness + 1)
    assert 0.97 * mean <= said <= 1.08 * mean
