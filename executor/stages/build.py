"""Plan + graph + model -> the programs of this rank's stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.costmodel.blocks.selective import selective_ops
from meshwright.costmodel.blocks.stage import recomputable
from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.costmodel.schedules.schedule import SCHEDULES, Action
from meshwright.costmodel.sharding.data_axis import DataLayout, data_layout
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts
from meshwright.costmodel.sharding.strategies import RP, Placement, R
from meshwright.executor.lowering.deferred import WeightGradientQueue
from meshwright.executor.lowering.emitter import State
from meshwright.executor.lowering.lower import Lowered, Lowering, buffer_state, crossing
from meshwright.executor.lowering.reshard import local_part
from meshwright.executor.parameters.parameters import (
    ParameterSpec,
    StageParameter,
    expose,
    make_parameter,
)
from meshwright.executor.parameters.tied import TiedLayout
from meshwright.executor.parameters.zero3 import shard_stage
from meshwright.executor.ranks.meshes import BACKWARD, FORWARD, Edge, Place
from meshwright.executor.stages.stage import BlockModule, StageProgram
from meshwright.executor.stages.transfer import Channel, held, slices
from meshwright.planner.plan.expert_parallel import expert_weights
from meshwright.planner.plan.flow import crossings, stage_of, stages_of_parameters
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.plan.written_buffers import updates_of

Channels = Mapping[tuple[Action, int], Mapping[str, Channel]]
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A stage on this rank: its program, own parameters in the order of the forward, buffers and
    ways to other stages.

    `reader` names the first block that reads each parameter (by FQN); `beside` gives the values
    that stages of this rank read, by stage; `counts` counts the loss rows of one micro-batch, in
    the order of `losses`.
    """

    program: StageProgram
    parameters: tuple[StageParameter, ...]
    reader: Mapping[str, str]
    buffers: Mapping[str, tuple[str, Placement]]
    channels: Channels
    beside: Mapping[int, tuple[str, ...]]
    counts: Lowered | None
    losses: Mapping[str, tuple[str, int]]
    data: DataLayout

    @property
    def reads(self) -> frozenset[str]:
        """Names of values that its graphs are called with."""
        called = [self.program.prologue.arguments, *(b.given for b in self.program.blocks)]
        if self.counts is not None:
            called.append(self.counts.arguments)
        return frozenset(name for names in called for name in names)


