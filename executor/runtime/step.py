"""What a rank runs in a step, for global batches of one shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules import Action, Instruction, build_schedule, stages_of_devices
from meshwright.costmodel.sharding import loss_is_summed
from meshwright.executor.lowering import row_weight
from meshwright.executor.ranks import Place
from meshwright.executor.stages import Batches, CheckedPlan, LoweredStage, Rows
from meshwright.planner.plan import Plan, crossings


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The stages of a rank, lowered for one shape of batches, and the instructions of a step in
    order; `last` gives the micro-batch of each stage's last backward."""

    plan: Plan
    graph: Graph
    checked: CheckedPlan
    place: Place
    stages: Mapping[int, LoweredStage]
    stream: tuple[Instruction, ...]
    last: Mapping[int, int]
    batches: Batches
    reads: Mapping[int, frozenset[str]]

    @staticmethod
    def of(checked: CheckedPlan, place: Place, stages: Mapping[int, LoweredStage]) -> Step:
        plan, graph = checked.plan, checked.graph
        stream = _stream(plan, graph, place)
        reductions = (i for i in stream if i.action is Action.REDUCE_GRADIENTS)
        return Step(
            plan=plan,
            graph=graph,
            checked=checked,
            place=place,
            stages=stages,
            stream=stream,
            last={i.stage: i.microbatch for i in reductions},
            batches=Batches(plan, graph, place, checked.use.filling),
            reads={k: stage.reads for k, stage in stages.items()},
        )

    @property
    def reads_data(self) -> bool:
        """Whether a stage of this rank reads anything of a batch."""
        return any(names & self.graph.inputs.keys() for names in self.reads.values())

    def loss_rows(
        self, k: int, tensors: Mapping[str, torch.Tensor], inputs: Rows
    ) -> dict[str, torch.Tensor]:
        """Per loss of a stage, its rows over the whole global batch, divided by the number of
        micro-batches: the denominator that makes Σ over micro-batches and ranks the mean over the
        batch. `tensors` are those of the stage's program."""
        stage, place = self.stages[k], self.place
        if stage.counts is None:
            return {}
        totals = {n: torch.zeros((), dtype=torch.int64, device=place.device) for n in stage.losses}
        with torch.no_grad():
            for microbatch in inputs:
                values = {**tensors, **microbatch}
                results = stage.counts.module(*[values[n] for n in stage.counts.arguments])
                targets = dict(zip(stage.counts.outputs, results, strict=True))
                for name, (target, ignored, weight) in stage.losses.items():
                    found = row_weight(targets[target], ignored, targets.get(weight or ""))
                    totals[name] = totals[name] + found
        for name, (target, *_) in stage.losses.items():
            for axis, layout in zip(place.outer, stage.outer, strict=True):
                if axis.size > 1 and layout.states[target].sharded:
                    dist.all_reduce(totals[name], group=axis.group)
        return {name: total / self.plan.num_microbatches for name, total in totals.items()}

    def mean_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The mean over micro-batches and data ranks, broadcast from the last stage."""
        place = self.place
        total = torch.zeros((), dtype=torch.float32, device=place.device)
        last = len(self.plan.stages) - 1
        if losses:
            total = (
                torch.stack([x.float().reshape(()) for x in losses]).sum()
                / self.plan.num_microbatches
            )
            for axis, layout in zip(place.outer, self.stages[last].outer, strict=True):
                if axis.size > 1 and loss_is_summed(layout, self.graph):
                    dist.all_reduce(total, group=axis.group)
        if place.mesh is not None and last > 0:
            dist.broadcast(total, src=place.meshes[last].ranks[0])
        return total


def _stream(plan: Plan, graph: Graph, place: Place) -> tuple[Instruction, ...]:
    """This rank's instructions of a step, in order."""
    counts = {"num_stages": len(plan.stages), "num_devices": len(plan.devices)}
    placed = stages_of_devices(plan.schedule, **counts)
    streams = build_schedule(
        plan.schedule,
        num_microbatches=plan.num_microbatches,
        edges=crossings(plan, graph).keys(),
        **counts,
    )
    return streams[placed.index(place.stages)]
