"""Plan + graph + model -> the programs of this rank's stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.costmodel.blocks import recomputable
from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.costmodel.schedules import SCHEDULES, backward_follows_forward
from meshwright.costmodel.sharding import (
    Assignment,
    BlockLayouts,
    DataLayout,
    FactorTable,
    Placement,
    RowUse,
    TotalKind,
    data_layout,
)
from meshwright.executor.backward import WeightGradientQueue
from meshwright.executor.lowering import Context, Lowered, Lowering, State
from meshwright.executor.parameters import StageParameter, shard_stage
from meshwright.executor.ranks import Place
from meshwright.executor.stages.buffers import HeldBuffer, buffer_placements, hold_buffers
from meshwright.executor.stages.channels import Channels, stage_channels
from meshwright.executor.stages.parameters import RankParameters, parameter_states
from meshwright.executor.stages.stage import BlockModule, StageProgram, StageValues
from meshwright.executor.stages.totals import Total
from meshwright.executor.stages.user_model import UserModel
from meshwright.planner.plan import Plan, crossings, stage_of, updates_of

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A stage on this rank: its program, own parameters in the order of the forward, buffers and
    channels.

    `reader` names the first block that reads each parameter (by FQN); `beside` gives the values
    that stages of this rank read, by stage; `totals` are taken over the batch before the step, in
    this order; `counts` finds the targets of one micro-batch, `losses` says which loss has which,
    with its ignored index and class weights.
    """

    program: StageProgram
    parameters: tuple[StageParameter, ...]
    reader: Mapping[str, str]
    buffers: tuple[HeldBuffer, ...]
    channels: Channels
    beside: Mapping[int, tuple[str, ...]]
    totals: tuple[Total, ...]
    counts: Lowered | None
    losses: Mapping[str, tuple[str, int, str | None]]
    data: DataLayout

    @property
    def reads(self) -> frozenset[str]:
        """Names of values that its graphs are called with."""
        called = [self.program.prologue.arguments, *(b.given for b in self.program.blocks)]
        called += [total.program.arguments for total in self.totals]
        if self.counts is not None:
            called.append(self.counts.arguments)
        return frozenset(name for names in called for name in names)


