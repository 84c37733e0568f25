"""Advice: changes beyond the plan, so that devices do more.

Margins, batches and devices are searched again, without unequal meshes and for a short time, so
that they fit as a chosen plan does. Sizes and logits are read off the plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from meshwright.planner.alternatives.alternatives import WORTH, SmallerMargin
from meshwright.planner.alternatives.what_if import CHUNKS, with_chunked_loss
from meshwright.planner.drafts import Candidate
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import InfeasibleError, describe, divisors, seconds, sized, slower
from meshwright.planner.pricing import StageCoster, evaluate
from meshwright.planner.report import busiest, device_groups, excluded
from meshwright.planner.search import Search, SearchResult, axes_of

MAX_BATCHES = 3  # searched
SEARCH_S = 0.5  # for one of them; no new one after twice as long
LOGITS = 0.25  # of the peak, from which on a loss in chunks is worth a line
KERNEL_MULTIPLE = 8  # elements of 16 bits in the 16 bytes that tensor cores load at once
PAD_TO = 64  # which also fills their tiles


def advice(
    search: Search, result: SearchResult, margin: SmallerMargin | None = None
) -> list[dict[str, Any]]:
    """Changes that are worth it, as rows with a sentence each (`advice`) and its numbers, a smaller
    `margin` first; when the time is over no further batch is searched."""
    return [
        *_margin(search, margin, result.best.step_time_s),
        *_faster(search, result),
        *_heads(search, result),
        *_words(search, result),
        *_logits(search, result),
    ]


# --- searched again ------------------------------------------------------------------------------


def _margin(
    search: Search, margin: SmallerMargin | None, ours_s: float
) -> Iterator[dict[str, Any]]:
    """The memory margin with which a plan fits that takes less."""
    if margin is not None:
        step_s, less = margin.best.step_time_s, margin.memory_margin
        yield {
            "kind": "margin",
            "memory_margin": less,
            "step_time_s": step_s,
            "advice": f"memory_margin={less:g} instead of {search.memory_margin:g}: "
            f"{seconds(step_s)} instead of {seconds(ours_s)} ({slower(step_s / ours_s - 1)}): "
            f"{describe(margin.best.plan)}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """Another batch or cluster: in words, as data, as a search, and the time for that."""

    kind: str
    what: str
    data: Mapping[str, int]
    search: Callable[..., Search]
    time_limit_s: float


def _faster(search: Search, result: SearchResult) -> Iterator[dict[str, Any]]:
    """Other batches and fewer devices that train more rows per second by what is worth a line, or
    more of them on fewer axes; most first."""

    def axes(candidate: Candidate) -> int:
        return axes_of(candidate.plan.stages, len(candidate.plan.devices))

    best, faster = result.best, list[tuple[float, _Try, Candidate]]()
    ours = search.global_batch_size / best.step_time_s
    for other in chain(_batches(search), _fewer(search, result)):
        candidate = _searched(search, other)
        if candidate is None:
            continue
        rate = candidate.plan.global_batch_size / candidate.step_time_s
        if rate > ours * (1.0 if axes(candidate) < axes(best) else 1 + WORTH):
            faster.append((rate, other, candidate))
    for rate, other, candidate in sorted(faster, key=lambda row: -row[0]):
        less = f", in {seconds(candidate.step_time_s)} instead of {seconds(best.step_time_s)}"
        yield {
            "kind": other.kind,
            **other.data,
            "rows_per_s": rate,
            "step_time_s": candidate.step_time_s,
            "advice": f"{other.what}: {rate:.4g} rows/s instead of {ours:.4g} "
            f"({rate / ours - 1:+.0%}){less}: {describe(candidate.plan)}",
        }


def _batches(search: Search) -> Iterator[_Try]:
    started = time.process_time()
    for batch in next_batches(search.global_batch_size, search.problem.cluster.num_devices):
        if time.process_time() - started > 2 * SEARCH_S:
            return
        yield _Try(
            kind="batch",
            what=f"batch {batch}",
            data={"global_batch_size": batch},
            search=partial(search.like, global_batch_size=batch),
            time_limit_s=SEARCH_S,
        )


def _fewer(search: Search, result: SearchResult) -> Iterator[_Try]:
    """Fewer nodes, and devices of each node left idle so that the batch shares out over more of the
    rest; those that would not compute longer than the chosen plan takes."""
    cluster, batch = search.problem.cluster, search.global_batch_size
    nodes, devices = cluster.num_nodes, cluster.devices_per_node
    shared = math.gcd(batch, cluster.num_devices)
    parts = [
        (replace(cluster, num_nodes=n), f"{n} of {nodes} nodes") for n in divisors(nodes)[-2::-1]
    ]
    better = [n for n in range(1, devices) if math.gcd(batch, n * nodes) > shared]
    parts += [
        (replace(cluster, devices_per_node=n), f"{n} of {devices} devices of each node")
        for n in better[-1:]
    ]
    computed_s = busiest(device_groups(result.best.evaluation)).compute_s
    for part, what in parts:
        if computed_s * cluster.num_devices < result.best.step_time_s * part.num_devices:
            yield _Try(
                kind="devices",
                what=what,
                data={"num_nodes": part.num_nodes, "devices_per_node": part.devices_per_node},
                search=partial(search.like, problem=replace(search.problem, cluster=part)),
                time_limit_s=max(SEARCH_S, sum(result.phases_s.values())),  # new prices
            )


def _searched(search: Search, other: _Try) -> Candidate | None:
    """The plan of a short search over equal meshes; None where there is none in time."""
    if search.programs.time.over():
        return None
    forbid = sorted({*search.overrides.forbid, "unequal_meshes"})
    try:
        overrides = replace(search.overrides, forbid=forbid)
        return other.search(overrides=overrides, time_limit_s=other.time_limit_s).run().best
    except (InfeasibleError, OverrideError):
        return None


def next_batches(batch: int, devices: int) -> list[int]:
    """Batches near one that share out over more of the devices, over most first, then the nearest;
    none where it shares out as well as any of its size."""
    most = max(d for d in divisors(devices) if d <= batch)
    common = math.gcd(batch, devices)
    if common >= most:
        return []
    steps = [most, most // 2] if most % 2 == 0 else [most]
    near = {step * k for step in steps for k in (batch // step, batch // step + 1)}
    better = [n for n in near if n > 0 and math.gcd(n, devices) > common]
    return sorted(better, key=lambda n: (-math.gcd(n, devices), abs(n - batch), n))[:MAX_BATCHES]


# --- sizes ---------------------------------------------------------------------------------------


def _heads(search: Search, result: SearchResult) -> Iterator[dict[str, Any]]:
    """Products that every tensor-parallel rank of the plan runs in full for a size that does not
    divide."""
    problem = search.problem
    degrees = {stage.tp for stage in result.best.plan.stages}
    for product in excluded(problem.graph, problem.factors, sorted(degrees)):
        for name, size in product.factors.items() if not product.instead else ():
            every = math.lcm(*product.degrees)
            near = [n for n in (size // every * every, -(-size // every) * every) if n]
            yield {
                "kind": "size",
                "factor": name,
                "size": size,
                "next_sizes": near,
                "advice": f"{name} = {size}: {product.operators} ({product.flops:.0%} of the "
                f"FLOPs) runs in full on tp {', '.join(map(str, product.degrees))}; "
                f"{' or '.join(map(str, near))} would be shared out",
            }


def _words(search: Search, result: SearchResult) -> Iterator[dict[str, Any]]:
    """Sizes of matrices that 16-bit kernels don't take in whole vectors; vocabularies mostly."""
    problem = search.problem
    graph, table = problem.graph, problem.factors
    if problem.precision == "fp32" or problem.cluster.device.kind != "cuda":
        return
    odd: dict[int, str] = {}
    for value in (v for op in graph.ops if table.ops[op.name].matmul for v in op.operands):
        shape = graph.values[value].shape
        for size in shape if value in graph.parameters and len(shape) == 2 else ():
            if size > PAD_TO and size % KERNEL_MULTIPLE:
                odd.setdefault(size, graph.parameters[value])
    unit = math.lcm(PAD_TO, *(stage.tp for stage in result.best.plan.stages))
    for size, name in odd.items():
        padded = -(-size // unit) * unit
        yield {
            "kind": "size",
            "factor": name,
            "size": size,
            "next_sizes": [padded],
            "advice": f"{size} of {name} is no multiple of {KERNEL_MULTIPLE}, which 16-bit kernels "
            f"are slow on (not in these prices): pad it to {padded}",
        }


# --- logits --------------------------------------------------------------------------------------


def _logits(search: Search, result: SearchResult) -> Iterator[dict[str, Any]]:
    """The fullest device's bytes without most of its logits, in the chosen plan."""
    best = result.best
    lighter = with_chunked_loss(replace(search.problem, precision=best.plan.precision))
    if lighter is None:
        return
    priced = evaluate(best.plan, lighter, best.assignments, StageCoster(lighter))
    before, after = (e.prediction.fullest_bytes for e in (best.evaluation, priced))
    taken = (before - after) / (1 - 1 / CHUNKS)
    if taken > LOGITS * before:
        yield {
            "kind": "logits",
            "logits_bytes": taken,
            "peak_bytes_without": after,
            "advice": f"logits and their gradients take {sized(taken)} of the peak's "
            f"{sized(before)}: a chunked or fused loss (in {CHUNKS} parts) leaves "
            f"{sized(after)}",
        }
