"""`meshwright profile`: measures what the plans of one model may run on this machine.

Operators: every call that a strategy on some tensor axis makes, at the rows that micro-batches may
have, each distinct one once, the most FLOPs first; what the cache knows already is not timed again.
Collectives: on as many local ranks as the cluster has devices. What is not of this machine comes
from files: measurements that it exported on another, and collectives that others published.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.operators import op_flops, signature
from meshwright.costmodel.sharding import FactorTable, Strategy, analyse, strategies
from meshwright.planner.batch import batch_rows
from meshwright.planner.plan import divisors
from meshwright.planner.tracing import trace
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import ArgumentError, MeasuringError, ProfileError, read_text
from meshwright.profiles.measure import (
    COLLECTIVES,
    SIZES_BYTES,
    CollectiveRow,
    Skipped,
    is_gpu,
    launch_local,
    measure_all,
    measure_host,
    neighbours,
    read_collectives_csv,
    read_nccl_tests,
    shapes,
    timings_for,
    world_of_log,
)
from meshwright.profiles.measure_cpu import local_rates
from meshwright.profiles.op_signature import OpSignature
from meshwright.profiles.profile import cores_busy, device_name, is_device_of, published_id
from meshwright.profiles.store import DeviceId, Measurements, Store, export_json, import_json
from meshwright.profiles.timings import OF_HOST, PROFILE_S, CollectiveTiming, Timing
from meshwright.shell.progress import Progress

T = TypeVar("T")

COLLECTIVES_SHARE = 1 / 3  # of the budget, at most
LOGS, TABLES = (".log", ".txt"), (".csv",)  # any other file is an export
MAX_ROWS = 6  # sizes of a micro-batch that are timed; others lie between two of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Seconds to spend all in all, whether to time collectives, whether to time what the cache
    knows again, and a folder on the node's flash to time files in."""

    budget_s: float = PROFILE_S
    collectives: bool = True
    again: bool = False
    flash: str | None = None


USUAL = Effort()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run of `meshwright profile`: distinct operator calls that the plans may make, how many of
    them were known, timed now, left out (by reason); collectives timed; seconds it took."""

    device: DeviceId
    cache: str
    calls: int
    known: int
    timed: int
    skipped: dict[str, int]
    collectives: tuple[CollectiveTiming, ...]
    of_host: tuple[CollectiveTiming, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.device.name} (driver {self.device.driver}, torch {self.device.torch})",
            f"operators: {self.calls} distinct calls, {self.known} known, {self.timed} timed now",
            *(f"  {count} left to the roofline: {why}" for why, count in self.skipped.items()),
            f"collectives: {len(self.collectives)} timed now",
            *_curve_ends((*self.collectives, *self.of_host)),
            f"cache {self.cache}; {self.seconds:.1f} s",
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A file taken in: measurements taken, others left out (by reason), and whose they are where
    others published them."""

    path: str
    taken: int
    skipped: dict[str, int]
    sources: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.taken} measurements taken in from {self.path}",
            *(f"  {count} left out: {why}" for why, count in self.skipped.items()),
            *(f"  source: {source}" for source in self.sources),
        ]
        return "\n".join(lines)


def profile_model(
    model: nn.Module,
    example: Any,
    loss_fn: Callable[..., Any] | None,
    cluster: Cluster,
    *,
    batch: int,
    precision: str,
    effort: Effort = USUAL,
    store: Store | None = None,
) -> Summary:
    """Measure on this machine, which must have the cluster's device, and keep it in the cache.

    Raises ValueError for a device that is not here and for a budget or batch that is no such thing.
    """
    started = time.monotonic()
    if not effort.budget_s > 0 or batch < 1:
        raise ArgumentError(
            f" of {effort.budget_s!r} s for a batch of {batch!r}",
            place="profile: budget",
            legal="seconds above 0, rows from 1",
        )
    device, here = _device_here(cluster)
    store = store or Store()
    rows = max(2, batch_rows(example))
    graph = trace(model, example, loss_fn=loss_fn, batch_size=rows, precision=precision)
    wanted = calls(graph, analyse(graph), cluster, batch)
    known = store.read(here)
    missing = [one for one in wanted if effort.again or one.text not in known.operators]
    curves = _curves(cluster, known, effort)
    timed, skipped = dict[str, Timing](), Counter[str]()
    deadline_s = started + effort.budget_s
    of_host = _of_host(device, cluster, known, effort, deadline_s)
    timing = device.type == "cpu" and time.monotonic() < deadline_s
    company = cores_busy(cluster) - 1 if timing else 0
    with neighbours(company, missing):
        for result in progress(measure_all(missing, device, deadline_s=deadline_s), len(missing)):
            if isinstance(result, Skipped):
                skipped[result.reason] += 1
            else:
                timed[result[0].text] = result[1]
    store.add(Measurements(device=here, operators=timed, collectives=(*curves, *of_host)))
    if missing and not timed and not skipped:
        raise _too_short(effort.budget_s, time.monotonic() - started, len(curves) + len(of_host))
    if effort.again and device.type == "cpu":
        local_rates(cluster.devices_per_node, again=True)
    return Summary(
        device=here,
        cache=str(store.path),
        calls=len(wanted),
        known=len(wanted) - len(missing),
        timed=len(timed),
        skipped=dict(skipped),
        collectives=tuple(curves),
        of_host=tuple(of_host),
        seconds=time.monotonic() - started,
    )