class Builder:
    """Lowers the stages of one rank and takes its part of the weights.

    `shared` are parameters that several stages of this rank read, `tied` gives per FQN held by
    several stages its layout on each. The graph is traced at the plan's micro-batch. `backend`
    compiles the blocks.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        table: FactorTable,
        assignments: Sequence[Mapping[str, Assignment]],
        model: nn.Module,
        place: Place,
        backend: str | None,
    ) -> None:
        self.plan, self.graph, self.table, self.assignments = plan, graph, table, assignments
        self.model, self.place, self.backend = model, place, backend
        self.owner = stage_of(plan)
        self.edges = crossings(plan, graph)
        self.owners = stages_of_parameters(plan, graph)
        splits = SCHEDULES[plan.schedule].splits_backward and backend is None
        self.weight_gradients = WeightGradientQueue() if splits else None
        self.dtype = COMPUTE[plan.precision]
        self.shared: dict[str, StageParameter] = {}
        self.states: dict[str, State] = {}  # of the shared ones
        self.tied = self._tied()
        self.reached = self._reached()
        self.experts = expert_weights(graph)
        self._layouts: dict[int, DataLayout] = {}

    def stage(self, k: int) -> BuiltStage:
        """Build one of this rank's stages."""
        graph, place, chosen = self.graph, self.place, self.assignments[k]
        blocks = [b for b in graph.blocks if self.owner[b.name] == k]
        mesh = place.meshes[k]
        layouts = {b.name: BlockLayouts(graph, self.table, b, mesh.tp) for b in blocks}
        data = self._data(mesh.dp)
        stored = parameter_states(graph, blocks, layouts, chosen, data)
        readers = Counter(n for b in blocks for n in b.parameters)
        policies = dict(zip(self.plan.stages[k].blocks, self.plan.stages[k].policies, strict=True))
        lowering = Lowering(
            graph=graph,
            table=self.table,
            data=data,
            data_axis=place.data,
            tensor_axis=place.tensor,
            exchange=place.exchange,
            device=place.device,
            microbatches=self.plan.num_microbatches,
            weight_gradients=self.weight_gradients,
            backend=self.backend,
            deferrable=self._deferrable(blocks),
            repeated_whole=frozenset(
                b.name for b in blocks if policies[b.name] == "full" and recomputable(b)
            ),
            repeated={
                b.name: selective_ops(b, graph, self.table, place.device.type)
                for b in blocks
                if policies[b.name] == "selective" and recomputable(b)
            },
        )
        updates = updates_of(graph, blocks)
        made = {n for b in blocks for n in b.outputs}
        wanted = dict.fromkeys(n for b in blocks for n in b.derived)
        wanted |= dict.fromkeys(n for n in updates.values() if n not in made)
        prologue = lowering.prologue(_needed(graph.derived, wanted), tuple(wanted))
        buffers = _buffers(graph, blocks, layouts, chosen, prologue, updates)
        lowered = _lowered(lowering, blocks, layouts, chosen, stored, buffers)
        own = self._parameters(k, blocks, stored)
        common = {p.value: p.leaf for p in self.shared.values() if p.value in stored}
        modules = [
            BlockModule(
                low,
                {p.value: p.leaf for p in own if p.value in b.parameters and readers[p.value] == 1},
            )
            for b, low in zip(blocks, lowered, strict=True)
        ]
        counts, losses = _counts(graph, blocks, lowered, lowering)
        program = StageProgram(
            prologue=prologue,
            blocks=modules,
            tensors=common
            | _load_buffers(graph, buffers, self.model, place)
            | {n: t.to(place.device) for n, t in graph.constants.items()},
            shared={p.value: p.leaf for p in own if readers[p.value] > 1},
            sends=tuple(
                dict.fromkeys(n for (s, _), ns in self.edges.items() if s == k for n in ns)
            ),
            loss=graph.loss if any(graph.loss in b.outputs for b in blocks) else None,
            updates=updates,
            differentiable=frozenset(n for n, meta in graph.values.items() if meta.requires_grad),
            device=place.device,
        )
        if any(p.gathered for p in own):
            ends = program.loss is not None and self.plan.schedule != "gpipe"
            shard_stage(program, modules, own, place, self.dtype, ends=ends)
        for p in own:
            expose(p, place)
        return BuiltStage(
            program=program,
            parameters=own,
            reader=_readers(graph, blocks),
            buffers=buffers,
            channels=self._channels(k),
            beside={
                j: names
                for (i, j), names in self.edges.items()
                if i == k and place.meshes[j].ranks == mesh.ranks
            },
            counts=counts,
            losses=losses,
            data=data,
        )

    def _data(self, dp: int) -> DataLayout:
        if dp not in self._layouts:
            self._layouts[dp] = data_layout(self.graph, self.table, dp)
        return self._layouts[dp]

    # --- parameters ---

    def _reached(self) -> set[str]:
        """Values that the loss depends on, through what has a gradient."""
        found = {self.graph.loss}
        for op in reversed(self.graph.ops):
            if found.intersection(op.results):
                found |= {v for v in op.operands if self.graph.values[v].requires_grad}
        return found

    def _deferrable(self, blocks: Sequence[Block]) -> frozenset[str]:
        """Parameters that one operator of the model reads: their gradient comes from it alone."""
        reads = Counter(v for b in self.graph.blocks for op in b.ops for v in op.operands)
        return frozenset(v for b in blocks for v in b.parameters if reads[v] == 1)

    def _parameters(
        self, k: int, blocks: Sequence[Block], stored: Mapping[str, State]
    ) -> tuple[StageParameter, ...]:
        """Make the parameters of a stage; those that other stages of this rank read, too, are made
        once and kept apart."""
        named = dict(self.model.named_parameters())
        made = []
        for value in dict.fromkeys(n for b in blocks for n in b.parameters):
            fqn = self.graph.parameters[value]
            here = [j for j in self.owners[value] if j in self.place.stages]
            if value in self.shared:
                if self.states[value] != stored[value]:
                    raise PlanError(
                        f"plan: stages {here} lie on one device group and share {fqn!r}, sharded "
                        f"{self.states[value][1]} and {stored[value][1]}: shard it alike in both"
                    )
                continue
            on_data, on_tensor = stored[value]
            experts = value in self.experts and self.place.exchange is not None
            if experts and len(self.owners[value]) > 1:
                raise PlanError(
                    f"plan: stages {list(self.owners[value])} share the experts {fqn!r}; legal "
                    "with ep > 1: experts of one stage; put their readers into one"
                )
            if experts and self.place.here.folded:
                on_tensor = Placement("S", 0)
            dtype = self.graph.values[value].dtype
            spec = ParameterSpec(
                value=value,
                fqn=fqn,
                placement=on_tensor if on_tensor.sharded else R,
                sum_data=on_data == RP,
                sum_tensor=on_tensor == RP,
                zero=self.plan.stages[k].zero,
                dtype=dtype,
                shared_stages=self.owners[value],
                experts=experts,
                gatherable=len(here) == 1 and dtype == self.dtype,
                reached=value in self.reached,
            )
            p = make_parameter(spec, named[fqn], self.place)
            if len(here) == 1:
                made.append(p)
            else:
                self.shared[value], self.states[value] = p, stored[value]
                expose(p, self.place)
        return tuple(made)

    def _tied(self) -> dict[str, dict[int, TiedLayout]]:
        found: dict[str, dict[int, TiedLayout]] = {}
        for block in self.graph.blocks:
            k = self.owner[block.name]
            for value in block.parameters:
                if len(self.owners[value]) > 1:
                    state = self.assignments[k][block.name].states[value]
                    per = found.setdefault(self.graph.parameters[value], {})
                    zero = bool(self.plan.stages[k].zero)
                    per.setdefault(
                        k, TiedLayout(placement=state if state.sharded else R, zero=zero)
                    )
        return found

    # --- ways to other stages ---

    def _channels(self, k: int) -> Channels:
        """A stage's channels, by (instruction, peer stage) and value."""
        found: dict[tuple[Action, int], dict[str, Channel]] = {}
        tag = 0
        for edge, names in self.edges.items():
            for name in names:
                tag += 1
                apart = self.place.meshes[edge[0]].ranks != self.place.meshes[edge[1]].ranks
                if k in edge and apart:
                    self._add_channels(found, k, edge, name, tag)
        return found

    def _add_channels(
        self,
        found: dict[tuple[Action, int], dict[str, Channel]],
        k: int,
        edge: Edge,
        name: str,
        tag: int,
    ) -> None:
        place, meta = self.place, self.graph.values[name]
        ends = [
            (mesh, crossing(self.graph, self._data(mesh.dp), name))
            for mesh in (place.meshes[j] for j in edge)
        ]
        mesh, placement = ends[edge.index(k)]
        mine = held(meta.shape, placement, mesh.dp, mesh.coordinate(place.rank)[0])

        def channel(a: int, b: int, way: str) -> Channel:
            moved = slices(meta.shape, *ends[a], *ends[b])
            group = place.edge_groups[edge, way]
            return Channel(moved, place.rank, mine, meta.dtype, place.device, group, tag)

        sends = k == edge[0]
        peer = edge[1] if sends else edge[0]
        action = Action.SEND_ACTIVATION if sends else Action.RECV_ACTIVATION
        back = Action.RECV_GRADIENT if sends else Action.SEND_GRADIENT
        found.setdefault((action, peer), {})[name] = channel(0, 1, FORWARD)
        found.setdefault((back, peer), {})
        if meta.requires_grad:
            found[back, peer][name] = channel(1, 0, BACKWARD)


