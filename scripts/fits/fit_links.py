"""Fits the links of the catalog to published collectives, on half of the rows; scores on the rest.

    python -m scripts.fits.fit_links [--data DIR] [link ...]

DIR holds `collectives.csv` (source, collective, gpu, nodes, n_gpus, inter_link, size_bytes,
size_convention, time_us). Of the sizes that a source has for a collective, sorted, every other one
is fitted and the rest held out. A fit starts at the catalog's numbers and minimises the squares of

    log(predicted / measured)  over its rows,  and  0.03 (t - 2)  over the knots of a curve,

where the fraction y of a knot is that of the next one times a value between the least that lets
more bytes take more time and 1, which is the logistic function of t: where no row says otherwise, a
link is efficient. Predictions are those of `costmodel.kernels.collectives`, for whole nodes.

Printed per link: the numbers fitted, and the mean absolute error of two predictions on the fitted
and on the held-out rows: of the fit, and of the catalog as it is. Then the catalog's on rows that
are in no fit; a star says that a number of the node was read off the largest sizes of that source.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.kernels import Group, collective_time
from meshwright.profiles.cluster import Cluster, Link
from meshwright.profiles.hardware.curve import Curve
from meshwright.profiles.measure import CollectiveRow, read_collectives_csv

Vector = NDArray[np.float64]
KNOTS = tuple(2.0**exponent for exponent in (16, 20, 23, 26, 29))
PULL = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a source for a GPU, of at least `least_bytes`; inside a node or `between` nodes."""

    source: str
    gpu: str
    collectives: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    between: bool = False
    least_bytes: float = 2.0**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What to fit of one link of a catalog node: fields of Link, and the rows to fit them to.

    `group_efficiency` is fitted at `group_sizes` but the last, which has all of the bandwidth.
    """

    node: str
    link: str
    rows: tuple[Rows, ...]
    free: tuple[str, ...] = ("latency_s", "bandwidth", "efficiency")
    group_sizes: tuple[int, ...] = ()


_AR = ("all_reduce",)
_EFA = ("all_reduce", "all_gather", "all_to_all")
# The rings are held where nearly all rows went to a switch; their bandwidth is read off the rows of
# 8 and 16 GiB that didn't.
_SWITCH = ("switch_bandwidth", "switch_latency_s")

FITS = (
    Fit(
        node="dgx-a100",
        link="intra_link",
        rows=(Rows(source="vTrain", gpu="A100"),),
        group_sizes=(2, 3, 4, 8),
    ),
    Fit(
        node="dgx-1-v100",
        link="intra_link",
        rows=(Rows(source="vTrain", gpu="V100"),),
        group_sizes=(2, 3, 4, 5, 6, 7, 8),
    ),
    Fit(
        node="abci-v",
        link="intra_link",
        rows=(Rows(source="aistabci", gpu="V100", collectives=_AR),),
    ),
    Fit(
        node="dgx-h200",
        link="intra_link",
        rows=(Rows(source="stas00", gpu="H200"), Rows(source="nccl-tests#290", gpu="H100")),
        free=_SWITCH,
    ),
    Fit(
        node="dgx-b200",
        link="intra_link",
        rows=(Rows(source="stas00", gpu="B200"), Rows(source="GKE a4 (8x", gpu="B200")),
        free=_SWITCH,
    ),
    Fit(
        node="pcie-8-rtx-4090",
        link="intra_link",
        rows=(Rows(source="8x RTX4090 log", gpu="RTX4090"),),
    ),
    Fit(
        node="p5.48xlarge",
        link="inter_link",
        rows=(Rows(source="crazyguitar", gpu="H100", collectives=_EFA, between=True),),
        free=("latency_s", "bandwidth", "efficiency", "direct_efficiency"),
    ),
    Fit(
        node="p6-b200.48xlarge",
        link="inter_link",
        rows=(
            Rows(source="stas00", gpu="B200", between=True, least_bytes=2.0**20),
            Rows(source="p6-b200", gpu="B200", between=True),
        ),
    ),
    Fit(
        node="gcp-a4-highgpu",
        link="inter_link",
        rows=(Rows(source="GKE a4 (2x8", gpu="B200", between=True),),
    ),
    Fit(
        node="gcp-a3-megagpu",
        link="inter_link",
        rows=(Rows(source="a3-megagpu", gpu="H100", between=True),),
    ),
    Fit(
        node="abci-a",
        link="inter_link",
        rows=(Rows(source="aistabci", gpu="A100", collectives=_AR, between=True),),
    ),
    Fit(
        node="abci-v",
        link="inter_link",
        rows=(Rows(source="aistabci", gpu="V100", collectives=_AR, between=True),),
    ),
)
# (node, rows in no fit, whether a number of the node was read off them). Broadcasts of ABCI are
# left out: 8 us at every group size say that the root did not wait for the others.
OUTSIDE = (
    ("dgx-a100", Rows(source="stas00", gpu="A100 SXM"), False),
    ("dgx-a100", Rows(source="aistabci", gpu="A100", collectives=_AR), False),
    ("dgx-a100", Rows(source="Hetu-Galvatron", gpu="A100", collectives=_AR), False),
    ("dgx-a100", Rows(source="Hetu-Galvatron", gpu="A100", collectives=("all_to_all",)), True),
    ("dgx-1-v100", Rows(source="Aceso", gpu="V100", collectives=_AR), False),
    ("dgx-1-v100", Rows(source="Aceso", gpu="V100", collectives=("all_gather",)), False),
    ("dgx-1-v100", Rows(source="Aceso", gpu="V100", collectives=("reduce_scatter",)), False),
    ("dgx-1-v100", Rows(source="Aceso", gpu="V100", collectives=("all_to_all",)), True),
    ("dgx-1-v100", Rows(source="V100-16GB 8x", gpu="V100"), False),
    ("pcie-8-rtx-4090-p2p", Rows(source="RTX4090 P2P driver", gpu="RTX4090"), True),
    ("dgx-h100", Rows(source="2x DGX H100", gpu="H100", between=True), False),
    ("dgx-h200", Rows(source="nccl-tests#256", gpu="H200", between=True), False),
    ("dgx-h100", Rows(source="nccl#1218", gpu="H100", between=True), True),
    ("dgx-2-v100", Rows(source="nccl-tests#78", gpu="V100", between=True), True),
    ("oci-bm.gpu4.8", Rows(source="OCI", gpu="A100", between=True), True),
)


def main() -> None:
    """Print all fits, or those of the nodes named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/validation"))
    parser.add_argument("nodes", nargs="*", help="catalog nodes; default: all")
    options = parser.parse_args()
    table = read_collectives_csv(options.data / "collectives.csv")
    for fit in FITS:
        if not options.nodes or fit.node in options.nodes:
            report_fit(fit, table)
    print("\nrows in no fit, by the catalog")
    for node, rows, read_off in OUTSIDE:
        if not options.nodes or node in options.nodes:
            chosen = select(rows, table)
            what = f"{rows.source} {rows.gpu} {'/'.join(rows.collectives)}"
            mark = "*" if read_off else " "
            print(f"{mark} {node:20s} {what:60.60s} {score(Cluster.from_catalog(node), chosen)}")


