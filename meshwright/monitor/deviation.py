"""How far measured steps are from the predicted one, and which term is the likely reason.

Terms are those of a rank: of its `train_step` forward, backward, gradient reduction, and the rest,
in which it waits for other ranks or for its host; between two of them a loader's wait, and the
rest. The likely reason is the term that is off most in the direction in which the step is; forward
and backward count as one where both are off by about the same factor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.plan import seconds, slower

TERMS = ("forward_s", "backward_s", "reduction_s", "waiting_s")  # of a train_step
BETWEEN = ("input_s", "between_s")  # before it; between_s without the wait for the input
BLOCKS = ("forward_s", "backward_s")
ALIKE = 2.0  # logarithms of their factors up to this apart have one reason
NAMES: Mapping[tuple[str, ...], str] = {
    ("forward_s",): "forward",
    ("backward_s",): "backward",
    ("reduction_s",): "gradient reduction",
    ("waiting_s",): "waiting inside train_step",
    ("input_s",): "waiting for the data_loader",
    ("between_s",): "what runs between train_steps",
    BLOCKS: "forward and backward alike",
}
_KERNELS = (
    "kernels or collectives inside the blocks; `meshwright profile` measures both, and plans rest "
    "on that from then on"
)
AIMS: Mapping[tuple[str, ...], str] = {
    ("forward_s",): _KERNELS,
    ("backward_s",): _KERNELS,
    ("reduction_s",): "the data axis' collectives: the link, or what hides behind the backward; "
    "`meshwright profile` measures them",
    ("waiting_s",): "other ranks, whose own result.monitor.told says why, or the host's launches; "
    "result.timeline(path) shows which",
    ("input_s",): "more num_workers, or samples that are prepared beforehand",
    ("between_s",): "the optimizer's step, clipping, an input without data_loader, logging",
    BLOCKS: "the device as a whole: other processes on it, its clocks; if it is always so, "
    "`meshwright profile` measures it, and plans rest on that from then on",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Median seconds of a step, `step_time_s`, against the prediction, and of each term the same;
    `interval_s` is where 80 % of measured steps are."""

    steps: int
    measured_s: float
    predicted_s: float
    interval_s: tuple[float, float]
    terms: Mapping[str, tuple[float, float]]

    @property
    def inside(self) -> bool:
        low, high = self.interval_s
        return low <= self.measured_s <= high

    @property
    def likely(self) -> tuple[str, ...]:
        """The term that is off most in the step's direction, or forward and backward both; empty
        where none is."""
        sign = 1 if self.measured_s >= self.predicted_s else -1
        off: dict[tuple[str, ...], float]
        off = {(name,): sign * (ours - theirs) for name, (ours, theirs) in self.terms.items()}
        if self._blocks_alike:
            off[BLOCKS] = sum(off.pop((name,)) for name in BLOCKS)
        names = max(off, key=lambda terms: off[terms])
        return names if off[names] > 0 else ()

    @property
    def _blocks_alike(self) -> bool:
        """Whether forward and backward are off in one direction, by about the same factor."""
        pairs = [self.terms[name] for name in BLOCKS]
        if not all(ours and theirs for ours, theirs in pairs):
            return False
        one, other = (math.log(ours / theirs) for ours, theirs in pairs)
        return one * other > 0 and max(abs(one), abs(other)) <= ALIKE * min(abs(one), abs(other))

    def __str__(self) -> str:
        more = self.measured_s / self.predicted_s - 1
        low, high = map(seconds, self.interval_s)
        where = "inside" if self.inside else "outside"
        text = (
            f"after {self.steps} steps: a step takes {seconds(self.measured_s)}, predicted "
            f"{seconds(self.predicted_s)} ({slower(more)}), {where} of the 80 % interval {low} to "
            f"{high}"
        )
        if names := self.likely:
            ours, theirs = (sum(self.terms[name][k] for name in names) for k in (0, 1))
            text += (
                f"; most is off in {NAMES[names]}: {seconds(ours)}, predicted {seconds(theirs)} "
                f"({AIMS[names]})"
            )
        return text


def deviation(
    measured: Sequence[Mapping[str, float]],
    predicted: Mapping[str, float],
    *,
    steps: int,
    interval_s: tuple[float, float],
) -> Deviation:
    """Of measured steps, each with `step_time_s` and the terms; the same of what was predicted."""

    def median(name: str) -> float:
        return statistics.median(row[name] for row in measured)

    return Deviation(
        steps=steps,
        measured_s=median("step_time_s"),
        predicted_s=predicted["step_time_s"],
        interval_s=interval_s,
        terms={name: (median(name), predicted[name]) for name in (*TERMS, *BETWEEN)},
    )
