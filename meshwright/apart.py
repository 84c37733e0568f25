"""Plans of replicas that train apart: how many, searched each on its part of the cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.costmodel.operators import Problem
from meshwright.decisions import Decision, Request
from meshwright.planner.decisions import DECISIONS, OUTER_LOOP, SYNC_EVERY, divisors
from meshwright.planner.overrides import OverrideError, Overrides, without
from meshwright.planner.plan import InfeasibleError, OuterLoop, seconds, sized
from meshwright.planner.pricing import (
    Evaluator,
    Prediction,
    cluster_of_replica,
    replica_counts,
    state_bytes,
)
from meshwright.planner.report import explain_plan
from meshwright.profiles.cluster import Cluster
from meshwright.served_search import without_servers

REPLICAS = OUTER_LOOP[0]
Search = Callable[[Problem, Request], Decision]


def best_apart(problem: Problem, request: Request, search: Search) -> Decision:
    """The plan that `search` finds, of the replicas that are asked for; where they are allowed and
    none are asked for, the plan without them unless replicas surely take less, as a step is not
    all that their training takes. Raises `OverrideError` and `InfeasibleError`."""
    alone = replace(request, overrides=without(request.overrides, *OUTER_LOOP))
    count = _asked(problem, request)
    if count == 1:
        return search(problem, alone)
    if count is not None:
        return _replicated(problem, request, search, count)
    best: Decision | None = None
    infeasible: InfeasibleError | None = None
    try:
        best = search(problem, alone)
    except InfeasibleError as error:
        infeasible = error
    for number in _counts(problem, request):
        try:
            other = _replicated(problem, request, search, number)
        except (InfeasibleError, OverrideError):
            continue
        if best is None or _pays(best, other, request.objective):
            best = _after(best, other)
    if best is None:
        assert infeasible is not None
        raise infeasible
    return best


def _asked(problem: Problem, request: Request) -> int | None:
    """Replicas that are asked for, 1 where none are allowed; None where they are free."""
    overrides = request.overrides
    count: int | None = overrides.everywhere(REPLICAS)
    if count is None and REPLICAS not in problem.allow:
        count = 1
    said = [f"{name}={value}" for name, value in _given(overrides).items() if name != REPLICAS]
    if count == 1 and said:
        raise OverrideError(
            f": there are no {REPLICAS} that would meet",
            place=f"override {', '.join(said)}",
            legal=f"beside {REPLICAS} from 2, or allow=[{REPLICAS!r}] (--allow {REPLICAS})",
            way_out="give one of these, or drop the override",
        )
    return count


def _given(overrides: Overrides) -> dict[str, int]:
    """Overrides of an outer loop, but for those that do without."""
    off = {"outer_bits": 32, "fragments": 1}
    values = {name: getattr(overrides, name) for name in OUTER_LOOP}
    return {n: value for n, value in values.items() if value not in (None, off.get(n))}


def _counts(problem: Problem, request: Request) -> Iterator[int]:
    """Numbers of replicas to try: of pools, or else any whose parts are whole nodes."""
    cluster, batch = problem.cluster, request.global_batch_size
    if cluster.num_nodes == 1:
        return
    counts = [cluster.num_pools] if cluster.num_pools > 1 else replica_counts(cluster)
    yield from (n for n in counts if batch % n == 0)


def _replicated(problem: Problem, request: Request, search: Search, count: int) -> Decision:
    """The best plan of so many replicas: that of one, with its rows, on its part."""
    overrides, batch = request.overrides, request.global_batch_size
    place = f"override {REPLICAS}"
    here = cluster_of_replica(problem.cluster, count, place, OverrideError)
    if batch % count:
        raise OverrideError(
            f"={count} does not divide global_batch_size={batch}",
            place=place,
            legal=[n for n in divisors(batch) if n in replica_counts(problem.cluster)] or 1,
            way_out="take one of these, or another batch",
        )
    loop = OuterLoop(
        replicas=count,
        sync_every=overrides.sync_every or _every(overrides.fragments or 1),
        outer_bits=overrides.outer_bits or 32,
        fragments=overrides.fragments or 1,
    )
    inner = replace(
        request, global_batch_size=batch // count, overrides=without(overrides, *OUTER_LOOP)
    )
    on_time = tuple(word for word in problem.allow if word != DECISIONS["staleness"].word)
    states = 0  # bytes of outer weights and momentum, for which the search leaves room
    while True:
        try:
            room = _less(here, states, request)
            decision = search(replace(problem, cluster=room, allow=on_time), without_servers(inner))
        except InfeasibleError as error:
            if states:
                error.add_note(f"beside {sized(states)} a device of outer weights and momentum")
            raise
        found, taken = _repeated(problem, decision, loop)
        lacks = _lacking(found.prediction, problem.cluster, request.memory_margin)
        if not any(lacks):
            return found
        if taken <= states:
            raise InfeasibleError(
                f"{place}={count}: the outer weights and momentum, {sized(taken)} a device, do not "
                f"fit beside the plan of a replica, {sized(max(lacks))} more. Way out: drop the "
                "override, more devices a replica, or less offload to host memory",
                lacks,
            )
        states = taken


def _less(cluster: Cluster, states: int, request: Request) -> Cluster:
    """The cluster without the memory that outer states take on each device: of a rank on the CPU
    its own, else its node's."""
    device, host = cluster.device, cluster.host
    if not states:
        return cluster
    if device.kind == "cpu":
        left = device.memory_bytes - math.ceil(states / (1 - request.memory_margin))
        return replace(
            cluster, device=replace(device, memory_bytes=max(left, device.reserved_bytes + 1))
        )
    if host is None:
        return cluster
    of_node = states * cluster.devices_per_node
    taken = math.ceil(of_node * host.memory_bytes / host.room_bytes) + 1  # rooms are whole bytes
    return replace(cluster, host=replace(host, memory_bytes=max(host.memory_bytes - taken, 1)))


