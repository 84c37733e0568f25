"""Plan + graph -> the stages of a rank for batches of one shape, without weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import torch

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.costmodel.rules import class_weights
from meshwright.costmodel.schedules import Instruction
from meshwright.costmodel.sharding import TotalKind
from meshwright.costmodel.written_buffers import updates_of
from meshwright.executor.backward import GradientFlow, WeightGradientQueue
from meshwright.executor.context_attention import KeyValueCache
from meshwright.executor.lowering import Context, Lowered, Lowering, State, boundary_placement
from meshwright.executor.ranks import Place
from meshwright.executor.resharding import SliceAxis, slice_axes
from meshwright.executor.stages.batches import Rows
from meshwright.executor.stages.buffers import buffer_placements
from meshwright.executor.stages.checked import CheckedPlan
from meshwright.executor.stages.rank_parameters import parameter_states
from meshwright.executor.stages.stage import StageGraphs
from meshwright.executor.transfers import Channel, Channels, stage_channels
from meshwright.planner.plan import arriving_states, away_blocks, crossings, segments_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Graphs of a stage for whole micro-batches, or for one of their slices, and the channels that
    carry the sends of it."""

    graphs: StageGraphs
    channels: Channels


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStage:
    """A stage for batches of one shape: its `parts`, one for each slice of a micro-batch, and what
    runs them.

    `beside` are the sends that stages of this rank read, by stage, which channels don't carry.
    `totals` are taken over the batch before the step, in this order; `counts` finds the targets of
    one micro-batch, `losses` says which loss has which, with its ignored index and class weights.
    `outer` are its layouts on the axes of rows and, where there is one, of context. `stored` gives
    the state of each parameter, `buffers` the FQN and the placement of each buffer, by value name;
    `handed` is the state of each value that is kept for the caller of an evaluation.
    """

    parts: tuple[StagePart, ...]
    beside: Mapping[int, tuple[str, ...]]
    totals: tuple[Total, ...]
    counts: Lowered | None
    losses: Mapping[str, tuple[str, int, str | None]]
    outer: Sequence[sharding.DataLayout]
    stored: Mapping[str, State]
    buffers: Mapping[str, tuple[str, sharding.Placement]]
    handed: Mapping[str, State]

    @property
    def graphs(self) -> StageGraphs:
        """The graphs of the first slice, or of whole micro-batches."""
        return self.parts[0].graphs

    def channels(self, message: Instruction) -> Mapping[str, Channel]:
        """The channels of a message to a stage of another rank, or from it."""
        part = self.parts[message.microbatch % len(self.parts)]
        assert message.peer is not None
        return part.channels[message.action, message.peer]

    @property
    def reads(self) -> frozenset[str]:
        """Names of values that its graphs are called with."""
        called = [self.graphs.prologue, *self.graphs.blocks, *(t.program for t in self.totals)]
        called += [self.counts] if self.counts is not None else []
        return frozenset(name for lowered in called for name in lowered.arguments)