def _too_short(budget_s: float, spent_s: float, kept: int) -> MeasuringError:
    """The error of a budget that was over before an operator was timed."""
    return MeasuringError(
        f" of {budget_s:g} s was over before an operator was timed: the model's trace, links and "
        f"host took {spent_s:.0f} s ({kept} timings are kept)",
        place="profile: budget",
        legal=f"more than {spent_s:.0f} s",
        way_out=f"give --budget {10 * math.ceil((spent_s + 60) / 10)}; what is kept is not "
        "measured again",
    )


def export_profile(cluster: Cluster, path: str | Path, store: Store | None = None) -> int:
    """Write the measurements of the cluster's device. Returns their number."""
    store = store or Store()
    stored = [store.read(d) for d in store.devices() if is_device_of(cluster, d.name)]
    if not any(known.count for known in stored):
        raise ProfileError(
            f"nothing to export of {device_name(cluster)!r}",
            place=f"cache {store.path}",
            legal="a device that was measured",
            way_out="run `meshwright profile` there first",
        )
    latest = max(
        (known for known in stored if known.count), key=lambda k: (k.device.torch, k.device.driver)
    )
    export_json(latest, path)
    return latest.count


def import_profile(
    cluster: Cluster,
    path: str | Path,
    store: Store | None = None,
    *,
    ranks: int | None = None,
    nodes: int | None = None,
    collective: str | None = None,
) -> Imported:
    """Take a file of measurements into the cache, if they are of the cluster's device.

    The file is what `export_profile` wrote; or collectives that others published for such nodes: an
    nccl-tests log, of `ranks` GPUs on `nodes` nodes if it doesn't list them, or a table. Raises
    ValueError for a file of another device, with both names, and for one that can't be read, with
    the line.
    """
    store, place = store or Store(), Path(path)
    if place.suffix not in LOGS and (ranks, nodes, collective) != (None, None, None):
        raise ProfileError(
            "ranks, nodes and collective describe an nccl-tests log",
            place=place,
            legal=f"with {', '.join(LOGS)}",
            way_out="leave them out",
        )
    if place.suffix not in (*LOGS, *TABLES):
        measurements = import_json(
            place, accepts=lambda name: is_device_of(cluster, name), expected=device_name(cluster)
        )
        store.add(measurements)
        return Imported(path=str(place), taken=measurements.count, skipped={}, sources=())
    if cluster.backend != "nccl":
        raise ProfileError(
            f" is of collectives of nccl, but cluster {cluster.name!r} runs {cluster.backend}",
            place=place,
            legal="a cluster that runs nccl",
            way_out="name the cluster that was measured, e.g. --cluster h100-sxm:8",
        )
    if place.suffix in TABLES:
        rows = read_collectives_csv(place)
    else:
        rows = _rows_of_log(cluster, place, ranks, nodes, collective)
    timings, skipped = timings_for(rows, cluster)
    if not timings:
        reasons = "; ".join(f"{count} {why}" for why, count in skipped.items())
        raise ProfileError(
            f"none of {len(rows)} rows holds for cluster {cluster.name!r}"
            + f" ({reasons})" * bool(reasons),
            place=place,
            legal="rows of its device and of groups that it has",
            way_out="name the cluster that was measured",
        )
    store.add(Measurements(device=published_id(cluster), operators={}, collectives=timings))
    sources = tuple(sorted({timing.source for timing in timings}))
    return Imported(path=str(place), taken=len(timings), skipped=skipped, sources=sources)


def _rows_of_log(
    cluster: Cluster, place: Path, ranks: int | None, nodes: int | None, collective: str | None
) -> list[CollectiveRow]:
    """The rows of an nccl-tests log; ValueError where it names another GPU."""
    source, device = str(place), cluster.device.name
    text = read_text(place, error=ProfileError)
    ranks, nodes = world_of_log(text, ranks=ranks, nodes=nodes, source=source)
    rows = read_nccl_tests(text, ranks=ranks, nodes=nodes, source=source, collective=collective)
    gpu = rows[0].gpu
    if gpu and not is_gpu(gpu, device):
        raise ProfileError(
            f" is of device {gpu!r}",
            place=place,
            legal=f"device {device!r}, as the cluster has",
            way_out="name the cluster the log is of",
        )
    return [replace(row, gpu=device) for row in rows]  # a log may not name it, the user does


