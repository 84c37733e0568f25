"""`meshwright fit`: whether a model fits a cluster, up to which batch and sequence, and what would
help where it doesn't."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.planner.alternatives import with_advice, with_sequences
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import InfeasibleError, Relaxation, describe, sized
from meshwright.planner.report import sequence_length
from meshwright.planner.search import Search, plan_that_fits

FITS, TIGHT, NOT = "fits", "tight", "does not fit"
SPARE = "what would help: a larger --memory-margin leaves more of each device free"
MOST = 2**12  # times the batch, or the sequence, at most
FINER = (1.5, 1.25, 1.75)  # times the largest power of two that fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The verdict, with the fullest device's bytes, the 80 % interval and what there is of memory;
    without a plan None. `batch_at_once` is the largest batch that fits as one micro-batch,
    `sequence` the longest; 0 where none does, None where there is nothing to vary. `advice` and
    `relaxations` are what would help where nothing fits."""

    verdict: str
    plan: str | None
    peak_bytes: float | None
    interval_bytes: tuple[float, float] | None
    memory_bytes: float
    batch: int
    batch_at_once: int
    sequence_now: int | None
    sequence: int | None
    why: str
    relaxations: tuple[Relaxation, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.plan or self.why}"]
        if self.peak_bytes is not None and self.interval_bytes is not None:
            low, high = map(sized, self.interval_bytes)
            lines.append(
                f"  {sized(self.peak_bytes)} of {sized(self.memory_bytes)} on the fullest device, "
                f"with 80 % {low} to {high}"
            )
            if self.why:
                lines.append(f"  {self.why}")
        if self.batch_at_once:
            said = f"{self.batch_at_once} rows; larger ones fit in several micro-batches"
        elif self.verdict == NOT:
            said = "none"
        else:
            said = f"none from {self.batch} rows on; it fits in micro-batches"
        lines.append(f"  largest batch that fits at once, as one micro-batch: {said}")
        if self.sequence is not None:
            found = f"{self.sequence} tokens" if self.sequence else "none"
            lines.append(
                f"  longest sequence that fits: {found} (planned: {self.sequence_now}); by memory, "
                "whatever the model's positions allow"
            )
        return "\n".join(lines)


def fit(search: Search) -> Fit:
    """What fits, by prices of memory; the search is run for the batch as given."""
    problem = search.problem
    length = sequence_length(problem)
    shared: dict[str, Any] = {
        "memory_bytes": float(problem.cluster.device.memory_bytes),
        "batch": search.global_batch_size,
        "batch_at_once": _largest_batch(search),
        "sequence_now": length,
        "sequence": _longest(search, length) if length else None,
    }
    try:
        best = search.run().best
    except InfeasibleError as error:
        found = with_advice(search, error)
        return Fit(
            verdict=NOT,
            plan=None,
            peak_bytes=None,
            interval_bytes=None,
            why=str(found),
            relaxations=found.relaxations,
            **shared,
        )
    prediction = best.evaluation.prediction
    verdict = prediction.memory_verdict(problem.cluster)
    return Fit(
        verdict=verdict,
        plan=describe(best.plan),
        peak_bytes=max(prediction.peak_memory_bytes),
        interval_bytes=prediction.memory_interval_bytes,
        why="" if verdict == FITS else SPARE,
        **shared,
    )


def _largest(fits: Callable[[float], bool]) -> float:
    """The largest factor found: powers of two, then a finer step; 0 where none does."""
    low = 1.0
    if not fits(low):
        while low > 1 / MOST:
            low /= 2
            if fits(low):
                break
        else:
            return 0.0
    else:
        while low < MOST and fits(low * 2):
            low *= 2
    if fits(low * FINER[0]):
        return low * (FINER[2] if fits(low * FINER[2]) else FINER[0])
    return low * (FINER[1] if fits(low * FINER[1]) else 1.0)


def _largest_batch(search: Search) -> int:
    """The largest batch, a multiple of the one given, that fits as one micro-batch."""
    batch, free = search.global_batch_size, search.overrides

    def fits(factor: float) -> bool:
        size = batch * factor
        if size < 1 or size != int(size):
            return False
        only = replace(free, num_microbatches=1)
        return _fits(lambda: search.like(global_batch_size=int(size), overrides=only))

    return int(batch * _largest(fits))


def _longest(search: Search, length: int) -> int | None:
    """The longest sequence that fits with the batch given; None where there is none to vary."""
    if with_sequences(search.problem, lambda size: size) is None:
        return None

    def fits(factor: float) -> bool:
        if length * factor < 1:
            return False
        longer = with_sequences(search.problem, lambda size: max(1, int(size * factor)))
        return longer is not None and _fits(lambda: search.like(problem=longer))

    return int(length * _largest(fits))


def _fits(made: Callable[[], Search]) -> bool:
    try:
        return plan_that_fits(made()) is not None
    except OverrideError:
        return False
