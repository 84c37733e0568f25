"""Seconds and bytes of one operator under one strategy, and of one re-shard, on one mesh.

    forward  = roofline(local FLOPs, local bytes)
    backward = 2 × forward for matrix products, twice the traffic for the rest; 0 where no gradient
    flows re-shard = its collectives, forward and backward (`strategies.TRANSITIONS`)

Parameters are paid for once per step: reduction of their gradients over the data axis (and over the
tensor axis where they come out partial), and the optimizer's traffic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodel.collectives import Group, collective_time, group_for
from costmodel.compute import op_time
from costmodel.factors import FactorTable
from costmodel.graph import Graph, Op
from costmodel.memory import optimizer_step_bytes
from costmodel.strategies import Placement, R, Strategy, transition
from profiles.cluster import Cluster

BUCKET_BYTES = 25 * 2**20  # gradients are reduced in buckets of this size
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a block runs: `rows` batch rows per device and micro-batch, on a (dp, tp) mesh, tp
    innermost."""

    cluster: Cluster
    dp: int
    tp: int
    rows: float
    num_microbatches: int
    precision: str
    optimizer: str
    zero: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one micro-batch, forward and backward, and the part of each that is communication;
    seconds once per step (gradient reduction, optimizer)."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    reduce_s: float = 0.0
    optimizer_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            forward_s=self.forward_s + other.forward_s,
            backward_s=self.backward_s + other.backward_s,
            forward_comm_s=self.forward_comm_s + other.forward_comm_s,
            backward_comm_s=self.backward_comm_s + other.backward_comm_s,
            reduce_s=self.reduce_s + other.reduce_s,
            optimizer_s=self.optimizer_s + other.optimizer_s,
        )

    def seconds(self, num_microbatches: int) -> float:
        """Seconds per micro-batch with the once-per-step work spread over them."""
        once = (self.reduce_s + self.optimizer_s) / num_microbatches
        return self.forward_s + self.backward_s + once


