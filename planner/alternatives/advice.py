"""Advice: what the user may change, beyond the plan, so that the same devices do more.

batch     one that shares out badly, against the next that share out well: searched again on
          what was priced, without unequal meshes
sizes     heads that a plan's tensor axis can't split, and the next numbers that it could;
          words that 16-bit kernels don't take well, and the next number that they do
logits    that take much of the peak, and what a loss in chunks leaves of it
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from meshwright.planner.alternatives.what_if import CHUNKS, with_chunked_loss
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import InfeasibleError, describe, divisors, seconds, sized
from meshwright.planner.pricing import StageCoster, evaluate
from meshwright.planner.report import excluded
from meshwright.planner.search import Search, SearchResult

BETTER = 0.1  # more rows per second that make another batch worth a line
MAX_BATCHES = 3  # searched
SEARCH_S = 0.5  # for each of them, no new one after twice as long
LOGITS = 0.25  # of the peak, from which on a loss in chunks is worth a line
KERNEL_MULTIPLE = 8  # elements of 16 bits in the 16 bytes that tensor cores load at once
PAD_TO = 64  # which also fills their tiles


def advice(search: Search, result: SearchResult) -> list[dict[str, Any]]:
    """What is worth changing, as rows with a sentence each (`advice`) and its numbers; when the
    time is over no further batch is searched."""
    found = [each(search, result) for each in (_heads, _words, _logits)]
    return [row for rows in (_batches(search, result), *found) for row in rows]


# --- batch ---------------------------------------------------------------------------------------


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


def _batches(search: Search, result: SearchResult) -> Iterator[dict[str, Any]]:
    """Batches that train more rows per second, most first."""
    batch, best = search.global_batch_size, result.best
    ours, found = batch / best.step_time_s, []
    started = time.process_time()
    for other in next_batches(batch, search.problem.cluster.num_devices):
        if time.process_time() - started > 2 * SEARCH_S or search.programs.time.over():
            break
        step = _searched(search, other)
        if step is not None and other / step[0] > ours * (1 + BETTER):
            found.append((other / step[0], other, *step))
    for rows_per_s, other, step_s, plan in sorted(found, reverse=True):
        less = f", in {seconds(step_s)} instead of {seconds(best.step_time_s)}"
        yield {
            "kind": "batch",
            "global_batch_size": other,
            "rows_per_s": rows_per_s,
            "step_time_s": step_s,
            "advice": f"batch {other}: {rows_per_s:.4g} rows/s instead of {ours:.4g} "
            f"({rows_per_s / ours - 1:+.0%}){less}: {plan}",
        }


def _searched(search: Search, batch: int) -> tuple[float, str] | None:
    """Step time and plan of another batch, in a short search over equal meshes; None where none is
    found."""
    given = search.overrides
    try:
        other = search.like(
            global_batch_size=batch,
            overrides=replace(given, forbid=sorted({*given.forbid, "unequal_meshes"})),
            objective="fastest",
            time_limit_s=SEARCH_S,
        )
        best = other.run()
    except (InfeasibleError, OverrideError):
        return None
    return best.best.step_time_s, describe(best.best.plan)


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
    matrices = {
        value: op.key
        for op in graph.ops
        if table.ops[op.name].matmul
        for value in op.operands
        if value in graph.parameters and len(graph.values[value].shape) == 2
    }
    odd: dict[int, str] = {}
    for value in matrices:
        for size in graph.values[value].shape:
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
