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

from torch import fx, nn

from meshwright.costmodel.blocks import repeated_ops
from meshwright.costmodel.graph import Block, Op, class_hash
from meshwright.costmodel.recompute import parts_of
from meshwright.costmodel.rules import recomputable, traits_of
from meshwright.costmodel.sharding import (
    Assignment,
    BlockLayouts,
    Placement,
    R,
    Step,
    moves,
    replicated_steps,
)
from meshwright.executor.backward import repeated
from meshwright.executor.context_attention import CachedAttention, ContextAttention, SlicedAttention
from meshwright.executor.devices import kind_of
from meshwright.executor.lowering.compile import CompiledBlock
from meshwright.executor.lowering.context import Context, State
from meshwright.executor.lowering.emitter import Emitter, Written


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A local graph and what to call it with: value names in order, then the counts of `losses`
    (operator names whose global count is handed in), then the random state if `random`, and what it
    `keeps` of earlier slices."""

    module: nn.Module
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]
    losses: tuple[str, ...]
    random: bool
    keeps: bool
    name: str


@dataclass(slots=True, kw_only=True)
class Lowering:
    """Lowers the parts of one stage for one rank.

    `policies` say what blocks run again that may; `backend` of torch.compile compiles the blocks,
    but not one that exchanges tokens with other ranks' experts: how many it sends depends on the
    data.
    """

    context: Context
    policies: Mapping[str, str] = field(default_factory=dict)
    backend: str | None = None
    classes: dict[Any, tuple[nn.Module, Written]] = field(default_factory=dict)

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
        boundary = self.context.boundary
        states = {name: boundary(name, inputs.get(name, R)) for name in block.inputs}
        states |= {name: boundary(name) for name in block.derived}
        states |= {name: parameters[name] for name in block.parameters}
        replicated = (R,) * len(self.context.outer)
        states |= {name: (*replicated, buffers[name]) for name in block.buffers}
        key = self._key(block, assignment, states)
        if key not in self.classes:
            steps = moves(layouts, assignment, {name: s[-1] for name, s in states.items()})
            written = self._written(steps, states, block.outputs)
            self.classes[key] = self._module(block, written), written
        module, written = self.classes[key]
        return Lowered(
            module=module,
            arguments=tuple(states),
            outputs=block.outputs,
            losses=tuple(block.ops[i].name for i in written.losses),
            random=written.random,
            keeps=written.keeps,
            name=block.name,
        )

    def _written(
        self, steps: Sequence[Step], states: Mapping[str, State], outputs: Sequence[str]
    ) -> Written:
        outside = {name: state[:-1] for name, state in states.items()}
        return Emitter(self.context, steps, outside).write(outputs)

    def _module(self, block: Block, written: Written) -> nn.Module:
        """The written graph with its recompute, compiled if it can be."""
        traits = [traits_of(op) for op in block.ops]
        opaque = written.exchanges or any(t.leaf or t.kernel == "chunked" for t in traits)
        unseen = (ContextAttention, CachedAttention, SlicedAttention)
        opaque |= any(isinstance(m, unseen) for m in written.module.children())
        compiled = self.backend is not None and not opaque  # which a compiler can look into
        module = repeated(written.module, self._again(block, written, compiled=compiled))
        if not compiled:
            return module
        assert self.backend is not None
        return CompiledBlock(module, name=block.name, backend=self.backend)

    def _policy(self, block: Block) -> str:
        return self.policies.get(block.name, "none") if recomputable(block) else "none"

    def _again(self, block: Block, written: Written, *, compiled: bool) -> list[fx.Node]:
        """The nodes that the block's policy repeats: operators, and gathers where it says so and no
        compiler keeps what they make; or under `full` all there are."""
        policy, regathers = parts_of(self._policy(block))
        gathers = [*written.gathers] if regathers and not compiled else []
        if policy == "none":
            return gathers
        if policy == "full":
            ends = ("placeholder", "output")
            return [node for node in written.module.graph.nodes if node.op not in ends]
        context = self.context
        positions = repeated_ops(block, context.graph, context.table, kind_of(context.device))[
            policy
        ]
        operators = [node for k in sorted(positions) for node in written.made[block.ops[k].name]]
        return operators + gathers

    def prologue(self, ops: Sequence[Op], wanted: Sequence[str]) -> Lowered:
        """Lower operators on raw inputs (masks, positions): replicated on the tensor axis, no
        gradient."""
        results = {r for op in ops for r in op.results}
        read = dict.fromkeys(n for op in ops for n in op.operands if n not in results)
        arguments = tuple(dict.fromkeys([*read, *(n for n in wanted if n not in results)]))
        known = self.context.totals.union(self.context.graph.inputs)
        replicated = (R,) * len(self.context.axes)
        entering = {n: self.context.boundary(n) if n in known else replicated for n in arguments}
        steps = replicated_steps(ops, arguments, wanted)
        return Lowered(
            module=self._written(steps, entering, wanted).module,
            arguments=arguments,
            outputs=tuple(wanted),
            losses=(),
            random=False,
            keeps=False,
            name="inputs",
        )

    def _key(self, block: Block, assignment: Assignment, states: Mapping[str, State]) -> Any:
        outer = self.context.outer
        choices = tuple(
            (assignment.strategies[op.name], *(layout.strategies[op.name] for layout in outer))
            for op in block.ops
        )
        results = tuple(
            (assignment.states[r], *(layout.states[r] for layout in outer))
            for op in block.ops
            for r in op.results
        )
        local_key = (
            self._policy(block),
            tuple(op.key in self.context.sums for op in block.ops),
            tuple(name in self.context.deferrable for name in block.parameters),
        )
        exact_hash = class_hash(self.context.graph, block, exact=True)
        leaves = tuple(op.name for op in block.ops if traits_of(op).leaf)  # each notes by its name
        return exact_hash, choices, results, local_key, leaves, tuple(states.values())


def block_salt(name: str) -> int:
    """A number for a block's random stream, the same in every process."""
    return zlib.crc32(name.encode())
