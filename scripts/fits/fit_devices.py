"""Fits curves of a GPU to published step times, on half of the models; scores on the rest.

    python -m scripts.fits.fit_devices [DEVICE ...] [--data DIR]

The halves are those of `scripts/validate_costmodel`: of each source every other model, in order of
size, of rows that were found later those that a hash says; of rows that differ in the number of
GPUs alone the one with the fewest is taken, mixtures of experts are left out. A fit multiplies each
curve of `START` by a factor and minimises over the fitted rows, each source weighing as much as the
root of its number of rows,

    huber(log(predicted / measured))    and    PULL · (logarithm of each factor)

by Gauss and Newton's steps. Printed: the curves fitted, in the catalog's units, and errors of both
halves at the start, by the catalog and by the fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from meshwright.profiles.cluster import Device
from meshwright.profiles.hardware.curve import Curve
from scripts.experts.rows import published_rows
from scripts.fits.fit_links import Vector
from scripts.published import Setup, Unpriced, evaluate, read_row
from scripts.validate_costmodel import halves, later_halves

BROAD = 0.1  # residuals beyond this weigh by their size, not its square
STEPS = 3
# curve of a device -> its unit over the catalog's; PULL: published figures of attention say more
CURVES: Mapping[str, float] = {
    "matmul_efficiency": 1e9,
    "memory_efficiency": 2.0**20,
    "attention_efficiency": 1.0,
    "tuned_attention_efficiency": 1.0,
}
Points = tuple[tuple[float, float], ...]
PULL = np.array([0.2, 0.2, 0.5, 1.0])
# device of the catalog -> text in the GPU of rows
DEVICES: Mapping[str, str] = {"h100-sxm": "H100-80GB", "a100-80gb": "A100-80GB"}
# products: as the A100's rise, below the best of 794 TFLOP/s (stas00/ml-engineering); streams: 1630
# of 2000 GB/s for long copies on the PCIe card (chsasank/device-benchmarks); attention: forwards of
# FlashAttention-2, and cuDNN's forward and backward (figures of arXiv 2407.08608). The A100's
# products: 229 to 267 TFLOP/s of best shapes (stas00/ml-engineering); attention: arXiv 2307.08691
START: Mapping[str, Mapping[str, Points]] = {
    "h100-sxm": {
        "matmul_efficiency": ((0.3, 0.09), (2, 0.24), (17, 0.52), (128, 0.68), (1000, 0.73)),
        "memory_efficiency": ((0.25, 0.24), (4, 0.6), (64, 0.8)),
        "attention_efficiency": (
            *((512, 0.26), (1024, 0.31), (2048, 0.34), (4096, 0.35), (16384, 0.36)),
        ),
        "tuned_attention_efficiency": (
            *((512, 0.28), (1024, 0.36), (2048, 0.42), (4096, 0.46), (16384, 0.5)),
        ),
    },
    "a100-80gb": {
        "matmul_efficiency": ((0.1, 0.32), (10, 0.8), (1000, 0.8)),
        "memory_efficiency": ((1, 0.5), (100, 0.8)),
        "attention_efficiency": (
            *((512, 0.4), (1024, 0.47), (2048, 0.53), (4096, 0.57), (16384, 0.6)),
        ),
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    setup: Setup
    measured_s: float
    source: str
    fitted: bool


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("devices", nargs="*", default=list(DEVICES), help="default: all")
    parser.add_argument("--data", type=Path, help="folder with step_times.csv")
    args = parser.parse_args()
    for name in args.devices:
        report(name, rows_of(DEVICES[name], args.data))


def rows_of(gpu: str, data: Path | None) -> list[Row]:
    """Rows on a GPU that can be priced."""
    found: dict[tuple[str, ...], tuple[int, Row]] = {}
    later = () if data else later_halves("")
    for _, fitted, row in chain(halves(published_rows("", data)), later):
        if gpu not in row["gpu"] or row["moe_experts"] not in ("", "0", "1"):
            continue
        try:
            setup = read_row(row)
        except Unpriced:
            continue
        source = row["source"].split(" (")[0]
        alike = (*(row[c] for c in ("model", "seq_len", "tp", "pp", "cp", "micro_batch")), source)
        taken = Row(setup, float(row["iteration_time_s"]), source, fitted)
        gpus = int(row["num_gpus"])
        if alike not in found or gpus < found[alike][0]:
            found[alike] = gpus, taken
    return [row for _, row in found.values()]


def report(name: str, rows: Sequence[Row]) -> None:
    fitted = [row for row in rows if row.fitted]
    device = fitted[0].setup.cluster.device
    start = dataclasses.replace(
        device,
        **{
            curve: Curve(points=tuple((x * CURVES[curve], y) for x, y in points))
            for curve, points in START[name].items()
        },
    )
    best = scaled(start, fit(start, fitted))
    print(f"{name}: {len(fitted)} rows fitted, {len(rows) - len(fitted)} scored")
    for curve, unit in CURVES.items():
        found = getattr(best, curve)
        if found is not None:
            print(f"  {curve}: {[[round(x / unit, 4), round(y, 3)] for x, y in found.points]}")
    for label, chosen in (("start", start), ("catalog", device), ("fitted", best)):
        for half in (True, False):
            of = [row for row in rows if row.fitted == half]
            print(f"  {label:7} {errors_line(residuals(chosen, of), fitted=half)}")


def errors_line(found: Sequence[float] | Vector, *, fitted: bool) -> str:
    """Errors of the rows of a half, of their log(predicted / measured)."""
    errors = [math.exp(each) - 1 for each in found]
    return (
        f"{'fit' if fitted else 'score':6} {len(errors):4} rows, mean absolute error "
        f"{statistics.mean(map(abs, errors)):.1%}, bias {statistics.mean(errors):+.1%}"
    )


def fit(device: Device, rows: Sequence[Row]) -> Vector:
    """Logarithms of the factors of `device`'s curves."""
    counts = Counter(row.source for row in rows)
    weights = np.array([counts[row.source] ** -0.25 for row in rows])
    point = np.zeros(len(CURVES))
    for _ in range(STEPS):
        here = residuals(scaled(device, point), rows)
        shifts = 0.02 * np.eye(len(point))
        slope = np.stack(
            [(residuals(scaled(device, point + shift), rows) - here) / 0.02 for shift in shifts],
            axis=1,
        )
        step = np.zeros(len(point))
        for _ in range(20):  # what stays far off weighs less
            left = here + slope @ step
            scale = weights * np.sqrt(np.minimum(1.0, BROAD / np.maximum(np.abs(left), 1e-9)))
            square = (slope * scale[:, None] ** 2).T @ slope + np.diag(PULL**2)
            step = np.linalg.solve(square, -(slope.T @ (scale**2 * here)) - PULL**2 * point)
        point = point + step
    return point


def residuals(device: Device, rows: Sequence[Row]) -> Vector:
    """log(predicted / measured) of rows on a device."""
    return np.array([math.log(predicted(device, row.setup) / row.measured_s) for row in rows])


def predicted(device: Device, setup: Setup) -> float:
    cluster = dataclasses.replace(setup.cluster, device=device)
    changed = dataclasses.replace(setup, cluster=cluster)
    return evaluate(changed).prediction.step_time_s


def scaled(device: Device, factors: Vector) -> Device:
    """`device` with its curves times e to the power of the factors."""
    curves = {name: getattr(device, name) for name in CURVES}
    return dataclasses.replace(
        device,
        **{
            name: _times(curve, math.exp(factor))
            for (name, curve), factor in zip(curves.items(), factors, strict=True)
            if curve is not None
        },
    )


def _times(curve: Curve, factor: float) -> Curve:
    return Curve(points=tuple((x, min(1.0, y * factor)) for x, y in curve.points))


if __name__ == "__main__":
    main()
