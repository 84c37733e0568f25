"""Plan + graph + model -> the program of this rank's stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from costmodel.factors import FactorTable
from costmodel.graph import Block, Graph, Op
from costmodel.schedule import Action
from costmodel.strategies import RP, Placement, R
from executor.emitter import State
from executor.lower import Lowered, Lowering, buffer_state
from executor.meshes import Place
from executor.parameters import StageParameter, make_parameter
from executor.reshard import local_part
from executor.stage import StageProgram
from executor.transfer import Channel, held, slices
from planner.data_axis import DataLayout, data_layout
from planner.evaluate import crossings, stage_of
from planner.layouts import Assignment, BlockLayouts
from planner.plan import Plan
from planner.stage_sums import recomputable

Channels = Mapping[tuple[Action, int], Mapping[str, Channel]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """Everything a rank needs to train: its program, parameters, buffers and ways to other stages.

    `counts` counts the loss rows of one micro-batch, in the order of `losses`; `tied` gives per FQN
    held by several stages its placement on each.
    """

    program: StageProgram
    parameters: tuple[StageParameter, ...]
    buffers: Mapping[str, tuple[str, Placement]]
    channels: Channels
    edges: frozenset[tuple[int, int]]
    counts: Lowered | None
    losses: Mapping[str, tuple[str, int]]
    tied: Mapping[str, Mapping[int, Placement]]
    data: DataLayout


def build_stage(
    plan: Plan,
    graph: Graph,
    table: FactorTable,
    assignments: Sequence[Mapping[str, Assignment]],
    model: nn.Module,
    place: Place,
) -> BuiltStage:
    """Lower this rank's stage and take its part of the weights. `graph` is traced at the plan's
    micro-batch."""
    stage = plan.stages[place.stage]
    blocks = [b for b in graph.blocks if b.name in set(stage.blocks)]
    layouts = {b.name: BlockLayouts(graph, table, b, stage.tp) for b in blocks}
    chosen = assignments[place.stage]
    data = data_layout(graph, table, stage.dp)
    lowering = Lowering(
        graph=graph, table=table, data=data, data_axis=place.data, tensor_axis=place.tensor,
        device=place.device, microbatches=plan.num_microbatches,
    )  # fmt: skip
    stored = parameter_states(graph, blocks, layouts, chosen, data)
    states: dict[str, Placement] = {}
    lowered = []
    for block in blocks:
        inputs = {n: states[n] for n in block.inputs if n in states}
        lowered.append(
            lowering.block(block, layouts[block.name], chosen[block.name], inputs, stored)
        )
        states |= {n: chosen[block.name].states[n] for n in block.outputs}
    edges = crossings(plan, graph)
    updates = _updates(graph, plan, place.stage)
    wanted = dict.fromkeys(n for b in blocks for n in b.derived)
    wanted |= dict.fromkeys(updates.values())
    prologue = lowering.prologue(_needed(graph.derived, wanted), tuple(wanted))
    parameters = _parameters(plan, graph, blocks, stored, model, place)
    buffers = _buffers(graph, blocks, layouts, chosen, prologue, updates)
    tensors = {p.value: p.leaf for p in parameters} | _load_buffers(graph, buffers, model, place)
    tensors |= {n: t.to(place.device) for n, t in graph.constants.items()}
    last = any(graph.loss in b.outputs for b in blocks)
    program = StageProgram(
        prologue=prologue,
        blocks=tuple(lowered),
        tensors=tensors,
        sends=tuple(
            dict.fromkeys(n for (s, _), ns in edges.items() if s == place.stage for n in ns)
        ),
        loss=graph.loss if last else None,
        loss_scale=1.0 / plan.num_microbatches,
        updates=updates,
        recompute=frozenset(
            b.name
            for b, policy in zip(blocks, stage.policies, strict=True)
            if policy == "full" and recomputable(b)
        ),
        differentiable=frozenset(n for n, meta in graph.values.items() if meta.requires_grad),
    )
    counts, losses = _counts(graph, blocks, lowered, lowering)
    return BuiltStage(
        program=program,
        parameters=parameters,
        buffers=buffers,
        channels=_channels(plan, graph, table, edges, place),
        edges=frozenset(edges),
        counts=counts,
        losses=losses,
        tied=_tied(plan, graph, assignments),
        data=data,
    )


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


def _parameters(
    plan: Plan, graph: Graph, blocks: Sequence[Block], stored: Mapping[str, State],
    model: nn.Module, place: Place,
) -> tuple[StageParameter, ...]:  # fmt: skip
    owners = _owners(plan, graph)
    named = dict(model.named_parameters())
    made = []
    for value in dict.fromkeys(n for b in blocks for n in b.parameters):
        on_data, on_tensor = stored[value]
        fqn = graph.parameters[value]
        made.append(
            make_parameter(
                value=value,
                fqn=fqn,
                source=named[fqn],
                placement=on_tensor if on_tensor.sharded else R,
                place=place,
                sum_data=on_data == RP,
                sum_tensor=on_tensor == RP,
                zero=plan.stages[place.stage].zero,
                dtype=graph.values[value].dtype,
                shared_stages=tuple(owners[value]),
            )
        )
    return tuple(made)


def _owners(plan: Plan, graph: Graph) -> dict[str, list[int]]:
    owner = stage_of(plan)
    found: dict[str, dict[int, None]] = {}
    for block in graph.blocks:
        for value in block.parameters:
            found.setdefault(value, {})[owner[block.name]] = None
    return {value: sorted(stages) for value, stages in found.items()}


def _tied(
    plan: Plan, graph: Graph, assignments: Sequence[Mapping[str, Assignment]]
) -> dict[str, dict[int, Placement]]:
    owner = stage_of(plan)
    found: dict[str, dict[int, Placement]] = {}
    for block in graph.blocks:
        k = owner[block.name]
        for value in block.parameters:
            state = assignments[k][block.name].states[value]
            found.setdefault(graph.parameters[value], {}).setdefault(
                k, state if state.sharded else R
            )
    return {fqn: per for fqn, per in found.items() if len(per) > 1}


def _needed(ops: Sequence[Op], wanted: Mapping[str, None]) -> list[Op]:
    """The operators behind `wanted`, in order."""
    live = set(wanted)
    kept = []
    for op in reversed(ops):
        if live & set(op.results):
            live |= set(op.operands)
            kept.append(op)
    return kept[::-1]


def _updates(graph: Graph, plan: Plan, stage: int) -> dict[str, str]:
    """Buffer updates that belong to this stage: where the buffer's module runs, else the first
    stage."""
    owner = stage_of(plan)
    home = {op.module: owner[b.name] for b in graph.blocks for op in b.ops}
    return {
        buffer: value
        for buffer, value in graph.updates.items()
        if home.get(graph.buffers[buffer].rpartition(".")[0], 0) == stage
    }


def _buffers(
    graph: Graph, blocks: Sequence[Block], layouts: Mapping[str, BlockLayouts],
    chosen: Mapping[str, Assignment], prologue: Lowered, updates: Mapping[str, str],
) -> dict[str, tuple[str, Placement]]:  # fmt: skip
    """Value name -> (FQN, placement on the tensor axis) of the stage's buffers."""
    found = {
        n: (graph.buffers[n], R) for n in (*prologue.arguments, *updates) if n in graph.buffers
    }
    for block in blocks:
        for name in block.buffers:
            state = buffer_state(layouts[block.name], name, chosen[block.name])
            found[name] = (graph.buffers[name], state)
    return found


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


