"""Divisor of a batch's mean loss, by which the losses of many batches are put together.

Let batch b have the loss l(b) = s(b) / n(b). The mean over all of them is Σ l(b) n(b) / Σ n(b). The
graph tells what n is: the targets that are not ignored of a cross-entropy, the divisor of a sum by
a count, the rows of any other mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.costmodel.graph import Graph, Op, argument
from meshwright.costmodel.rules import row_reduction, traits_of
from meshwright.costmodel.sharding import RowUse
from meshwright.executor.errors import StateError
from meshwright.executor.lowering import row_weight
from meshwright.executor.runtime.step import Step

# operators that give the elements that they take
SAME = frozenset({"to", "_to_copy", "clone", "alias", "reshape", "view", "squeeze", "contiguous"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """Count of a loss: the `target` of a cross-entropy, with its `ignored` class and the values of
    class `weight`s, or the `divisor` of a sum; without either its rows. `exponential` says whether
    exp(loss) is a perplexity."""

    target: str | None = None
    ignored: int = -100
    weight: str | None = None
    divisor: str | None = None
    exponential: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        """The values of the graph that the count is made of."""
        return tuple(v for v in (self.target, self.weight, self.divisor) if v is not None)


def counting(graph: Graph, use: RowUse) -> Counting:
    """Count of a graph's loss. Raises `StateError` where the losses of batches can't be put
    together."""
    makers = {r: op for op in (*graph.derived, *graph.ops) for r in op.results}
    derived = {r for op in graph.derived for r in op.results} | set(graph.inputs)
    op = makers[graph.loss]
    while op.short in SAME and len(op.operands) == 1:
        op = makers[op.operands[0]]
    known = derived | set(graph.buffers) | set(graph.constants)
    if row_reduction(op) == 1 and not graph.values[op.operands[1]].dtype.is_floating_point:
        _, target, *weight = op.operands
        if target in derived and known.issuperset(weight):
            return Counting(
                target=target,
                ignored=int(argument(op, 4, "ignore_index", -100)),
                weight=next(iter(weight), None),
                exponential=not weight and not argument(op, 5, "label_smoothing", 0.0),
            )
    elif op.short == "div" and len(op.operands) == 2 and op.operands[1] in derived:
        return Counting(divisor=op.operands[1])
    elif not use.meetings and not use.sums and not any(map(_ignores, graph.ops)):
        return Counting()
    raise StateError(
        f"the loss ends in {op.key} ({op.target}), which does not tell what it is a mean over",
        place="evaluate",
        legal="a mean cross-entropy, a sum divided by a count of raw inputs (a loss_fn may return "
        "both), a mean over rows",
        way_out="evaluate(batches, weigh=...), a function of a batch that gives what its loss "
        "counts",
    )


def _ignores(op: Op) -> bool:
    """Whether an operator is a loss that may ignore rows."""
    return bool(traits_of(op).loss) and row_reduction(op) > 0


class Counted:
    """The count of one batch, taken as it is evaluated: the `Keep` of a run."""

    def __init__(self, how: Counting, step: Step) -> None:
        self.how, self.step = how, step
        self.total = torch.zeros((), dtype=torch.float64)

    def __call__(self, stage: int, microbatch: int, outputs: Mapping[str, torch.Tensor]) -> None:
        how, handed = self.how, self.step.stages[stage].handed
        main = how.target or how.divisor
        if main is None or main not in handed or not handed.keys() >= set(how.values):
            return
        count = outputs[main]
        if how.target is not None:
            count = row_weight(count, how.ignored, outputs.get(how.weight or ""))
        elif self.step.plan.num_microbatches > 1:  # a total of the batch already
            count = count / self.step.plan.num_microbatches
        count = count.detach().double().reshape(())
        for axis, state in zip(self.step.place.outer, handed[main][:-1], strict=True):
            if axis.size > 1 and (state.sharded or state.kind == "P"):
                dist.all_reduce(count, group=axis.group)
        self.total = self.total + count.cpu()

    def whole(self) -> float:
        """The count, on every rank. Collective."""
        place, ends = self.step.place, self.step.ends
        if place.mesh is None or ends[0] == 0:
            return float(self.total)
        total = self.total.to(place.device)
        if len(ends) > 1:
            dist.all_reduce(total if self.step.speaks else total.zero_())
        else:
            dist.broadcast(total, src=place.meshes[ends[0]].ranks[0])
        return float(total)
