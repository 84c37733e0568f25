"""Timings: records of one measurement each, of an operator or a collective."""

from __future__ import annotations

from dataclasses import dataclass

COPIES = ("to_device", "to_host")  # kinds of copies between host and device, of one rank each


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """Seconds of one collective in groups of `size` ranks, `per_node` of them on a node, tiling a
    world of `ranks`: median over `repetitions`, `spread` its interquartile range over it.

    `source` says who measured, where that was not this program.
    """

    backend: str
    kind: str
    ranks: int
    size: int
    per_node: int
    nbytes: int
    seconds: float
    repetitions: int
    spread: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a forward and of a backward (0 where no gradient flows): medians over
    `repetitions`; `spread` is the interquartile range of both together over their median."""

    forward_s: float
    backward_s: float
    repetitions: int
    spread: float
