"""Import of published measurements: nccl-tests logs, tables of collectives and matrix products.

Every record is in SI units, and a collective's `size_bytes` is that of the full tensor, as the cost
model counts it, whatever its source counted: nccl-tests and some tables give the buffer of one rank
for an all-to-all, which is 1/n of it.

Nothing is stored here and nothing guessed: a line that can't be read is an error that names the
file, the line and the column.

`timings_for` picks what holds for the groups of a cluster. A test runs one group alone; in a plan,
groups of one shape tile the cluster and all talk at once. Between nodes that is the same only where
the group fills its nodes, for their NICs are shared; inside a node, links are each rank's own.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.catalog_reader import catalog_names, device_of_driver, read_entry
from meshwright.profiles.inputs import ProfileError, read_text, shown
from meshwright.profiles.inputs.limits import LEAST_NUMBER, MOST_NUMBER
from meshwright.profiles.timings import CollectiveTiming

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
# name of the nccl-tests program -> collective
_PROGRAMS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "p2p",
}
_RANK = re.compile(
    r"#\s+Rank\s+(?P<rank>\d+)\b.*\bon\s+(?P<host>\S+)\s+device\s+\d+\s+\[[^\]]*\]"
    r"\s*(?P<gpu>.*?)\s*$"
)
# How a table says what its sizes count; all of them give one rank's buffer for an all-to-all.
_CONVENTIONS = (
    *("nccl-tests size", "full buffer", "total gathered bytes", "per-rank send buffer"),
    "MB column, assumed MiB",
)
# size count type redop [root], then time algbw busbw #wrong out of place and in place
_LOG_COLUMNS = (12, 13)
_TIME_COLUMNS = {False: -8, True: -4}
_COLLECTIVE_COLUMNS = (
    *("source", "collective", "gpu", "nodes", "n_gpus"),
    *("inter_link", "size_bytes", "size_convention", "time_us"),
)
_FORM_FACTORS = {"sxm", "pcie"}
_GEMM_COLUMNS = ("source", "gpu", "dtype", "m", "n", "k", "groups", "tflops")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One measured collective: `n_gpus` ranks on `nodes` equal nodes, a tensor of `size_bytes`."""

    collective: str
    n_gpus: int
    nodes: int
    size_bytes: float
    time_s: float
    source: str
    gpu: str = ""
    inter_link: str = ""
    in_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRow:
    """The FLOP/s of `groups` simultaneous products of (m, k) by (k, n); shape (m, n, k), None where
    none is given."""

    gpu: str
    dtype: str
    shape: tuple[int, int, int] | None
    groups: int
    flops_per_s: float
    source: str


def read_nccl_tests(
    text: str, *, ranks: int, nodes: int, source: str, collective: str | None = None
) -> list[CollectiveRow]:
    """The rows of an nccl-tests log, two per line of its table: out of place, then in place.

    `source` names the log in the rows and in errors. `collective` is needed for logs of versions
    that don't print which test they ran. Raises ValueError for a collective that is neither given
    nor printed, for a log without a table, and for a number that can't be read.
    """
    if ranks < 2 or not 1 <= nodes <= ranks:
        raise ProfileError(
            f"{ranks} ranks on {nodes} nodes", place=source, legal="2 or more, on 1 to all"
        )
    kind = _collective_of(text, collective, source)
    gpus = [listed["gpu"] for _, listed in _listed_ranks(text)]
    rows = [
        CollectiveRow(
            collective=kind,
            n_gpus=ranks,
            nodes=nodes,
            size_bytes=_tensor_bytes(kind, size, ranks),
            time_s=time_us * 1e-6,
            source=source,
            gpu=gpus[0] if gpus else "",
            in_place=in_place,
        )
        for size, time_us, in_place in _log_lines(text, source)
    ]
    if not rows:
        raise ProfileError(
            f"no line of an nccl-tests table in {len(text.splitlines())} lines",
            place=source,
            legal="lines of size count type redop [root], then time algbw busbw #wrong twice",
            way_out="name the log of a run of nccl-tests",
        )
    return rows


