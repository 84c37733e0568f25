"""Seconds and bytes of one operator under one strategy, and of one re-shard, on one mesh.

    matrix product   forward Y = XW, backward dX = dY·Wᵀ and dW = Xᵀ·dY where a gradient is wanted
    attention        backward 2.5 × the forward's FLOPs (scores are computed again)
    the rest         forward reads operands and writes results; backward reads the results'
                     gradients and what was saved, writes the operands' gradients
    re-shard         its collectives, forward and backward (`strategies.TRANSITIONS`)

What a fused kernel keeps in registers is not moved (`fusion.py`). Beside the device's seconds runs
the host, which issues every operator: a stage takes the longer of the two (`planner/stage_sums`).

Parameters are paid for once per step (`parameter_costs.py`); where their gradients come out partial
on the tensor axis, they are reduced over it as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.kernels.collectives import Group, collective_time
from meshwright.costmodel.kernels.compute import attention_seconds, matmul_seconds, stream_seconds
from meshwright.costmodel.kernels.moe_costs import exchange_seconds
from meshwright.costmodel.operators.cost import DTYPE_BYTES, NOTHING, Cost, Setting
from meshwright.costmodel.operators.fusion import Fusion, is_free
from meshwright.costmodel.operators.gathering import splits_batch, whole_batch
from meshwright.costmodel.operators.leaf_costs import leaf_seconds
from meshwright.costmodel.operators.parameter_costs import ParameterPricer, unit_numels
from meshwright.costmodel.rules.leaf import leaf_of
from meshwright.costmodel.rules.moe import EXPERT_FACTOR, TOKEN_FACTORS
from meshwright.costmodel.rules.traits import (
    IMPLEMENTATIONS,
    Product,
    takes_batch_statistics,
    traits_of,
)
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.local_call import signature
from meshwright.costmodel.sharding.strategies import (
    Placement,
    R,
    Strategy,
    largest_part,
    stays_with_experts,
    transition,
)

VIEW_HOST_SHARE = 0.5  # a view allocates nothing and launches nothing


@dataclass(slots=True, kw_only=True)
class Pricer:
    """Prices of one graph in one setting. Owns its caches; pure otherwise."""

    graph: Graph
    table: FactorTable
    setting: Setting
    fusion: Fusion = field(default_factory=Fusion)
    tensor_group: Group = field(init=False)
    unit_numel: Mapping[str, float] = field(default_factory=dict)
    parameters: ParameterPricer = field(init=False)
    sequence: int | None = field(init=False)
    _comm: dict[tuple[str, float], float] = field(default_factory=dict)
    _ops: dict[tuple[str, str], Cost] = field(default_factory=dict)
    _moves: dict[tuple[str, str, str], Cost] = field(default_factory=dict)
    _numels: dict[tuple[str, int], float] = field(default_factory=dict)
    _once: dict[Any, Cost] = field(default_factory=dict)
    _splits: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        setting = self.setting
        self.tensor_group = setting.group(size=setting.tp, stride=1)
        if setting.target.unit == "block" and not self.unit_numel:
            self.unit_numel = unit_numels(self.graph)
        self.parameters = ParameterPricer(
            graph=self.graph,
            table=self.table,
            setting=setting,
            numel=self.numel,
            unit_numel=self.unit_numel,
            known=self._once,
        )
        self.sequence = self.table.sequence if setting.cp > 1 else None

    # --- sizes ---

    def numel(self, value: str, placement: Placement = R) -> float:
        """Local elements of a value at `rows` rows, on this mesh."""
        key = value, placement.dim
        if key not in self._numels:
            self._numels[key] = self._numel(value, placement)
        return self._numels[key]

    def _numel(self, value: str, placement: Placement) -> float:
        numel = float(self.graph.values[value].numel)
        if self.table.has_batch(value):
            numel *= self.setting.rows / self.graph.batch_size
        if self.sequence is not None and self.table.find(value, self.sequence):
            numel /= self.setting.cp
        if self.table.has_experts(value):
            numel /= self.setting.ep
        numel *= self.crowding(value)
        if not placement.sharded:
            return numel
        size = self.graph.values[value].shape[placement.dim]
        return numel * largest_part(size, self.setting.tp) / size

    def crowding(self, value: str) -> float:
        """Copies of tokens on the busiest of the ranks that share the experts out, over the mean;
        1 for other values."""
        shared = self.setting.ep > 1 and value in self.table.copies
        return self.setting.target.expert_imbalance if shared else 1.0

    def nbytes(self, value: str, placement: Placement = R) -> float:
        return self.numel(value, placement) * self.graph.values[value].dtype.itemsize

    # --- operators ---

    def once(self, setting: Setting) -> Pricer:
        """The same prices per micro-batch (caches shared) with another data axis: same tp, cp, ep,
        rows and spread."""
        return Pricer(
            graph=self.graph,
            table=self.table,
            setting=setting,
            fusion=self.fusion,
            unit_numel=self.unit_numel,
            _comm=self._comm,
            _ops=self._ops,
            _moves=self._moves,
            _numels=self._numels,
            _once=self._once,
            _splits=self._splits,
        )

    def op_cost(self, op: Op, strategy: Strategy) -> Cost:
        """Compute and inner communication of one operator call."""
        key = (op.name, strategy.name)
        if key not in self._ops:
            self._ops[key] = self._op_cost(op, strategy)
        if self.setting.dp > 1 and takes_batch_statistics(op):
            return self._ops[key] + self._statistics(op)
        if self.setting.dp > 1 and self._gathers(op):
            rows = [
                sum(self.nbytes(v) for v in values if self.table.has_batch(v))
                for values in (op.operands, op.results)
            ]
            return self._ops[key] + whole_batch(self.setting, self._ops[key], *rows)
        return self._ops[key]

    def _gathers(self, op: Op) -> bool:
        """Whether the data axis gathers the batch for an operator."""
        if op.name not in self._splits:
            self._splits[op.name] = splits_batch(self.graph, self.table, op)
        return not self._splits[op.name]

    def _statistics(self, op: Op) -> Cost:
        """Statistics of a batch split over the data axis: sums and squares are added up in both
        directions, by operators that pass over the tensor some four times more than one kernel."""
        setting, channels = self.setting, self.graph.values[op.operands[-1]].numel
        group = setting.group(size=setting.dp, stride=setting.tp)
        each = setting.collective_s("all_reduce", 4.0 * channels, group)
        passes = stream_seconds(setting.cluster.device, 4 * self.nbytes(op.operands[0]))
        return Cost(
            forward_s=2 * each + passes,
            backward_s=2 * each + passes,
            forward_comm_s=2 * each,
            backward_comm_s=2 * each,
        )

    def _op_cost(self, op: Op, strategy: Strategy) -> Cost:
        device, target = self.setting.cluster.device, self.setting.target
        differentiable = any(self.graph.values[r].requires_grad for r in op.results)
        free = is_free(self.table, op)
        issued = 0.0 if op.name in self.fusion.joined else VIEW_HOST_SHARE if free else 1.0
        if traits_of(op).leaf:
            issued = float(leaf_of(op).work.kernels)
        host = issued * device.host_overhead_s * target.host_scale
        if device.kind == "cpu" and not free:
            host = 0.0  # issued by the core that computes, within the operator's own seconds
        if free:
            return Cost(forward_host_s=host, backward_host_s=host * differentiable)
        forward, backward, weight = self._modelled(op, strategy)
        label = ""
        if measured := self._measured(op, strategy):
            weight *= measured[1] / backward if backward else 0.0
            forward, backward, label = measured
        backward *= differentiable
        weight *= differentiable and target.defers_weights
        inner = self._inner_comm(op, strategy)
        exchange = self._context_comm(op, strategy, forward)
        tokens = (0.0, 0.0)
        if traits_of(op).experts in ("dispatch", "combine"):
            exchange = tokens = (self._expert_exchange(op, strategy),) * 2
        if traits_of(op).experts:
            host *= target.expert_host
        # a library that posts token by token has the host wait for the counts of all
        waiting = tokens[0] if target.message_s and traits_of(op).experts == "dispatch" else 0.0
        kernels = 2.0 if self.table.ops[op.name].matmul or traits_of(op).leaf else 1.0
        return Cost(
            forward_s=forward + inner + exchange[0],
            backward_s=backward + exchange[1],
            forward_comm_s=inner + exchange[0],
            backward_comm_s=exchange[1],
            forward_exchange_s=tokens[0],
            backward_exchange_s=tokens[1],
            weight_s=weight,
            forward_host_s=host + waiting,
            backward_host_s=host * kernels * differentiable,
            measured_s=(forward + backward) * (label == "measured"),
            interpolated_s=(forward + backward) * (label == "interpolated"),
        )

    def _measured(self, op: Op, strategy: Strategy) -> tuple[float, float, str] | None:
        """What was timed of an operator that runs by itself, as it was timed."""
        setting, fusion = self.setting, self.fusion
        if op.name in fusion.joined or not fusion.internal.isdisjoint(op.results):
            return None
        if setting.profile is None or setting.cp > 1 or setting.ep > 1:  # not in signatures
            return None
        found = signature(self.graph, self.table, op, strategy, rows=setting.rows, tp=setting.tp)
        return setting.profile.op(str(found)) if found else None

    def _modelled(self, op: Op, strategy: Strategy) -> tuple[float, float, float]:
        """Device seconds of the forward, of the backward, and of the backward's weight
        gradients."""
        if traits_of(op).leaf:
            work, device = leaf_of(op).work, self.setting.cluster.device
            share = self.numel(op.results[0], strategy.results[0]) / work.numel
            taken = [
                self.numel(value, placement) / max(1, self.graph.values[value].numel)
                for value, placement in zip(op.operands, strategy.operands, strict=True)
            ]
            return *leaf_seconds(device, self._dtype(op), work, share, taken), 0.0
        if not self.table.ops[op.name].matmul:
            return *self._streamed(op, strategy), 0.0
        if traits_of(op).kernel == "attention":
            return *self._attention(op, strategy), 0.0
        return self._products(op, strategy)

    def _streamed(self, op: Op, strategy: Strategy) -> tuple[float, float]:
        device = self.setting.cluster.device
        launch = 0.0 if op.name in self.fusion.joined else device.launch_overhead_s
        made = self.table.ops[op.name]
        placed = list(zip(op.operands, strategy.operands, strict=True))
        read = [
            (value, placement)
            for i, (value, placement) in enumerate(placed)
            if (op.name, i) not in self.fusion.free_reads
        ]
        written = [
            (value, placement)
            for value, placement in zip(op.results, strategy.results, strict=True)
            if value not in self.fusion.internal
        ]
        out = sum(self.nbytes(v, p) for v, p in written)
        wanted = sum(self.nbytes(v, p) for v, p in read if self.graph.values[v].requires_grad)
        if traits_of(op).kernel == "lookup":  # rows are looked up; the table's gradient is dense
            return (
                stream_seconds(device, 2 * out) + launch,
                stream_seconds(device, 2 * out + wanted) + launch,
            )
        forward = stream_seconds(device, sum(self.nbytes(v, p) for v, p in read) + out)
        if traits_of(op).experts in (
            "dispatch",
            "combine",
        ):  # copies are sorted by expert on arrival, or back
            sorting = stream_seconds(device, 2 * max(out, *(self.nbytes(v, p) for v, p in read)))
            moving = forward + sorting + 2 * launch
            return moving, moving
        if not made.saves and traits_of(op).kernel == "sum":
            # gradients pass through; where a value has several readers they are summed
            return forward + launch, stream_seconds(device, wanted)
        saved = sum(
            self.nbytes(*(placed[i] if i >= 0 else (op.results[-1 - i], strategy.results[-1 - i])))
            for i in made.saves
            if i < 0 or (op.name, i) not in self.fusion.free_reads
        )
        return forward + launch, stream_seconds(device, out + saved + wanted) + launch

    def _products(self, op: Op, strategy: Strategy) -> tuple[float, float, float]:
        """Y = XW, then dX and dW where they are wanted."""
        device, dtype = self.setting.cluster.device, self._dtype(op)
        m, n, k, batch, scale = self._extents(op, strategy)
        if (
            traits_of(op).experts == "product"
        ):  # tokens of all ranks of the expert axis come to a rank's experts
            batch = self.table.ops[op.name].sizes[EXPERT_FACTOR] / self.setting.ep
            m *= self.crowding(op.results[0]) / batch
        first = _first(op)
        pair = list(zip(op.operands, strategy.operands, strict=True))[first : first + 2]
        moved = self.nbytes(op.results[0], strategy.results[0])
        moved += sum(self.nbytes(v, p) for v, p in pair)

        def seconds(rows: float, columns: float, inner: float) -> float:
            busy_s = matmul_seconds(device, dtype, rows, columns, inner, batch, moved)
            return scale * busy_s + device.launch_overhead_s

        left, right = (self.graph.values[v].requires_grad for v, _ in (pair[0], pair[-1]))
        second = seconds(k, n, m) * right
        # a product of two activations has no gradient that could wait
        weight = 0.0 if self.table.has_batch(pair[-1][0]) else second
        return seconds(m, n, k), seconds(m, k, n) * left + second, weight

    def _extents(self, op: Op, strategy: Strategy) -> tuple[float, float, float, float, float]:
        """(m, n, k, batch, FLOPs over 2mnk·batch) of a product at local sizes: factors of the
        result that only the left operand has, that only the right one has, summed ones, and those
        that all have."""
        made, atoms = self.table.ops[op.name], self.table.letters[op.name]
        first = _first(op)
        left, right = (_letters(dims) for dims in made.operands[first : first + 2])
        result = _letters(made.results[0])
        m = n = k = batch = 1.0
        sequence_left = self.sequence
        for letter in made.flop_factors:
            size = float(made.sizes[letter])
            found = atoms.get(letter, ())
            if self.table.batch is not None and self.table.batch in found:
                size *= self.setting.rows / self.graph.batch_size
            if sequence_left is not None and sequence_left in found:
                size, sequence_left = size / self.setting.cp, None
            if letter == strategy.split_factor:
                whole = made.sizes[letter]
                size *= largest_part(whole, self.setting.tp) / whole
            if letter not in result:
                k *= size
            elif letter not in right:
                m *= size
            elif letter not in left:
                n *= size
            else:
                batch *= size
        return m, n, k, batch, made.flops / 2

    def _attention(self, op: Op, strategy: Strategy) -> tuple[float, float]:
        device = self.setting.cluster.device
        made = self.table.ops[op.name]
        m, n, k, batch, scale = self._extents(op, strategy)
        flops = 2 * m * n * k * batch * scale
        if op.kwargs.get("is_causal") or True in op.args[5:6]:
            flops /= 2
        keys = next((made.sizes[f] for f in made.flop_factors if f == "t"), 1)
        moved = sum(
            self.nbytes(v, p)
            for v, p in [
                *zip(op.operands, strategy.operands, strict=True),
                *zip(op.results, strategy.results, strict=True),
            ]
        )
        dtype = self._dtype(op)
        flops /= self.setting.target.attention_scale
        launch = device.launch_overhead_s
        return (
            attention_seconds(device, dtype, flops, keys, moved) + launch,
            attention_seconds(device, dtype, 2.5 * flops, keys, 2 * moved) + 2 * launch,
        )

    def _dtype(self, op: Op) -> str:
        itemsize = self.graph.values[op.results[0]].dtype.itemsize if op.results else 4
        return self.setting.precision if itemsize == DTYPE_BYTES[self.setting.precision] else "fp32"

    def _inner_comm(self, op: Op, strategy: Strategy) -> float:
        """What an implementation exchanges by itself: vocabulary-parallel loss sends three numbers
        a row."""
        numbers = IMPLEMENTATIONS[strategy.implementation].per_row
        return numbers and numbers * self.comm("all_reduce", self.numel(op.operands[1]) * 4)

    def _context_comm(self, op: Op, strategy: Strategy, compute_s: float) -> tuple[float, float]:
        """Exposed seconds of gathering keys and values over the context axis, forward and backward
        (there their gradients are scattered as well); ring attention hides them behind the
        scores."""
        setting = self.setting
        if self.sequence is None or traits_of(op).kernel != "attention":
            return 0.0, 0.0
        group = setting.group(size=setting.cp, stride=setting.tp)
        whole = setting.cp * sum(
            self.nbytes(v, p) for v, p in zip(op.operands[1:3], strategy.operands[1:3], strict=True)
        )
        each = float(collective_time("all_gather", whole, group, setting.cluster))
        if not setting.target.overlap_parameters:
            return each, 2 * each
        return max(0.0, each - compute_s), max(0.0, 2 * each - 2.5 * compute_s)

    def _expert_exchange(self, op: Op, strategy: Strategy) -> float:
        """Seconds of bringing each token's copies to their experts, or back."""
        setting = self.setting
        if setting.ep == 1:
            return 0.0
        wide = op.results if traits_of(op).experts == "dispatch" else op.operands
        placed = strategy.results if traits_of(op).experts == "dispatch" else strategy.operands
        folded = strategy.split_factor in TOKEN_FACTORS  # the tensor axis has tokens of its own
        shape = self.graph.values[wide[0]].shape
        return exchange_seconds(
            self.nbytes(wide[0], placed[0]),
            shape[2],
            setting.group(size=setting.ep, stride=1 if folded else setting.tp),
            setting.cluster,
            once_per_node=setting.target.dispatch == "per_node",
            message_s=setting.target.message_s,
            tokens=self.numel(wide[0], placed[0]) / math.prod(shape[2:]),
        )

    # --- communication ---

    def comm(self, kind: str, nbytes: float) -> float:
        """Seconds of a collective over the tensor axis; `nbytes` is the full tensor's."""
        if not kind or self.setting.tp == 1:
            return 0.0
        key = (kind, nbytes)
        if key not in self._comm:
            exposed = 1.0 - self.setting.target.overlap_tensor
            self._comm[key] = exposed * self.setting.collective_s(kind, nbytes, self.tensor_group)
        return self._comm[key]

    def reshard(self, value: str, source: Placement, target: Placement) -> Cost | None:
        """Moving an activation between two states, once per micro-batch; None where it is
        illegal."""
        kinds = transition(source, target)
        if kinds is None:
            return None
        if self.setting.ep > 1 and stays_with_experts(self.table, value, source, target):
            return None
        key = (value, *kinds)
        if key not in self._moves:
            self._moves[key] = self._moved(value, *kinds)
        return self._moves[key]

    def _moved(self, value: str, forward: str, backward: str) -> Cost:
        nbytes = self.nbytes(value)
        if not self.graph.values[value].requires_grad:
            backward = ""
        if not forward and not backward:
            return NOTHING
        f, b = self.comm(forward, nbytes), self.comm(backward, nbytes)
        host = self.setting.cluster.device.host_overhead_s * self.setting.target.host_scale
        return Cost(
            forward_s=f,
            backward_s=b,
            forward_comm_s=f,
            backward_comm_s=b,
            forward_host_s=host * bool(forward),
            backward_host_s=host * bool(backward),
        )

    def reshard_parameter(self, value: str, source: Placement, target: Placement) -> Cost | None:
        """As `reshard`, but a gradient that comes out partial is reduced once per step, not per
        micro-batch."""
        if source == R and target.kind == "Rp" and self.table.has_experts(value):
            return NOTHING  # reduced with all ranks that hold it, `parameter_cost`
        if source == R and target.kind == "Rp":
            return Cost(reduce_s=self.comm("all_reduce", self.numel(value) * 4))
        return self.reshard(value, source, target)

    # --- once per step ---

    def parameter_cost(self, value: str, placement: Placement) -> Cost:
        """Gradient reduction over the data axis, gathering, accumulation over micro-batches and the
        optimizer step of one parameter."""
        return self.parameters.cost(value, placement)


def _first(op: Op) -> int:
    """Position of a product's left operand."""
    return (traits_of(op).product or Product()).x


def _letters(dims: tuple[tuple[str, ...], ...]) -> frozenset[str]:
    return frozenset(letter for names in dims for letter in names)