def _device_here(cluster: Cluster) -> tuple[torch.device, DeviceId]:
    """The device to measure on; ValueError where this machine has not what the cluster is of."""
    kind = cluster.device.kind
    if kind == "cuda" and not torch.cuda.is_available():
        raise ProfileError(
            f"has {cluster.device.name!r} devices and this machine has no GPU that torch can use",
            place=f"cluster {cluster.name!r}",
            legal="clusters of the device that is here",
            way_out="profile on such a machine with --export FILE, then give --import FILE here",
        )
    here = DeviceId.here(kind, cores_busy(cluster))
    if not is_device_of(cluster, here.name):
        raise ProfileError(
            f"{cluster.name!r} is of device {cluster.device.name!r}",
            place="cluster",
            legal=f"this machine's device, {here.name!r}",
            way_out="name a cluster of this device, or import a profile of the other",
        )
    return torch.device(kind), here


def _of_host(
    device: torch.device, cluster: Cluster, known: Measurements, effort: Effort, deadline_s: float
) -> list[CollectiveTiming]:
    """Timings of such a node's host that are not known."""
    return measure_host(
        device,
        backend=cluster.backend,
        ranks=cluster.devices_per_node,
        cores=cores_busy(cluster) if device.type == "cpu" else os.cpu_count() or 1,
        flash=effort.flash,
        known=() if effort.again else {c.kind for c in known.collectives},
        deadline_s=deadline_s,
    )


def _curves(cluster: Cluster, known: Measurements, effort: Effort) -> list[CollectiveTiming]:
    """Collectives of local ranks, where they are wanted and not known."""
    here = cluster.num_nodes == 1 and cluster.num_devices > 1
    if not (effort.collectives and here and (effort.again or not _has_curves(cluster, known))):
        return []
    share_s = effort.budget_s * COLLECTIVES_SHARE
    with Progress() as said:
        said(f"profile: collectives of {cluster.num_devices} ranks, {share_s:.0f} s at most")
        return launch_local(cluster.num_devices, cluster.backend, budget_s=share_s)


def _has_curves(cluster: Cluster, known: Measurements) -> bool:
    """Whether all curves of the cluster's groups are there, to their ends."""
    world = (cluster.num_devices, cluster.backend)
    timed = sum(c.kind not in OF_HOST and (c.ranks, c.backend) == world for c in known.collectives)
    groups = shapes(cluster.num_devices, cluster.devices_per_node)
    return timed >= len(groups) * len(COLLECTIVES) * len(SIZES_BYTES)


# --- calls to measure -----------------------------------------------------------------------------


def calls(graph: Graph, table: FactorTable, cluster: Cluster, batch: int) -> list[OpSignature]:
    """Every distinct call that a plan of the cluster may make, the most FLOPs first."""
    work: dict[OpSignature, tuple[float, int]] = {}
    for tp in divisors(cluster.num_devices):
        choices = [(op, way) for op in graph.ops for way in strategies(graph, table, op, tp)]
        for rows in microbatch_rows(batch):
            for op, way in choices:
                call = signature(graph, table, op, way, rows=rows, tp=tp)
                if call is not None and call not in work:
                    work[call] = (_flops(graph, table, op, way, rows, tp), call.nbytes)
    return sorted(work, key=lambda call: (*(-amount for amount in work[call]), call.text))


def microbatch_rows(batch: int) -> list[int]:
    """Rows a rank may have of a micro-batch: divisors of the batch, spread evenly if many."""
    legal = divisors(batch)
    if len(legal) <= MAX_ROWS:
        return legal
    last = len(legal) - 1
    return [legal[round(k * last / (MAX_ROWS - 1))] for k in range(MAX_ROWS)]


def _flops(
    graph: Graph, table: FactorTable, op: Op, strategy: Strategy, rows: int, tp: int
) -> float:
    split = strategy.split_factor in table.ops[op.name].flop_factors
    return op_flops(table, op) * rows / graph.batch_size / (tp if split else 1)


# --- on the terminal ------------------------------------------------------------------------------


def progress(items: Iterable[T], total: int) -> Iterator[T]:
    """The items, with a bar on stderr as they come."""
    with Progress() as said:
        for done, item in enumerate(items, 1):
            said(f"profiling: {done} of {total}", done / max(1, total))
            yield item


def _curve_ends(curves: Sequence[CollectiveTiming]) -> list[str]:
    """Per collective and group the shortest time, and the bytes per second of the largest."""
    by_group: dict[tuple[str, int, int], list[CollectiveTiming]] = defaultdict(list)
    for timing in curves:
        by_group[timing.kind, timing.size, timing.per_node].append(timing)
    lines = []
    for (kind, size, per_node), curve in by_group.items():
        name = f"{kind} of {size} ranks ({per_node} on a node)"
        if kind in OF_HOST:
            name = f"host, {kind.replace('_', ' ')}"
        least, most = min(c.seconds for c in curve), max(curve, key=lambda c: c.nbytes)
        lines.append(
            f"  {name}: from {least * 1e6:.0f} µs; "
            f"{most.nbytes / most.seconds / 1e9:.2f} GB/s at {most.nbytes / 2**20:.3g} MiB"
        )
    return lines
