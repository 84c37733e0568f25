"""Code generation: the steps of one block (`costmodel.sharding.moves`) as a local fx graph, with
operators at local shapes and re-shards where states change.

The steps are those of the tensor axis. On the data axis a value is in the state in which it was
made, and is moved from there, last, for each other state that a reader needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx, nn

from meshwright.costmodel.graph import Op, argument, map_refs
from meshwright.costmodel.rules import divided, draws, runs_as_reshape, traits_of
from meshwright.costmodel.sharding import COPY_DIMS, Enter, Leave, Move, Placement, Run, Step
from meshwright.executor.lowering.context import Context, State, local_view
from meshwright.executor.lowering.experts import (
    FindRoute,
    GroupedProduct,
    Return,
    Send,
    legs,
    refused,
)
from meshwright.executor.lowering.implementations import Scaled
from meshwright.executor.lowering.losses import is_counted
from meshwright.executor.lowering.replacements import Call, callable_of, replacement
from meshwright.executor.lowering.reshard import Reshard
from meshwright.planner.plan import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A local graph. After its values it takes the global counts of `losses` (positions of
    operators), then the random state if `random`. `made` are its nodes by operator, without
    the re-shards between them, of which `gathers` make values whole on the tensor axis; `exchanges`
    says whether it sends tokens to other ranks' experts."""

    module: fx.GraphModule
    losses: tuple[int, ...]
    random: bool
    made: Mapping[str, Sequence[fx.Node]]
    gathers: Sequence[fx.Node]
    exchanges: bool


