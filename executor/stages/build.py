"""The graphs of this rank's stages with its part of the weights: what trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.schedules import backward_follows_forward
from meshwright.executor.backward import GradientFlow, WeightGradientQueue
from meshwright.executor.context_attention import KeyValueCache
from meshwright.executor.parameters import StageParameter, shard_stage
from meshwright.executor.ranks import Place
from meshwright.executor.stages.buffers import HeldBuffer, hold_buffers
from meshwright.executor.stages.checked import CheckedPlan
from meshwright.executor.stages.lowered import LoweredStage, StageLowering
from meshwright.executor.stages.rank_parameters import RankParameters
from meshwright.executor.stages.stage import BlockModule, StageGraphs, StageProgram
from meshwright.executor.stages.user_model import UserModel


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStage:
    """A stage on this rank: its program, as lowered for the planned shape of batches; its own
    parameters in the order of the forward, and buffers. `reader` names the first block that reads
    each parameter (by FQN)."""

    lowered: LoweredStage
    program: StageProgram
    parameters: tuple[StageParameter, ...]
    reader: Mapping[str, str]
    buffers: tuple[HeldBuffer, ...]


class Builder:
    """Builds the stages of one rank, and takes its part of the weights.

    `shared` are parameters that several stages of this rank read, `tied` gives per FQN held by
    several stages its layout on each. `backend` compiles the blocks.
    """

    def __init__(
        self, checked: CheckedPlan, user: UserModel, place: Place, *, backend: str | None
    ) -> None:
        self.plan = checked.plan
        self.graph = checked.graph
        self.user = user
        self.place = place
        self.backend = backend
        splits = self.plan.record.splits_backward and backend is None
        self.weight_gradients = WeightGradientQueue() if splits else None
        self.flow = GradientFlow()
        self.lowering = self.at(checked)
        precision = PRECISIONS[self.plan.precision]
        self.dtype, self.kept = precision.dtype, precision.kept_dtype
        self.parameters = RankParameters(checked, user.module, place, self.dtype, self.kept)
        self.shared = self.parameters.shared
        self.tied = self.parameters.tied

    def at(
        self, checked: CheckedPlan, keep: Collection[str] = (), cache: KeyValueCache | None = None
    ) -> StageLowering:
        """The lowering of the plan at another shape of batches, or `keep`ing values, or with a
        `cache` of keys and values, for the programs built here."""
        return StageLowering(
            checked.keeping(keep) if keep else checked,
            self.place,
            backend=self.backend,
            weight_gradients=self.weight_gradients,
            flow=self.flow,
            keep=keep,
            cache=cache,
        )

    def stage(self, k: int) -> BuiltStage:
        """Build one of this rank's stages."""
        graph, blocks, lowered = self.graph, self.lowering.blocks(k), self.lowering.stage(k)
        stage_parameters = self.parameters.of_stage(k, blocks, lowered.stored)
        graphs = lowered.graphs
        held = hold_buffers(graph, lowered.buffers, graphs.updates, self.user, self.place)
        tensors = {b.value: b.read() for b in held}
        tensors |= {p.value: p.leaf for p in self.shared.values() if p.value in lowered.stored}
        program = self._program(k, blocks, graphs, stage_parameters, tensors)
        for p in stage_parameters:
            self.parameters.expose(p)
        return BuiltStage(
            lowered=lowered,
            program=program,
            parameters=stage_parameters,
            reader=_readers(graph, blocks),
            buffers=tuple(held),
        )

    def _program(
        self,
        k: int,
        blocks: Sequence[Block],
        graphs: StageGraphs,
        own: Sequence[StageParameter],
        tensors: Mapping[str, torch.Tensor],
    ) -> StageProgram:
        """The stage as a module, its parameters sharded where ZeRO-3 gathers them."""
        place = self.place
        readers = Counter(n for b in blocks for n in b.parameters)
        modules = [
            BlockModule(
                low,
                {p.value: p.leaf for p in own if p.value in b.parameters and readers[p.value] == 1},
            )
            for b, low in zip(blocks, graphs.blocks, strict=True)
        ]
        program = StageProgram(
            graphs,
            modules,
            tensors=tensors,
            shared={p.value: p.leaf for p in own if readers[p.value] > 1},
            device=place.device,
        )
        if any(p.gathered for p in own):
            ends = graphs.loss is not None and backward_follows_forward(self.plan.pipeline, k)
            shard_stage(program, modules, own, place, self.dtype, kept=self.kept, ends=ends)
        return program


def _readers(graph: Graph, blocks: Sequence[Block]) -> dict[str, str]:
    """FQN -> the first block that reads it, in order."""
    readers: dict[str, str] = {}
    for block in blocks:
        for value in block.parameters:
            readers.setdefault(graph.parameters[value], block.name)
    return readers
