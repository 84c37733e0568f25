"""Reads measurements that others published: nccl-tests logs, tables of collectives and products.

Every record is in SI units, and a collective's `size_bytes` is that of the full tensor, as the cost
model counts it, whatever its source counted: nccl-tests and some tables give the buffer of one rank
for an all-to-all, which is 1/n of it.

Nothing is stored here and nothing guessed: a line that can't be read is an error that names the
file, the line and the column.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    """`groups` products of (m, k) by (k, n) at once, and the rate; no shape where none is given."""

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
        raise ValueError(f"{source}: {ranks} ranks on {nodes} nodes; legal: 2 or more, on 1 to all")
    kind = collective or _printed_collective(text, source)
    if kind not in COLLECTIVES:
        raise ValueError(f"{source}: collective is {kind!r}; legal: {', '.join(COLLECTIVES)}")
    gpu = re.search(r"^#\s+Rank\s+0\b.*device\s+\d+\s+\[\w+\]\s+(.+?)\s*$", text, re.MULTILINE)
    rows = [
        CollectiveRow(
            collective=kind,
            n_gpus=ranks,
            nodes=nodes,
            size_bytes=_tensor_bytes(kind, size, ranks),
            time_s=time_us * 1e-6,
            source=source,
            gpu=gpu.group(1) if gpu else "",
            in_place=in_place,
        )
        for size, time_us, in_place in _log_lines(text, source)
    ]
    if not rows:
        raise ValueError(
            f"{source}: no line of an nccl-tests table in {len(text.splitlines())} lines; a line "
            f"has size count type redop [root], then time algbw busbw #wrong twice"
        )
    return rows


def read_collectives_csv(path: str | os.PathLike[str]) -> list[CollectiveRow]:
    """The rows of a table of collectives that give a size and a time.

    Columns: source, collective, gpu, nodes, n_gpus, inter_link, size_bytes, size_convention,
    time_us, and any others. `size_convention` says what the size counts.
    """
    place = Path(path)
    rows = []
    for line, cells in _csv_rows(place, _COLLECTIVE_COLUMNS):
        if not cells["size_bytes"] or not cells["time_us"]:
            continue
        where = f"{place}:{line}"
        kind = cells["collective"]
        if kind not in COLLECTIVES:
            raise ValueError(f"{where}: collective is {kind!r}; legal: {', '.join(COLLECTIVES)}")
        convention = cells["size_convention"]
        if not convention.startswith(_CONVENTIONS):
            raise ValueError(
                f"{where}: size_convention is {convention!r}; legal: {', '.join(_CONVENTIONS)}"
            )
        n_gpus = _whole(cells["n_gpus"], f"{where}: n_gpus")
        size = _number(cells["size_bytes"], f"{where}: size_bytes")
        rows.append(
            CollectiveRow(
                collective=kind,
                n_gpus=n_gpus,
                nodes=_whole(cells["nodes"], f"{where}: nodes"),
                size_bytes=_tensor_bytes(kind, size, n_gpus),
                time_s=_number(cells["time_us"], f"{where}: time_us") * 1e-6,
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
    for line, cells in _csv_rows(place, _GEMM_COLUMNS):
        where = f"{place}:{line}"
        given = [name for name in ("m", "n", "k") if cells[name]]
        if len(given) not in (0, 3):
            raise ValueError(f"{where}: of m, n and k only {given}; legal: all three or none")
        m, n, k = (_whole(cells[name], f"{where}: {name}") if given else 0 for name in "mnk")
        groups = cells["groups"]
        rows.append(
            GemmRow(
                gpu=cells["gpu"],
                dtype=cells["dtype"],
                shape=(m, n, k) if given else None,
                groups=_whole(groups, f"{where}: groups") if groups else 1,
                flops_per_s=_number(cells["tflops"], f"{where}: tflops") * 1e12,
                source=cells["source"],
            )
        )
    return rows


def _printed_collective(text: str, source: str) -> str:
    found = re.search(r"\b(\w+?)_perf\b", text)
    if found is None or found.group(1) not in _PROGRAMS:
        raise ValueError(
            f"{source}: the log doesn't say which collective it measured; pass collective=, one of "
            f"{', '.join(COLLECTIVES)}"
        )
    return _PROGRAMS[found.group(1)]


def _log_lines(text: str, source: str) -> Iterator[tuple[float, float, bool]]:
    """Size, microseconds and whether in place, for every line that begins with a number."""
    for line, content in enumerate(text.splitlines(), start=1):
        columns = content.split()
        if not columns or not columns[0].isdigit():
            continue
        where, legal = f"{source}:{line}", " or ".join(map(str, _LOG_COLUMNS))
        if len(columns) not in _LOG_COLUMNS:
            raise ValueError(f"{where}: {len(columns)} columns; legal: {legal}")
        if not int(columns[0]):  # a line of 0 bytes moved nothing
            continue
        for in_place, column in _TIME_COLUMNS.items():
            what = f"{where}: column {len(columns) + column + 1} (time)"
            yield float(columns[0]), _number(columns[column], what), in_place


def _tensor_bytes(collective: str, size: float, ranks: int) -> float:
    return size * ranks if collective == "all_to_all" else size


def _csv_rows(place: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Line number and cells of every row."""
    with place.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{place}:1: no column {', '.join(missing)}; needed: {needed}")
        for cells in reader:
            for name in needed:
                if cells[name] is None:
                    raise ValueError(f"{place}:{reader.line_num}: the row ends before {name}")
            yield reader.line_num, cells


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{what} is {text!r}; legal: a finite number above 0")
    return value


def _whole(text: str, what: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{what} is {text!r}; legal: a whole number, 1 or more")
    return int(text)