class Emitter:
    """Writes one local fx graph. `on_data` are the states on the data axis of what enters."""

    def __init__(
        self, context: Context, steps: Sequence[Step], on_data: Mapping[str, Placement]
    ) -> None:
        self.context, self.steps = context, steps
        self.graph, self.table = context.graph, context.table
        self.out = fx.Graph()
        self.root = nn.Module()
        self.on_data = dict(on_data)
        self.nodes: dict[tuple[str, State], fx.Node] = {}
        self.made: dict[str, list[fx.Node]] = {}
        self.gathers: list[fx.Node] = []
        self.ops = [step.op for step in steps if isinstance(step, Run)]
        self.positions = {op.name: k for k, op in enumerate(self.ops)}
        self.strategies = {
            step.op.name: (context.data.strategies[step.op.name], step.strategy)
            for step in steps
            if isinstance(step, Run)
        }
        self.counts: dict[str, fx.Node] = {}
        self.rng: fx.Node | None = None
        outputs = [step.value for step in steps if isinstance(step, Leave)]
        shared_out = context.exchange is not None
        self.legs = legs(self.ops, self.graph, self.table, outputs) if shared_out else {}
        self.routes: dict[str, fx.Node] = {}
        self.sent: dict[tuple[str, State, str], fx.Node] = {}
        self.away: set[str] = set()  # values between a dispatch and its combine

    def write(self, outputs: Sequence[str]) -> Written:
        """The graph that takes what enters, in order, and gives `outputs`."""
        entering = {step.value: step.state for step in self.steps if isinstance(step, Enter)}
        for i, (name, state) in enumerate(entering.items()):
            self.nodes[name, (self.on_data[name], state)] = self.out.placeholder(f"a{i}")
        losses = [op for op in self.ops if self._counted(op) and op.operands[1] in entering]
        self.counts = {op.name: self.out.placeholder(f"n{i}") for i, op in enumerate(losses)}
        if any(draws(op) for op in self.ops):
            self.rng = self.out.placeholder("rng")
        leaving: dict[str, fx.Node] = {}
        for step in self.steps:
            match step:
                case Run():
                    before = len(self.out.nodes)
                    self._run(step.op)
                    written = islice(reversed(self.out.nodes), len(self.out.nodes) - before)
                    self.made[step.op.name] = [*written]
                case Move(value, source, target) if not step.known:
                    data = self.on_data[value]
                    self._move(value, (data, source), (data, target))
                case Leave(value, state):
                    leaving[value] = self.value(value, self.context.boundary(value, state))
        self.out.output(tuple(leaving[name] for name in outputs))
        self.out.lint()
        return Written(
            module=fx.GraphModule(self.root, self.out),
            losses=tuple(self.positions[op.name] for op in losses),
            random=self.rng is not None,
            made=self.made,
            gathers=self.gathers,
            exchanges=bool(self.legs),
        )

    def _counted(self, op: Op) -> bool:
        return is_counted(op, self.context, self.strategies[op.name])

    # --- values ---

    def value(self, name: str, wanted: State) -> fx.Node:
        """The node of a value that is in a state on the tensor axis, in that state on both."""
        return self._move(name, (self.on_data[name], wanted[1]), wanted)

    def _move(self, name: str, source: State, target: State) -> fx.Node:
        """The node of a value moved on one axis, once."""
        if (name, target) not in self.nodes:
            node = self.nodes[name, source]
            k = 0 if source[0] != target[0] else 1
            self._check_at_home(name, source[k], target[k])
            axis, other = self.context.axes[k], self.context.axes[1 - k]
            differentiable = self.graph.values[name].requires_grad
            if axis.size > 1 and (differentiable or target[k].kind != "Rp"):
                start, end = (local_view(p[k], p[1 - k], other.size) for p in (source, target))
                size = self.graph.values[name].shape[source[k].dim] if source[k].sharded else 0
                uneven = size if size % axis.size else None
                reshard = Reshard(start, end, axis, uneven)
                node = self._call(reshard, (node,))
                self.gathers += [node] * (k == 1 and reshard.gathers)
            self.nodes[name, target] = node
        return self.nodes[name, target]

    def _check_at_home(self, name: str, source: Placement, target: Placement) -> None:
        if name in self.away and any(p.sharded and p.dim < COPY_DIMS for p in (source, target)):
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
        if node is None and (found := replacement(call, self.context)):
            node = self._call(*found)
        if node is None:
            node = self.out.call_function(callable_of(op), tuple(call.args), call.kwargs)
        node = self._scaled(call, node)
        if self._at_experts(op):
            self.away.update(op.results)
        several = len(op.results) > 1 or op.results != (op.name,)
        for k, (value, state) in enumerate(zip(op.results, call.results, strict=True)):
            self.on_data[value] = state[0]
            self.nodes[value, state] = (
                self.out.call_function(_getitem, (node, k)) if several else node
            )

    def _called(self, op: Op) -> Call:
        """The call with local operands, sizes and device."""
        data, tensor = self.strategies[op.name]
        states = zip(data.operands, tensor.operands, strict=True)
        operands = iter(
            [self._operand(op, *each) for each in zip(op.operands, states, strict=True)]
        )
        args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda _: next(operands))
        results = list(zip(data.results, tensor.results, strict=True))
        args = self._localized(op, [self._here(a) for a in args], results)
        kwargs = {name: self._here(a) for name, a in kwargs.items()}
        made = self.table.ops[op.name]
        sizes = dict(made.sizes)
        for strategy, axis in zip((data, tensor), self.context.axes, strict=True):
            if strategy.split_factor in sizes:
                sizes[strategy.split_factor] = axis.part(sizes[strategy.split_factor])[1]
        args, kwargs = divided(op, made, args, kwargs, sizes)
        return Call(
            op=op,
            position=self.positions[op.name],
            strategies=(data, tensor),
            args=args,
            kwargs=kwargs,
            results=results,
            count=self.counts.get(op.name),
            rng=self.rng,
            travels=op.name in self.legs,
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
        made = self.table.ops[call.op.name]
        scale: float = self.context.microbatches if call.op.key in self.context.sums else 1
        for strategy, axis in zip(call.strategies, self.context.axes, strict=True):
            if made.kinds.get(strategy.split_factor) == "mean":
                size = made.sizes[strategy.split_factor]
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
            if self.context.data_axis.size > 1 and not call.results[0][0].sharded:
                raise refused(op, "the data ranks have no tokens of their own")
            find = FindRoute(self.context.exchange, leg.experts)
            self.routes[op.name] = self._call(find, (args[1],))
            return self._call(Send(tokens=True), (args[0], self.routes[op.name]))
        route = self.routes[leg.dispatch]
        if part == "product":
            x, weight = args[:2]
            bias = args[3] if len(args) > 3 else None
            transposed = args[4] if len(args) > 4 else False
            return self._call(GroupedProduct(transposed=transposed), (x, weight, bias, route))
        return self._call(Return(), (args[0], route)) if part == "combine" else None

    def _sent(self, name: str, state: State, dispatch: str) -> fx.Node:
        """A value of copies that was made outside, sent after them."""
        key = name, state, dispatch
        if key not in self.sent:
            given = self.value(name, state), self.routes[dispatch]
            self.sent[key] = self._call(Send(tokens=False), given)
        return self.sent[key]


def _getitem(values: Sequence[torch.Tensor], k: int) -> torch.Tensor:
    return values[k]
