"""Seconds of one operator under one strategy, and of one re-shard, on one mesh.

    products, attention    `products.py`
    all other kernels      `streams.py`
    data exchanged inside  `communication.py`
    re-shards              `resharding.py`
    parameters             once per step, `parameter_costs.py`; where their gradients come out
                           partial on the tensor axis, they are reduced over it as well

What a fused kernel keeps in registers is not moved (`fusion.py`). Beside the device's seconds runs
the host, which issues every operator: a stage takes the longer of the two (`blocks/stage.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.costmodel.fp8 import cast_calls
from meshwright.costmodel.graph import Op
from meshwright.costmodel.operators.communication import (
    batch_statistics,
    expert_exchange,
    gathered_batch,
    splits_batch,
)
from meshwright.costmodel.operators.context import (
    context_exchange,
    gathered_tokens,
    moved_tokens,
    shifts_tokens,
)
from meshwright.costmodel.operators.cost import NOTHING, Cost
from meshwright.costmodel.operators.fusion import Fusion, is_free
from meshwright.costmodel.operators.local_call import signature
from meshwright.costmodel.operators.parameter_costs import ParameterPricer, unit_numels
from meshwright.costmodel.operators.products import attention, product
from meshwright.costmodel.operators.resharding import ReshardPricer
from meshwright.costmodel.operators.setting import Setting
from meshwright.costmodel.operators.streams import leaf, stream
from meshwright.costmodel.rules import IMPLEMENTATIONS, leaf_of, takes_batch_statistics, traits_of
from meshwright.costmodel.sharding import Placement, Strategy
from meshwright.profiles.steps import BACKWARD, FORWARD, HOST

VIEW_HOST_SHARE = 0.5  # a view allocates nothing and launches nothing


@dataclass(slots=True, kw_only=True)
class Pricer(ReshardPricer):
    """Prices of one graph in one setting, kept as `step`; its `setting` is that of a pass, and all
    that prices of a pass may read. Owns its caches, but for `known_parameters`, which pricers of
    one problem may share; pure otherwise."""

    step: Setting = field(init=False)
    fusion: Fusion = field(default_factory=Fusion)
    unit_numel: Mapping[str, float] = field(default_factory=dict)
    parameters: ParameterPricer = field(init=False)
    _ops: dict[tuple[str, str], Cost] = field(default_factory=dict)
    known_parameters: dict[Any, dict[Any, Cost]] = field(default_factory=dict)
    _splits: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.step, self.setting = self.setting, self.setting.of_pass
        ReshardPricer.__post_init__(self)
        target = self.setting.target
        if "block" in (target.unit, target.gathered_unit) and not self.unit_numel:
            self.unit_numel = unit_numels(self.graph)
        self.parameters = ParameterPricer(
            graph=self.graph,
            table=self.table,
            setting=self.step,
            numel=self.numel,
            unit_numel=self.unit_numel,
            known=self.known_parameters,
        )

    def once(self, setting: Setting) -> Pricer:
        """The same prices per micro-batch (caches shared) with another data axis: same tp, cp, ep,
        rows and spread."""
        return replace(self, setting=setting)

    def op_cost(self, op: Op, strategy: Strategy) -> Cost:
        """Compute and inner communication of one operator call."""
        key = (op.name, strategy.name)
        if key not in self._ops:
            self._ops[key] = self._op_cost(op, strategy)
            self._ops[key] += _of_moves(moved_tokens(self, op))
            if self.context is not None and op.key in self.context.gathered:
                self._ops[key] += gathered_tokens(self, op, self._ops[key])
        cost = self._ops[key]
        if self.step.mesh.dp > 1 and takes_batch_statistics(op):
            return cost + batch_statistics(self, op, self.step)
        if self.step.mesh.dp > 1 and self.gathers_batch(op):
            return cost + gathered_batch(self, op, cost, self.step)
        return cost

    def parameter_cost(self, value: str, placement: Placement) -> Cost:
        """Gradient reduction over the data axis, gathering, accumulation over micro-batches and the
        optimizer step of one parameter."""
        return self.parameters.cost(value, placement)

    def gathers_batch(self, op: Op) -> bool:
        """Whether the data axis gathers the batch for an operator."""
        if op.name not in self._splits:
            self._splits[op.name] = splits_batch(self.graph, self.table, op)
        return not self._splits[op.name]

    def _op_cost(self, op: Op, strategy: Strategy) -> Cost:
        target, traits = self.setting.target, traits_of(op)
        differentiable = any(self.graph.values[r].requires_grad for r in op.results)
        host = self._host_seconds(op)
        if is_free(self.table, op) and not shifts_tokens(self, op):
            return Cost(forward_host_s=host, backward_host_s=host * differentiable)
        forward, backward, weight = self._modelled(op, strategy)
        label = ""
        if measured := self._measured(op, strategy):
            weight *= measured[1] / backward if backward else 0.0
            forward, backward, label = measured
        forward *= self.setting.correction(FORWARD)
        corrected = self.setting.correction(BACKWARD) * differentiable
        backward *= corrected
        weight *= corrected * target.defers_weights
        inner = self._implementation_seconds(op, strategy)
        context = context_exchange(self, op, strategy, forward, backward)
        tokens = expert_exchange(self, op, strategy)
        exchange = tuple(seconds + tokens for seconds in context)
        # a library that posts token by token has the host wait for the counts of all
        waiting = tokens if target.message_s and traits.experts == "dispatch" else 0.0
        kernels = 2.0 if self.table.ops[op.name].matmul or traits.leaf else 1.0
        return Cost(
            forward_s=forward + inner + exchange[0],
            backward_s=backward + exchange[1],
            forward_comm_s=inner + exchange[0],
            backward_comm_s=exchange[1],
            forward_exchange_s=tokens,
            backward_exchange_s=tokens,
            weight_s=weight,
            forward_host_s=host + waiting,
            backward_host_s=host * kernels * differentiable,
            measured_s=(forward + backward) * (label == "measured"),
            interpolated_s=(forward + backward) * (label == "interpolated"),
        )

    def _host_seconds(self, op: Op) -> float:
        """Seconds in which the host issues an operator's forward."""
        device, target, traits = self.setting.cluster.device, self.setting.target, traits_of(op)
        free = is_free(self.table, op)
        if device.kind == "cpu" and not free:
            return 0.0  # issued by the core that computes, within the operator's own seconds
        issued = 0.0 if op.name in self.fusion.joined else VIEW_HOST_SHARE if free else 1.0
        if traits.leaf:
            issued = float(leaf_of(op).work.kernels)
        if self.in_fp8(op):
            issued += cast_calls(target)
        host = issued * device.host_overhead_s * target.host_scale * self.setting.correction(HOST)
        return host * target.expert_host if traits.experts else host

    def _measured(self, op: Op, strategy: Strategy) -> tuple[float, float, str] | None:
        """An operator's timing, where it runs by itself as it was timed."""
        setting, fusion = self.setting, self.fusion
        if op.name in fusion.joined or not fusion.internal.isdisjoint(op.results):
            return None
        if (
            setting.profile is None or setting.mesh.cp > 1 or setting.mesh.ep > 1
        ):  # not in signatures
            return None
        if self.in_fp8(op):  # timed in 16 bits
            return None
        found = signature(
            self.graph, self.table, op, strategy, rows=setting.batch.rows, tp=setting.mesh.tp
        )
        return setting.profile.op(str(found)) if found else None

    def _modelled(self, op: Op, strategy: Strategy) -> tuple[float, float, float]:
        """Device seconds of the forward, of the backward, and of the backward's weight
        gradients."""
        traits = traits_of(op)
        if traits.leaf:
            return leaf(self, op, strategy)
        if not self.table.ops[op.name].matmul:
            return stream(self, self.fusion, op, strategy)
        return (attention if traits.kernel == "attention" else product)(self, op, strategy)

    def _implementation_seconds(self, op: Op, strategy: Strategy) -> float:
        """Seconds that an implementation exchanges by itself."""
        numbers = IMPLEMENTATIONS[strategy.implementation].per_row
        return numbers and numbers * self.comm("all_reduce", self.numel(op.operands[1]) * 4)


def _of_moves(seconds: tuple[float, float]) -> Cost:
    """The cost of communication, forward and backward."""
    forward, backward = seconds
    if not (forward or backward):
        return NOTHING
    return Cost(
        forward_s=forward, backward_s=backward, forward_comm_s=forward, backward_comm_s=backward
    )
