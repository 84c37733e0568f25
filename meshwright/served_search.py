"""Plans with parameter servers: a worker's plan, searched on one device, beside so many servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.costmodel.operators import Problem
from meshwright.decisions import Decision, Request, made_now
from meshwright.planner.decisions import DECISIONS
from meshwright.planner.overrides import OverrideError, restrict, without
from meshwright.planner.plan import (
    InfeasibleError,
    Plan,
    PlanError,
    describe,
    seconds,
    why_unserved,
)
from meshwright.planner.pricing import STATELESS, Evaluation, Evaluator, served_shortage
from meshwright.planner.report import explain
from meshwright.planner.search import Search

FASTER = 0.99  # times the step without servers: they are taken for less
STALE = 1  # the staleness that is priced where it is allowed and free: more hides no more


def without_servers(request: Request) -> Request:
    """The request of one of several replicas, which have no servers."""
    return replace(request, overrides=replace(request.overrides, servers=0))


def workers_of(problem: Problem, request: Request) -> int:
    """Devices that compute. Raises `OverrideError` where servers leave none, or none that share the
    batch out."""
    devices, servers = problem.cluster.num_devices, request.overrides.servers or 0
    rows, dp = request.global_batch_size, request.overrides.everywhere("dp")
    if servers and dp is not None and dp != devices - servers:
        raise OverrideError(
            f" with dp={dp}: the other {devices - servers} ranks are workers",
            place=f"override servers={servers}",
            legal=f"dp={devices - servers}",
            way_out="leave dp free",
        )
    legal = [0, *(k for k in range(1, devices) if rows % (devices - k) == 0)]
    if servers and servers not in legal:
        workers = devices - servers
        why = f"{workers} workers don't share {rows} rows out" if workers > 0 else "no worker"
        raise OverrideError(
            f": of {devices} devices they leave {max(0, workers)}, {why}",
            place=f"override servers={servers}",
            legal=legal,
            way_out="take one of these, or another global_batch_size",
        )
    return devices - servers


def best_served(
    problem: Problem,
    request: Request,
    phases_s: Mapping[str, float],
    unserved: Callable[[], Decision],
) -> Decision:
    """The best plan, with parameter servers where they are asked for, or allowed and faster than
    the best one without (`unserved`)."""
    asked, word = request.overrides.servers, DECISIONS["servers"].word
    if asked:
        return served_plan(problem, request, phases_s)
    if asked == 0 or word not in problem.allow:
        return unserved()
    began = time.monotonic()
    plain, left_s = unserved(), request.time_limit_s
    if left_s is not None and (left_s := left_s - (time.monotonic() - began)) <= 0:
        return plain
    try:
        served = served_plan(problem, replace(request, time_limit_s=left_s), phases_s)
    except (InfeasibleError, OverrideError, PlanError):
        return plain
    chosen, other = plain, served
    if served.prediction.step_time_s < FASTER * plain.prediction.step_time_s:
        chosen, other = served, plain
    took = seconds(other.prediction.step_time_s)
    kind = "with" if other is served else "without"
    note = f"{kind} parameter servers the best plan ({describe(other.plan)}) takes {took}"
    return replace(chosen, report=replace(chosen.report, notes=(*chosen.report.notes, note)))


def served_plan(problem: Problem, request: Request, phases_s: Mapping[str, float]) -> Decision:
    """The best plan with the servers that are asked for, or with 1, 2, 4, ... Raises
    `OverrideError` for what can't have any, `InfeasibleError` where none fits."""
    asked = request.overrides
    _check(problem, request)
    restrict(
        replace(asked, servers=asked.servers or 1),
        problem.graph,
        target=problem.target,
        allow=problem.allow,
        precision=problem.precision,
    )
    priced = [*_priced(problem, request)]
    fitting = [one for one in priced if not _short(one, problem, request)]
    if not fitting:
        raise _unfitting(priced, problem, request)
    best = min(fitting, key=lambda one: one.prediction.step_time_s)
    made = made_now(problem.graph)
    report = explain(best, problem, phases_s=phases_s, notes=())
    plan = replace(best.plan, made=made)
    return Decision(
        plan=plan, report=replace(report, plan=plan, made=made), prediction=best.prediction
    )


def _unfitting(priced: Sequence[Evaluation], problem: Problem, request: Request) -> InfeasibleError:
    """Why no plan fits: what the fullest rank of the one that lacks least needs."""
    shorts = [_short(one, problem, request) for one in priced]
    if not priced:
        return InfeasibleError("no number of workers shares the batch out", [0.0])
    short, best = min(zip(shorts, priced, strict=True), key=lambda pair: pair[0])
    server, fullest = best.prediction.server_bytes, best.prediction.fullest_bytes
    said = served_shortage(server, fullest, short, problem.cluster)
    return InfeasibleError(f"no plan with parameter servers fits: {said}", [short])


def _check(problem: Problem, request: Request) -> None:
    servers = request.overrides.servers or "1, 2, 4, ..."
    if why := why_unserved(problem):
        raise OverrideError(
            f": {why}", place=f"override servers={servers}", legal="0", way_out="drop the override"
        )


def _priced(problem: Problem, request: Request) -> Iterator[Evaluation]:
    """Priced plans with servers. Raises `InfeasibleError` where no worker fits by itself."""
    asked, cluster = request.overrides, problem.cluster
    word = DECISIONS["staleness"].word
    staleness = asked.everywhere("staleness")
    late = [staleness] if staleness is not None else [0, STALE]
    if staleness is None and (word not in problem.allow or asked.servers):
        late = [0]
    counts = [asked.servers] if asked.servers else [2**i for i in range(cluster.num_devices)]
    one = replace(cluster, num_nodes=1, devices_per_node=1)
    alone = replace(problem, cluster=one, optimizer=STATELESS)
    overrides = without(asked, "servers", "staleness", "dp")
    evaluator, plans = Evaluator(problem), dict[int, Plan]()
    lacking: InfeasibleError | None = None
    for servers in counts:
        workers = cluster.num_devices - servers
        if workers < 1:
            break
        if request.global_batch_size % workers:
            continue
        rows = request.global_batch_size // workers
        if rows not in plans:
            search = Search(
                alone, rows, overrides, memory_margin=request.memory_margin,
                objective=request.objective, time_limit_s=request.time_limit_s,
            )  # fmt: skip
            try:
                plans[rows] = search.run().best.plan
            except InfeasibleError as error:
                lacking = lacking or InfeasibleError(
                    f"a worker beside parameter servers: {error}", error.shortfall_bytes
                )
                continue
        for staleness in late:
            yield evaluator.price(plans[rows].served_by(servers, workers, staleness))
    if lacking is not None and not plans:
        raise lacking


def _short(one: Evaluation, problem: Problem, request: Request) -> float:
    """Bytes that the fullest device lacks."""
    room = problem.cluster.device.memory_bytes * (1 - request.memory_margin)
    return max(0.0, one.prediction.fullest_bytes - room)
