"""Code generation: the steps of one block (`costmodel.sharding.moves`) as a local fx graph, with
operators at local shapes and re-shards where states change.

The steps are those of the tensor axis. On the outer axes (data, context) a value is in the states
in which it was made, and is moved from there, last, for each other state that a reader needs. Only
tokens that the tensor axis splits, too, are put together on it before the context axis moves them:
of one dim the context axis has the outer parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Op, argument, map_refs
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.rules import divided, draws, runs_as_reshape, traits_of
from meshwright.executor.backward import EightBitExperts
from meshwright.executor.host_values import read
from meshwright.executor.lowering.context import Context, State, seen_locally
from meshwright.executor.lowering.implementations import Scaled
from meshwright.executor.lowering.replacements import Call, callable_of, is_counted, replacement
from meshwright.executor.resharding import Axis, Reshard, SliceAxis
from meshwright.planner.operators import expert_order, grouped_rows, grouped_weights, inverse_of
from meshwright.planner.plan import PlanError, legs, refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A local graph. After its values it takes the global counts of `losses` (positions of
    operators), then the random state if `random`, then what it `keeps` of earlier slices. `made`
    are its nodes by operator, without the re-shards between them, of which `gathers` make values
    whole on the tensor axis; `exchanges` says whether it sends tokens to other ranks' experts."""

    module: fx.GraphModule
    losses: tuple[int, ...]
    random: bool
    keeps: bool
    made: Mapping[str, Sequence[fx.Node]]
    gathers: Sequence[fx.Node]
    exchanges: bool


