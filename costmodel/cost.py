"""Where a block runs, what it costs there, and what was measured: the nouns of pricing."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Protocol

from costmodel.target import EAGER, Target
from profiles.cluster import Cluster

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class OpProfile(Protocol):
    """Measured seconds, where there are any: (forward, backward, label) and (seconds, label)."""

    def op(self, signature_text: str) -> tuple[float, float, str] | None: ...

    def collective(
        self, kind: str, nbytes: float, size: int, per_node: int
    ) -> tuple[float, str] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how a block runs: `rows` batch rows per device and micro-batch, on a (dp, cp, tp)
    mesh, tp innermost; cp splits the sequence of every activation. `ep` ranks of that mesh,
    neighbours, share out the experts, which are whole or replicated on the other axes."""

    cluster: Cluster
    dp: int
    tp: int
    rows: float
    num_microbatches: int
    precision: str
    optimizer: str
    zero: int = 0
    cp: int = 1
    ep: int = 1
    target: Target = EAGER
    profile: OpProfile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one block or stage on one rank.

    Per micro-batch on the device, forward and backward: `*_comm_s` is the part of each that is
    communication, `*_exchange_s` the part of that which moves tokens between experts; `weight_s`
    the part of the backward that is gradients of weights, `*_host_s` the host's seconds to issue
    them; `measured_s` and `interpolated_s` are the seconds of both that rest on measurement. Once
    per step: `reduce_s` (all-reduce of gradients), `scatter_s` and `gather_s` (reduce-scatter of
    gradients and all-gather of weights, for ZeRO), `optimizer_s`, of which `shard_s` is left where
    ZeRO divides it among the ranks that hold the same parameters.
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
    optimizer_s: float = 0.0
    shard_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in COST_FIELDS})

    def seconds(self, num_microbatches: int) -> float:
        """Device seconds per micro-batch with the once-per-step work spread over them."""
        once = (self.reduce_s + self.optimizer_s) / num_microbatches
        return self.forward_s + self.backward_s + once


COST_FIELDS = tuple(each.name for each in dataclass_fields(Cost))
