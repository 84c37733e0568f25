"""Values of the graph that an evaluation keeps, gathered from the ranks that have parts of them.

A value lies on the ranks of the stage that makes it: split by the plan on the tensor axis, and
by rows on the data axis, a micro-batch at a time. Every rank of the stage gets it whole on the
tensor axis; its own rows, or with `gather` those of all data ranks, on every rank of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.costmodel.graph import Graph, Op, Ref, argument
from meshwright.costmodel.rules import class_weights, row_reduction, traits_of
from meshwright.costmodel.sharding import ContextLayout, Placement, R, RowUse, token_dim
from meshwright.executor.context_attention import KeyValueCache
from meshwright.executor.errors import StateError
from meshwright.executor.lowering import Lowered, State, local_view, row_weight
from meshwright.executor.ranks import Place
from meshwright.executor.resharding import Axis, Reshard, all_gather
from meshwright.executor.runtime.runtime import Runtime
from meshwright.executor.runtime.step import Step
from meshwright.executor.stages import Batches, BatchShape, CheckedPlan, Keep
from meshwright.planner.plan import NO_LOGITS, pipelines, stage_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """The mean loss of a batch, and the values that were asked for, each None where this rank has
    no part of it."""

    loss: torch.Tensor
    values: Mapping[str, torch.Tensor | None]


def forward(
    runtime: Runtime,
    batch: Any,
    values: Collection[str],
    *,
    rows: int,
    gather: bool,
    at: torch.Tensor | None = None,
    lower: Callable[[Step], Step] | None = None,
) -> Forwarded:
    """Evaluate a batch and keep `values` of the first so many `rows` of it: those that this rank
    has, or with `gather` all, on every rank. Collective.

    With `at` a value [rows, positions, ...] is read at one position per row: [rows, ...]. `lower`
    is as for `Runtime.evaluate`. Raises
    `StateError` for a value without rows in a plan of several micro-batches, and for logits where
    the loss runs in parts.
    """
    if not runtime.graph.values.keys() >= set(values):
        raise StateError(
            "logits are asked for, of which the plan never has more than a part: its loss runs in "
            f"{runtime.graph.loss_parts}",
            place="forward",
            **NO_LOGITS,
        )
    outputs: list[_Kept] = []

    def keep(step: Step) -> Keep:
        outputs.append(_Kept(step=step, place=runtime.place, rows=rows, gather=gather, at=at))
        for value in values:
            outputs[0].row_dim(value)
        return outputs[0]

    loss, _ = runtime.evaluate(batch, values, keep=keep, lower=lower)
    with torch.no_grad():
        return Forwarded(loss=loss, values={value: outputs[0].whole(value) for value in values})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Values of one evaluation, micro-batch by micro-batch."""

    step: Step
    place: Place
    rows: int
    gather: bool
    at: torch.Tensor | None
    parts: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, stage: int, microbatch: int, outputs: Mapping[str, torch.Tensor]) -> None:
        """Take what a stage made of a micro-batch. Collective over the stage's ranks."""
        for value, state in self.step.stages[stage].handed.items():
            part = self._part(stage, value, state, microbatch, outputs[value])
            copy = next(c for c, stages in enumerate(pipelines(self.step.plan)) if stage in stages)
            self.parts.setdefault((value, copy), []).append(part)

    def whole(self, value: str) -> torch.Tensor | None:
        """The value of all micro-batches. With `gather` collective over all ranks."""
        copies = [self._of_copy(value, c) for c in range(len(pipelines(self.step.plan)))]
        dim, here = self.row_dim(value), [x for x in copies if x is not None]
        return torch.cat(here, dim) if dim is not None and len(here) > 1 else next(iter(here), None)

    def _of_copy(self, value: str, copy: int) -> torch.Tensor | None:
        """The value of the micro-batches of a copy of the model."""
        parts, dim = self.parts.get((value, copy), []), self.row_dim(value)
        joined: torch.Tensor | None = None
        if parts:
            joined = parts[0] if dim is None else torch.cat(parts, dim)
        if not self.gather or len(self.step.plan.devices) == 1 or self.place.mesh is None:
            return joined
        if joined is None:
            meta, shape = self.step.graph.values[value], self._shape(value, copy)
            joined = torch.empty(shape, dtype=meta.dtype, device=self.place.device)
        source = self.place.meshes[_stage_with(self.step, value, copy)].ranks[0]
        dist.broadcast(joined := joined.contiguous(), src=source)
        return joined

    def row_dim(self, value: str) -> int | None:
        """The dim of the batch's rows in a value; None where it has none. Raises `StateError` where
        micro-batches of it can't be put together."""
        graph, table = self.step.graph, self.step.checked.factors
        shape = graph.values[value].shape
        place = None if table.batch is None else table.find(value, table.batch)
        if table.batch is None and shape[:1] == (1,):  # of one row, which no dim tells
            place = 0, 1
        if place is not None and place[1] == 1:
            return place[0]
        if self.step.plan.num_microbatches == 1 and place is None:
            return None
        raise StateError(
            f"the output {value!r} of shape {shape} has no dim of the batch's rows, or others "
            f"before them, and the batch runs in {self.step.plan.num_microbatches} micro-batches: "
            "it can't be put together",
            place="forward",
            legal="outputs that have a dim of rows, or num_microbatches=1",
        )

    def _shape(self, value: str, copy: int) -> list[int]:
        """The shape of a value of all rows of a copy of the model."""
        shape, dim = list(self.step.graph.values[value].shape), self.row_dim(value)
        plan = self.step.plan
        copy_rows = plan.global_batch_size // len(pipelines(plan))
        if dim is not None:
            rows = min(max(self.rows - copy * copy_rows, 0), copy_rows)
            shape[dim] = shape[dim] // plan.microbatch_rows * rows
        return shape if self.at is None else [shape[0], *shape[2:]]

    def _all_tokens(
        self, x: torch.Tensor, value: str, stage: int, outer: Sequence[Placement]
    ) -> torch.Tensor:
        """A value whole on the context axis."""
        (data, tokens), axis = outer, self.place.context
        layout = self.step.stages[stage].outer[1]
        if axis is None or tokens.kind not in ("S", "P"):
            return x
        assert isinstance(layout, ContextLayout)
        zigzag = layout.zigzag and token_dim(self.step.checked.factors, value, tokens)
        local = local_view(tokens, data, self.place.rows)
        gathered: torch.Tensor = Reshard(local, R, axis, zigzag=(zigzag, False))(x)
        return gathered

    def _part(
        self, stage: int, value: str, state: State, microbatch: int, x: torch.Tensor
    ) -> torch.Tensor:
        *outer, tensor = state
        data, axis, part_rows = outer[0], self.place.rows, self.step.plan.microbatch_rows
        dim = self.row_dim(value)
        first = microbatch * part_rows
        if data.sharded:
            part_rows //= axis.size
            first += axis.rank * part_rows
        sizes = self.step.graph.values[value].shape
        if len(outer) > 1:  # tokens first: the tensor axis may split theirs further
            x = _whole_on(self.place.tensor, x, tensor, data, axis, sizes)
            x, tensor = self._all_tokens(x, value, stage, outer), R
        if self.at is not None:
            x, tensor, sizes = self._at(x, (data, tensor), first, part_rows, sizes)
        x = _whole_on(self.place.tensor, x, tensor, data, axis, sizes)
        if data.kind == "P" and axis.size > 1:
            x = Reshard(data, R, axis)(x)
        if data.sharded and axis.size > 1 and self.gather:
            x = all_gather(x, data, axis)
            first, part_rows = microbatch * self.step.plan.microbatch_rows, part_rows * axis.size
        if dim is None:
            return x
        real = min(max(self.rows - first, 0), part_rows)
        return x.narrow(dim, 0, x.shape[dim] // part_rows * real)

    def _at(
        self, x: torch.Tensor, state: State, first: int, part_rows: int, sizes: tuple[int, ...]
    ) -> tuple[torch.Tensor, Placement, tuple[int, ...]]:
        """A value [rows, positions, ...] at each row's position, with its state on the tensor axis
        and its whole sizes; only this is gathered where positions are not what is split."""
        assert self.at is not None
        data, tensor = state
        if tensor.sharded and tensor.dim < 2:
            x = _whole_on(self.place.tensor, x, tensor, data, self.place.rows, sizes)
            tensor = R
        indices = self.at[first : first + part_rows].to(x.device)
        indices = torch.nn.functional.pad(indices, (0, part_rows - len(indices)))
        x = x[torch.arange(part_rows, device=x.device), indices]
        if tensor.sharded:
            tensor = replace(tensor, dim=tensor.dim - 1)
        return x, tensor, (sizes[0], *sizes[2:])


def _whole_on(
    axis: Axis,
    x: torch.Tensor,
    state: Placement,
    other: Placement,
    rows: Axis,
    sizes: tuple[int, ...],
) -> torch.Tensor:
    """A tensor whole on the tensor `axis`; `other` is its state on the data axis, `rows`."""
    if axis.size == 1 or state.kind not in ("S", "P"):
        return x
    size = sizes[state.dim] if state.sharded else 0
    uneven = size if size % axis.size else None
    gathered: torch.Tensor = Reshard(local_view(state, other, rows), R, axis, uneven)(x)
    return gathered


def _stage_with(step: Step, value: str, copy: int) -> int:
    """The stage of a copy of the model whose blocks make a value, or are the first to read it."""
    owner = stage_of(step.plan, copy)
    blocks = step.graph.blocks
    producers = [b for b in blocks if any(value in op.results for op in b.ops)]
    return owner[(producers or [b for b in blocks if value in b.derived])[0].name]


# --- forwards that go on --------------------------------------------------------------------------

# Forwards of a causal model over some tokens, with the keys and values of all before them.
#
# The plan is lowered twice: at the whole length, which fills the cache, and at a few tokens. What
# follows from raw inputs alone (positions, masks, tables of angles) is made at the whole length in
# both; the second one takes the tokens' part of it.


ATTENTION = "aten.scaled_dot_product_attention.default"


def why_not_cached(checked: CheckedPlan) -> str:
    """Why keys and values can't be kept under a plan; empty where they can."""
    graph, plan = checked.graph, checked.plan
    ops = {op.name: op for op in graph.ops if traits_of(op).kernel == "attention"}
    derived = {v for block in graph.blocks for v in block.derived}
    if not ops:
        return "no operator of the model is an attention (attn_implementation='sdpa' makes one)"
    if any(stage.cp > 1 for stage in plan.stages):
        return "context parallelism splits the tokens"
    for op in ops.values():
        mask, causal = argument(op, 3, "attn_mask", None), argument(op, 5, "is_causal", False)
        masked = mask.name in derived if isinstance(mask, Ref) else causal
        if op.target != ATTENTION or not masked:
            return f"{op.key} is not causal, or by a mask that is made inside of a block"
    for assignments in checked.assignments:
        for assignment in assignments.values():
            for name in assignment.strategies.keys() & ops.keys():
                split = assignment.strategies[name].results[0]
                if split.sharded and split.dim == len(graph.values[name].shape) - 2:
                    return f"the plan splits the tokens of {ops[name].key}"
    return ""


class CachedForward:
    """Forwards that keep keys and values, of batches of one shape at a time.

    `tokens` are as many as the second of its steps takes: an even number on each rank of the tensor
    axis, so that what is split by tokens has a part on each.
    """

    def __init__(self, runtime: Runtime, value: str) -> None:
        self.runtime, self.value = runtime, value
        self.cache = KeyValueCache()
        self.tokens = 2 * max(stage.tp for stage in runtime.plan.stages)
        self._steps: dict[Batches, tuple[Step, Step]] = {}

    def __call__(
        self, batch: Any, few: Any, position: int, *, rows: int, start: int | None
    ) -> torch.Tensor:
        """The value [rows, ...] at a position, on every rank: of the tokens from `start` on, the
        keys and values of those before being there; None: of all tokens. `few` is a batch of as
        many tokens, for its shape. Collective."""

        def lower(step: Step) -> Step:
            if step.batches not in self._steps:
                self._steps = {step.batches: self._lowered(step, few)}
            return self._steps[step.batches][start is not None]

        self.cache.begin(start)
        at = torch.full((rows,), position - (start or 0))
        found = forward(
            self.runtime, batch, [self.value], rows=rows, gather=True, at=at, lower=lower
        ).values[self.value]
        assert found is not None, "gathered on every rank"
        return found

    def _lowered(self, step: Step, few: Any) -> tuple[Step, Step]:
        """The steps of all tokens and of few. Collective."""
        runtime = self.runtime
        whole = self._with_cache(step.checked.whole)
        assert runtime.at_shape is not None, "a model that was traced"
        tensors = step.batches.checked(few)
        shape = BatchShape.of(step.graph, step.batches.planned.rows, tensors)
        with runtime.user.as_passed():
            checked = runtime.at_shape(shape, few)
        part, stages = self._with_cache(checked.whole), {}
        for k, stage in part.stages.items():
            of_all = whole.stages[k]
            prologue = _part_of(of_all.graphs.prologue, self.cache, step.graph, part.graph)
            (few_tokens,) = stage.parts
            graphs = replace(few_tokens.graphs, prologue=prologue)
            stages[k] = replace(
                stage,
                parts=(replace(few_tokens, graphs=graphs),),
                totals=of_all.totals,
                counts=of_all.counts,
            )
        reads = {k: stage.reads for k, stage in stages.items()}
        return whole, replace(part, stages=stages, reads=reads, batches=step.batches)

    def _with_cache(self, checked: CheckedPlan) -> Step:
        runtime = self.runtime
        lowering = runtime.builder.at(checked, [self.value], self.cache)
        stages = {k: lowering.stage(k) for k in runtime.stages}
        return Step.of(checked, runtime.place, stages)


def _part_of(prologue: Lowered, cache: KeyValueCache, whole: Graph, part: Graph) -> Lowered:
    """The operators on raw inputs at the whole length, of whose results the tokens from the cache's
    start on are taken: along the first dim that is shorter in `part`, where a second one is that of
    the keys that a mask has."""
    cuts = []
    for value in prologue.outputs:
        sizes = zip(whole.values[value].shape, part.values[value].shape, strict=True)
        shorter = [(d, size, few) for d, (size, few) in enumerate(sizes) if size != few]
        cuts.append(shorter[0] if shorter else None)
    return replace(prologue, module=_Cut(prologue.module, cache, cuts))


class _Cut(nn.Module):
    """Results of a module, of each the part along a dim that holds some tokens. One that the cut
    does not fit (flat targets, which no logit reads) is as long as its readers expect."""

    def __init__(
        self, module: nn.Module, cache: KeyValueCache, cuts: Sequence[tuple[int, int, int] | None]
    ) -> None:
        super().__init__()
        self.module, self.cache, self.cuts = module, cache, cuts

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        start = self.cache.start
        assert start is not None, "of a forward that goes on"
        parts = []
        for x, cut in zip(self.module(*inputs), self.cuts, strict=True):
            if cut is None:
                parts.append(x)
                continue
            dim, size, few = cut
            count = x.shape[dim] * few // size
            parts.append(x.narrow(dim, min(start, x.shape[dim] - count), count))
        return tuple(parts)


# --- divisor of the mean loss ---------------------------------------------------------------------

# Divisor of a batch's mean loss, by which the losses of many batches are put together.
#
# Let batch b have the loss l(b) = s(b) / n(b). The mean over all of them is Σ l(b) n(b) / Σ n(b).
# The graph tells what n is: the targets that are not ignored of a cross-entropy, the divisor of a
# sum by a count, the rows of any other mean.


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
        target, weight = op.operands[1], class_weights(op)
        if target in derived and (weight is None or weight in known):
            return Counting(
                target=target,
                ignored=int(argument(op, 4, "ignore_index", -100)),
                weight=weight,
                exponential=weight is None and not argument(op, 5, "label_smoothing", 0.0),
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