class Emitter:
    """Writes one local fx graph. `outside` are the states on the outer axes of what enters."""

    def __init__(
        self, context: Context, steps: Sequence[sharding.Step], outside: Mapping[str, State]
    ) -> None:
        self.context, self.steps = context, steps
        self.graph, self.table = context.graph, context.table
        self.out = fx.Graph()
        self.root = nn.Module()
        self.outside = dict(outside)
        self.nodes = Memo[tuple[str, State], fx.Node]()
        self.made: dict[str, list[fx.Node]] = {}
        self.gathers: list[fx.Node] = []
        self.ops = [step.op for step in steps if isinstance(step, sharding.Run)]
        self.positions = {op.name: k for k, op in enumerate(self.ops)}
        self.strategies = {
            step.op.name: (
                *(layout.strategies[step.op.name] for layout in context.outer),
                step.strategy,
            )
            for step in steps
            if isinstance(step, sharding.Run)
        }
        self.counts: dict[str, fx.Node] = {}
        self.rng: fx.Node | None = None
        self.kept: fx.Node | None = None
        outputs = [step.value for step in steps if isinstance(step, sharding.Leave)]
        shared_out = context.exchange is not None
        self.legs = legs(self.ops, self.graph, self.table, outputs) if shared_out else {}
        self.routes: dict[str, fx.Node] = {}
        self.sent: dict[tuple[str, State, str], fx.Node] = {}
        self.away: set[str] = set()  # values between a dispatch and its combine

    def write(self, outputs: Sequence[str]) -> Written:
        """The graph that takes what enters, in order, and gives `outputs`."""
        entering = {
            step.value: step.state for step in self.steps if isinstance(step, sharding.Enter)
        }
        for i, (name, state) in enumerate(entering.items()):
            self.nodes[name, (*self.outside[name], state)] = self.out.placeholder(f"a{i}")
        losses = [op for op in self.ops if self._counted(op) and op.operands[1] in entering]
        self.counts = {op.name: self.out.placeholder(f"n{i}") for i, op in enumerate(losses)}
        if any(draws(op) for op in self.ops):
            self.rng = self.out.placeholder("rng")
        if any(self._keeps(op) for op in self.ops):
            self.kept = self.out.placeholder("kept")
        leaving: dict[str, fx.Node] = {}
        for step in self.steps:
            match step:
                case sharding.Run():
                    before = len(self.out.nodes)
                    self._run(step.op)
                    written = islice(reversed(self.out.nodes), len(self.out.nodes) - before)
                    self.made[step.op.name] = [*written]
                case sharding.Move(value, source, target) if not step.known:
                    outer = self.outside[value]
                    self._move(value, (*outer, source), (*outer, target))
                case sharding.Leave(value, state):
                    leaving[value] = self.value(value, self.context.boundary(value, state))
        self.out.output(tuple(leaving[name] for name in outputs))
        self.out.lint()
        return Written(
            module=fx.GraphModule(self.root, self.out),
            losses=tuple(self.positions[op.name] for op in losses),
            random=self.rng is not None,
            keeps=self.kept is not None,
            made=self.made,
            gathers=self.gathers,
            exchanges=bool(self.legs),
        )

    def _counted(self, op: Op) -> bool:
        return is_counted(op, self.context, self.strategies[op.name])

    def _keeps(self, op: Op) -> bool:
        """Whether an operator reads what it kept of earlier slices."""
        sliced = isinstance(self.context.context_axis, SliceAxis)
        return sliced and any(
            s.implementation == sharding.BY_BLOCKS for s in self.strategies[op.name]
        )

    # --- values ---

    def value(self, name: str, wanted: State) -> fx.Node:
        """The node of a value that is in a state on the tensor axis, in that state on all."""
        at: State = (*self.outside[name], wanted[-1])
        for k in range(len(wanted) - 1):
            target = (*at[:k], wanted[k], *at[k + 1 :])
            if at[k] != wanted[k] and self._nested(name, k, at, target):
                joined = (*at[:-1], sharding.R)
                self._move(name, at, joined)
                self._move(name, joined, (*target[:-1], sharding.R))
                at = (*target[:-1], sharding.R)
                target = (*at[:-1], wanted[-1])
            self._move(name, at, target)
            at = target
        return self.nodes[name, wanted]

    def _nested(self, name: str, k: int, source: State, target: State) -> bool:
        """Whether an outer axis moves tokens whose parts the tensor axis splits further."""
        tensor = source[-1]
        moved = (p for p in (source[k], target[k]) if p.sharded)
        return tensor.sharded and any(
            (p.dim, p.split) == (tensor.dim, tensor.split)
            and sharding.token_dim(self.table, name, p)
            for p in moved
        )

    def _move(self, name: str, source: State, target: State) -> fx.Node:
        """The node of a value moved on one axis, once."""
        return self.nodes.of((name, target), lambda: self._moved(name, source, target))

    def _moved(self, name: str, source: State, target: State) -> fx.Node:
        node, context = self.nodes[name, source], self.context
        (k,) = (j for j, (a, b) in enumerate(zip(source, target, strict=True)) if a != b)
        self._check_at_home(name, source[k], target[k])
        axis = context.axes[k]
        differentiable = self.graph.values[name].requires_grad
        if axis.size == 1 or not (differentiable or target[k].kind != "Rp"):
            return node
        start, end = (seen_locally(k, state[k], state, context.axes) for state in (source, target))
        if isinstance(axis, SliceAxis):
            return self._sliced(node, name, (start, end), axis)
        size = self.graph.values[name].shape[source[k].dim] if source[k].sharded else 0
        uneven = size if size % axis.size else None
        before, after = (context.lies_in_zigzag(name, k, state[k]) for state in (source, target))
        reshard = Reshard(start, end, axis, uneven, (before, after))
        moved = self._call(reshard, (node,))
        if axis is context.tensor_axis and reshard.gathers:
            self.gathers.append(moved)
        return moved

    def _sliced(
        self,
        node: fx.Node,
        name: str,
        states: tuple[sharding.Placement, sharding.Placement],
        axis: SliceAxis,
    ) -> fx.Node:
        """The node of a value moved between states on the axis of slices: what is whole is cut. Its
        gradients are those by slices, which add up as those of micro-batches do."""
        start, end = states
        if start.kind in ("S", "P"):
            raise PlanError(
                f"{name} is {start} on the slices of a micro-batch, and read as {end}",
                place="plan: slices",
                legal="1",
                way_out="drop slices",
            )
        return node if end.kind in ("R", "Rp") else self._call(InSlice(end, axis), (node,))

    def _check_at_home(
        self, name: str, source: sharding.Placement, target: sharding.Placement
    ) -> None:
        if name in self.away and any(
            p.sharded and p.dim < sharding.COPY_DIMS for p in (source, target)
        ):
            raise PlanError(
                f"{name} goes from {source} to {target} between dispatch and "
                "combine, where copies of tokens stay with their experts",
                place="plan: ep > 1",
                legal="splits of what stands behind the copies' dims, or ep=1",
            )

    def _call(self, module: nn.Module, args: Sequence[Any]) -> fx.Node:
        name = f"m{len(list(self.root.children()))}"
        self.root.add_module(name, module)
        return self.out.create_node("call_module", name, tuple(args))

    # --- operators ---

    def _run(self, op: Op) -> None:
        call = self._called(op)
        node = self._travelling(call)
        if node is None and (replaced := replacement(call, self.context)):
            node = self._call(*replaced)
        if node is None:
            node = self.out.call_function(callable_of(op), tuple(call.args), call.kwargs)
        node = self._scaled(call, node)
        if self._at_experts(op):
            self.away.update(op.results)
        several = len(op.results) > 1 or op.results != (op.name,)
        for k, (value, state) in enumerate(zip(op.results, call.results, strict=True)):
            self.outside[value] = state[:-1]
            self.nodes[value, state] = (
                self.out.call_function(_getitem, (node, k)) if several else node
            )

    def _called(self, op: Op) -> Call:
        """The call with local operands, sizes and device."""
        chosen = self.strategies[op.name]
        states = zip(*(strategy.operands for strategy in chosen), strict=True)
        operands = iter(
            [self._operand(op, *operand) for operand in zip(op.operands, states, strict=True)]
        )
        args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda _: next(operands))
        results = list(zip(*(strategy.results for strategy in chosen), strict=True))
        args = self._localized(op, [self._here(a) for a in args], results)
        kwargs = {name: self._here(a) for name, a in kwargs.items()}
        factors = self.table.ops[op.name]
        sizes = dict(factors.sizes)
        for strategy, axis in zip(chosen, self.context.axes, strict=True):
            if strategy.split_factor in sizes:
                sizes[strategy.split_factor] = axis.part(sizes[strategy.split_factor])[1]
        args, kwargs = divided(op, factors, args, kwargs, sizes)
        return Call(
            op=op,
            position=self.positions[op.name],
            strategies=chosen,
            args=args,
            kwargs=kwargs,
            results=results,
            count=self.counts.get(op.name),
            rng=self.rng,
            kept=self.kept,
        )

    def _operand(self, op: Op, name: str, state: State) -> fx.Node:
        leg = self.legs.get(op.name)
        if leg is not None and name in leg.sent:
            return self._sent(name, state, leg.dispatch)
        node = self.value(name, state)
        return self._detached(node) if self._without_history(op, name) else node

    def _without_history(self, op: Op, name: str) -> bool:
        """Whether an operator ran under `torch.no_grad` in the user's model, on an operand with a
        gradient. The graph records that by floating-point results without one."""
        results = [self.graph.values[r] for r in op.results]
        return (
            self.graph.values[name].requires_grad
            and op.short != "detach"
            and not any(meta.requires_grad for meta in results)
            and any(meta.dtype.is_floating_point or meta.dtype.is_complex for meta in results)
        )

    def _detached(self, node: fx.Node) -> fx.Node:
        """So that autograd keeps nothing for the reader, and no gradient takes a closed way."""
        return self.out.call_function(torch.ops.aten.detach.default, (node,))

    def _here(self, argument: Any) -> Any:
        """Traced on meta, run on this rank's device."""
        return self.context.device if isinstance(argument, torch.device) else argument

    def _localized(self, op: Op, args: Sequence[Any], results: Sequence[State]) -> list[Any]:
        """Arguments that hold sizes, rewritten with the local ones."""
        index = self.table.ops[op.name].shape_arg
        args = list(args)
        if runs_as_reshape(op):  # squeeze too: a dim of one local element is not one to drop
            return [args[0], self._sizes(op, op.results[0], results[0])]
        if index is None or index >= len(args):
            return args
        shapes = [self._sizes(op, v, s) for v, s in zip(op.results, results, strict=True)]
        holds = traits_of(op).sizes
        if holds == "parts":
            dim = int(argument(op, 2, "dim", 0)) % len(shapes[0])
            sizes = [shape[dim] for shape in shapes]
            args[index] = sizes[0] if isinstance(args[index], int) else sizes
        elif holds == "dims":
            dim = int(op.args[1]) % len(self.graph.values[op.operands[0]].shape)
            args[index] = shapes[0][dim : dim + len(args[index])]
        else:
            args[index] = shapes[0]
        return args

    def _sizes(self, op: Op, value: str, state: State) -> list[int]:
        """The local shape of a result; copies at their experts are as many as arrived."""
        shape = self.context.local_shape(value, state)
        return [-1, 1, 1, *shape[3:]] if self._at_experts(op) else shape

    def _scaled(self, call: Call, node: fx.Node) -> fx.Node:
        """A mean over a split factor is this rank's share of the mean, a sum over rows that of m
        micro-batches."""
        factors = self.table.ops[call.op.name]
        scale: float = self.context.microbatches if call.op.key in self.context.sums else 1
        for strategy, axis in zip(call.strategies, self.context.axes, strict=True):
            if factors.kinds.get(strategy.split_factor) == "mean":
                size = factors.sizes[strategy.split_factor]
                scale *= axis.part(size)[1] / size
        return node if scale == 1 else self._call(Scaled(scale), (node,))

    # --- copies of tokens at their experts ---

    def _at_experts(self, op: Op) -> bool:
        """Whether an operator's results are copies at their experts."""
        return op.name in self.legs and traits_of(op).experts != "combine"

    def _travelling(self, call: Call) -> fx.Node | None:
        """The module standing in for an operator that sends copies of tokens away, or back, or
        multiplies them there."""
        op, args, part = call.op, call.args, traits_of(call.op).experts
        leg = self.legs.get(op.name)
        if leg is None:
            return None
        assert self.context.exchange is not None
        if part == "dispatch":
            outer = zip(call.results[0][:-1], self.context.axes, strict=False)
            if any(axis.size > 1 and not placement.sharded for placement, axis in outer):
                raise refused(op, "the data ranks have no tokens of their own")
            find = FindRoute(self.context.exchange, leg.experts)
            self.routes[op.name] = self._call(find, (args[1],))
            return self._call(Send(tokens=True), (args[0], self.routes[op.name]))
        route = self.routes[leg.dispatch]
        if part == "product":
            x, weight = args[:2]
            bias = args[3] if len(args) > 3 else None
            transposed = args[4] if len(args) > 4 else False
            product: nn.Module = GroupedProduct(transposed=transposed)
            if by := self.context.scaled_by(op):
                product = EightBitExperts(product, by=by, dim=2 if transposed else 1)
            return self._call(product, (x, weight, bias, route))
        return self._call(Return(), (args[0], route)) if part == "combine" else None

    def _sent(self, name: str, state: State, dispatch: str) -> fx.Node:
        """A value of copies that was made outside, sent after them."""
        key = name, state, dispatch
        if key not in self.sent:
            operands = self.value(name, state), self.routes[dispatch]
            self.sent[key] = self._call(Send(tokens=False), operands)
        return self.sent[key]