class Builder:
    """Lowers the stages of one rank and takes its part of the weights.

    `shared` are parameters that several stages of this rank read, `tied` gives per FQN held by
    several stages its layout on each. The graph is traced at the plan's micro-batch; `use` says
    what its loss makes of rows. `backend` compiles the blocks.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        table: FactorTable,
        assignments: Sequence[Mapping[str, Assignment]],
        user: UserModel,
        place: Place,
        *,
        use: RowUse,
        backend: str | None,
    ) -> None:
        self.plan = plan
        self.graph = graph
        self.table = table
        self.assignments = assignments
        self.user = user
        self.place = place
        self.backend = backend
        self.use = use if plan.num_microbatches > 1 else RowUse()
        self.owner = stage_of(plan)
        self.edges = crossings(plan, graph)
        splits = SCHEDULES[plan.schedule].splits_backward and backend is None
        self.weight_gradients = WeightGradientQueue() if splits else None
        self.dtype = COMPUTE[plan.precision]
        self.parameters = RankParameters(plan, graph, assignments, user.module, place, self.dtype)
        self.shared = self.parameters.shared
        self.tied = self.parameters.tied
        self._layouts: dict[int, DataLayout] = {}

    def stage(self, k: int) -> BuiltStage:
        """Build one of this rank's stages."""
        graph, place, chosen = self.graph, self.place, self.assignments[k]
        blocks = [b for b in graph.blocks if self.owner[b.name] == k]
        mesh = place.meshes[k]
        layouts = {b.name: BlockLayouts(graph, self.table, b, mesh.tp) for b in blocks}
        data = self._data(mesh.dp)
        stored = parameter_states(graph, blocks, chosen, data)
        lowering = self._lowering(k, blocks, data)
        updates = updates_of(graph, blocks)
        prologue = _prologue(lowering, graph, blocks, updates)
        buffers = buffer_placements(graph, blocks, layouts, chosen, prologue, updates)
        lowered = _lowered(lowering, blocks, layouts, chosen, stored, buffers)
        own = self.parameters.of_stage(k, blocks, stored)
        held = hold_buffers(graph, buffers, updates, self.user, place)
        tensors = {b.value: b.read() for b in held}
        tensors |= {p.value: p.leaf for p in self.shared.values() if p.value in stored}
        tensors |= {n: t.to(place.device) for n, t in graph.constants.items()}
        program = self._program(k, blocks, prologue, lowered, own, tensors)
        for p in own:
            self.parameters.expose(p)
        counts, losses = _counts(graph, blocks, lowered, lowering)
        targets = counts.outputs if counts else ()
        return BuiltStage(
            program=program,
            parameters=own,
            reader=_readers(graph, blocks),
            buffers=tuple(held),
            channels=stage_channels(k, self.edges, graph, place, self._data),
            beside={
                j: names
                for (i, j), names in self.edges.items()
                if i == k and place.meshes[j].ranks == mesh.ranks
            },
            totals=self._totals(lowering, (*prologue.outputs, *targets)),
            counts=counts,
            losses=losses,
            data=data,
        )

    def _data(self, dp: int) -> DataLayout:
        if dp not in self._layouts:
            self._layouts[dp] = data_layout(self.graph, self.table, dp)
        return self._layouts[dp]

    def _lowering(self, k: int, blocks: Sequence[Block], data: DataLayout) -> Lowering:
        place, stage = self.place, self.plan.stages[k]
        policies = dict(zip(stage.blocks, stage.policies, strict=True))
        context = Context(
            graph=self.graph,
            table=self.table,
            data=data,
            data_axis=place.data,
            tensor_axis=place.tensor,
            exchange=place.exchange,
            device=place.device,
            microbatches=self.plan.num_microbatches,
            sums=self.use.sums,
            totals=frozenset(r for op in self.graph.derived for r in self._kinds(op)),
            weight_gradients=self.weight_gradients,
            deferrable=self._deferrable(blocks),
        )
        return Lowering(
            context=context,
            backend=self.backend,
            recompute={b.name: policies[b.name] for b in blocks if recomputable(b)},
        )

    def _kinds(self, op: Op) -> dict[str, TotalKind]:
        """The totals that an operator makes."""
        kind = self.use.totals.get(op.key)
        return dict.fromkeys(op.results, kind) if kind else {}

    def _totals(self, lowering: Lowering, wanted: Sequence[str]) -> tuple[Total, ...]:
        """The totals behind values of raw inputs, in order."""
        needed = _needed(self.graph.derived, wanted)
        return tuple(
            Total(value=value, kind=kind, program=_on_raw(lowering, self.graph, (value,), but=op))
            for op in needed
            for value, kind in self._kinds(op).items()
        )

    def _deferrable(self, blocks: Sequence[Block]) -> frozenset[str]:
        """Parameters that one operator of the model reads: their gradient comes from it alone."""
        reads = Counter(v for b in self.graph.blocks for op in b.ops for v in op.operands)
        return frozenset(v for b in blocks for v in b.parameters if reads[v] == 1)

    def _program(
        self,
        k: int,
        blocks: Sequence[Block],
        prologue: Lowered,
        lowered: Sequence[Lowered],
        own: Sequence[StageParameter],
        tensors: dict[str, torch.Tensor],
    ) -> StageProgram:
        """The stage as a module, its parameters sharded where ZeRO-3 gathers them."""
        graph, place = self.graph, self.place
        readers = Counter(n for b in blocks for n in b.parameters)
        modules = [
            BlockModule(
                low,
                {p.value: p.leaf for p in own if p.value in b.parameters and readers[p.value] == 1},
            )
            for b, low in zip(blocks, lowered, strict=True)
        ]
        program = StageProgram(
            prologue=prologue,
            blocks=modules,
            tensors=tensors,
            shared={p.value: p.leaf for p in own if readers[p.value] > 1},
            values=StageValues(
                sends=tuple(
                    dict.fromkeys(n for (s, _), ns in self.edges.items() if s == k for n in ns)
                ),
                loss=graph.loss if any(graph.loss in b.outputs for b in blocks) else None,
                updates=updates_of(graph, blocks),
                differentiable=frozenset(n for n, v in graph.values.items() if v.requires_grad),
            ),
            device=place.device,
        )
        if any(p.gathered for p in own):
            ends = program.loss is not None and backward_follows_forward(
                self.plan.schedule,
                stage=k,
                num_stages=len(self.plan.stages),
                num_microbatches=self.plan.num_microbatches,
                num_devices=len(self.plan.devices),
            )
            shard_stage(program, modules, own, place, self.dtype, ends=ends)
        return program