def _readers(graph: Graph, blocks: Sequence[Block]) -> dict[str, str]:
    """FQN -> the first block that reads it, in order."""
    found: dict[str, str] = {}
    for block in blocks:
        for value in block.parameters:
            found.setdefault(graph.parameters[value], block.name)
    return found


def _lowered(
    lowering: Lowering,
    blocks: Sequence[Block],
    layouts: Mapping[str, BlockLayouts],
    chosen: Mapping[str, Assignment],
    stored: Mapping[str, State],
    buffers: Mapping[str, tuple[str, Placement]],
) -> list[Lowered]:
    states: dict[str, Placement] = {}
    held_as = {name: placement for name, (_, placement) in buffers.items()}
    found = []
    for block in blocks:
        inputs = {n: states[n] for n in block.inputs if n in states}
        of, assignment = layouts[block.name], chosen[block.name]
        found.append(lowering.block(block, of, assignment, inputs, stored, held_as))
        states |= {n: assignment.states[n] for n in block.outputs}
    return found


def parameter_states(
    graph: Graph,
    blocks: Sequence[Block],
    layouts: Mapping[str, BlockLayouts],
    chosen: Mapping[str, Assignment],
    data: DataLayout,
) -> dict[str, State]:
    """(data, tensor) state of each parameter of a stage: partial where every reader leaves it so,
    to be summed once per step; a parameter read in two ways is summed inside the graph."""
    on_data: dict[str, set[Placement]] = {}
    on_tensor: dict[str, set[Placement]] = {}
    stored: dict[str, Placement] = {}
    for block in blocks:
        assignment = chosen[block.name]
        for op in block.ops:
            for i, value in enumerate(op.operands):
                if value in graph.parameters:
                    on_data.setdefault(value, set()).add(data.strategies[op.name].operands[i])
                    on_tensor.setdefault(value, set()).add(
                        assignment.strategies[op.name].operands[i]
                    )
        for value in block.parameters:
            stored.setdefault(value, assignment.states[value])
    return {
        value: (
            RP if on_data[value] == {RP} else R,
            RP if state == R and on_tensor[value] == {RP} else state,
        )
        for value, state in stored.items()
    }