class InSlice(nn.Module):
    """The part of a whole tensor in a slice; what is to be summed is all in the first one."""

    def __init__(self, placement: sharding.Placement, axis: SliceAxis) -> None:
        super().__init__()
        self.placement, self.axis = placement, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.placement.sharded:
            return self.axis.local(x, self.placement).contiguous()
        return x * float(self.axis.rank == 0)


def _getitem(values: Sequence[torch.Tensor], k: int) -> torch.Tensor:
    return values[k]


# --- experts --------------------------------------------------------------------------------------

# Experts shared out: each token's copies travel to the ranks of their experts, and home again.
#
# ep ranks with tokens of their own hold E/ep experts each, in rank order. Between `dispatch` and
# `combine` a value of a rank's copies, traced as [b, s, k, ...], is laid out [n, 1, 1, ...]
# instead: the n copies that arrived from all ep ranks, sorted by expert. What works on each copy
# alone runs there as it was traced, and a value made outside (the router's weights) is sent the
# same way.
#
#     own copies, by token  --order-->  by expert  --all-to-all-->  by sender, then expert
#                           --arranged-->  by expert
#
# The way home, and the backward of each way, is the inverse. How many copies travel is known when
# the router has chosen: the ranks exchange E numbers, which cost the host one wait. A rank that
# gets no copy takes part with none.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """Permutations and counts of the copies of a rank's tokens on their way, `copies` = (b, s, k),
    and what comes in their place.

    `order` sorts this rank's copies by expert, `arranged` those that arrive; `home` and `restored`
    undo them. `sent` and `received` are copies per rank, `counts` what arrived per expert.
    """

    axis: Axis
    copies: tuple[int, ...]
    order: torch.Tensor
    home: torch.Tensor
    arranged: torch.Tensor
    restored: torch.Tensor
    sent: list[int]
    received: list[int]
    counts: list[int]


class FindRoute(nn.Module):
    """Experts of each token [b, s, k] -> the route of their copies over `axis`."""

    def __init__(self, axis: Axis, experts: int) -> None:
        super().__init__()
        self.axis, self.experts = axis, experts

    def forward(self, chosen: torch.Tensor) -> Route:
        axis, local_experts = self.axis, self.experts // self.axis.size
        order, counts = expert_order(chosen, self.experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=axis.group)
        numbers = torch.stack([counts, arriving]).view(2, axis.size, local_experts)
        leaving, coming = read(numbers, lambda: _balanced(chosen.numel(), axis, local_experts))
        expert = torch.arange(local_experts, device=chosen.device).repeat(axis.size)
        received = [sum(row) for row in coming]
        expert = expert.repeat_interleave(arriving, output_size=sum(received))
        arranged = expert.argsort(stable=True)
        return Route(
            axis=axis,
            copies=tuple(chosen.shape),
            order=order,
            home=inverse_of(order),
            arranged=arranged,
            restored=inverse_of(arranged),
            sent=[sum(row) for row in leaving],
            received=received,
            counts=[sum(column) for column in zip(*coming, strict=True)],
        )


def _balanced(copies: int, axis: Axis, local_experts: int) -> list[list[list[int]]]:
    """Copies that a rehearsal sends to each expert of each rank, and gets from each rank for each
    of its experts: as many as any other, the first experts one more."""
    quotient, more = divmod(copies, axis.size * local_experts)
    per_expert = [
        [quotient + (rank * local_experts + e < more) for e in range(local_experts)]
        for rank in range(axis.size)
    ]
    return [per_expert, [per_expert[axis.rank]] * axis.size]


def _outward(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """This rank's copies, sorted by expert -> those of its experts. Copies of no expert stay."""
    out = rows.new_empty(sum(route.received), rows.shape[1])
    leaving = rows[: sum(route.sent)]
    dist.all_to_all_single(out, leaving, route.received, route.sent, group=route.axis.group)
    return out.index_select(0, route.arranged)


