"""How far measured steps are from the predicted one, and which term is the likely reason.

Terms are those of a rank: forward, backward, gradient reduction, and the rest, in which it waits
for other ranks or for its host. The likely reason is the term that is off most in the direction in
which the step is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.plan import seconds

TERMS = ("forward_s", "backward_s", "reduction_s", "waiting_s")
NAMES = dict(zip(TERMS, ("forward", "backward", "gradient reduction", "waiting"), strict=True))
AIMS = {
    "forward_s": "kernels or collectives inside the blocks; `meshwright profile` measures both",
    "backward_s": "kernels or collectives inside the blocks; `meshwright profile` measures both",
    "reduction_s": "the data axis' collectives: the link, or what hides behind the backward",
    "waiting_s": "other ranks, the host's launches, or the input; result.timeline(path) shows it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Median seconds of a `train_step` against the prediction, and of each term the same;
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
    def likely(self) -> str | None:
        """The term that is off most in the step's direction; None where none is."""
        sign = 1 if self.measured_s >= self.predicted_s else -1
        off = {name: sign * (ours - theirs) for name, (ours, theirs) in self.terms.items()}
        name = max(off, key=lambda term: off[term], default=None)
        return name if name is not None and off[name] > 0 else None

    def __str__(self) -> str:
        more = self.measured_s / self.predicted_s - 1
        low, high = map(seconds, self.interval_s)
        where = "inside" if self.inside else "outside"
        text = (
            f"after {self.steps} steps: train_step takes {seconds(self.measured_s)}, predicted "
            f"{seconds(self.predicted_s)} ({more:+.0%}), {where} of the 80 % interval {low} to "
            f"{high}"
        )
        if (name := self.likely) is not None:
            ours, theirs = self.terms[name]
            text += (
                f"; most is off in {NAMES[name]}: {seconds(ours)}, predicted {seconds(theirs)} "
                f"({AIMS[name]})"
            )
        return text


def deviation(
    measured: Sequence[Mapping[str, float]],
    predicted: Mapping[str, float],
    *,
    steps: int,
    interval_s: tuple[float, float],
) -> Deviation:
    """Of measured steps, each with `train_step_s` and the terms."""

    def median(name: str) -> float:
        return statistics.median(row[name] for row in measured)

    return Deviation(
        steps=steps,
        measured_s=median("train_step_s"),
        predicted_s=predicted["train_step_s"],
        interval_s=interval_s,
        terms={name: (median(name), predicted[name]) for name in TERMS},
    )