def world_of_log(
    text: str, *, ranks: int | None, nodes: int | None, source: str
) -> tuple[int, int]:
    """Ranks and nodes of an nccl-tests log: as its header lists them, or as given where it doesn't.

    Raises ValueError where neither says, and where both do and differ.
    """
    hosts: dict[str, str] = {}
    first = 0
    for line, listed in _listed_ranks(text):
        first = first or line
        hosts[listed["rank"]] = listed["host"]
    if hosts:
        world = (len(hosts), len(set(hosts.values())))
        for name, stated, logged in zip(("ranks", "nodes"), (ranks, nodes), world, strict=True):
            if stated not in (None, logged):
                raise ProfileError(
                    f" is {stated}, but the log lists {logged}",
                    place=f"{source}:{first}: {name}",
                    legal=logged,
                    way_out=f"leave --{name} out",
                )
        return world
    if ranks is None or nodes is None:
        raise ProfileError(
            "the log lists no ranks",
            place=source,
            legal="a header that lists them, or --ranks and --nodes",
            way_out="give both --ranks N and --nodes K of that run",
        )
    return ranks, nodes


def read_collectives_csv(path: str | os.PathLike[str]) -> list[CollectiveRow]:
    """The rows of a table of collectives that give a size and a time.

    Columns: source, collective, gpu, nodes, n_gpus, inter_link, size_bytes, size_convention,
    time_us, and any others. `size_convention` says what the size counts.
    """
    place = Path(path)
    rows = []
    for line, cells in csv_rows(place, _COLLECTIVE_COLUMNS):
        if not cells["size_bytes"] or not cells["time_us"]:
            continue
        where = f"{place}:{line}"
        kind = cells["collective"]
        if kind not in COLLECTIVES:
            raise ProfileError(f" is {kind!r}", place=f"{where}: collective", legal=COLLECTIVES)
        convention = cells["size_convention"]
        if not convention.startswith(_CONVENTIONS):
            raise ProfileError(
                f" is {convention!r}", place=f"{where}: size_convention", legal=_CONVENTIONS
            )
        n_gpus = whole(cells["n_gpus"], f"{where}: n_gpus")
        size = number(cells["size_bytes"], f"{where}: size_bytes")
        rows.append(
            CollectiveRow(
                collective=kind,
                n_gpus=n_gpus,
                nodes=whole(cells["nodes"], f"{where}: nodes"),
                size_bytes=_tensor_bytes(kind, size, n_gpus),
                time_s=number(cells["time_us"], f"{where}: time_us") * 1e-6,
                source=cells["source"],
                gpu=cells["gpu"],
                inter_link=cells["inter_link"],
            )
        )
    return rows


def read_gemm_csv(path: str | os.PathLike[str]) -> list[GemmRow]:
    """The rows of a table of matrix products.

    Columns: source, gpu, dtype, m, n, k, groups, tflops, and any others. `groups` may be empty for
    one; m, n and k where the row is a device's best over many shapes.
    """
    place = Path(path)
    rows = []
    for line, cells in csv_rows(place, _GEMM_COLUMNS):
        where = f"{place}:{line}"
        sizes = [name for name in ("m", "n", "k") if cells[name]]
        if len(sizes) not in (0, 3):
            raise ProfileError(
                f"of m, n and k only {sizes}", place=where, legal="all three or none"
            )
        m, n, k = (whole(cells[name], f"{where}: {name}") if sizes else 0 for name in "mnk")
        groups = cells["groups"]
        rows.append(
            GemmRow(
                gpu=cells["gpu"],
                dtype=cells["dtype"],
                shape=(m, n, k) if sizes else None,
                groups=whole(groups, f"{where}: groups") if groups else 1,
                flops_per_s=number(cells["tflops"], f"{where}: tflops") * 1e12,
                source=cells["source"],
            )
        )
    return rows


