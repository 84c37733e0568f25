"""Timings: records of one measurement each, of an operator or a collective."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COPIES = ("to_device", "to_host")  # between host and device, of one rank
HOST_STEP = "optimizer_step"  # the optimizer's on all cores of a node: bytes read plus written
FLASH = ("from_flash", "to_flash")  # files that all ranks of a node read or write together
OF_HOST = (*COPIES, HOST_STEP, *FLASH)  # kinds of what a node's host does
PROFILE_S = 120.0  # that `meshwright profile` measures, all in all


def at_once(kind: str, per_node: int) -> int:
    """Ranks of a node that a timing of a kind of `OF_HOST` is of."""
    return per_node if kind in FLASH else 1


def spread_of(times: Sequence[float]) -> float:
    """Interquartile range of repetitions over their median."""
    middle = statistics.median(times)
    if len(times) < 2 or not middle:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


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

    @property
    def key(self) -> tuple[Any, ...]:
        """Backend, kind and groups, by which a curve is known, and bytes, its point."""
        return self.backend, self.kind, self.ranks, self.size, self.per_node, self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a forward and of a backward (0 where no gradient flows): medians over
    `repetitions`; `spread` is the interquartile range of both together over their median."""

    forward_s: float
    backward_s: float
    repetitions: int
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRates:
    """Rates of one thread of a CPU on a `date`: FLOP/s of a matmul, bytes/s read plus written of a
    copy and of the other operators of a Transformer's block, seconds to issue an operator; whether
    the machine was `busy` with something else."""

    fp32_flops: float
    bf16_flops: float
    copy_bandwidth: float
    stream_bandwidth: float
    launch_overhead_s: float
    date: str
    busy: bool = False
