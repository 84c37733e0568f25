"""Moves of one block's values under an assignment: the instruction stream that every rank runs.

On the tensor axis a value is made (or enters) in one state and *waits* for its readers in one, its
hub. From there it is re-sharded once for each other state that a reader takes; readers of the same
state share the result. A value with a single target, and a hub that adds nothing, goes there
directly. Values that cross the block's boundary leave in the state that the plan gives them, and
wait for readers inside as `default_state` says.

Three readers interpret the stream (docs/architecture.md). The data axis is not in it: its states
follow from the batch (`data_axis`). `planner.intra_op.program`, which chooses the assignment, has a
node per stop of a value (`Route`) and an edge per re-shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.costmodel.graph import Op
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, default_state
from meshwright.costmodel.sharding.strategies import RP, Placement, R, Strategy, replicated

Role = Literal["input", "derived", "parameter", "buffer"]


@dataclass(frozen=True, slots=True)
class Enter:
    """A value comes from outside the block, in a state."""

    value: str
    state: Placement
    role: Role


@dataclass(frozen=True, slots=True)
class Move:
    """A re-shard of a value, for operator `op` that made it or is the first to read it so (empty:
    as it enters). `once`: its backward's reduction may wait for the end of the step. `known`: the
    value has been in the target before its hub, and is read from there; nothing is run, but the way
    from the hub is priced, since no edge of the program tells that state from others."""

    value: str
    source: Placement
    target: Placement
    op: str
    once: bool = False
    known: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """An operator on operands in its strategy's states."""

    op: Op
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Leave:
    """A value that operator `op` made is handed on to other blocks, in a state."""

    value: str
    state: Placement
    op: str


Step = Enter | Move | Run | Leave


@dataclass(frozen=True, slots=True)
class Route:
    """Stops of a value on its way to its `readers` (operators and operand numbers), under any
    assignment: its `maker`, as result number `result` (or outside the block, None); the boundary,
    if it `leaves`; a hub, if it is `shared`."""

    value: str
    maker: Op | None
    result: int
    leaves: bool
    readers: Sequence[tuple[Op, int]]

    @property
    def shared(self) -> bool:
        return len(self.readers) > 1

    @property
    def crosses(self) -> bool:
        """Whether it crosses the boundary, so that it waits inside in its `default_state`."""
        return self.leaves or self.maker is None


def routes(layouts: BlockLayouts) -> dict[str, Route]:
    """Routes of a block's activations by name: its inputs, then its operators' results."""
    block, readers = layouts.block, layouts.readers
    entering = {v: Route(v, None, 0, False, readers.get(v, ())) for v in block.inputs}
    return entering | {
        v: Route(v, op, k, v in block.outputs, readers.get(v, ()))
        for op in block.ops
        for k, v in enumerate(op.results)
    }


def moves(
    layouts: BlockLayouts, assignment: Assignment, entering: Mapping[str, Placement]
) -> list[Step]:
    """The steps of a block in the order in which they run, all that enters first. `entering` are
    states of values from outside: input activations (R where absent), and parameters and buffers
    that the stage holds otherwise than this block would by itself."""
    return _Stream(layouts, assignment, routes(layouts)).steps(entering)


def replicated_steps(
    ops: Sequence[Op], inputs: Sequence[str], outputs: Sequence[str]
) -> list[Step]:
    """The steps of operators on raw inputs (masks, positions): replicated, nothing is moved."""
    entering = [Enter(value, R, "derived") for value in inputs]
    leaving = [Leave(value, R, "") for value in outputs]
    return [*entering, *(Run(op, replicated(op)) for op in ops), *leaving]


def buffer_state(layouts: BlockLayouts, value: str, assignment: Assignment) -> Placement:
    """State of a buffer: as its readers take it where they agree on a shard, else replicated."""
    targets = layouts.targets(value, assignment.strategies)
    return targets[0] if len(targets) == 1 and targets[0].sharded else R


@dataclass(slots=True)
class _Stream:
    """The steps so far; `hub` is the state in which each value waits, `known` all that it is in,
    `read` those to which there is a step from the hub."""

    layouts: BlockLayouts
    assignment: Assignment
    routes: Mapping[str, Route]
    emitted: list[Step] = field(default_factory=list)
    hub: dict[str, Placement] = field(default_factory=dict)
    known: set[tuple[str, Placement]] = field(default_factory=set)
    read: set[tuple[str, Placement]] = field(default_factory=set)

    def steps(self, entering: Mapping[str, Placement]) -> list[Step]:
        block, states = self.layouts.block, self.assignment.states
        for value in block.inputs:
            self._enter(value, entering.get(value, R), "input")
        for value in block.derived:
            self._enter(value, R, "derived")
        for value in block.parameters:
            self._enter(value, entering.get(value, states[value]), "parameter")
        for value in block.buffers:
            alone = buffer_state(self.layouts, value, self.assignment)
            self._enter(value, entering.get(value, alone), "buffer")
        for value in block.inputs:
            self._settle(value, "")
        for op in block.ops:
            strategy = self.assignment.strategies[op.name]
            for value, state in zip(op.operands, strategy.operands, strict=True):
                if state != self.hub[value] and (value, state) not in self.read:
                    self.read.add((value, state))
                    self._move(value, state, op.name)
            self.emitted.append(Run(op, strategy))
            for value, state in zip(op.results, strategy.results, strict=True):
                self._finish(value, state, op.name)
        return self.emitted

    def _enter(self, value: str, state: Placement, role: Role) -> None:
        self.emitted.append(Enter(value, state, role))
        self._at(value, state)

    def _at(self, value: str, state: Placement) -> None:
        self.hub[value] = state
        self.known.add((value, state))

    def _finish(self, value: str, state: Placement, op: str) -> None:
        """Bring a result to its hub, unless it has one target and may go there directly."""
        self._at(value, state)
        hub, leaves = self.assignment.states[value], self.routes[value].leaves
        targets = self.layouts.targets(value, self.assignment.strategies)
        if leaves or len(targets) != 1 or hub not in (state, targets[0]):
            self._wait(value, hub, op)
        if leaves:
            self.emitted.append(Leave(value, hub, op))
            self._settle(value, op)

    def _settle(self, value: str, op: str) -> None:
        """Let a value of the block's boundary wait as suits its readers inside."""
        targets = self.layouts.targets(value, self.assignment.strategies)
        self._wait(value, default_state(self.hub[value], targets, False), op)

    def _wait(self, value: str, hub: Placement, op: str) -> None:
        if hub != self.hub[value]:
            self._move(value, hub, op)
            self.hub[value] = hub

    def _move(self, value: str, target: Placement, op: str) -> None:
        source, known = self.hub[value], (value, target) in self.known
        self.emitted.append(Move(value, source, target, op, self._once(value), known))
        self.known.add((value, target))

    def _once(self, value: str) -> bool:
        """Whether a value is a parameter whose gradient is partial for all its readers."""
        if value not in self.layouts.graph.parameters:
            return False
        if len(self.layouts.readers[value]) == 1:
            return True
        return all(t == RP for t in self.layouts.targets(value, self.assignment.strategies))
