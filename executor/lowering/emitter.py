"""Writes one block as a local fx graph: operators at local shapes, re-shards where states change.

A value waits in one state per axis (data, tensor) and is moved once per state that a reader needs;
what was moved is kept, so readers share it. The tensor axis is moved first, then the data axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from meshwright.costmodel.graph import Op, argument, map_refs
from meshwright.costmodel.rules.draws import ATTENTION, COUNTED, draws
from meshwright.costmodel.rules.language import divided
from meshwright.costmodel.rules.leaf import LEAVES
from meshwright.costmodel.rules.moe import COMBINE, DISPATCH, GROUPED
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, default_state
from meshwright.costmodel.sharding.strategies import COPY_DIMS, Placement, R, Strategy
from meshwright.executor.lowering.deferred import DeferredProduct
from meshwright.executor.lowering.draws import DropoutAttention, IndexGrid, drawn, single_rows
from meshwright.executor.lowering.experts import (
    FindRoute,
    GroupedProduct,
    Leg,
    Return,
    Send,
    refused,
)
from meshwright.executor.lowering.implementations import (
    GlobalLoss,
    ParallelEmbedding,
    ScaledMean,
    SyncBatchNorm,
)
from meshwright.executor.lowering.leaves import LeafCall, part_number
from meshwright.executor.lowering.no_grad import read_by
from meshwright.executor.lowering.reshard import Axis, Reshard
from meshwright.planner.plan.plan import PlanError

if TYPE_CHECKING:
    from meshwright.executor.lowering.lower import Lowering

State = tuple[Placement, Placement]  # (on the data axis, on the tensor axis)
PRODUCTS = ("linear", "addmm", "mm", "matmul")
LOSSES = {"cross_entropy_loss": "cross_entropy", "nll_loss": "nll", "nll_loss_nd": "nll"}


class Emitter:
    """Writes one local fx graph."""

    def __init__(
        self,
        lowering: Lowering,
        ops: Sequence[Op],
        states: Mapping[str, State],
        assignment: Assignment | None,
        layouts: BlockLayouts | None,
    ) -> None:
        self.low, self.ops, self.assignment, self.layouts = lowering, ops, assignment, layouts
        self.graph, self.table = lowering.graph, lowering.table
        self.out = fx.Graph()
        self.root = nn.Module()
        self.states: dict[str, State] = dict(states)
        self.nodes: dict[tuple[str, State], fx.Node] = {}
        self.losses: list[Op] = []
        self.rng: fx.Node | None = None
        self.counts: dict[str, fx.Node] = {}
        self.made: dict[str, list[fx.Node]] = {}
        self.legs: Mapping[str, Leg] = {}  # operators on copies that have been sent away
        self.routes: dict[str, fx.Node] = {}
        self.sent: dict[tuple[str, State, str], fx.Node] = {}
        self.away: set[str] = set()  # values between a dispatch and its combine

    def module(self, arguments: Sequence[str], outputs: Sequence[str]) -> fx.GraphModule:
        for i, name in enumerate(arguments):
            self.nodes[name, self.states[name]] = self.out.placeholder(f"a{i}")
        known = set(arguments)
        self.losses = [op for op in self.ops if self._counted(op, known)]
        self.counts = {op.name: self.out.placeholder(f"n{i}") for i, op in enumerate(self.losses)}
        if any(draws(op) for op in self.ops):
            self.rng = self.out.placeholder("rng")
        for name in arguments:
            if name in self.graph.values and not self._parameter_like(name):
                self._settle(name)
        for position, op in enumerate(self.ops):
            before = len(self.out.nodes)
            self._emit(op, position, outputs)
            written = islice(reversed(self.out.nodes), len(self.out.nodes) - before)
            self.made[op.name] = list(written)
        results = [self.value(name, self._leaving(name)) for name in outputs]
        self.out.output(tuple(results))
        self.out.lint()
        return fx.GraphModule(self.root, self.out)

    def _parameter_like(self, name: str) -> bool:
        return name in self.graph.parameters or name in self.graph.buffers

    def _settle(self, name: str) -> None:
        """Move a value that crosses the block's boundary to the state in which its readers share
        it."""
        if self.assignment is None or self.layouts is None or self.layouts.fixed(name):
            return
        state = self.states[name]
        targets = self.layouts.targets(name, self.assignment.strategies)
        hub = default_state(state[1], targets, False)
        if hub != state[1]:
            moved = (state[0], hub)
            self.nodes[name, moved] = self._move(name, self.nodes[name, state], state, moved)
            self.states[name] = moved

    def _leaving(self, name: str) -> State:
        tensor = self.assignment.states.get(name, R) if self.assignment else R
        return self.low.boundary(name, tensor)

    # --- values in the state that a reader needs ---

    def value(self, name: str, wanted: State) -> fx.Node:
        """The node of a value in a state, re-sharded where needed: tensor axis first, then data."""
        if (name, wanted) in self.nodes:
            return self.nodes[name, wanted]
        state = self.states[name]
        middle = (state[0], wanted[1])
        node = self.nodes[name, state]
        if middle != state:
            node = self._move(name, node, state, middle)
        if wanted != middle:
            node = self._move(name, node, middle, wanted)
        return node

    def _move(self, name: str, node: fx.Node, source: State, target: State) -> fx.Node:
        if (name, target) in self.nodes:
            return self.nodes[name, target]
        k = 0 if source[0] != target[0] else 1
        axis = (self.low.data_axis, self.low.tensor_axis)[k]
        other = (self.low.tensor_axis, self.low.data_axis)[k]
        moved = node
        differentiable = self.graph.values[name].requires_grad
        if source[k].kind == "Rp" and target[k] == R and name in self.graph.parameters:
            raise AssertionError(
                f"parameter {name} is stored with a partial gradient but read whole"
            )
        ends = source[k], target[k]
        if name in self.away and any(p.sharded and p.dim < COPY_DIMS for p in ends):
            raise PlanError(
                f"plan: ep > 1: {name} goes from {ends[0]} to {ends[1]} between dispatch and "
                "combine, where copies of tokens stay with their experts; legal: splits of what "
                "stands behind the copies' dims, or ep=1"
            )
        if axis.size > 1 and (differentiable or target[k].kind != "Rp"):
            local = [local_view(p[k], p[1 - k], other.size) for p in (source, target)]
            moved = self._call(Reshard(*local, axis, self._uneven(name, source[k], axis)), (node,))
        self.nodes[name, target] = moved
        return moved

    def _uneven(self, name: str, source: Placement, axis: Axis) -> int | None:
        """The size of a split dim that its axis doesn't divide."""
        size = self.graph.values[name].shape[source.dim] if source.sharded else 0
        return size if size % axis.size else None

    def _call(self, module: nn.Module, args: tuple[Any, ...]) -> fx.Node:
        name = f"m{len(list(self.root.children()))}"
        self.root.add_module(name, module)
        return self.out.create_node("call_module", name, args)

    # --- operators ---

    def _strategies(self, op: Op) -> tuple[Strategy, Strategy]:
        data = self.low.data.strategies[op.name]
        if self.assignment is not None:
            return data, self.assignment.strategies[op.name]
        return data, Strategy(
            name="replicate", operands=(R,) * len(op.operands), results=(R,) * len(op.results)
        )

    def _emit(self, op: Op, position: int, outputs: Sequence[str]) -> None:
        data, tensor = self._strategies(op)
        states = zip(data.operands, tensor.operands, strict=True)
        wanted = iter(zip(op.operands, states, strict=True))
        leg = self.legs.get(op.name)

        def operand(name: str) -> fx.Node:
            value, state = next(wanted)
            assert value == name
            if leg is not None and name in leg.sent:
                return self._sent(name, state, leg.dispatch)
            return read_by(op, name, self.value(name, state), self.graph)

        args, kwargs = map_refs((op.args, dict(op.kwargs)), operand)
        results = [(d, t) for d, t in zip(data.results, tensor.results, strict=True)]
        args = self._localized(op, [self._here(a) for a in args], results)
        kwargs = {name: self._here(a) for name, a in kwargs.items()}
        made = self.table.ops[op.name]
        sizes = dict(made.sizes)
        for strategy, axis in ((data, self.low.data_axis), (tensor, self.low.tensor_axis)):
            if strategy.split_factor in sizes:
                sizes[strategy.split_factor] = axis.part(sizes[strategy.split_factor])[1]
        args, kwargs = divided(op, made, args, kwargs, sizes)
        node = self._travelling(op, args, results)
        if node is None:
            node = self._replaced(op, position, args, kwargs, data, tensor, results)
        if node is None:
            node = self.out.call_function(_callable(op), tuple(args), kwargs)
        self._bind(op, self._scaled(op, node, data, tensor), results, outputs)

    def _here(self, argument: Any) -> Any:
        """Traced on meta, run on this rank's device."""
        return self.low.device if isinstance(argument, torch.device) else argument

    def _bind(
        self, op: Op, node: fx.Node, results: Sequence[State], outputs: Sequence[str]
    ) -> None:
        """Name the results, and move each to the state in which it waits for its readers."""
        several = len(op.results) > 1 or op.results != (op.name,)
        if op.name in self.legs and op.short != COMBINE:
            self.away.update(op.results)
        for k, (value, state) in enumerate(zip(op.results, results, strict=True)):
            made = self.out.call_function(_getitem, (node, k)) if several else node
            self.states[value] = state
            self.nodes[value, state] = made
            if self.assignment is None or self.layouts is None:
                continue
            hub = self.assignment.states[value]
            targets = self.layouts.targets(value, self.assignment.strategies)
            direct = len(targets) == 1 and value not in outputs and hub in (state[1], targets[0])
            if hub != state[1] and not direct:
                moved = (state[0], hub)
                self.nodes[value, moved] = self._move(value, made, state, moved)
                self.states[value] = moved
            if value in outputs:
                leaving = self._leaving(value)
                self.nodes[value, leaving] = self.value(value, leaving)
                self._settle(value)

    # --- copies of tokens at their experts ---

    def _travelling(self, op: Op, args: list[Any], results: Sequence[State]) -> fx.Node | None:
        """The module standing in for an operator that sends copies of tokens away, or back, or
        multiplies them there."""
        leg = self.legs.get(op.name)
        if leg is None:
            return None
        assert self.low.exchange is not None
        if op.short == DISPATCH:
            if self.low.data_axis.size > 1 and not results[0][0].sharded:
                raise refused(op, "the data ranks have no tokens of their own")
            self.routes[op.name] = self._call(FindRoute(self.low.exchange, leg.experts), (args[1],))
            return self._call(Send(tokens=True), (args[0], self.routes[op.name]))
        route = self.routes[leg.dispatch]
        if op.short == GROUPED:
            x, weight, _, bias, transposed = (*args, *(None, False)[len(args) - 3 :])
            return self._call(GroupedProduct(transposed=transposed), (x, weight, bias, route))
        return self._call(Return(), (args[0], route)) if op.short == COMBINE else None

    def _sent(self, name: str, state: State, dispatch: str) -> fx.Node:
        """A value of copies that was made outside, sent after them."""
        key = name, state, dispatch
        if key not in self.sent:
            given = self.value(name, state), self.routes[dispatch]
            self.sent[key] = self._call(Send(tokens=False), given)
        return self.sent[key]

    def _sizes(self, op: Op, value: str, state: State) -> list[int]:
        """The local shape of a result; copies at their experts are as many as arrived."""
        shape = self.low.local_shape(value, state)
        travels = op.name in self.legs and op.short != COMBINE
        return [-1, 1, 1, *shape[3:]] if travels else shape

    def _localized(self, op: Op, args: Sequence[Any], results: Sequence[State]) -> list[Any]:
        """Arguments that hold sizes, rewritten with the local ones."""
        index = self.table.ops[op.name].shape_arg
        args = list(args)
        if op.short == "squeeze":  # as a reshape: a dim of one local element is not one to drop
            return [args[0], self._sizes(op, op.results[0], results[0])]
        if index is None or index >= len(args):
            return args
        shapes = [self._sizes(op, v, s) for v, s in zip(op.results, results, strict=True)]
        if op.short in ("split", "split_with_sizes"):
            dim = int(argument(op, 2, "dim", 0)) % len(shapes[0])
            sizes = [shape[dim] for shape in shapes]
            args[index] = (
                sizes[0] if op.short == "split" and isinstance(args[index], int) else sizes
            )
        elif op.short == "unflatten":
            dim = int(op.args[1]) % len(self.graph.values[op.operands[0]].shape)
            args[index] = shapes[0][dim : dim + len(args[index])]
        else:
            args[index] = shapes[0]
        return args

    def _scaled(self, op: Op, node: fx.Node, data: Strategy, tensor: Strategy) -> fx.Node:
        """A mean over a split factor is this rank's share of the mean."""
        kinds = self.table.ops[op.name].kinds
        scale = 1.0
        for strategy, axis in ((data, self.low.data_axis), (tensor, self.low.tensor_axis)):
            if kinds.get(strategy.split_factor) == "mean":
                size = self.table.ops[op.name].sizes[strategy.split_factor]
                scale *= axis.part(size)[1] / size
        return node if scale == 1.0 else self._call(ScaledMean(scale), (node,))

    def _replaced(
        self,
        op: Op,
        position: int,
        args: list[Any],
        kwargs: dict[str, Any],
        data: Strategy,
        tensor: Strategy,
        results: Sequence[State],
    ) -> fx.Node | None:
        """The module standing in for an operator, if its strategy or its nature asks for one."""
        if op.short in LEAVES:
            axes = ((data, self.low.data_axis), (tensor, self.low.tensor_axis))
            call = LeafCall(op, self.low.device, position, part_number(axes))
            return self._call(call, (*args[1], *([self.rng] if draws(op) else ())))
        if draws(op):
            return self._drawn(op, position, args, kwargs, results[0])
        if self._normalised(op) and self._global(op, data, tensor):
            return self._loss(op, args, data, tensor)
        if tensor.implementation == "embedding":
            start, _ = self.low.tensor_axis.part(self.graph.values[op.operands[0]].shape[0])
            return self._call(ParallelEmbedding(start), tuple(args))
        for strategy, axis in ((data, self.low.data_axis), (tensor, self.low.tensor_axis)):
            if strategy.implementation == "batch_norm":
                size = self.table.ops[op.name].sizes[strategy.split_factor]
                return self._call(SyncBatchNorm(axis, size), tuple(args))
        if self.low.weight_gradients is not None:
            return self._deferred(op, args, kwargs)
        return None

    def _deferred(self, op: Op, args: list[Any], kwargs: dict[str, Any]) -> fx.Node | None:
        """A product whose weight's gradient is put off: the weight is read as it is stored."""
        assert self.low.weight_gradients is not None
        if op.short not in PRODUCTS or kwargs or len(args) != len(op.operands):
            return None
        weight = 2 if op.short == "addmm" else 1
        given = [
            node.op == "placeholder" and value in self.low.deferrable
            for node, value in zip(args, op.operands, strict=True)
        ]
        sizes = [len(self.graph.values[v].shape) for v in op.operands]
        biased = len(args) == 3 and sizes[0 if op.short == "addmm" else 2] != 1
        if not given[weight] or sizes[weight] != 2 or biased:
            return None
        bias = given[0 if op.short == "addmm" else 2] if len(args) == 3 else False
        return self._call(
            DeferredProduct(op.short, self.low.weight_gradients, defer_bias=bias), tuple(args)
        )

    def _drawn(
        self, op: Op, position: int, args: list[Any], kwargs: dict[str, Any], state: State
    ) -> fx.Node | None:
        """Draws that are the same under every plan; others run on one device alone."""
        if op.name in self.legs:
            raise refused(op, "its mask is by token, and it does not know which it has")
        if op.short == ATTENTION:
            return self._attention(op, position, args, kwargs, state)
        if op.short in COUNTED:
            dtype = self.graph.values[op.results[0]].dtype
            module = drawn(op, dtype, self._grid(op.results[0], state), position)
            return self._call(module, (self.rng, *(a for a in args if isinstance(a, fx.Node))))
        if self.low.data_axis.size * self.low.tensor_axis.size == 1:
            return None
        raise PlanError(
            f"plan: {op.key} ({op.target}) draws random numbers in a way of its own, which would "
            "differ from rank to rank; legal: dropout, rand, randn, bernoulli and the like, or "
            "dp=1 and tp=1"
        )

    def _attention(
        self, op: Op, position: int, args: list[Any], kwargs: dict[str, Any], state: State
    ) -> fx.Node:
        given = dict(zip(("q", "k", "v", "mask", "p", "causal"), args, strict=False)) | kwargs
        q, k = (self.graph.values[name].shape for name in op.operands[:2])
        scores = (*q[:-1], k[-2])
        grid = self._grid(op.results[0], state, scores)
        call = (
            given["q"],
            given["k"],
            given["v"],
            given.get("mask", given.get("attn_mask")),
            given.get("p", given.get("dropout_p", 0.0)),
            given.get("causal", given.get("is_causal", False)),
            given.get("scale"),
            q[-3] != k[-3],
            self.rng,
        )
        return self._call(DropoutAttention(grid, position), call)

    def _grid(self, value: str, state: State, shape: Sequence[int] | None = None) -> IndexGrid:
        axes = (self.low.data_axis, self.low.tensor_axis)
        cuts = [
            (
                local_view(state[k], state[0], axes[0].size) if k else state[k],
                axes[k].size,
                axes[k].rank,
            )
            for k in (0, 1)
        ]
        shape = tuple(shape or self.graph.values[value].shape)
        batched = self.table.has_batch(value) or value in self._single_rows
        return IndexGrid(shape, cuts, math.prod(shape) // self.graph.batch_size if batched else 0)

    @cached_property
    def _single_rows(self) -> frozenset[str]:
        return single_rows(self.graph)

    # --- losses ---

    def _global(self, op: Op, data: Strategy, tensor: Strategy) -> bool:
        split = data.name != "replicate" or tensor.name != "replicate"
        return split or self.low.microbatches > 1

    def _normalised(self, op: Op) -> bool:
        """Whether an operator is a loss over rows that are counted globally: reduced,
        unweighted."""
        reduced = op.short in LOSSES and argument(op, 3, "reduction", 1) != 0
        return reduced and self.table.ops[op.name].known

    def _counted(self, op: Op, known: Iterable[str]) -> bool:
        """Whether the loss's rows are counted up front, over all micro-batches: its target is an
        input."""
        if not self._normalised(op) or argument(op, 3, "reduction", 1) != 1:
            return False
        data, tensor = self._strategies(op)
        return self._global(op, data, tensor) and op.operands[1] in known

    def _loss(self, op: Op, args: list[Any], data: Strategy, tensor: Strategy) -> fx.Node:
        on_axes = ((data, self.low.data_axis), (tensor, self.low.tensor_axis))
        # the data axis splits classes too where they are rows, as in a contrastive loss
        vocabulary = next((axis for x, axis in on_axes if x.implementation), None)
        sizes = self.table.ops[op.name].sizes
        count = tuple(axis for x, axis in on_axes if x.split_factor and not x.implementation)
        module = GlobalLoss(
            LOSSES[op.short],
            int(argument(op, 3, "reduction", 1)),
            vocabulary,
            count,
            first_class=vocabulary.part(sizes["vocab"])[0] if vocabulary else 0,
        )
        ignore = argument(op, 4, "ignore_index", -100)
        smoothing = argument(op, 5, "label_smoothing", 0.0)
        return self._call(module, (args[0], args[1], ignore, smoothing, self.counts.get(op.name)))


def local_view(placement: Placement, other: Placement, other_size: int) -> Placement:
    """A placement as seen on a tensor already split by the other axis: parts before it are
    fewer."""
    if (
        placement.sharded
        and other.sharded
        and other.dim == placement.dim
        and other.split < placement.split
    ):
        return Placement("S", placement.dim, placement.split // other_size)
    return placement


def _callable(op: Op) -> Any:
    namespace, name, overload = op.target.split(".")
    if name in ("view", "_unsafe_view", "squeeze") and overload != "dtype":
        name, overload = "reshape", "default"  # a shard's memory need not allow a view
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _getitem(values: Sequence[torch.Tensor], k: int) -> torch.Tensor:
    return values[k]