def report_fit(fit: Fit, table: Sequence[CollectiveRow]) -> None:
    """Fit one link, and print what came out and how it scores."""
    cluster = Cluster.from_catalog(fit.node)
    rows = [row for part in fit.rows for row in select(part, table)]
    fitted, held_out = split(rows)
    best = solve(fit, cluster, fitted)
    link: Link = getattr(best, fit.link)
    print(f"\n{fit.node} {fit.link}: {describe(link)}")
    for label, part in (("fitted on", fitted), ("held out", held_out)):
        print(f"  {label:9s} {score(best, part)}; catalog {score(cluster, part)}")


def select(wanted: Rows, table: Iterable[CollectiveRow]) -> list[CollectiveRow]:
    """The rows wanted; where a source measured the same twice (with and without an option), the
    faster."""
    fastest: dict[tuple[str, str, int, int, float], CollectiveRow] = {}
    for row in table:
        if (
            wanted.source in row.source
            and wanted.gpu in row.gpu
            and row.collective in wanted.collectives
            and (row.nodes > 1) == wanted.between
            and row.size_bytes >= wanted.least_bytes
        ):
            key = (row.source, row.collective, row.nodes, row.n_gpus, row.size_bytes)
            if key not in fastest or row.time_s < fastest[key].time_s:
                fastest[key] = row
    return list(fastest.values())


