"""Cost of a block: seconds by kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from operator import attrgetter


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one block or stage on one rank.

    Per micro-batch on the device, forward and backward: `*_comm_s` is the part of each that is
    communication, `*_exchange_s` the part of that which moves tokens between experts; `weight_s`
    the part of the backward that is gradients of weights, `*_host_s` the host's seconds to issue
    them; `measured_s` and `interpolated_s` are the seconds of both that rest on measurement. Once
    per step: `reduce_s` (all-reduce of gradients), `scatter_s` and `gather_s` (reduce-scatter of
    gradients and all-gather of weights, for ZeRO-1 and 2), `replicate_s` (all-reduce of the
    scattered gradients among the replicas of a shard), `zero3_*_s` (each of these three by ZeRO-3,
    and its all-gather of weights from secondary shards), `optimizer_s`, of which `shard_s` is left
    where ZeRO divides it among the ranks that hold the same parameters.
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
    zero3_secondary_s: float = 0.0
    zero3_replicate_s: float = 0.0
    optimizer_s: float = 0.0
    shard_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return total((self, other))

    def seconds(self, num_microbatches: float) -> float:
        """Device seconds per micro-batch with the once-per-step work spread over them."""
        once = (self.reduce_s + self.optimizer_s) / num_microbatches
        return self.forward_s + self.backward_s + once


COST_FIELDS = tuple(each.name for each in dataclass_fields(Cost))
NOTHING = Cost()
_values = attrgetter(*COST_FIELDS)


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of any number of costs."""
    columns = zip(*(_values(cost) for cost in costs if cost is not NOTHING), strict=True)
    return Cost(**dict(zip(COST_FIELDS, map(sum, columns), strict=False)))