@dataclass(slots=True, kw_only=True)
class Pricer:
    """Prices of one graph in one setting. Owns its caches; pure otherwise."""

    graph: Graph
    table: FactorTable
    setting: Setting
    tensor_group: Group = field(init=False)
    data_group: Group = field(init=False)
    data_seconds_per_byte: float = field(init=False)
    _comm: dict[tuple[str, float], float] = field(default_factory=dict)
    _ops: dict[tuple[str, str], Cost] = field(default_factory=dict)
    _moves: dict[tuple[str, Placement, Placement], Cost | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        setting = self.setting
        self.tensor_group = group_for(setting.cluster, size=setting.tp, stride=1)
        self.data_group = group_for(setting.cluster, size=setting.dp, stride=setting.tp)
        self.data_seconds_per_byte = (
            float(collective_time("all_reduce", BUCKET_BYTES, self.data_group, setting.cluster))
            / BUCKET_BYTES
        )

    # --- sizes ---

    def numel(self, value: str, placement: Placement = R) -> float:
        """Local elements of a value at `rows` rows, on this mesh."""
        numel = float(self.graph.values[value].numel)
        if self.table.has_batch(value):
            numel *= self.setting.rows / self.graph.batch_size
        return numel / self.setting.tp if placement.sharded else numel

    def nbytes(self, value: str, placement: Placement = R) -> float:
        return self.numel(value, placement) * self.graph.values[value].dtype.itemsize

    # --- operators ---

    def once(self, setting: Setting) -> Pricer:
        """The same prices per micro-batch (caches shared) with another data axis: same tp and
        rows."""
        return Pricer(
            graph=self.graph, table=self.table, setting=setting,
            _comm=self._comm, _ops=self._ops, _moves=self._moves,
        )  # fmt: skip

    def op_cost(self, op: Op, strategy: Strategy) -> Cost:
        """Compute and inner communication of one operator call."""
        key = (op.name, strategy.name)
        if key not in self._ops:
            self._ops[key] = self._op_cost(op, strategy)
        return self._ops[key]

    def _op_cost(self, op: Op, strategy: Strategy) -> Cost:
        made = self.table.ops[op.name]
        results = sum(self.nbytes(v, p) for v, p in zip(op.results, strategy.results, strict=True))
        if made.view and not made.matmul and op.short not in ("cat", "stack"):
            return Cost()
        moved = results + sum(
            self.nbytes(v, p) for v, p in zip(op.operands, strategy.operands, strict=True)
        )
        if op.short == "embedding":
            moved = 2 * results
        flops = self._flops(op, strategy)
        dtype = self._dtype(op)
        device = self.setting.cluster.device
        forward = op_time(device, flops=flops, bytes_moved=moved, dtype=dtype, matmul=made.matmul)
        differentiable = any(self.graph.values[r].requires_grad for r in op.results)
        backward = 0.0
        if differentiable:
            factor = 2.5 if op.short == "scaled_dot_product_attention" else 2.0
            if op.short == "embedding":
                moved += self.nbytes(op.operands[0], strategy.operands[0])
            backward = op_time(
                device, flops=factor * flops, bytes_moved=2 * moved, dtype=dtype, matmul=made.matmul
            )
        inner = self._inner_comm(op, strategy)
        return Cost(
            forward_s=float(forward) + inner, backward_s=float(backward), forward_comm_s=inner
        )

    def _flops(self, op: Op, strategy: Strategy) -> float:
        made = self.table.ops[op.name]
        if not made.flops:
            return 0.0
        flops = made.flops * math.prod(made.sizes[f] for f in made.flop_factors)
        atoms = self.table.letters[op.name]
        if any(self.table.batch in atoms.get(f, ()) for f in made.flop_factors):
            flops *= self.setting.rows / self.graph.batch_size
        if op.kwargs.get("is_causal") or (op.short.startswith("scaled") and True in op.args[5:6]):
            flops /= 2
        return flops / self.setting.tp if strategy.split_factor in made.flop_factors else flops

    def _dtype(self, op: Op) -> str:
        itemsize = self.graph.values[op.results[0]].dtype.itemsize if op.results else 4
        return self.setting.precision if itemsize == DTYPE_BYTES[self.setting.precision] else "fp32"

    def _inner_comm(self, op: Op, strategy: Strategy) -> float:
        """What an implementation exchanges by itself: vocabulary-parallel loss sends three numbers
        a row."""
        if strategy.implementation != "cross_entropy" or strategy.split_factor == "n":
            return 0.0
        return 3 * self.comm("all_reduce", self.numel(op.operands[1]) * 4)

    # --- communication ---

    def comm(self, kind: str, nbytes: float) -> float:
        """Seconds of a collective over the tensor axis; `nbytes` is the full tensor's."""
        if not kind or self.setting.tp == 1:
            return 0.0
        key = (kind, nbytes)
        if key not in self._comm:
            self._comm[key] = float(
                collective_time(kind, nbytes, self.tensor_group, self.setting.cluster)
            )
        return self._comm[key]

    def reshard(self, value: str, source: Placement, target: Placement) -> Cost | None:
        """Moving an activation between two states, once per micro-batch; None where it is
        illegal."""
        key = (value, source, target)
        if key not in self._moves:
            self._moves[key] = self._reshard(value, source, target)
        return self._moves[key]

    def _reshard(self, value: str, source: Placement, target: Placement) -> Cost | None:
        kinds = transition(source, target)
        if kinds is None:
            return None
        forward, backward = kinds
        nbytes = self.nbytes(value)
        if not self.graph.values[value].requires_grad:
            backward = ""
        f, b = self.comm(forward, nbytes), self.comm(backward, nbytes)
        return Cost(forward_s=f, backward_s=b, forward_comm_s=f, backward_comm_s=b)

    def reshard_parameter(self, value: str, source: Placement, target: Placement) -> Cost | None:
        """As `reshard`, but a gradient that comes out partial is reduced once per step, not per
        micro-batch."""
        if source == R and target.kind == "Rp":
            return Cost(reduce_s=self.comm("all_reduce", self.numel(value) * 4))
        return self.reshard(value, source, target)

    # --- once per step ---

    def parameter_cost(self, value: str, placement: Placement) -> Cost:
        """Gradient reduction over the data axis and the optimizer step of one parameter (fp32
        gradients)."""
        if not self.graph.values[value].requires_grad:
            return Cost()
        setting = self.setting
        numel = self.numel(value, placement)
        reduce_s = 0.0
        if setting.dp > 1:
            # a share of a bucket: its bytes, without a launch of its own
            reduce_s = self.data_seconds_per_byte * numel * 4
        device = setting.cluster.device
        owned = numel / setting.dp if setting.zero else numel
        moved = optimizer_step_bytes(owned, optimizer=setting.optimizer)
        optimizer_s = moved / (device.memory_bandwidth * device.memory_efficiency)
        return Cost(reduce_s=reduce_s, optimizer_s=optimizer_s)


def total(costs: Mapping[str, Cost]) -> Cost:
    """Sum of named costs."""
    result = Cost()
    for cost in costs.values():
        result = result + cost
    return result
