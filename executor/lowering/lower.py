"""Plan + graph -> local graphs: every block rewritten with local shapes and explicit re-shards.

A lowered block is an fx GraphModule over plain local tensors. Where the plan moves a value between
states there is a `Reshard` module; where an operator's rule names an implementation, that module
stands in its place; all other operators are the traced ones. On one device nothing is moved, so the
lowered graph is the original graph. Blocks of one class with equal decisions share one lowered
module.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.costmodel.graph import Block, Graph, Op, class_hash
from meshwright.costmodel.rules.leaf import LEAVES
from meshwright.costmodel.sharding.data_axis import DataLayout
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts
from meshwright.costmodel.sharding.strategies import Placement, R
from meshwright.executor.lowering.compile import CompiledBlock
from meshwright.executor.lowering.deferred import WeightGradientQueue
from meshwright.executor.lowering.emitter import Emitter, State
from meshwright.executor.lowering.experts import legs
from meshwright.executor.lowering.regions import repeat, repeat_whole, with_keepers
from meshwright.executor.lowering.reshard import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A local graph and what to call it with: value names in order, then the counts of `losses`
    (operator names whose global count is handed in), then the random state if `random`."""

    module: nn.Module
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    losses: tuple[str, ...]
    random: bool
    name: str


@dataclass(slots=True, kw_only=True)
class Lowering:
    """Lowers the parts of one stage for one rank.

    `microbatches` is m, for losses that are means. `weight_gradients` queues those of `deferrable`
    parameters where the schedule splits the backward; `repeated` names the operators
    that selective recompute runs again, by block, `repeated_whole` the blocks that full recompute
    does; `backend` of torch.compile compiles the blocks. `exchange` are the ranks that share the
    experts out: what is sent to them depends on the data, so that no block which does is compiled.
    """

    graph: Graph
    table: FactorTable
    data: DataLayout
    data_axis: Axis
    tensor_axis: Axis
    device: torch.device
    microbatches: int
    exchange: Axis | None = None
    weight_gradients: WeightGradientQueue | None = None
    deferrable: frozenset[str] = frozenset()
    repeated: Mapping[str, frozenset[str]] = field(default_factory=dict)
    repeated_whole: frozenset[str] = frozenset()
    backend: str | None = None
    _classes: dict[Any, tuple[nn.Module, tuple[int, ...], bool]] = field(default_factory=dict)

    # --- states and shapes ---

    def boundary(self, value: str, tensor: Placement = R) -> State:
        """State in which a value crosses a block's boundary; the loss leaves as it is."""
        own = value == self.graph.loss
        data = self.data.states[value] if own else crossing(self.graph, self.data, value)
        return data, tensor

    def local_shape(self, value: str, state: State) -> list[int]:
        shape = list(self.graph.values[value].shape)
        for placement, axis in zip(state, (self.data_axis, self.tensor_axis), strict=True):
            if placement.sharded:
                shape[placement.dim] = axis.part(shape[placement.dim])[1]
        return shape

    def block(
        self,
        block: Block,
        layouts: BlockLayouts,
        assignment: Assignment,
        inputs: Mapping[str, Placement],
        parameters: Mapping[str, State],
        buffers: Mapping[str, Placement],
    ) -> Lowered:
        """Lower one block. `inputs` are the tensor-axis states of its input activations,
        `parameters` and `buffers` the states in which the stage holds those."""
        arguments = (*block.inputs, *block.derived, *block.parameters, *block.buffers)
        states = {name: self.boundary(name, inputs.get(name, R)) for name in block.inputs}
        states |= {name: self.boundary(name) for name in block.derived}
        states |= {name: parameters[name] for name in block.parameters}
        states |= {name: (R, buffers[name]) for name in block.buffers}
        key = self._key(block, assignment, states)
        if key not in self._classes:
            emitter = Emitter(self, block.ops, states, assignment, layouts)
            if self.exchange is not None:
                emitter.legs = legs(block.ops, self.graph, self.table, block.outputs)
            written = emitter.module(arguments, block.outputs)
            if again := self.repeated.get(block.name):
                ops = with_keepers(block.ops, again, self.table)
                written = repeat(written, (n for name in ops for n in emitter.made[name]))
            if block.name in self.repeated_whole:
                written = repeat_whole(written)
            module: nn.Module = written
            whole = any(op.short in LEAVES for op in block.ops)  # what a compiler can't look into
            if self.backend is not None and not emitter.legs and not whole:
                module = CompiledBlock(written, name=block.name, backend=self.backend)
            positions = tuple(block.ops.index(op) for op in emitter.losses)
            self._classes[key] = (module, positions, emitter.rng is not None)
        module, positions, random = self._classes[key]
        return Lowered(
            module=module,
            arguments=arguments,
            outputs=block.outputs,
            losses=tuple(block.ops[i].name for i in positions),
            random=random,
            name=block.name,
        )

    def prologue(self, ops: Sequence[Op], wanted: Sequence[str]) -> Lowered:
        """Lower operators on raw inputs (masks, positions): replicated on the tensor axis, no
        gradient."""
        made = {r for op in ops for r in op.results}
        read = dict.fromkeys(n for op in ops for n in op.operands if n not in made)
        arguments = tuple(dict.fromkeys([*read, *(n for n in wanted if n not in made)]))
        states = {n: self.boundary(n) if n in self.graph.inputs else (R, R) for n in arguments}
        emitter = Emitter(self, ops, states, None, None)
        module = emitter.module(arguments, tuple(wanted))
        return Lowered(
            module=module,
            arguments=arguments,
            outputs=tuple(wanted),
            losses=(),
            random=False,
            name="inputs",
        )

    def _key(self, block: Block, assignment: Assignment, states: Mapping[str, State]) -> Any:
        choices = tuple(
            (assignment.strategies[op.name], self.data.strategies[op.name]) for op in block.ops
        )
        results = tuple(
            (assignment.states[r], self.data.states[r]) for op in block.ops for r in op.results
        )
        again = self.repeated.get(block.name, frozenset())
        own = (
            tuple(op.name in again for op in block.ops),
            block.name in self.repeated_whole,
            tuple(name in self.deferrable for name in block.parameters),
        )
        whole = class_hash(self.graph, block, exact=True)
        return whole, choices, results, own, tuple(states.values())


def crossing(graph: Graph, data: DataLayout, value: str) -> Placement:
    """State on the data axis in which a value goes from block to block, or from stage to stage: its
    rows split or whole, never partial; whole if it replaces a buffer, which every rank holds."""
    state = data.states[value]
    rows = state.sharded and state.split == 1
    return state if rows and value not in graph.updates.values() else R


def buffer_state(layouts: BlockLayouts, name: str, assignment: Assignment) -> Placement:
    """A buffer is stored as its reader takes it if there is one way, else replicated."""
    targets = layouts.targets(name, assignment.strategies)
    return targets[0] if len(targets) == 1 and targets[0].sharded else R


def block_salt(name: str) -> int:
    """A number for a block's random stream, the same in every process."""
    return zlib.crc32(name.encode())
