"""Regret of choosing plans by their prices, against measured step times that others published.

    python -m scripts.regret [--data DIR] [--source TEXT] [--plans]

A sweep is a model on a cluster with one batch and sequence, of which a source measured at least
four plans. Each is priced as `validate_costmodel` does; the one predicted fastest is ours. Its
measured time over the best measured one, less one, is the sweep's regret. Measurements of one plan
count once, by their median. DIR holds `step_times.csv` (default: `experts/published.csv`).
"""

from __future__ import annotations

import argparse
import collections
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.published import Unpriced, predict_row
from scripts.experts.rows import published_rows

PLANS = 4  # measured plans that make a sweep
SWEEP = (
    "source", "model", "gpu", "num_gpus", "interconnect", "precision", "global_batch", "seq_len",
    "framework",
)  # fmt: skip
PLAN = ("tp", "pp", "cp", "ep", "vp", "dp", "zero_stage_fsdp", "recompute", "micro_batch")
MEASURED = ("iteration_time_s", "peak_mem_gib")

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan of a sweep: its degrees, and its seconds per step."""

    plan: tuple[str, ...]
    measured_s: float
    predicted_s: float

    def __str__(self) -> str:
        degrees = " ".join(f"{name}{value}" for name, value in zip(PLAN, self.plan, strict=True))
        error = f"{self.predicted_s / self.measured_s - 1:+.1%}"
        return f"{degrees}: {self.measured_s:.4g} s, predicted {self.predicted_s:.4g} ({error})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Plans of one model, cluster, batch and sequence, that one source measured."""

    key: tuple[str, ...]
    plans: tuple[Priced, ...]

    @property
    def choice(self) -> Priced:
        return min(self.plans, key=lambda p: (p.predicted_s, p.plan))

    @property
    def best(self) -> Priced:
        return min(self.plans, key=lambda p: (p.measured_s, p.plan))

    @property
    def regret(self) -> float:
        return self.choice.measured_s / self.best.measured_s - 1

    def __str__(self) -> str:
        named = dict(zip(SWEEP, self.key, strict=True))
        return (
            f"{self.regret:6.1%} {named['model']} on {named['num_gpus']} {named['gpu']}, batch "
            f"{named['global_batch']}: {len(self.plans)} plans [{named['source']}]"
        )


def sweeps(rows: Iterable[Row]) -> Iterator[Sweep]:
    """The sweeps among published rows that can be priced, by key."""
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[Row]]] = {}
    for row in rows:
        plans = groups.setdefault(tuple(row[c] for c in SWEEP), collections.defaultdict(list))
        plans[tuple(row[c] for c in PLAN)].append(row)
    for key, plans in sorted(groups.items()):
        if len(plans) < PLANS:
            continue
        priced = [p for plan, same in plans.items() if (p := _priced(plan, same))]
        if len(priced) >= PLANS:
            yield Sweep(key=key, plans=tuple(priced))


def _priced(plan: tuple[str, ...], rows: Iterable[Row]) -> Priced | None:
    """A plan's times, the medians of its rows; None where none can be priced."""
    found, prices = [], dict[tuple[str, ...], float]()
    for row in rows:
        cells = tuple(text for name, text in row.items() if name not in MEASURED)
        try:
            if cells not in prices:
                prices[cells] = predict_row(row).step_time_s
        except Unpriced:
            continue
        found.append((float(row["iteration_time_s"]), prices[cells]))
    if not found:
        return None
    measured, predicted = (statistics.median(times) for times in zip(*found, strict=True))
    return Priced(plan=plan, measured_s=measured, predicted_s=predicted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with step_times.csv")
    parser.add_argument("--source", default="", help="only sources that contain this text")
    parser.add_argument("--plans", action="store_true", help="print every plan of a sweep")
    args = parser.parse_args()
    rows = published_rows(args.source, args.data)
    found = []
    for sweep in sweeps(rows):
        found.append(sweep)
        print(sweep, flush=True)
        for plan in sorted(sweep.plans, key=lambda p: p.measured_s) if args.plans else ():
            print(f"         {plan}" + ("  <- ours" if plan is sweep.choice else ""))
    if not found:
        raise SystemExit(f"no sweep of {PLANS} plans that can be priced among {len(rows)} rows")
    lost = [sweep.regret for sweep in found]
    print(f"{len(found)} sweeps: mean {statistics.mean(lost):.2%}, worst {max(lost):.1%}")


if __name__ == "__main__":
    main()
