"""The price of one operator under one strategy, and of one re-shard, on one mesh: the entries of
the modules beside this one, put together.

Values in a fused kernel's registers are not moved (`fusion.py`). The host issues every operator
beside the device's seconds (`stages/stage.py`). Partial gradients of parameters on the tensor axis
are reduced over it as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.costmodel.fp8 import cast_calls
from meshwright.costmodel.graph import Op
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.operators import communication, context
from meshwright.costmodel.operators.cost import FORWARD_S, PASS_COLUMNS, Cost, Entry, Priced, priced
from meshwright.costmodel.operators.fusion import Fusion, is_free
from meshwright.costmodel.operators.local_call import signature
from meshwright.costmodel.operators.parameter_costs import ParameterPricer, unit_numels
from meshwright.costmodel.operators.products import attention, product
from meshwright.costmodel.operators.resharding import ReshardPricer
from meshwright.costmodel.operators.setting import Setting
from meshwright.costmodel.operators.streams import leaf, stream
from meshwright.costmodel.rules import IMPLEMENTATIONS, leaf_of, takes_batch_statistics, traits_of
from meshwright.costmodel.sharding import Move, Placement, Run, Strategy
from meshwright.profiles.inputs import MeshwrightError
from meshwright.profiles.steps import BACKWARD, FORWARD, HOST

VIEW_HOST_SHARE = 0.5  # a view allocates nothing and launches nothing


@dataclass(slots=True, kw_only=True)
class Pricer(ReshardPricer):
    """Prices of one graph in one setting, kept as `step`; its `setting` is that of a pass, all that
    prices of a pass may read. Pure but for its caches, of which pricers of one problem may share
    `known_parameters`."""

    step: Setting = field(init=False)
    fusion: Fusion = field(default_factory=Fusion)
    unit_numel: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    parameters: ParameterPricer = field(init=False)
    _ops: Memo[tuple[str, str], Priced] = field(default_factory=Memo)
    known_parameters: Memo[Any, Memo[Any, Priced]] = field(default_factory=Memo)
    _issues: Memo[tuple[str, float], Entry] = field(default_factory=Memo)
    _splits: Memo[str, bool] = field(default_factory=Memo)

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
        """Prices on another data axis, caches per micro-batch shared."""
        return replace(self, setting=setting)

    def op_cost(self, op: Op, strategy: Strategy) -> Cost:
        """Compute and inner communication of one operator call."""
        cost = self._known(op, strategy)[1]
        return cost + Cost.of(more) if (more := self._met(op, strategy)) else cost

    def _known(self, op: Op, strategy: Strategy) -> Priced:
        key = op.name, strategy.name
        return self._ops.of(key, lambda: priced(self._op_entries(op, strategy)))

    def _met(self, op: Op, strategy: Strategy) -> list[Entry]:
        """Entries of an operator with the batches of other ranks on the data axis."""
        if self.step.mesh.dp > 1 and takes_batch_statistics(op):
            return communication.batch_statistics(self, op, self.step)
        if self.step.mesh.dp > 1 and self.gathers_batch(op):
            return communication.gathered_batch(self, op, self._known(op, strategy)[0], self.step)
        return []

    def step_entries(self, step: Run | Move) -> tuple[Entry, ...]:
        """Entries of a step of a block. Raises ValueError for a re-shard that does not exist."""
        if isinstance(step, Run):
            op, strategy = step.op, step.strategy
            return (*self._known(op, strategy)[0], *self._met(op, strategy))
        return self._move(step)[0]

    def step_cost(self, step: Run | Move) -> Cost:
        """Price of a step of a block; raises the same."""
        if isinstance(step, Run):
            return self.op_cost(step.op, step.strategy)
        return self._move(step)[1]

    def _move(self, move: Move) -> Priced:
        if moved := self.moved(move.value, move.source, move.target, once=move.once):
            return moved
        raise MeshwrightError(
            "no re-shard exists between the states the plan gives it",
            place=f"value {move.value}",
            legal="states with a re-shard between them",
            way_out="change one of the two, or leave it to follow",
        )

    def parameter_cost(self, value: str, placement: Placement) -> Cost:
        """Cost of a parameter once per step."""
        return self.parameters.priced(value, placement)[1]

    def meets_batch(self, op: Op) -> bool:
        """Whether an operator takes more than its rank's rows of a batch that others have, too."""
        return takes_batch_statistics(op) or self.gathers_batch(op)

    def gathers_batch(self, op: Op) -> bool:
        """Whether the data axis gathers the batch for an operator."""
        splits = communication.splits_batch
        return not self._splits.of(op.name, lambda: splits(self.graph, self.table, op))

    def _op_entries(self, op: Op, strategy: Strategy) -> list[Entry]:
        target, traits = self.setting.target, traits_of(op)
        differentiable = any(self.graph.values[r].requires_grad for r in op.results)
        host, kernels = self._host_seconds(op), 1.0
        entries = list[Entry]()
        if not is_free(self.table, op) or context.shifts_tokens(self, op):
            entries = self._computed(op, strategy, differentiable)
            seconds = [sum(e.seconds for e in entries if e.column == c) for c in PASS_COLUMNS]
            exchanged = communication.expert_exchange(self, op, strategy)
            entries += self._implementation(op, strategy)
            entries += [*context.context_exchange(self, op, strategy, *seconds), *exchanged]
            # a library that posts token by token has the host wait for the counts of all
            if target.message_s and traits.experts == "dispatch" and exchanged:
                waits = Entry(FORWARD_S, "wait", host_s=exchanged[0].seconds)
                entries.append(waits)
            kernels = 2.0 if self.table.ops[op.name].matmul or traits.leaf else 1.0
        issued = host, host * kernels * differentiable
        entries += [
            self._issued(column, host_s)
            for column, host_s in zip(PASS_COLUMNS, issued, strict=True)
            if host_s
        ]
        entries += context.moved_tokens(self, op)
        if self.context is not None and op.key in self.context.gathered:
            entries += context.gathered_tokens(self, op, entries)
        return entries

    def _issued(self, column: str, host_s: float) -> Entry:
        """Host's issue of an operator, the same entry for many."""
        key = column, host_s
        return self._issues.of(key, lambda: Entry(column, "issue", host_s=host_s))

    def _computed(self, op: Op, strategy: Strategy, differentiable: bool) -> list[Entry]:
        """Computing of the device, timed or modelled, and corrected by the steps that ran."""
        setting, entries = self.setting, self._modelled(op, strategy)
        if measured := self._measured(op, strategy):
            *seconds, source = measured
            entries = [_timed(e, s, source) for e, s in zip(entries, seconds, strict=True)]
        if not differentiable:
            entries = [entry for entry in entries if entry.column == FORWARD_S]
        forward, backward = setting.correction(FORWARD), setting.correction(BACKWARD)
        if forward == backward == 1.0 and setting.target.defers_weights:
            return entries
        return [
            entry._replace(
                seconds=entry.seconds * (forward if entry.column == FORWARD_S else backward),
                weight_s=entry.weight_s * backward * setting.target.defers_weights,
            )
            for entry in entries
        ]

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
        """Timing of an operator that runs by itself, as it was timed."""
        setting, fusion = self.setting, self.fusion
        if op.name in fusion.joined or not fusion.internal.isdisjoint(op.results):
            return None
        if setting.mesh.cp > 1 or setting.mesh.ep > 1:  # not in signatures
            return None
        if setting.profile is None or self.in_fp8(op):  # timed in 16 bits
            return None
        rows, tp = setting.batch.rows, setting.mesh.tp
        call = signature(self.graph, self.table, op, strategy, rows=rows, tp=tp)
        return setting.profile.op(str(call)) if call else None

    def _modelled(self, op: Op, strategy: Strategy) -> list[Entry]:
        """Work of the device, the forward first."""
        traits = traits_of(op)
        if traits.leaf:
            return leaf(self, op, strategy)
        if not self.table.ops[op.name].matmul:
            return stream(self, self.fusion, op, strategy)
        return (attention if traits.kernel == "attention" else product)(self, op, strategy)

    def _implementation(self, op: Op, strategy: Strategy) -> list[Entry]:
        """Collectives inside an implementation."""
        numbers = IMPLEMENTATIONS[strategy.implementation].per_row
        if not numbers or self.setting.mesh.tp == 1:
            return []
        return [self.comm(FORWARD_S, "all_reduce", self.numel(op.operands[1]) * 4).times(numbers)]


def _timed(entry: Entry, seconds: float, source: str) -> Entry:
    """An entry as it was timed."""
    weight_s = entry.weight_s * seconds / entry.seconds if entry.seconds else 0.0
    return entry._replace(seconds=seconds, weight_s=weight_s, source=source)