class StageLowering:
    """Lowers the stages of one rank. `backend` compiles the blocks; put-off weight gradients go to
    `weight_gradients`, notes of leaves to `flow`."""

    def __init__(
        self,
        checked: CheckedPlan,
        place: Place,
        *,
        backend: str | None,
        weight_gradients: WeightGradientQueue | None,
        flow: GradientFlow,
        keep: Collection[str] = (),
        cache: KeyValueCache | None = None,
    ) -> None:
        """`keep` are values that each stage hands on to the caller where it has them; with a
        `cache` attention reads the keys and values of earlier tokens."""
        self.cache = cache
        self.plan = plan = checked.plan
        self.graph = graph = checked.graph
        self.table = checked.factors
        self.assignments = checked.assignments
        self.parts = plan.num_microbatches * checked.workers  # of the rows, one by one
        self.use = checked.use if self.parts > 1 else sharding.RowUse()
        self.place = place
        self.backend = backend
        self.weight_gradients = weight_gradients
        self.flow = flow
        self.keep = keep
        self.edges = crossings(plan, graph)
        self.arriving = arriving_states(plan, graph, checked.assignments)
        self.split = {value: state for of in self.arriving for value, state in of.items()}
        self._layouts: dict[tuple[int, int, str], tuple[sharding.DataLayout, ...]] = {}
        self.slices: list[SliceAxis | None] = [*slice_axes(plan.slices)] or [None]
        self.slice_layout = sharding.slice_layout(graph, self.table) if plan.slices else None
        # of blocks, lowered once for all stages, by slice
        self._classes = [dict[Any, Any]() for _ in self.slices]

    def blocks(self, k: int) -> list[Block]:
        """The blocks of a stage."""
        names = frozenset(self.plan.stages[k].blocks)
        return [b for b in self.graph.blocks if b.name in names]

    def stage(self, k: int) -> LoweredStage:
        """One of this rank's stages."""
        graph, place, chosen = self.graph, self.place, self.assignments[k]
        blocks, mesh = self.blocks(k), place.meshes[k]
        layouts = {b.name: sharding.BlockLayouts(graph, self.table, b, mesh.tp) for b in blocks}
        outer = self._outer(k)
        stored = parameter_states(graph, blocks, chosen, outer, mesh.outer)
        lowering = self._lowering(k, blocks, outer)
        updates = updates_of(graph, blocks)
        prologue = _prologue(lowering, graph, blocks, updates)
        buffers = buffer_placements(graph, blocks, layouts, chosen, prologue, updates)
        held_as = {name: placement for name, (_, placement) in buffers.items()}
        made = dict(self.arriving[k])
        made |= {n: chosen[b.name].states[n] for b in blocks for n in b.outputs}
        handed = self._handed(blocks, lowering.context, made)
        shared = self._graphs(k, prologue, updates, tuple(handed))
        parts = []
        for number, _ in enumerate(self.slices):
            lowered = self._blocks(k, number, layouts, outer, (stored, held_as))
            shape_of = partial(self._shape, self.slices[number])
            channels = stage_channels(
                k, self.edges, graph, place, self._outer, self.split, shape_of
            )
            graphs = replace(shared, blocks=tuple(lowered))
            parts.append(StagePart(graphs=graphs, channels=channels))
        counts, losses = _counts(graph, blocks, parts[0].graphs.blocks, lowering)
        targets = counts.outputs if counts else ()
        return LoweredStage(
            parts=tuple(parts),
            beside={
                j: names
                for (i, j), names in self.edges.items()
                if i == k and place.meshes[j].ranks == mesh.ranks
            },
            totals=self._totals(lowering, (*prologue.outputs, *targets)),
            counts=counts,
            losses=losses,
            outer=outer,
            stored=stored,
            buffers=buffers,
            handed=handed,
        )

    def _graphs(
        self, k: int, prologue: Lowered, updates: Mapping[str, str], outputs: tuple[str, ...]
    ) -> StageGraphs:
        """The graphs of a stage without its blocks."""
        graph, stage, blocks = self.graph, self.plan.stages[k], self.blocks(k)
        sends = (n for (source, _), names in self.edges.items() if source == k for n in names)
        return StageGraphs(
            prologue=prologue,
            blocks=(),
            constants={n: t.to(self.place.device) for n, t in graph.constants.items()},
            sends=tuple(dict.fromkeys(sends)),
            loss=graph.loss if any(graph.loss in b.outputs for b in blocks) else None,
            updates=updates,
            once=sharding.written_once(graph),
            differentiable=frozenset(n for n, v in graph.values.items() if v.requires_grad),
            outputs=outputs,
            segments=tuple(segments_of(blocks, stage.segments, graph.loss)),
            away=away_blocks(stage),
        )

    def _blocks(
        self,
        k: int,
        number: int,
        layouts: Mapping[str, sharding.BlockLayouts],
        outer: Sequence[sharding.DataLayout],
        held: tuple[Mapping[str, State], Mapping[str, sharding.Placement]],
    ) -> list[Lowered]:
        """The blocks of a stage for a slice; `held` are the states of its parameters and
        buffers."""
        blocks, chosen, (stored, held_as) = self.blocks(k), self.assignments[k], held
        lowering = self._lowering(k, blocks, outer, number)
        if self.slices[number] is not None:  # of which each has all
            stored = {name: (*s[:-1], sharding.R, s[-1]) for name, s in stored.items()}
        states, lowered = dict(self.arriving[k]), []  # then as the blocks before leave them
        for block in blocks:
            inputs = {n: states[n] for n in block.inputs if n in states}
            of, assignment = layouts[block.name], chosen[block.name]
            lowered.append(lowering.block(block, of, assignment, inputs, stored, held_as))
            states |= {n: assignment.states[n] for n in block.outputs}
        return lowered

    def _shape(self, axis: SliceAxis | None, value: str) -> tuple[int, ...]:
        """The shape of a value, of which a slice has its tokens."""
        shape = self.graph.values[value].shape
        if axis is None or self.slice_layout is None:
            return shape
        tokens = boundary_placement(self.graph, self.slice_layout, value)
        if not tokens.sharded:
            return shape
        return *shape[: tokens.dim], axis.part(shape[tokens.dim])[1], *shape[tokens.dim + 1 :]

    def _handed(
        self, blocks: Sequence[Block], context: Context, states: Mapping[str, sharding.Placement]
    ) -> dict[str, State]:
        """States of the blocks' results that are kept, and of raw inputs that they read."""
        read = dict.fromkeys(v for b in blocks for v in b.derived)
        states_of = {n: states.get(n, sharding.R) for n in (*states, *read) if n in self.keep}
        return {name: context.boundary(name, state) for name, state in states_of.items()}

    def _outer(self, k: int) -> tuple[sharding.DataLayout, ...]:
        """The layouts of stage k on the axes of rows and, where there is one, of context."""
        stage = self.plan.stages[k]
        key = stage.dp, stage.cp, stage.mesh.kind
        if key not in self._layouts:
            rows = sharding.data_layout(self.graph, self.table, stage.dp)
            self._layouts[key] = (rows,)
            if stage.cp > 1:
                tokens = sharding.context_layout(self.graph, self.table, stage.cp, stage.mesh.kind)
                self._layouts[key] = rows, tokens
        return self._layouts[key]

    def _lowering(
        self,
        k: int,
        blocks: Sequence[Block],
        outer: Sequence[sharding.DataLayout],
        number: int | None = None,
    ) -> Lowering:
        """The lowering of whole micro-batches, or of a slice."""
        place, stage = self.place, self.plan.stages[k]
        slices = None if number is None else self.slices[number]
        tokens = next((x for x in outer if isinstance(x, sharding.ContextLayout)), None)
        context = Context(
            graph=self.graph,
            table=self.table,
            data=outer[0],
            data_axis=place.rows,
            context=self.slice_layout if slices else tokens,
            context_axis=slices or place.context,
            tensor_axis=place.tensor,
            exchange=place.exchange,
            device=place.device,
            microbatches=self.parts,
            sums=self.use.sums,
            totals=frozenset(r for op in self.graph.derived for r in self._kinds(op)),
            weight_gradients=self.weight_gradients,
            flow=self.flow,
            deferrable=self._deferrable(blocks),
            precision=self.plan.precision,
            cache=self.cache,
        )
        return Lowering(
            context=context,
            backend=self.backend,
            policies=dict(zip(stage.blocks, stage.policies, strict=True)),
            classes=self._classes[number or 0],
        )

    def _kinds(self, op: Op) -> dict[str, sharding.TotalKind]:
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
        return self.graph.read_once & {v for b in blocks for v in b.parameters}


