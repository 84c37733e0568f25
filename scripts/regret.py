"""Regret of choosing plans by their prices, against measured step times that others published.

    python -m scripts.regret [--data DIR] [--source TEXT] [--plans] [--record]

A sweep is a model (its dims, not its name alone) on a cluster with one batch and sequence, of which
a source measured at least three plans. Each is priced as `validate_costmodel` does. Ours is the one
that the planner would take: of every combination of degrees the micro-batch predicted fastest, and
of those the least by seconds and simplicity together (`planner/search/taste.py`; the errors'
quantile is left out). Its measured time over the best
measured one, less one, is the sweep's regret. Measurements of one plan count once, by their
median. DIR holds `step_times.csv` (default: the tables in `experts/`). `rank` is Spearman's
correlation. `--record` keeps the figures for the documents.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.experts.rows import later_rows, published_rows
from scripts.experts.sweeps import PLANS, SWEEP, Sweep, sweeps
from scripts.recording.results import record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with step_times.csv")
    parser.add_argument("--source", default="", help="only sources that contain this text")
    parser.add_argument("--plans", action="store_true", help="print every plan of a sweep")
    parser.add_argument("--record", action="store_true", help="keep the figures for the documents")
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
    if args.record:
        record(
            "regret",
            "python -m scripts.regret --record",
            title="The plan that would be chosen, in published sweeps",
            note="Its measured step over the best measured one of the sweep, less one; the median "
            "rank correlation of predicted and measured steps.",
            rows=by_source(found),
        )


def by_source(found: Sequence[Sweep]) -> Iterator[dict[str, Any]]:
    """Regret of each source's sweeps, and of all."""
    groups = {"all": [*found]}
    for sweep in found:
        source = dict(zip(SWEEP, sweep.key, strict=True))["source"]
        groups.setdefault(source.split(" (")[0], []).append(sweep)
    for name, of in groups.items():
        lost = [100 * sweep.regret for sweep in of]
        yield {
            "source": name,
            "sweeps": len(of),
            "mean, %": statistics.mean(lost),
            "median, %": statistics.median(lost),
            "worst, %": max(lost),
            "rank correlation": statistics.median(sweep.rank for sweep in of),
        }


if __name__ == "__main__":
    main()
