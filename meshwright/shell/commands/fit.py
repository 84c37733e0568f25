"""`meshwright fit`: whether a model fits a cluster, up to which batch and sequence, and what would
help where it doesn't."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.planner.alternatives import Answers, with_sequences, with_ways_out
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import (
    InfeasibleError,
    Relaxation,
    describe,
    seconds,
    sized,
    without_ways_out,
)
from meshwright.planner.report import sequence_length
from meshwright.planner.search import Search, some_plan_fits
from meshwright.shell import override_flags
from meshwright.shell.commands import flags
from meshwright.shell.commands.parallelized import searching
from meshwright.shell.commands.served import check_training, serving
from meshwright.shell.named import CommandError, cluster_named
from meshwright.shell.progress import progress_shown
from meshwright.shell.terminal import Answer, listed

progress = logging.getLogger("meshwright.progress")  # heard where somebody watches

FITS, TIGHT, NOT = "fits", "tight", "does not fit"
OTHERWISE = "anything that changes the model, the optimizer or the precision"
MOST = 2**12  # times the batch, or the sequence, at most
FINER = (1.5, 1.25, 1.75)  # times the largest power of two that fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, source=True)
    parser.add_argument("--plan", help="plan file: whether a plan with its decisions fits")
    flags.add_serving(parser, "--generate", "whether generation fits, and of how many rows at once")
    flags.add_search(parser)
    override_flags.add_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    if args.serves:
        return _generating(args)
    check_training(args)
    with progress_shown():
        overrides = override_flags.overrides_of(args)
        _check(args)
        answer = fit(searching(args, cluster_named(args.cluster), overrides))
    return Answer(data=answer.as_dict, text=lambda: str(answer), code=2 * (answer.verdict == NOT))


def _generating(args: argparse.Namespace) -> Answer:
    """The most rows at once that fit, by tensor axis and stages."""
    found = serving(args, "--generate")
    asked, most = found.asked, max(found.fits, key=lambda fit: fit.rows * fit.replicas)
    lines = [
        f"{FITS}: {most.rows * most.replicas:,} rows at once of {asked.prompt:,} tokens of prompt "
        f"and {asked.new:,} new ones, with tp={most.tp}, pp={most.pp} on {most.replicas} replicas",
        found.kept_line,
        *(f"  tp={fit.tp}, pp={fit.pp}: {fit.rows:,} rows a replica" for fit in found.fits),
    ]
    return Answer(data=found.as_dict, text=lambda: "\n".join(lines))


def _check(args: argparse.Namespace) -> None:
    if args.source and args.plan:
        raise CommandError("decides all", place="--from beside --plan", legal="one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The verdict and its probability, with the plan's seconds, the fullest device's bytes, their
    80 % interval and its memory; without a plan None. `batch_at_once` is the largest batch that
    fits as one micro-batch, `sequence` the longest; 0 where none does, None where there is nothing
    to vary. `why` nothing fits, in full; `helps` is what would."""

    verdict: str
    probability: float = 0.0
    plan: str | None = None
    step_time_s: float | None = None
    peak_bytes: float | None = None
    interval_bytes: tuple[float, float] | None = None
    memory_bytes: float
    batch: int
    batch_at_once: int
    sequence_now: int | None
    sequence: int | None
    why: str = ""
    helps: tuple[str, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [*self._verdict(), f"  largest batch that fits at once, {self._batch()}"]
        if self.sequence is not None:
            longest = f"{self.sequence:,} tokens" if self.sequence else "none"
            lines.append(
                f"  longest sequence that fits: {longest} (planned: {self.sequence_now:,}); "
                "by memory, whatever the model's positions allow"
            )
        return "\n".join([*lines, *listed("What would help", self.helps)])

    def _verdict(self) -> list[str]:
        if self.peak_bytes is None or self.interval_bytes is None or self.step_time_s is None:
            return [f"{self.verdict}: {without_ways_out(self.why)}"]
        low, high = map(sized, self.interval_bytes)
        return [
            f"{self.verdict}: {self.probability:.0%}; {sized(self.peak_bytes)} of "
            f"{sized(self.memory_bytes)} on the fullest device, 80 % interval {low} to {high}",
            f"  plan: {self.plan}; {seconds(self.step_time_s)} a step",
        ]

    def _batch(self) -> str:
        if self.batch_at_once:
            rows = f"{self.batch_at_once:,} rows; larger ones fit in several micro-batches"
        elif self.verdict == NOT:
            rows = "none"
        else:
            rows = f"none from {self.batch} rows on; it fits in micro-batches"
        return f"as one micro-batch: {rows}"


def fit(search: Search) -> Fit:
    """The largest batch and sequence that fit by prices of memory, and the plan for the batch as
    given."""
    problem, found = search.problem, None
    length = sequence_length(problem)
    try:
        found = search.run()
    except InfeasibleError as error:
        refused = with_ways_out(search, error)
    shared: dict[str, Any] = {
        "memory_bytes": float(problem.cluster.device.memory_bytes),
        "batch": search.global_batch_size,
        "batch_at_once": _largest_batch(search, found is not None),
        "sequence_now": length,
        "sequence": _longest(search, length, found is not None) if length else None,
    }
    if found is None:
        helps = tuple(map(str, refused.relaxations)) or (OTHERWISE,)
        relaxations = refused.relaxations
        return Fit(verdict=NOT, why=str(refused), helps=helps, relaxations=relaxations, **shared)
    best = found.best
    prediction = best.evaluation.prediction
    verdict = prediction.memory_verdict(problem.cluster)
    return Fit(
        verdict=verdict,
        probability=prediction.memory_probability(problem.cluster),
        plan=describe(best.plan),
        step_time_s=prediction.step_time_s,
        peak_bytes=prediction.fullest_bytes,
        interval_bytes=prediction.memory_interval_bytes,
        helps=() if verdict == FITS else (_surer(Answers(search=search, result=found)),),
        **shared,
    )


def _surer(answers: Answers) -> str:
    """The plan that surely fits, and the margin that chooses it."""
    row = answers.surely_fits()
    margin = f"`--memory-margin {row['memory_margin']:g}`"
    if row["plan"] is None:
        return f"more devices, or a smaller batch: no plan surely fits (with {margin})"
    step, likely = seconds(row["step_time_s"]), row["memory_probability"]
    return f"{margin}: {row['plan']}; {step} a step, fits: {likely:.0%}"


def _largest(fits: Callable[[float], bool]) -> float:
    """The largest factor that fits: powers of two, then a finer step; 0 where none does."""
    halves = (2.0**-k for k in range(MOST.bit_length()))
    if not (low := next(filter(fits, halves), 0.0)):
        return 0.0
    while 1 <= low < MOST and fits(low * 2):
        low *= 2
    if fits(low * FINER[0]):
        return low * (FINER[2] if fits(low * FINER[2]) else FINER[0])
    return low * (FINER[1] if fits(low * FINER[1]) else 1.0)


def _largest_batch(search: Search, planned: bool) -> int:
    """The largest batch, a multiple or a part of the one given, that fits as one micro-batch; a
    part alone where that was not `planned`."""
    batch = search.global_batch_size

    def fits(factor: float) -> bool:
        size = batch * factor
        if size < 1 or size != int(size) or (factor >= 1 and not planned):
            return False
        at_once = replace(search.overrides, num_microbatches=1, microbatch_size=None)
        progress.debug(f"asking whether {int(size)} rows fit at once")
        return _fits(lambda: search.like(global_batch_size=int(size), overrides=at_once))

    return int(batch * _largest(fits))


def _longest(search: Search, length: int, planned: bool) -> int | None:
    """The longest sequence that fits with the batch given, the one given where it was `planned`;
    None where there is none to vary."""
    if with_sequences(search.problem, lambda size: size) is None:
        return None

    def fits(factor: float) -> bool:
        if length * factor < 1 or (factor >= 1 and not planned):
            return False
        if planned and factor <= 1:
            return True
        progress.debug(f"asking whether sequences of {int(length * factor)} fit")
        longer = with_sequences(search.problem, lambda size: max(1, int(size * factor)))
        return longer is not None and _fits(lambda: search.like(problem=longer))

    return int(length * _largest(fits))


def _fits(search: Callable[[], Search]) -> bool:
    try:
        return some_plan_fits(search())
    except OverrideError:
        return False
