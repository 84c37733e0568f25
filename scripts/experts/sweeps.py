"""Sweeps of published measurements, and the plan of each that the planner would choose.

`scripts/regret.py` says what a sweep is, and which plan is ours.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from meshwright.planner.search import TIE, looks_of
from scripts.published import Unpriced, evaluate_row, read_row
from scripts.ranks.rank_correlation import spearman

PLANS = 3  # measured plans that make a sweep
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
    """A plan of a sweep: its degrees, its seconds per step, and the part of a tie by which it has
    to be faster than the plainest."""

    plan: tuple[str, ...]
    measured_s: float
    predicted_s: float
    complexity: float = 0.0

    @property
    def number_s(self) -> float:
        """The seconds by which plans are compared (`planner/search/taste.py`)."""
        return self.predicted_s * (1 + TIE * self.complexity)

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
        """The best of the fastest micro-batch of each combination of degrees."""
        kinds: dict[tuple[str, ...], Priced] = {}
        for plan in sorted(self.plans, key=lambda p: (p.predicted_s, p.plan)):
            kinds.setdefault(plan.plan[:ROWS_AT_ONCE], plan)
        return min(kinds.values(), key=lambda p: (p.number_s, p.plan))

    @property
    def best(self) -> Priced:
        return min(self.plans, key=lambda p: (p.measured_s, p.plan))

    @property
    def regret(self) -> float:
        return self.choice.measured_s / self.best.measured_s - 1

    @property
    def rank(self) -> float:
        """Spearman's correlation of predicted with measured seconds."""
        return spearman([p.measured_s for p in self.plans], [p.predicted_s for p in self.plans])

    def __str__(self) -> str:
        named = dict(zip(SWEEP, self.key, strict=True))
        return (
            f"{self.regret:6.1%} rank {self.rank:+.2f} {named['model']} on {named['num_gpus']} "
            f"{named['gpu']}, batch {named['global_batch']}: {len(self.plans)} plans "
            f"[{named['source']}]"
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
    complexity = 0.0
    prices = dict[tuple[str, ...], tuple[float, float]]()
    for row in rows:
        cells = tuple(text for name, text in row.items() if name not in MEASURED)
        try:
            if cells not in prices:
                prices[cells] = _price(row)
        except Unpriced:
            continue
        seconds, complexity = prices[cells]
        measured.append(float(row["iteration_time_s"]))
        predicted.append(seconds)
    if not measured:
        return None
    return Priced(
        plan=plan,
        measured_s=statistics.median(measured),
        predicted_s=statistics.median(predicted),
        complexity=complexity,
    )


def _price(row: Row) -> tuple[float, float]:
    """Predicted seconds and complexity. Raises `Unpriced`."""
    found = evaluate_row(row)
    peak = max(found.prediction.peak_memory_bytes)
    memory = read_row(row).cluster.device.memory_bytes
    return found.prediction.step_time_s, looks_of(found.plan, peak, memory).complexity
