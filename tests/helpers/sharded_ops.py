"""Runs operators on simulated shards, forward and backward, against the whole operator.

The oracle of every sharding rule. A traced graph is evaluated once in double precision; then, for
each strategy of an operator, its operands are cut as the strategy's placements say, the operator is
lowered for every rank and run there, and what comes back is put together again:

    state   value of the whole                  gradient of the whole
    R       on every rank                       on every rank
    Rp      on every rank                       Σ over ranks
    P       Σ over ranks                        on every rank
    S       the parts, joined                   the parts, joined

Partial values are random parts that sum to the whole, so that nothing passes by luck.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from meshwright.costmodel.graph import Graph, Op, Ref, argument, map_refs
from meshwright.costmodel.rules.traits import draws
from meshwright.costmodel.sharding.data_axis import DataLayout
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.costmodel.sharding.moves import Enter, Leave, Run
from meshwright.costmodel.sharding.strategies import (
    RP,
    Placement,
    R,
    Strategy,
    replicated,
    strategies,
)
from meshwright.costmodel.user_rules import called
from meshwright.executor.lowering.context import Context, State
from meshwright.executor.lowering.emitter import Emitter
from meshwright.executor.lowering.implementations import row_weight
from meshwright.executor.resharding.reshard import Axis
from meshwright.planner.batch import input_leaves
from meshwright.planner.tracing.trace import trace
from tests.helpers.shards import close, gradient_state, shards, whole
from tests.helpers.threaded_ranks import Mesh, Rank, Ranks, alone

EXCHANGING = {"cross_entropy", "batch_norm"}
PRECISION = torch.float64
# --- a traced graph and its values ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A graph in double precision and every value of one evaluation on one device."""

    graph: Graph
    table: FactorTable
    values: Mapping[str, torch.Tensor]

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        return (*self.graph.derived, *self.graph.ops)


def sampled(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    differentiable_inputs: bool = False,
    graph: Graph | None = None,
) -> Sample:
    """Evaluate a model's `graph`, traced here by default, on `batch`. A value requires a gradient
    if it did there; with `differentiable_inputs` the floating inputs do."""
    graph = _doubled(graph or trace(model, batch, loss_fn=loss_fn))
    leaves = _leaves(graph, model, batch, differentiable_inputs)
    values = evaluate(graph, leaves)
    metas = {
        name: replace(meta, requires_grad=values[name].requires_grad, dtype=values[name].dtype)
        for name, meta in graph.values.items()
    }
    graph = replace(graph, values=metas)
    values = {name: value.detach() for name, value in values.items()}
    return Sample(graph=graph, table=analyse(graph), values=values)


def _doubled(graph: Graph) -> Graph:
    def double(tree: Any) -> Any:
        if isinstance(tree, torch.dtype):
            return PRECISION if tree.is_floating_point else tree
        if isinstance(tree, torch.device):
            return torch.device("cpu")
        if isinstance(tree, (list, tuple)):
            return type(tree)(double(x) for x in tree)
        return {k: double(x) for k, x in tree.items()} if isinstance(tree, Mapping) else tree

    def rewritten(ops: Sequence[Op]) -> tuple[Op, ...]:
        return tuple(replace(op, args=double(op.args), kwargs=double(op.kwargs)) for op in ops)

    return replace(graph, ops=rewritten(graph.ops), derived=rewritten(graph.derived))