def timings_for(
    rows: Iterable[CollectiveRow], cluster: Cluster
) -> tuple[tuple[CollectiveTiming, ...], dict[str, int]]:
    """The timings that hold for groups of the cluster, and the number of rows left out, by reason.

    A curve is of one source: of several, the one with the most sizes. Of several rows for one size
    it has the median. Which of several networks is the cluster's can't be told from their names:
    then no row between nodes is taken.
    """
    judged = [(row, _misfit(row, cluster)) for row in rows]
    skipped = Counter(misfit for _, misfit in judged if misfit)
    fitting = [row for row, misfit in judged if not misfit]
    networks = {row.inter_link for row in fitting if row.nodes > 1}
    curves: dict[tuple[str, int, int], dict[str, dict[int, list[float]]]] = defaultdict(dict)
    for row in fitting:
        if row.nodes > 1 and len(networks) > 1:
            skipped["between nodes, of several networks: give a file with one's rows"] += 1
            continue
        by_source = curves[row.collective, row.n_gpus, row.n_gpus // row.nodes]
        source = f"{row.source} ({row.inter_link})" if row.inter_link else row.source
        times = by_source.setdefault(source, {}).setdefault(round(row.size_bytes), [])
        times.append(row.time_s)
    timings = []
    for (kind, size, per_node), by_source in curves.items():
        chosen = min(by_source, key=lambda source: (-len(by_source[source]), source))
        for source, points in by_source.items():
            if source != chosen:
                skipped["another source has more of the curve"] += sum(map(len, points.values()))
        for nbytes, times in sorted(by_source[chosen].items()):
            seconds = statistics.median(times)
            timings.append(
                CollectiveTiming(
                    backend="nccl",
                    kind=kind,
                    ranks=cluster.num_devices,
                    size=size,
                    per_node=per_node,
                    nbytes=nbytes,
                    seconds=seconds,
                    repetitions=len(times),
                    spread=_spread(times),
                    source=chosen,
                )
            )
    return tuple(timings), dict(skipped)


def _spread(times: list[float]) -> float:
    if len(times) == 1:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle


def is_gpu(text: str, device: str) -> bool:
    """Whether a table's or a log's name for a GPU is that of the catalog's `device`.

    That is what a driver calls it, or a text with every part of the catalog's name ("A100-80GB SXM"
    is a100-80gb, "A100 SXM" may be of 40 GB) and no other form factor than the device has.
    """
    if device_of_driver(text) == device:
        return True
    parts, wanted = _name_parts(text), _name_parts(device)
    names = (device, *(read_entry(device).driver_names if device in catalog_names() else ()))
    form_factors = set().union(*map(_name_parts, names)) & _FORM_FACTORS
    return wanted <= parts and (not form_factors or parts & _FORM_FACTORS <= form_factors)


def _name_parts(text: str) -> set[str]:
    """The parts of a GPU's name: rtx, 4090, 24gb of `RTX4090-24GB`; a100, sxm, 4, 80gb of
    `A100-SXM4-80GB`."""
    return set(re.findall(r"(?<![a-z])[a-z]\d[a-z\d]*|[a-z]+|\d[a-z\d]*", text.lower()))


def _misfit(row: CollectiveRow, cluster: Cluster) -> str:
    """The reason why a row does not hold for the cluster's groups; empty where it does."""
    per_node, unequal = divmod(row.n_gpus, row.nodes)
    if not is_gpu(row.gpu, cluster.device.name):
        return f"not of {cluster.device.name}"
    if row.in_place:
        return "in place, and plans run collectives out of place"
    if unequal:
        return "not as many GPUs on each node"
    if row.nodes > cluster.num_nodes or per_node > cluster.devices_per_node:
        return f"more than {cluster.num_nodes} nodes of {cluster.devices_per_node} GPUs"
    if row.nodes > 1 and per_node < cluster.devices_per_node:
        return "leaves GPUs of its nodes idle, whose NICs it has to itself"
    if row.collective == "p2p" and row.n_gpus != 2:
        return "sends in a ring, and plans send in pairs"
    return ""


def _listed_ranks(text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Line number and rank, host and gpu of each rank in the header of a log."""
    for line, content in enumerate(text.splitlines(), start=1):
        if listed := _RANK.match(content):
            yield line, listed


def _collective_of(text: str, stated: str | None, source: str) -> str:
    """The collective of a log, from its program's name or as given. Raises ValueError where both
    differ or are missing."""
    if stated is not None and stated not in COLLECTIVES:
        raise ProfileError(f" is {stated!r}", place=f"{source}: collective", legal=COLLECTIVES)
    programs = re.findall(r"\b(\w+?)_perf\b", text)
    printed = {_PROGRAMS[program] for program in programs if program in _PROGRAMS}
    if len(printed) > 1:
        raise ProfileError(
            f"the log is of {' and '.join(sorted(printed))}",
            place=source,
            legal="one collective",
            way_out="give each run a file",
        )
    if stated and printed and printed != {stated}:
        raise ProfileError(
            f" is {stated!r}, but the log is of {printed.pop()!r}",
            place=f"{source}: collective",
            legal=printed,
            way_out="leave --collective out",
        )
    if not printed and not stated:
        raise ProfileError(
            "the log doesn't say which collective it measured",
            place=source,
            legal=COLLECTIVES,
            way_out="pass collective= (--collective)",
        )
    return stated or printed.pop()


def _log_lines(text: str, source: str) -> Iterator[tuple[float, float, bool]]:
    """(bytes, microseconds, in place) of every line that begins with a number."""
    for line, content in enumerate(text.splitlines(), start=1):
        columns = content.split()
        if not columns or not re.fullmatch("[0-9]{1,15}", columns[0]):
            continue
        where, legal = f"{source}:{line}", " or ".join(map(str, _LOG_COLUMNS))
        if len(columns) not in _LOG_COLUMNS:
            raise ProfileError(f"{len(columns)} columns", place=where, legal=legal)
        if not int(columns[0]):  # a line of 0 bytes moved nothing
            continue
        for in_place, column in _TIME_COLUMNS.items():
            what = f"{where}: column {len(columns) + column + 1} (time)"
            yield float(columns[0]), number(columns[column], what), in_place


def _tensor_bytes(collective: str, size: float, ranks: int) -> float:
    """Bytes of the full tensor, from one rank's buffer for an all-to-all."""
    return size * ranks if collective == "all_to_all" else size


# --- cells of tables ------------------------------------------------------------------------------

# The cells of tables that others measured: rows of a CSV file, numbers in range.


def csv_rows(place: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Line number and cells of every row."""
    reader = csv.DictReader(
        io.StringIO(read_text(place, error=ProfileError), newline=""), strict=True
    )
    try:
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise ProfileError(
                f"no column {', '.join(missing)}",
                place=f"{place}:1",
                legal=needed,
                way_out="add the columns, empty where they may be",
            )
        for cells in reader:
            for name in needed:
                if cells[name] is None:
                    raise ProfileError(
                        f"the row ends before {name}",
                        place=f"{place}:{reader.line_num}",
                        legal=f"{len(needed)} cells or more",
                        way_out="fill the row up",
                    )
            yield reader.line_num, cells
    except csv.Error as error:
        where = f"{place}:{reader.line_num + 1}"
        raise ProfileError(
            f"not a row of a CSV file in UTF-8 ({error})",
            place=where,
            legal="a row as the csv module writes it",
            way_out="correct the row",
        ) from None


def number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LEAST_NUMBER <= value <= MOST_NUMBER:
        legal = f"a finite number above 0, {LEAST_NUMBER:g} to {MOST_NUMBER:g}"
        raise ProfileError(f" is {shown(text)}", place=what, legal=legal)
    return value


def whole(text: str, what: str) -> int:
    if not re.fullmatch("[0-9]{1,15}", text) or int(text) < 1:
        legal = "a whole number, 1 or more, of up to 15 digits"
        raise ProfileError(f" is {shown(text)}", place=what, legal=legal)
    return int(text)
