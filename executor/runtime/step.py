"""A rank's step, for global batches of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules import Action, Early, Instruction, build_schedule, early_parts
from meshwright.costmodel.sharding import loss_is_summed
from meshwright.executor.backward import Edge, GradientFlow, edges_of, reached
from meshwright.executor.errors import StateError
from meshwright.executor.lowering import row_weight
from meshwright.executor.ranks import Place, all_gather_object, gloo_group, world_size
from meshwright.executor.stages import (
    Batches,
    BatchShape,
    CheckedPlan,
    Given,
    LoweredStage,
    Phase,
    Rows,
)
from meshwright.planner.plan import Plan, crossings, pipelines


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The stages of a rank, lowered for one shape of batches, and the instructions of a step in
    order; `last` gives the micro-batch of each stage's last backward, `early` what may run before
    the last step's verdict is known, where the plan validates it afterwards, `edges` the operands
    of leaves that may go without a gradient, `behind_loss` all values that may have one."""

    plan: Plan
    graph: Graph
    checked: CheckedPlan
    place: Place
    stages: Mapping[int, LoweredStage]
    stream: tuple[Instruction, ...]
    last: Mapping[int, int]
    batches: Batches
    reads: Mapping[int, frozenset[str]]
    early: Early | None
    edges: tuple[Edge, ...]
    behind_loss: frozenset[str]

    @staticmethod
    def of(checked: CheckedPlan, place: Place, stages: Mapping[int, LoweredStage]) -> Step:
        plan, graph = checked.plan, checked.graph
        stream, early = _stream(plan, graph, place)
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
            early=early,
            edges=edges_of(graph),
            behind_loss=frozenset(reached(graph)),
        )

    def arrived(self, flow: GradientFlow) -> list[float]:
        """Whether this rank's backward gave each of `edges` a gradient, as numbers to be summed."""
        return [float(edge in flow.arrived) for edge in self.edges]

    def absent(self, arrived: Sequence[float]) -> frozenset[str]:
        """Parameters that no rank's backward gave a gradient, by value; `arrived` is summed over
        ranks."""
        cut = {edge for edge, count in zip(self.edges, arrived, strict=True) if not count}
        return self.behind_loss - reached(self.graph, cut) if cut else frozenset()

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
                    weights = row_weight(targets[target], ignored, targets.get(weight or ""))
                    totals[name] = totals[name] + weights
        for name, (target, *_) in stage.losses.items():
            for axis, layout in zip(place.outer, stage.outer, strict=True):
                if axis.size > 1 and layout.states[target].sharded:
                    dist.all_reduce(totals[name], group=axis.group)
        return {name: total / self.plan.num_microbatches for name, total in totals.items()}

    def mean_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The mean over micro-batches and data ranks, broadcast from the last stage; summed over
        the last stages of several copies of the model."""
        place, ends = self.place, self.ends
        if place.mesh is not None and len(ends) > 1:
            total = self.own_loss(losses)
            dist.all_reduce(total)
            return total
        total = self._mean_here(losses)
        if place.mesh is not None and ends[0] > 0:
            dist.broadcast(total, src=place.meshes[ends[0]].ranks[0])
        return total

    @property
    def ends(self) -> tuple[int, ...]:
        """The last stage of each copy of the model: together they have all losses."""
        return tuple(stages[-1] for stages in pipelines(self.plan))

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for a last stage."""
        return any(self.place.rank == self.place.meshes[k].ranks[0] for k in self.ends)

    def own_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """This rank's part of the mean loss, over all ranks: all of it on the first one of the last
        stage (of its copy of the model), 0 on others."""
        total = self._mean_here(losses)
        return total if self.speaks else torch.zeros_like(total)

    def _mean_here(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The mean loss on ranks of the last stage (its part of the micro-batches, where there are
        several last stages), 0 on others."""
        place = self.place
        total = torch.zeros((), dtype=torch.float32, device=place.device)
        last = next((k for k in self.ends if k in place.stages), None)
        if losses and last is not None:
            total = (
                torch.stack([x.float().reshape(()) for x in losses]).sum()
                / self.plan.num_microbatches
            )
            for axis, layout in zip(place.outer, self.stages[last].outer, strict=True):
                if axis.size > 1 and loss_is_summed(layout, self.graph):
                    dist.all_reduce(total, group=axis.group)
        return total


def unobserved(what: Instruction | Phase, run: Callable[[], None]) -> None:
    """The observer of a step that nobody observes."""
    run()


def _stream(plan: Plan, graph: Graph, place: Place) -> tuple[tuple[Instruction, ...], Early | None]:
    """This rank's instructions of a step, in order, and the early part of them."""
    streams = build_schedule(plan.pipeline, crossings(plan, graph).keys())
    mine = plan.pipeline.placed.index(place.stages)
    return streams[mine], early_parts(streams)[mine] if plan.post_validation else None


# --- losses ---------------------------------------------------------------------------------------

# The scalars that steps return: a loss whose backward is done, and numbers on their way.


def with_backward_done(loss: torch.Tensor) -> torch.Tensor:
    """A step's loss, whose `backward()` says what to do instead."""
    loss_done: torch.Tensor = _BackwardIsDone.apply(loss.requires_grad_())  # type: ignore[no-untyped-call]
    return loss_done


class _BackwardIsDone(torch.autograd.Function):
    """A step's loss: `backward()` of it, or of what is made of it, says that it is done."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise StateError(
            "train_step has run the backward already, and added the gradients to .grad",
            place="loss.backward()",
            legal="the loss' value",
            way_out="drop this line (and a GradScaler: train_step scales and unscales), and step "
            "the optimizer",
        )


class PendingScalar(torch.Tensor):
    """An fp32 scalar that is waited for when it is first read. `detach()` doesn't read it."""

    _read: Callable[[], torch.Tensor]

    @staticmethod
    def of(read: Callable[[], torch.Tensor]) -> PendingScalar:
        """The scalar that `read` returns, on the host."""
        scalar: PendingScalar = torch.Tensor._make_subclass(PendingScalar, torch.full((), math.nan))
        scalar._read = read
        return scalar

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach and isinstance(args[0], PendingScalar):
            return args[0]
        arguments = pytree.tree_map(
            lambda x: x._read() if isinstance(x, PendingScalar) else x, (args, kwargs or {})
        )
        return func(*arguments[0], **arguments[1])


KEPT = 64  # steps lowered for other batches, at a time


class Steps:
    """The steps of a plan: the `planned` one, and `others` for batches of other shapes, or of other
    values that the forward asks for, the last used last; `handing` are those lowered once more so
    that they hand values on, by their batches and the values."""

    def __init__(self, planned: Step) -> None:
        self.planned = planned
        self.others: list[Step] = []
        self.handing: dict[tuple[Batches, frozenset[str]], Step] = {}

    def hand_on(self, key: tuple[Batches, frozenset[str]], step: Step) -> None:
        """Keep a step that hands values on."""
        while len(self.handing) >= KEPT:
            del self.handing[next(iter(self.handing))]
        self.handing[key] = step

    def serving(self, shape: BatchShape, inputs: Given) -> Step | None:
        """The step that serves a batch. Collective where the forward asks for values."""
        steps = [s for s in (self.planned, *self.others) if s.batches.planned == shape]
        return self._served(steps, inputs)

    def add(self, step: Step, inputs: Given) -> Step:
        """Keep a step, which was lowered for these inputs."""
        if self._served([step], inputs) is None:
            raise step.batches.unserved()
        return step

    def _served(self, steps: Sequence[Step], inputs: Given) -> Step | None:
        """The first of these that serves, on all ranks."""
        here = [step.batches.serves(inputs) for step in steps]
        if world_size() > 1 and any(step.graph.known for step in steps):
            of_ranks = all_gather_object(gloo_group(), here)
            here = [all(answers) for answers in zip(*of_ranks, strict=True)]
        step = next((step for step, serves in zip(steps, here, strict=True) if serves), None)
        if step is not None and step is not self.planned:
            others = [other for other in self.others if other is not step]
            self.others = [*others[1 - KEPT :], step]
        return step
