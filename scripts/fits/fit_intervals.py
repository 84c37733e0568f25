"""Fits the intervals of predictions (`costmodel/residuals.json`) to published measurements.

    python -m scripts.fits.fit_intervals [--write]

Rows of the half that nothing was fitted on (`scripts/validate_costmodel`) are priced; of each
group (GPU, dense or experts, target) the 80 % interval of measured over predicted is printed, and
the part of its rows that lies in the interval of its other models: what the interval is worth.
Groups of fewer than 20 rows or 5 models have that of the next larger group. --write keeps them.
About five minutes.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright.costmodel import intervals
from meshwright.costmodel.intervals import groups_of
from meshwright.planner.pricing import Prediction
from meshwright.planner.published import Unpriced, evaluate_row, read_row
from scripts.experts.residuals import Residual, coverage, table
from scripts.experts.rows import published_rows
from scripts.validate_costmodel import halves

PATH = Path(intervals.__file__).with_name("residuals.json")


def residuals() -> dict[str, dict[str, list[Residual]]]:
    """Of step times and of memory, by group."""
    found: dict[str, dict[str, list[Residual]]] = {
        "step": collections.defaultdict(list),
        "memory": collections.defaultdict(list),
    }
    for name, fitted, row in halves(published_rows()):
        if fitted:
            continue
        try:
            evaluation = evaluate_row(row)
        except Unpriced:
            continue
        groups = groups_of(
            read_row(row).cluster.device.name,
            evaluation.target.name,
            experts=row["moe_experts"] not in ("", "0", "1"),
        )
        for what, ratio in _ratios(row, evaluation.prediction):
            for group in groups:
                found[what][group].append(Residual(f"{name} {row['model']}", ratio))
    return found


def _ratios(row: Mapping[str, str], prediction: Prediction) -> Iterator[tuple[str, float]]:
    yield "step", float(row["iteration_time_s"]) / prediction.step_time_s
    if published := row.get("peak_mem_gib"):
        yield "memory", float(published) * 2**30 / max(prediction.peak_memory_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="keep them in costmodel")
    args = parser.parse_args()
    found = residuals()
    tables = {what: table(groups) for what, groups in found.items()}
    for what, groups in tables.items():
        print(f"{what:34} rows models    low   high  within")
        for name, own in groups.items():
            print(
                f"  {name:32} {own['rows']:4} {own['models']:6} {own['low']:6.2f} "
                f"{own['high']:6.2f}  {coverage(found[what][name]):6.0%}"
            )
    if args.write:
        date = datetime.date.today().isoformat()
        PATH.write_text(json.dumps({"date": date, **tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