def _lacking(prediction: Prediction, cluster: Cluster, memory_margin: float) -> list[float]:
    """Bytes that a plan takes beyond what there is where outer states are: of each stage's devices
    on the CPU, but for the margin, else of a node's host."""
    if cluster.device.kind != "cpu":
        return [float(prediction.host_shortfall(cluster))]
    room = cluster.device.memory_bytes * (1 - memory_margin)
    return [max(0.0, peak - room) for peak in prediction.peak_memory_bytes]


def _every(fragments: int) -> int:
    """Steps between meetings where nothing is said: a multiple of the fragments."""
    return -(-SYNC_EVERY // fragments) * fragments


def _repeated(problem: Problem, decision: Decision, loop: OuterLoop) -> tuple[Decision, int]:
    """The decision for one replica as that for all of them, whose report's answers are of one, and
    the bytes of outer weights and momentum of a rank."""
    plan = replace(decision.plan.repeated(loop), made=decision.plan.made)
    evaluator = Evaluator(replace(problem, precision=plan.precision))
    priced = evaluator.price(plan)
    report = explain_plan(priced, priced.priced[0].setting.problem, decision.report.phases_s)
    notes = (
        *decision.report.notes,
        f"what was compared is of one replica, on {1 / loop.replicas:.3g} of the cluster",
    )
    described = {"cluster": problem.cluster.describe()}
    report = replace(
        report,
        notes=notes,
        summary={**report.summary, **described},
        solver=decision.report.solver,
        aside=decision.report.aside,
        made=decision.report.made,
        deferred=decision.report.deferred,
    )
    # without the programs of the search, which are of a part of the cluster
    whole = Decision(plan=plan, report=report, prediction=priced.prediction)
    assert priced.meeting is not None, "the plan has a loop"
    return whole, math.ceil(state_bytes(priced.meeting))


def _pays(best: Decision, other: Decision, objective: str) -> bool:
    """Whether replicas take less: by more than prices are off, unless the fastest is asked for."""
    if objective == "fastest":
        return other.prediction.step_time_s < best.prediction.step_time_s
    return _longest_s(other.prediction) < best.prediction.step_interval_s[0]


def _longest_s(prediction: Prediction) -> float:
    return prediction.step_interval_s[1]


def _after(before: Decision | None, chosen: Decision) -> Decision:
    """The chosen decision, whose report says what there was without it."""
    if before is None or before.plan.outer_loop is not None:
        return chosen
    took = seconds(before.prediction.step_time_s)
    notes = (*chosen.report.notes, f"without replicas the best plan takes {took}")
    return replace(chosen, report=replace(chosen.report, notes=notes))
