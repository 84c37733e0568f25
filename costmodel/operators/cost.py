"""The ledger of a price: entries, each something that a rank does; and their sums by columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from meshwright.profiles.steps import BACKWARD, DATA_AXIS, FORWARD, MESSAGES, TENSOR_AXIS, linked

Axis = Literal["tensor", "context", "experts", "data", "pipeline", "host"]
FORWARD_S, BACKWARD_S = PASS_COLUMNS = "forward_s", "backward_s"
COMPUTING = {FORWARD_S: FORWARD, BACKWARD_S: BACKWARD}


class Entry(NamedTuple):
    """Something that a rank does in a pass of one micro-batch, or once in a step; a tuple, since a
    search makes very many.

    `column` is the field of `Cost` that its `seconds` add to; `hidden_s` pass beside others and add
    nothing. `kind` is what it is: "product", "attention", "stream" (an operator that moves memory),
    "leaf", "cast", "merge", "copy", "accumulation", "optimizer", "collective", or "issue" and
    "wait" where only the host works, its `host_s`. Of the seconds, `weight_s` are gradients of
    weights. `flops` of products and attention; `moved_bytes` of the device's memory; `sent_bytes`
    to links, by `calls` of a `collective` on an `axis`, of a group that `crosses` nodes or not.
    `source`: the seconds are "measured", "interpolated" between measurements, or "modelled".
    """

    column: str
    kind: str
    seconds: float = 0.0
    hidden_s: float = 0.0
    weight_s: float = 0.0
    host_s: float = 0.0
    flops: float = 0.0
    moved_bytes: float = 0.0
    axis: Axis | None = None
    collective: str = ""
    calls: float = 0.0
    sent_bytes: float = 0.0
    crosses: bool = False
    source: str = "modelled"

    @property
    def component(self) -> str | None:
        """Component whose correction by steps that ran its device seconds take; None for none."""
        if self.axis is None:
            return COMPUTING.get(self.column)
        if self.axis in ("experts", "host") or (self.axis, self.collective) == ("context", "send"):
            return None
        what = {"tensor": TENSOR_AXIS, "pipeline": MESSAGES}.get(self.axis, DATA_AXIS)
        return linked(what, crosses=self.crosses)

    def times(self, factor: float) -> Entry:
        """The entry so many times, issued once."""
        return self._replace(**{name: factor * getattr(self, name) for name in _MULTIPLIED})


_MULTIPLIED = (
    "seconds", "hidden_s", "weight_s", "flops", "moved_bytes", "calls", "sent_bytes",
)  # fmt: skip


class Cost(NamedTuple):
    """Seconds of one block or stage on one rank: sums over entries.

    Per micro-batch on the device, forward and backward: `*_comm_s` is the part of each that is
    communication, `*_exchange_s` the part of that which moves tokens between experts; `weight_s`
    the part of the backward that is gradients of weights, `*_host_s` the host's seconds to issue
    them; `measured_s` and `interpolated_s` are the seconds of both that rest on measurement. Once
    per step: `reduce_s` (all-reduce of gradients), `scatter_s` and `gather_s` (reduce-scatter of
    gradients and all-gather of weights, for ZeRO-1 and 2), `replicate_s` (all-reduce of the
    scattered gradients among the replicas of a shard), `zero3_*_s` (each of these three by ZeRO-3,
    its all-gather of weights for a backward, and that from secondary shards), `compress_s` (what a
    rank computes of compressed gradients, beside nothing), `optimizer_s`, of
    which `shard_s` is left where ZeRO divides it among the ranks that hold the same parameters.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    forward_exchange_s: float = 0.0
    backward_exchange_s: float = 0.0
    weight_s: float = 0.0
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0
    measured_s: float = 0.0
    interpolated_s: float = 0.0
    reduce_s: float = 0.0
    scatter_s: float = 0.0
    gather_s: float = 0.0
    replicate_s: float = 0.0
    zero3_scatter_s: float = 0.0
    zero3_gather_s: float = 0.0
    zero3_again_s: float = 0.0
    zero3_secondary_s: float = 0.0
    zero3_replicate_s: float = 0.0
    compress_s: float = 0.0
    optimizer_s: float = 0.0
    shard_s: float = 0.0

    @staticmethod
    def of(entries: Iterable[Entry]) -> Cost:
        """The sums over entries."""
        sums = defaultdict[str, float](float)
        for entry in entries:
            sums[entry.column] += entry.seconds
            if entry.column not in _WITHIN:
                continue
            host, comm, exchange = _WITHIN[entry.column]
            sums[host] += entry.host_s
            sums["weight_s"] += entry.weight_s
            if entry.axis is not None:
                sums[comm] += entry.seconds
            if entry.axis == "experts":
                sums[exchange] += entry.seconds
            if entry.axis is None and entry.source != "modelled":
                sums[f"{entry.source}_s"] += entry.seconds
        return Cost(**sums) if sums else NOTHING

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        """The sum of two, not one tuple after the other."""
        return total((self, other))

    def seconds(self, num_microbatches: float) -> float:
        """Device seconds per micro-batch with the once-per-step work spread over them."""
        once = (self.reduce_s + self.optimizer_s) / num_microbatches
        return self.forward_s + self.backward_s + once


# columns of a pass: those of its host's seconds, of communication, of exchanges
_WITHIN = {
    column: tuple(f"{column.removesuffix('_s')}_{part}_s" for part in ("host", "comm", "exchange"))
    for column in PASS_COLUMNS
}


Priced: TypeAlias = tuple[tuple[Entry, ...], Cost]
NOTHING = Cost()


def priced(entries: Iterable[Entry]) -> Priced:
    """Entries and their sums."""
    ledger = tuple(entries)
    return ledger, Cost.of(ledger)


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of any number of costs."""
    columns = zip(*(cost for cost in costs if cost is not NOTHING), strict=True)
    return Cost(*map(sum, columns))
