"""The price of one operator under one strategy, and of one re-shard, on one mesh: the entries of
the modules beside this one, put together.

Values in a fused kernel's registers are not moved (`fusion.py`). The host issues every operator
beside the device's seconds (`stages/stage.py`). Partial gradients of parameters on the tensor axis
are reduced over it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.kernels import Group, stream_seconds
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.memory import Sides
from meshwright.costmodel.operators import communication, context
from meshwright.costmodel.operators.cost import (
    BACKWARD_S,
    FORWARD_S,
    NOTHING,
    PASS_COLUMNS,
    Cost,
    Entry,
    Priced,
    priced,
)
from meshwright.costmodel.operators.fusion import Fusion, is_free
from meshwright.costmodel.operators.local_call import signature
from meshwright.costmodel.operators.matrices import matrices_of
from meshwright.costmodel.operators.parameter_costs import ParameterPricer, unit_numels
from meshwright.costmodel.operators.products import (
    attention,
    chunk_calls,
    loss_in_parts,
    product,
    split_product_seconds,
)
from meshwright.costmodel.operators.setting import Setting
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.precisions import cast_calls
from meshwright.costmodel.rules import (
    IMPLEMENTATIONS,
    Work,
    leaf_of,
    takes_batch_statistics,
    traits_of,
)
from meshwright.costmodel.sharding import (
    FactorTable,
    Move,
    Placement,
    R,
    Run,
    ShardingError,
    Strategy,
    stays_with_experts,
    transition,
)
from meshwright.profiles.cluster import Device
from meshwright.profiles.steps import BACKWARD, FORWARD, HOST

# --- resharding -----------------------------------------------------------------------------------

# Prices of re-shards on the tensor axis, forward and backward, less what their products hide.
#
# A product's operand is gathered, or its result summed and scattered, part by part round a ring of
# n ranks while other parts are multiplied (Wang et al., ASPLOS 2023; Transformer Engine's user
# buffers, torch's async tensor parallelism). A rank begins, or ends, with its own part, so that
# the n products of p seconds each run beside n - 1 sends of c seconds; while both run, a product
# loses the part s of the shorter to the send (`Device.overlap_slowdown`):
#
#     time = p + (n - 1) max(p + s min(p, c), c)
#
# The parts are issued to several streams, so that together they fill a device as the whole product
# does. What is left of the collective is that time less the whole product's n p. In a backward the
# same is taken of the gradient of what was scattered, which is gathered, and of what was gathered.
# Collectives without a product beside them (an embedding's) wait.


@dataclass(slots=True, kw_only=True)
class ReshardPricer(LocalSizes):
    """Prices of re-shards in one setting, by their collectives (`strategies.TRANSITIONS`)."""

    tensor_group: Group = field(init=False)
    _comm: Memo[tuple[str, str, float, float], Entry] = field(default_factory=Memo)
    _moves: Memo[tuple[str, str, str], Priced] = field(default_factory=Memo)
    _alike: dict[tuple[str, str, float], Priced] = field(default_factory=dict)
    _beside: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        LocalSizes.__post_init__(self)
        if self.setting.mesh.tp > 1 and self.setting.target.overlap_tensor:
            self._beside = products_beside(self.graph, self.table)
        self.tensor_group = self.setting.group(size=self.setting.mesh.tp, stride=1)

    def comm(self, column: str, kind: str, nbytes: float, host_s: float = 0.0) -> Entry:
        """A collective over the tensor axis of `nbytes` in full, issued in `host_s`."""
        collective, group = self.setting.collective, self.tensor_group
        return self._comm.of(
            (column, kind, nbytes, host_s),
            lambda: collective(column, kind, nbytes, group, "tensor")._replace(host_s=host_s),
        )

    def reshard(
        self, value: str, source: Placement, target: Placement, *, once: bool = False
    ) -> Cost | None:
        """Price of moving a value between two states, per micro-batch; None where it is illegal.
        Partial gradients of parameters (`once`) are reduced once per step."""
        moved = self.moved(value, source, target, once=once)
        return moved and moved[1]

    def moved(
        self, value: str, source: Placement, target: Placement, *, once: bool = False
    ) -> Priced | None:
        """Entries of moving a value, and their sums."""
        if once and source == R and target.kind == "Rp":
            if self.table.has_experts(value):
                return (), NOTHING  # reduced with all ranks that hold it, `parameter_cost`
            return priced([self.comm("reduce_s", "all_reduce", self.numel(value) * 4)])
        kinds = transition(source, target)
        if kinds is None:
            return None
        if self.setting.mesh.ep > 1 and stays_with_experts(self.table, value, source, target):
            return None
        key = (value, *kinds)
        return self._moves.of(key, lambda: self._priced(value, *kinds))

    def _priced(self, value: str, forward: str, backward: str) -> Priced:
        if not self.graph.values[value].requires_grad:
            backward = ""
        nbytes, products = self.nbytes(value), self._beside.get(value)
        key = forward, backward, nbytes
        if not products and key in self._alike:
            return self._alike[key]
        host = self.setting.cluster.device.host_overhead_s * self.setting.target.host_scale
        host *= self.setting.correction(HOST)
        ways = ((FORWARD_S, forward), (BACKWARD_S, backward))
        entries = [self.comm(column, kind, nbytes, host) for column, kind in ways if kind]
        if products:
            return priced(self.exposed(value, entry) for entry in entries)
        return self._alike.setdefault(key, priced(entries))

    def exposed(self, value: str, entry: Entry) -> Entry:
        """A collective of a value with the seconds that no product beside it hides."""
        if not entry.seconds or entry.collective not in self.setting.target.overlap_tensor:
            return entry
        ranks, slowdown = self.setting.mesh.tp, self.setting.cluster.device.overlap_slowdown
        product_s = sum(split_product_seconds(self, op) for op in self._beside[value])
        part_s = product_s / ranks
        send_s = entry.seconds / (ranks - 1)
        together_s = part_s + (ranks - 1) * max(part_s + slowdown * min(part_s, send_s), send_s)
        exposed = min(entry.seconds, together_s - product_s)
        return entry._replace(seconds=exposed, hidden_s=entry.seconds - exposed)


def products_beside(graph: Graph, table: FactorTable) -> Mapping[str, tuple[Op, ...]]:
    """Value -> the products that make it or, where none does, that take it, but for views."""
    makers: dict[str, tuple[Op, ...]] = {}
    takers: dict[str, tuple[Op, ...]] = {}
    source: dict[str, str] = {}
    for op in graph.ops:
        if is_free(table, op) and op.operands:
            first = source.get(op.operands[0], op.operands[0])
            source |= dict.fromkeys(op.results, first)
            makers |= {value: makers[first] for value in op.results if first in makers}
        elif table.ops[op.name].matmul and traits_of(op).kernel != "attention":
            makers |= {value: (op,) for value in op.results}
            for value in {source.get(v, v) for v in op.operands if v not in graph.parameters}:
                takers[value] = (*takers.get(value, ()), op)
    takers |= {view: takers[first] for view, first in source.items() if first in takers}
    return {**takers, **makers}


# --- pricing --------------------------------------------------------------------------------------


VIEW_HOST_SHARE = 0.5  # a view allocates nothing and launches nothing


@dataclass(slots=True, kw_only=True)
class Pricer(ReshardPricer):
    """Prices of one graph in one setting, kept as `step`; its `setting` is that of a pass, all that
    prices of a pass may read. Pure but for its caches, of which pricers of one problem may share
    `known_parameters`."""

    step: Setting = field(init=False)
    fusion: Fusion = field(default_factory=Fusion)
    unit_numel: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    matrices: Mapping[str, Sides] | None = None  # that the optimizer steps whole
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
        if self.matrices is None:
            self.matrices = matrices_of(self.graph, self.step.optimizer)
        self.parameters = ParameterPricer(
            graph=self.graph,
            table=self.table,
            setting=self.step,
            numel=self.numel,
            unit_numel=self.unit_numel,
            matrices=self.matrices,
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
        raise ShardingError(
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
        if traits.kernel == "chunked":
            issued = float(chunk_calls(op))
        if self.in_narrow(op):
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
        if setting.profile is None or self.in_narrow(op):  # timed in 16 bits
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
        modelled = {"attention": attention, "chunked": loss_in_parts}.get(traits.kernel, product)
        return modelled(self, op, strategy)

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


# --- streams of memory ----------------------------------------------------------------------------

# Operators that move memory, and leaves: seconds, FLOPs, bytes moved.
#
#     stream    forward reads operands and writes results; backward reads the results' gradients and
#               what was saved, writes the operands' gradients
#     leaf      its kernels one after the other, none fused with another operator:
#               forward     n launches + FLOPs / (peak · efficiency(FLOPs / n)) + bytes / bandwidth
#               backward    twice that
#
# A leaf's FLOPs and bytes are in proportion to this rank's part of the first result, but for the
# bytes of tensors it takes: those are in proportion to this rank's part of each.


BACKWARD_WORK = 2.0  # gradients of what a leaf takes and of its weights


class _Pass(NamedTuple):
    """Bytes of each kernel of a pass, one after the other, and the number of launches."""

    moved: Sequence[float]
    launches: int


def stream(sizes: LocalSizes, fusion: Fusion, op: Op, strategy: Strategy) -> list[Entry]:
    """The forward and the backward of an operator that moves memory."""
    device, speed = sizes.setting.cluster.device, sizes.setting.target.stream_speed
    launch = 0.0 if op.name in fusion.joined else device.launch_overhead_s
    passes = zip(PASS_COLUMNS, _passes(sizes, fusion, op, strategy), strict=True)
    return [
        Entry(
            column,
            "stream",
            sum(stream_seconds(device, nbytes) for nbytes in kernels.moved) / speed
            + kernels.launches * launch,
            moved_bytes=sum(kernels.moved),
        )
        for column, kernels in passes
    ]


def _passes(sizes: LocalSizes, fusion: Fusion, op: Op, strategy: Strategy) -> tuple[_Pass, _Pass]:
    traits = traits_of(op)
    placed = list(zip(op.operands, strategy.operands, strict=True))
    read = [operand for i, operand in enumerate(placed) if (op.name, i) not in fusion.free_reads]
    written = [
        (value, placement)
        for value, placement in zip(op.results, strategy.results, strict=True)
        if value not in fusion.internal
    ]
    out = sum(sizes.nbytes(v, p) for v, p in written)
    wanted = sum(sizes.nbytes(v, p) for v, p in read if sizes.graph.values[v].requires_grad)
    if traits.kernel == "lookup":  # the gradient of the rows' table is dense
        forward = _Pass([2 * out], 1)
        return forward, _Pass([2 * out + wanted], 1)
    taken = sum(sizes.nbytes(v, p) for v, p in read) + out
    if traits.experts:  # copies are sorted by expert on arrival, or back
        sorting = 2 * max(out, *(sizes.nbytes(v, p) for v, p in read))
        both = _Pass([taken, sorting], 2)
        return both, both
    forward, saves = _Pass([taken], 1), sizes.table.ops[op.name].saves
    if not saves and traits.kernel == "sum":
        # gradients pass through; where a value has several readers they are summed
        return forward, _Pass([wanted], 0)
    saved = sum(
        sizes.nbytes(*(placed[i] if i >= 0 else (op.results[-1 - i], strategy.results[-1 - i])))
        for i in saves
        if i < 0 or (op.name, i) not in fusion.free_reads
    )
    return forward, _Pass([out + saved + wanted], 1)


def leaf(sizes: LocalSizes, op: Op, strategy: Strategy) -> list[Entry]:
    """A leaf's forward, and its backward, in which none of it can wait."""
    work = leaf_of(op).work
    share = sizes.numel(op.results[0], strategy.results[0]) / work.numel
    taken = [
        sizes.numel(value, placement) / max(1, sizes.graph.values[value].numel)
        for value, placement in zip(op.operands, strategy.operands, strict=True)
    ]
    passed = share * work.nbytes
    passed += sum(part * nbytes for part, nbytes in zip(taken, work.taken, strict=True))
    device = sizes.setting.cluster.device
    seconds = leaf_seconds(device, sizes.dtype(op), work, share, passed)
    forward = Entry(FORWARD_S, "leaf", seconds, flops=share * work.flops, moved_bytes=passed)
    return [forward, forward.times(BACKWARD_WORK)._replace(column=BACKWARD_S)]


def leaf_seconds(device: Device, dtype: str, work: Work, share: float, passed: float) -> float:
    """Device seconds of the forward of a `share` of a leaf, that moves the bytes `passed`."""
    flops, nbytes = share * work.flops / work.kernels, passed / work.kernels
    busy_s = flops / (device.flops(dtype) * device.matmul_efficiency(flops)) if flops else 0.0
    each_s = busy_s + stream_seconds(device, nbytes) + device.launch_overhead_s
    return work.kernels * each_s