def _homeward(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Copies of this rank's experts -> its own, each in its token's place; zeros for no expert."""
    out, sent = rows.new_empty(len(route.home), rows.shape[1]), sum(route.sent)
    back = rows.index_select(0, route.restored)
    dist.all_to_all_single(out[:sent], back, route.sent, route.received, group=route.axis.group)
    out[sent:].zero_()
    return out.index_select(0, route.home)


class _Send(torch.autograd.Function):
    """Tokens [b, s, h], or values of their copies [b, s, k, ...], to the experts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: Route, tokens: bool) -> torch.Tensor:
        ctx.route, ctx.tokens, ctx.shape = route, tokens, x.shape
        features = x.shape[2:] if tokens else x.shape[3:]
        order = route.order // route.copies[2] if tokens else route.order
        rows = x.reshape(-1, prod(features)).index_select(0, order)
        return _outward(rows, route).view(-1, 1, 1, *features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        route, (grad,) = ctx.route, grads
        returned = _homeward(grad.reshape(len(grad), prod(grad.shape[3:])), route)
        if ctx.tokens:
            returned = returned.view(*route.copies, -1).sum(2)
        return returned.view(ctx.shape), None, None


class _Return(torch.autograd.Function):
    """Results [n, 1, 1, h] home, and each token's added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return _homeward(x.flatten(0, 2), route).view(*route.copies, -1).sum(2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        route, (grad,) = ctx.route, grads
        rows = grad.flatten(0, 1).index_select(0, route.order // route.copies[2])
        return _outward(rows, route).view(-1, 1, 1, grad.shape[2]), None


class _Product(torch.autograd.Function):
    """Copies [n, 1, 1, i], sorted, times the matrices [E, i, o] of this rank's experts, plus their
    biases [E, o]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counts: list[int],
        transposed: bool,
    ) -> torch.Tensor:
        rows = x.flatten(0, 2)
        ctx.save_for_backward(rows, weight)
        ctx.counts, ctx.transposed = counts, transposed
        matrices = weight.transpose(1, 2) if transposed else weight
        return grouped_rows(rows, matrices, counts, bias).view(-1, 1, 1, matrices.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows, weight), counts = ctx.saved_tensors, ctx.counts
        to_rows, to_weight, to_bias, *_ = ctx.needs_input_grad
        grad = grads[0].flatten(0, 2)
        back = weight if ctx.transposed else weight.transpose(1, 2)
        left, right = (grad, rows) if ctx.transposed else (rows, grad)
        ones = grad.new_ones(len(grad), 1)
        return (
            grouped_rows(grad, back, counts).view(-1, 1, 1, rows.shape[1]) if to_rows else None,
            grouped_weights(left, right, counts) if to_weight else None,
            grouped_weights(ones, grad, counts).squeeze(1) if to_bias else None,
            None,
            None,
        )


_send: Callable[..., torch.Tensor] = _Send.apply
_return: Callable[..., torch.Tensor] = _Return.apply
_product: Callable[..., torch.Tensor] = _Product.apply


class Send(nn.Module):
    """Tokens, or values of their copies, along a route."""

    def __init__(self, *, tokens: bool) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        return _send(x, route, self.tokens)


class Return(nn.Module):
    """Results home, each token's copies added up."""

    def forward(self, x: torch.Tensor, route: Route) -> torch.Tensor:
        return _return(x, route)


class GroupedProduct(nn.Module):
    """The copies that arrived, each times the matrix of its expert, plus its bias."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, route: Route
    ) -> torch.Tensor:
        return _product(x, weight, bias, route.counts, self.transposed)