def _channels(
    plan: Plan,
    graph: Graph,
    table: FactorTable,
    edges: Mapping[tuple[int, int], Sequence[str]],
    place: Place,
) -> Channels:
    """This rank's channels, by (instruction, peer stage) and value."""
    found: dict[tuple[Action, int], dict[str, Channel]] = {}
    tag = 0
    layouts = {m.dp: data_layout(graph, table, m.dp) for m in place.meshes}
    for (source, target), names in edges.items():
        for name in names:
            tag += 1
            if place.stage not in (source, target):
                continue
            meta = graph.values[name]
            ends = [
                (place.meshes[k], _crossing_state(layouts[place.meshes[k].dp], name))
                for k in (source, target)
            ]
            mesh, placement = ends[0] if place.stage == source else ends[1]
            mine = held(meta.shape, placement, mesh.dp, mesh.coordinate(place.rank)[0])

            def channel(
                a: int, b: int, group: object, mine=mine, meta=meta, ends=ends, tag=tag
            ) -> Channel:
                moved = slices(meta.shape, *ends[a], *ends[b])
                return Channel(moved, place.rank, mine, meta.dtype, place.device, group, tag)

            forward = channel(0, 1, place.forward_group)
            sends = place.stage == source
            action = Action.SEND_ACTIVATION if sends else Action.RECV_ACTIVATION
            peer = target if sends else source
            found.setdefault((action, peer), {})[name] = forward
            back = Action.RECV_GRADIENT if sends else Action.SEND_GRADIENT
            found.setdefault((back, peer), {})
            if meta.requires_grad:
                found[back, peer][name] = channel(1, 0, place.backward_group)
    return found


def _crossing_state(layout: DataLayout, name: str) -> Placement:
    state = layout.states[name]
    return state if state.sharded and state.split == 1 else R