def _prologue(
    lowering: Lowering, graph: Graph, blocks: Sequence[Block], updates: Mapping[str, str]
) -> Lowered:
    """The operators on raw inputs that the blocks, or updates of buffers, read."""
    outputs = {n for b in blocks for n in b.outputs}
    wanted = dict.fromkeys(n for b in blocks for n in b.derived)
    wanted |= dict.fromkeys(n for n in updates.values() if n not in outputs)
    return _on_raw(lowering, graph, tuple(wanted))


def _on_raw(
    lowering: Lowering, graph: Graph, wanted: Sequence[str], but: Op | None = None
) -> Lowered:
    """The operators on raw inputs behind `wanted`, without those of totals `but` one."""
    totals = lowering.context.totals
    ops = [op for op in graph.derived if op is but or not totals & set(op.results)]
    return lowering.prologue(_needed(ops, wanted), wanted)


def _needed(ops: Sequence[Op], wanted: Iterable[str]) -> list[Op]:
    """The operators behind `wanted`, in order."""
    live = set(wanted)
    needed = []
    for op in reversed(ops):
        if live & set(op.results):
            live |= set(op.operands)
            needed.append(op)
    return needed[::-1]


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
            losses[name] = (op.operands[1], int(ignored), class_weights(op))
    if not losses:
        return None, {}
    read = dict.fromkeys(v for target, _, weight in losses.values() for v in (target, weight))
    return _on_raw(lowering, graph, tuple(v for v in read if v is not None)), losses


# --- totals ---------------------------------------------------------------------------------------

# Totals: values of the whole batch that raw inputs decide (the number of labels, of a mask's
# flags), put together from those of micro-batches before the step.


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """One total: `program` makes that of a micro-batch from raw inputs and from totals before it,
    on the data axis in the state in which the stage reads it."""

    value: str
    kind: TotalKind
    program: Lowered


TOGETHER: Mapping[TotalKind, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = MappingProxyType({
    "sum": lambda parts: reduce(torch.add, parts),
    "mean": lambda parts: reduce(torch.add, parts) / len(parts),
    "max": lambda parts: reduce(torch.maximum, parts),
    "min": lambda parts: reduce(torch.minimum, parts),
})  # fmt: skip


def add_totals(totals: Sequence[Total], tensors: Mapping[str, torch.Tensor], rows: Rows) -> None:
    """Add the totals to the inputs of every micro-batch; `tensors` are the stage's."""
    with torch.no_grad():
        for total in totals:
            parts = []
            for inputs in rows:
                values = {**tensors, **inputs}
                parts += total.program.module(*[values[n] for n in total.program.arguments])
            summed = TOGETHER[total.kind](parts)
            for inputs in rows:
                inputs[total.value] = summed
