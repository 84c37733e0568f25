"""Regret of choosing plans by their prices, against measured step times that others published.

    python -m scripts.regret [--data DIR] [--source TEXT] [--plans]

A sweep is a model (its dims, not its name alone) on a cluster with one batch and sequence, of which
a source measured at least four plans. Each is priced as `validate_costmodel` does. Ours is the one
that the planner would take: of every combination of degrees the micro-batch predicted fastest, and
of those that prices can't tell from the fastest (`TIE`) the simplest (`planner/search/taste.py`;
the errors' quantile, which moves the mean by 0.1 %, is left out). Its measured time over the best
measured one, less one, is the sweep's regret. Measurements of one plan count once, by their median.
DIR holds `step_times.csv` (default: `experts/published.csv`).
"""

from __future__ import annotations

import argparse
import collections
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.planner.published import Unpriced, evaluate_row, read_row
from meshwright.planner.search import TIE, simplicity
from scripts.experts.rows import published_rows

PLANS = 4  # measured plans that make a sweep
SWEEP = (
    "source", "model", "gpu", "num_gpus", "interconnect", "precision", "global_batch", "seq_len",
    "framework", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "moe_experts", "moe_topk",
)  # fmt: skip
PLAN = ("tp", "pp", "cp", "ep", "vp", "dp", "zero_stage_fsdp", "recompute", "micro_batch")
ROWS_AT_ONCE = PLAN.index("micro_batch")
MEASURED = ("iteration_time_s", "peak_mem_gib")

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A plan of a sweep: its degrees, its seconds per step, and its place in the order of
    simplicity."""

    plan: tuple[str, ...]
    measured_s: float
    predicted_s: float
    simplicity: tuple[float, ...] = ()

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
        """The simplest of the plans near the one predicted fastest."""
        kinds: dict[tuple[str, ...], Priced] = {}
        for plan in sorted(self.plans, key=lambda p: (p.predicted_s, p.plan)):
            kinds.setdefault(plan.plan[:ROWS_AT_ONCE], plan)
        least = min(plan.predicted_s for plan in kinds.values())
        near = [plan for plan in kinds.values() if plan.predicted_s <= least * (1 + TIE)]
        return min(near, key=lambda p: (p.simplicity, p.predicted_s, p.plan))

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
    measured, predicted = [], []
    simple: tuple[float, ...] = ()
    prices = dict[tuple[str, ...], tuple[float, tuple[float, ...]]]()
    for row in rows:
        cells = tuple(text for name, text in row.items() if name not in MEASURED)
        try:
            if cells not in prices:
                prices[cells] = _price(row)
        except Unpriced:
            continue
        seconds, simple = prices[cells]
        measured.append(float(row["iteration_time_s"]))
        predicted.append(seconds)
    if not measured:
        return None
    return Priced(
        plan=plan,
        measured_s=statistics.median(measured),
        predicted_s=statistics.median(predicted),
        simplicity=simple,
    )


def _price(row: Row) -> tuple[float, tuple[float, ...]]:
    """Predicted seconds and simplicity. Raises `Unpriced`."""
    found = evaluate_row(row)
    peak = max(found.prediction.peak_memory_bytes)
    memory = read_row(row).cluster.device.memory_bytes
    return found.prediction.step_time_s, simplicity(found.plan, peak, memory)


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
    print(
        f"{len(found)} sweeps: mean {statistics.mean(lost):.2%}, median "
        f"{statistics.median(lost):.2%}, worst {max(lost):.1%}, "
        f"{sum(own > 0.08 for own in lost)} above 8 %"
    )


if __name__ == "__main__":
    main()