def _needed(ops: Sequence[Op], wanted: Mapping[str, None]) -> list[Op]:
    """The operators behind `wanted`, in order."""
    live = set(wanted)
    kept = []
    for op in reversed(ops):
        if live & set(op.results):
            live |= set(op.operands)
            kept.append(op)
    return kept[::-1]


def _buffers(
    graph: Graph,
    blocks: Sequence[Block],
    layouts: Mapping[str, BlockLayouts],
    chosen: Mapping[str, Assignment],
    prologue: Lowered,
    updates: Mapping[str, str],
) -> dict[str, tuple[str, Placement]]:
    """Value name -> (FQN, placement on the tensor axis) of the stage's buffers: as the blocks read
    them if they agree and nothing else does, else whole."""
    whole = [n for n in (*prologue.arguments, *updates) if n in graph.buffers]
    wanted: dict[str, set[Placement]] = {n: {R} for n in whole}
    for block in blocks:
        for name in block.buffers:
            state = buffer_state(layouts[block.name], name, chosen[block.name])
            wanted.setdefault(name, set()).add(state)
    return {
        name: (graph.buffers[name], states.pop() if len(states) == 1 else R)
        for name, states in wanted.items()
    }


def _load_buffers(
    graph: Graph, buffers: Mapping[str, tuple[str, Placement]], model: nn.Module, place: Place
) -> dict[str, torch.Tensor]:
    named = dict(model.named_buffers(remove_duplicate=False))
    loaded = {}
    for value, (fqn, state) in buffers.items():
        source = named[fqn].detach()
        if source.is_meta:
            source = torch.zeros(source.shape, dtype=source.dtype, device=place.device)
        if state.sharded:
            source = local_part(source, state, place.tensor.size, place.tensor.rank)
        dtype = graph.values[value].dtype  # the trace may have cast it to the compute dtype
        loaded[value] = source.to(place.device, dtype).clone()
    return loaded


def _counts(
    graph: Graph, blocks: Sequence[Block], lowered: Sequence[Lowered], lowering: Lowering
) -> tuple[Lowered | None, dict[str, tuple[str, int]]]:
    """A graph from raw inputs to the targets of the losses counted up front, and per loss its
    target and ignored index."""
    losses: dict[str, tuple[str, int]] = {}
    ops = {op.name: op for b in blocks for op in b.ops}
    for block in lowered:
        for name in block.losses:
            op = ops[name]
            ignored = op.kwargs.get("ignore_index", op.args[4] if len(op.args) > 4 else -100)
            losses[name] = (op.operands[1], int(ignored))
    if not losses:
        return None, {}
    wanted = tuple(dict.fromkeys(target for target, _ in losses.values()))
    return lowering.prologue(_needed(graph.derived, dict.fromkeys(wanted)), wanted), losses