def _readers(graph: Graph, blocks: Sequence[Block]) -> dict[str, str]:
    """FQN -> the first block that reads it, in order."""
    found: dict[str, str] = {}
    for block in blocks:
        for value in block.parameters:
            found.setdefault(graph.parameters[value], block.name)
    return found


def _prologue(
    lowering: Lowering, graph: Graph, blocks: Sequence[Block], updates: Mapping[str, str]
) -> Lowered:
    """The operators on raw inputs that the blocks, or updates of buffers, read."""
    made = {n for b in blocks for n in b.outputs}
    wanted = dict.fromkeys(n for b in blocks for n in b.derived)
    wanted |= dict.fromkeys(n for n in updates.values() if n not in made)
    return _on_raw(lowering, graph, tuple(wanted))


def _on_raw(
    lowering: Lowering, graph: Graph, wanted: Sequence[str], but: Op | None = None
) -> Lowered:
    """The operators on raw inputs behind `wanted`, without those of totals `but` one."""
    totals = lowering.context.totals
    ops = [op for op in graph.derived if op is but or not totals & set(op.results)]
    return lowering.prologue(_needed(ops, wanted), wanted)


def _lowered(
    lowering: Lowering,
    blocks: Sequence[Block],
    layouts: Mapping[str, BlockLayouts],
    chosen: Mapping[str, Assignment],
    stored: Mapping[str, State],
    buffers: Mapping[str, tuple[str, Placement]],
) -> list[Lowered]:
    """The stage's blocks, each with inputs in the states that the blocks before leave."""
    states: dict[str, Placement] = {}
    held_as = {name: placement for name, (_, placement) in buffers.items()}
    found = []
    for block in blocks:
        inputs = {n: states[n] for n in block.inputs if n in states}
        of, assignment = layouts[block.name], chosen[block.name]
        found.append(lowering.block(block, of, assignment, inputs, stored, held_as))
        states |= {n: assignment.states[n] for n in block.outputs}
    return found


def _needed(ops: Sequence[Op], wanted: Iterable[str]) -> list[Op]:
    """The operators behind `wanted`, in order."""
    live = set(wanted)
    kept = []
    for op in reversed(ops):
        if live & set(op.results):
            live |= set(op.operands)
            kept.append(op)
    return kept[::-1]


def _counts(
    graph: Graph, blocks: Sequence[Block], lowered: Sequence[Lowered], lowering: Lowering
) -> tuple[Lowered | None, dict[str, tuple[str, int, str | None]]]:
    """A graph from raw inputs to the targets and class weights of the losses counted up front, and
    per loss its target, ignored index and weights."""
    losses: dict[str, tuple[str, int, str | None]] = {}
    ops = {op.name: op for b in blocks for op in b.ops}
    for block in lowered:
        for name in block.losses:
            op = ops[name]
            ignored = op.kwargs.get("ignore_index", op.args[4] if len(op.args) > 4 else -100)
            losses[name] = (op.operands[1], int(ignored), next(iter(op.operands[2:]), None))
    if not losses:
        return None, {}
    read = dict.fromkeys(v for target, _, weight in losses.values() for v in (target, weight))
    return _on_raw(lowering, graph, tuple(v for v in read if v is not None)), losses