def split(rows: Sequence[CollectiveRow]) -> tuple[list[CollectiveRow], list[CollectiveRow]]:
    """Every other size of each source and collective, and the others."""
    seen: Counter[tuple[str, str]] = Counter()
    halves: dict[tuple[str, str, float], int] = {}
    for key in sorted({(row.source, row.collective, row.size_bytes) for row in rows}):
        halves[key] = seen[key[:2]] % 2
        seen[key[:2]] += 1
    parts: dict[int, list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        parts[halves[row.source, row.collective, row.size_bytes]].append(row)
    return parts[0], parts[1]


def predict(cluster: Cluster, rows: Sequence[CollectiveRow]) -> Vector:
    """Seconds of every row."""
    return np.array(
        [
            collective_time(
                row.collective,
                row.size_bytes,
                Group(size=row.n_gpus, per_node=row.n_gpus // row.nodes),
                cluster,
            )
            for row in rows
        ]
    )


def score(cluster: Cluster, rows: Sequence[CollectiveRow]) -> str:
    """Rows, mean absolute error and bias."""
    ratio = predict(cluster, rows) / np.array([row.time_s for row in rows]) - 1
    return f"{len(rows):4d} rows, error {np.abs(ratio).mean():6.1%}, bias {ratio.mean():+6.1%}"


def describe(link: Link) -> str:
    """The numbers of a link in the catalog's units."""
    parts = [f"{link.latency_s * 1e6:.2f} us, {link.bandwidth / 1e9:.1f} GB/s"]
    parts.append(f"efficiency {[(x / 2**20, round(y, 3)) for x, y in link.efficiency.points]} MiB")
    if not link.group_efficiency.is_constant:
        pairs = [(int(x), round(y, 3)) for x, y in link.group_efficiency.points]
        parts.append(f"group efficiency {pairs}")
    if link.switch_bandwidth is not None:
        switch_us = link.switch_latency_s * 1e6
        parts.append(f"switch {switch_us:.2f} us, {link.switch_bandwidth / 1e9:.1f} GB/s")
    if link.direct_efficiency < 1:
        parts.append(f"direct {link.direct_efficiency:.3f}")
    return ", ".join(parts)


def solve(fit: Fit, cluster: Cluster, rows: Sequence[CollectiveRow]) -> Cluster:
    """`cluster` with the free numbers of the link where the squares are least."""
    measured = np.log([row.time_s for row in rows])
    start: Link = getattr(cluster, fit.link)

    def build(point: Vector) -> Cluster:
        changes: dict[str, Any] = {fit.link: _link(fit, start, point)}
        return dataclasses.replace(cluster, **changes)

    knots = len(KNOTS) - 1 if "efficiency" in fit.free else 0

    def residuals(point: Vector) -> Vector:
        pulled = PULL * (point[:knots] - 2.0)
        return np.concatenate([np.log(predict(build(point), rows)) - measured, pulled])

    logs = [math.log(getattr(start, name)) for name in fit.free if name != "efficiency"]
    groups = [math.log(start.group_efficiency(float(size))) for size in fit.group_sizes[:-1]]
    return build(least_squares(residuals, np.array([1.0] * knots + logs + groups)))


def _link(fit: Fit, start: Link, point: Vector) -> Link:
    """`start` with a point of the search put in: the curve's knots, the logs of the rest."""
    values = list(point)
    changes: dict[str, Any] = {}
    if "efficiency" in fit.free:
        changes["efficiency"] = _curve([values.pop(0) for _ in KNOTS[1:]])
    names = [name for name in fit.free if name != "efficiency"]
    changes |= {name: math.exp(values.pop(0)) for name in names}
    if "direct_efficiency" in changes:
        changes["direct_efficiency"] = min(1.0, changes["direct_efficiency"])
    if fit.group_sizes:
        sizes = zip(fit.group_sizes, [*values, 0.0], strict=True)
        pairs = tuple((float(size), min(1.0, math.exp(value))) for size, value in sizes)
        changes["group_efficiency"] = Curve(points=pairs)
    if start.per_rank_bandwidth is not None:  # a rank keeps its share of all NICs
        share = start.per_rank_bandwidth / start.bandwidth
        changes["per_rank_bandwidth"] = share * changes.get("bandwidth", start.bandwidth)
    return dataclasses.replace(start, **changes)


def _curve(logits: Sequence[float]) -> Curve:
    y, points = 1.0, [(KNOTS[-1], 1.0)]
    for k in range(len(KNOTS) - 2, -1, -1):
        least = 1 / (1 + math.log(KNOTS[k + 1] / KNOTS[k]))
        y *= least + (1 - least) / (1 + math.exp(-logits[k]))
        points.append((KNOTS[k], y))
    return Curve(points=tuple(reversed(points)))


def least_squares(residuals: Callable[[Vector], Vector], point: Vector) -> Vector:
    """The point of least squares near `point`, by Levenberg and Marquardt's damped steps."""
    damping, here = 1e-2, residuals(point)
    for _ in range(60):
        shifts = 1e-4 * np.eye(len(point))
        slope = np.stack([(residuals(point + shift) - here) / 1e-4 for shift in shifts], axis=1)
        square = slope.T @ slope
        scale = np.diag(1e-6 + np.diag(square))
        for _ in range(8):
            step = np.clip(np.linalg.solve(square + damping * scale, -slope.T @ here), -1, 1)
            there = residuals(point + step)
            if there @ there < here @ here:
                break
            damping *= 4
        else:
            return point
        gain = (here @ here - there @ there) / (here @ here)
        point, here, damping = point + step, there, max(damping / 5, 1e-8)
        if gain < 1e-6:
            return point
    return point


if __name__ == "__main__":
    main()
