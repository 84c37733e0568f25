"""Regret of choosing plans by their prices, against measured step times that others published.

    python -m scripts.regret [--data DIR] [--source TEXT] [--plans]

A sweep is a model (its dims, not its name alone) on a cluster with one batch and sequence, of which
a source measured at least three plans. Each is priced as `validate_costmodel` does. Ours is the one
that the planner would take: of every combination of degrees the micro-batch predicted fastest, and
of those the least by seconds and simplicity together (`planner/search/taste.py`; the errors'
quantile is left out). Its measured time over the best
measured one, less one, is the sweep's regret. Measurements of one plan count once, by their median.
DIR holds `step_times.csv` (default: the tables in `experts/`). `rank` is Spearman's correlation.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from scripts.experts.rows import later_rows, published_rows
from scripts.experts.sweeps import PLANS, sweeps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with step_times.csv")
    parser.add_argument("--source", default="", help="only sources that contain this text")
    parser.add_argument("--plans", action="store_true", help="print every plan of a sweep")
    args = parser.parse_args()
    rows = published_rows(args.source, args.data)
    rows += later_rows(args.source) if args.data is None else []
    found = []
    for sweep in sweeps(rows):
        found.append(sweep)
        print(sweep, flush=True)
        for plan in sorted(sweep.plans, key=lambda p: p.measured_s) if args.plans else ():
            print(f"         {plan}" + ("  <- ours" if plan is sweep.choice else ""))
    if not found:
        raise SystemExit(f"no sweep of {PLANS} plans that can be priced among {len(rows)} rows")
    lost = [sweep.regret for sweep in found]
    print(
        f"{len(found)} sweeps: mean {statistics.mean(lost):.2%}, median "
        f"{statistics.median(lost):.2%}, worst {max(lost):.1%}, "
        f"{sum(own > 0.1 for own in lost)} above 10 %; median rank "
        f"{statistics.median(sweep.rank for sweep in found):.2f}"
    )


if __name__ == "__main__":
    main()