def sources(graph: Graph, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The tensors that a graph starts from."""
    named = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    given = dict(input_leaves(batch)[0])
    stored = {**graph.parameters, **graph.buffers}
    found = {name: named[fqn] for name, fqn in stored.items()}
    found |= {name: given[path] for name, path in graph.inputs.items()}
    return {**found, **graph.constants}


def _leaves(graph: Graph, model: nn.Module, batch: Any, differentiable: bool) -> dict[str, Any]:
    leaves = {}
    for name, tensor in sources(graph, model, batch).items():
        leaf = tensor.detach().clone()
        if leaf.is_floating_point():
            grad = name in graph.parameters or (name in graph.inputs and differentiable)
            leaf = leaf.to(PRECISION).requires_grad_(grad)
        leaves[name] = leaf
    return leaves


def evaluate(graph: Graph, leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every value of a graph, operator by operator, with no part of the lowering."""
    values = dict(leaves)
    with double_by_default():
        for op in (*graph.derived, *graph.ops):
            operands = [values[name] for name in op.operands]
            if op.short == "batch_norm":  # updates its buffers in place
                operands = [x.clone() for x in operands]
            values |= dict(zip(op.results, called(op, operands), strict=True))
    return values


@contextmanager
def double_by_default() -> Iterator[None]:
    """Factories without a dtype make doubles."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(PRECISION)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- one operator on shards ----------------------------------------------------------------------


class _AsMade(Context):
    """Values cross the boundary as they were made."""

    def boundary(self, value: str, tensor: Placement = R) -> State:
        return self.data.states[value], tensor


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results, gradients of the operands (None: there is none), operands as the call left them."""

    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    operands: list[torch.Tensor]

    def gradient(self, i: int) -> torch.Tensor:
        found = self.gradients[i]
        return torch.zeros_like(self.operands[i]) if found is None else found


class _Whole(nn.Module):
    """The operator as it is, on whole operands."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, *operands: torch.Tensor) -> list[torch.Tensor]:
        return called(self.op, operands)


class OperatorCheck:
    """One operator of a sample, alone: each operand has a name of its own; the whole is known."""

    def __init__(self, sample: Sample, op: Op) -> None:
        self.sample = sample
        names = [f"{name}_{i}" for i, name in enumerate(op.operands)]
        given = iter(names)
        args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda _: Ref(next(given)))
        self.traced, self.op = op, replace(op, args=args, kwargs=kwargs)
        values = {
            new: sample.graph.values[old] for new, old in zip(names, op.operands, strict=True)
        }
        self.graph = replace(
            sample.graph, values={**sample.graph.values, **values}, loss="", blocks=()
        )
        self.operands = [sample.values[name] for name in op.operands]
        self.needs = [sample.graph.values[name].requires_grad for name in op.operands]
        self.cotangents = [
            torch.randn(meta.shape, dtype=torch.promote_types(meta.dtype, PRECISION))
            for meta in (sample.graph.values[name] for name in op.results)
        ]
        self.replicated = replicated(self.op)
        self.microbatches = 1
        with double_by_default():
            self.expected = self._expected()

    def _expected(self) -> Outcome:
        if draws(self.op):
            alone_here = Axis("data", 1, 0), Axis("tensor", 1, 0)
            module, extras = self._module(self.replicated, self.replicated, *alone_here)
            return _run(module, self.operands, self.needs, extras, self.cotangents)
        return _run(_Whole(self.op), self.operands, self.needs, [], self.cotangents)

    def options(self, degree: int, *, data: bool = False) -> list[Strategy]:
        """The strategies of the operator on an axis; on the data axis those of the batch."""
        sample = self.sample
        if not data:
            return strategies(sample.graph, sample.table, self.traced, degree)
        batch = sample.table.batch if sample.table.batch is not None else -1
        return strategies(sample.graph, sample.table, self.traced, degree, only=batch)

    def _module(
        self, data: Strategy, tensor: Strategy, data_axis: Axis, tensor_axis: Axis
    ) -> tuple[nn.Module, list[torch.Tensor]]:
        """The lowered operator of one rank, and what it takes besides its operands."""
        op = self.op
        states = dict(zip(op.results, data.results, strict=True))
        context = _AsMade(
            graph=self.graph,
            table=self.sample.table,
            data=DataLayout(strategies={op.name: data}, states=states, gathered=()),
            data_axis=data_axis,
            tensor_axis=tensor_axis,
            device=torch.device("cpu"),
            microbatches=self.microbatches,
        )
        operands = zip(op.operands, tensor.operands, strict=True)
        results = zip(op.results, tensor.results, strict=True)
        steps = [
            *(Enter(value, state, "input") for value, state in operands),
            Run(op, tensor),
            *(Leave(value, state, op.name) for value, state in results),
        ]
        outside = {name: (state,) for name, state in zip(op.operands, data.operands, strict=True)}
        written = Emitter(context, steps, outside).write(op.results)
        extras: list[torch.Tensor] = []
        if written.losses:
            ignored = argument(op, 4, "ignore_index", -100)
            weight = self.operands[2] if len(self.operands) > 2 else None
            extras.append(row_weight(self.operands[1], ignored, weight))
        if written.random:
            extras.append(torch.tensor([12345, 0]))
        return written.module, extras

    def check(
        self,
        mesh: Mesh,
        data: Strategy | None,
        tensor: Strategy | None,
        ranks: Ranks,
        *,
        talking: bool = False,
    ) -> None:
        """Raise AssertionError unless the operator on shards is the whole operator."""
        data, tensor = data or self.replicated, tensor or self.replicated
        operands = list(zip(data.operands, tensor.operands, strict=True))
        results = list(zip(data.results, tensor.results, strict=True))
        given = [shards(x, s, mesh) for x, s in zip(self.operands, operands, strict=True)]
        seeds = [
            shards(x, gradient_state(s), mesh)
            for x, s in zip(self.cotangents, results, strict=True)
        ]

        def work(data_axis: Axis, tensor_axis: Axis) -> Outcome:
            here = (data_axis.rank, tensor_axis.rank)
            module, extras = self._module(data, tensor, data_axis, tensor_axis)
            mine = [held[here] for held in given]
            return _run(module, mine, self.needs, extras, [held[here] for held in seeds])

        talking = talking or bool({data.implementation, tensor.implementation} & EXCHANGING)
        with double_by_default():  # not per rank: the default is the process's
            got = ranks.run(mesh, work) if talking else alone(mesh, work)
        at = f"{self.op.target} data={data.name} tensor={tensor.name} on {mesh}"
        self._compare(got, operands, results, mesh, at)

    def _compare(
        self,
        got: Mapping[Rank, Outcome],
        operands: list[State],
        results: list[State],
        mesh: Mesh,
        at: str,
    ) -> None:
        def same(
            state: State, expected: torch.Tensor, what: str, of: Callable[[Outcome], torch.Tensor]
        ) -> None:
            held = {rank: of(outcome) for rank, outcome in got.items()}
            close(whole(held, state, mesh, what), expected, what)

        for k, state in enumerate(results):
            expected = self.expected.results[k]
            same(state, expected, f"{at} result {k}", lambda own, k=k: own.results[k])
        for i, state in enumerate(operands):
            expected = self.expected.operands[i]
            same(state, expected, f"{at} operand {i} after", lambda own, i=i: own.operands[i])
            if self.needs[i]:
                what = f"{at} gradient of operand {i} as {state[0]}, {state[1]}"
                same(
                    gradient_state(state),
                    self.expected.gradient(i),
                    what,
                    lambda own, i=i: own.gradient(i),
                )

    def _reduced(self) -> Strategy:
        """Replicated, with gradients passed on as they come: still to be summed."""
        states = tuple(RP if need else R for need in self.needs)
        return replace(
            self.replicated, name="reduced", operands=states, results=(RP,) * len(self.op.results)
        )

    def everything(self, ranks: Ranks) -> None:
        """Check every strategy on each axis of two ranks, and every pair on a 2×2 mesh."""
        tensors, batches = self.options(2), self.options(2, data=True)
        for tensor in tensors:
            self.check((1, 2), None, tensor, ranks)
        for data in (*batches, self._reduced()):
            self.check((2, 1), data, None, ranks)
        for data, tensor in itertools.product(batches[1:], tensors[1:]):
            self.check((2, 2), data, tensor, ranks)


def _run(
    module: nn.Module,
    operands: Sequence[torch.Tensor],
    needs: Sequence[bool],
    extras: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
) -> Outcome:
    leaves = [
        x.detach().clone().requires_grad_(need) for x, need in zip(operands, needs, strict=True)
    ]
    results = list(module(*leaves, *extras))
    roots = [(y, g) for y, g in zip(results, cotangents, strict=True) if y.requires_grad]
    if roots:
        torch.autograd.backward([y for y, _ in roots], [g for _, g in roots])
    return Outcome(
        results=[y.detach() for y in results],
        gradients=[leaf.grad for leaf in leaves],
        operands=[leaf.detach() for leaf in leaves],
    )
