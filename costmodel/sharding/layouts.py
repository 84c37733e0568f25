"""Layouts of a block on the tensor axis: completing a few decisions into all, and the reverse.

A plan names only the decisions that do not follow: an operator takes the strategy of the least
communication for its operands as they come. A value is re-sharded once where all its readers agree
(its state), else once per kind of reader. `complete(compress(a)) == a`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.strategies import (
    ALIASES,
    DISPLAY,
    RP,
    Placement,
    R,
    ShardingError,
    Strategy,
    indivisible,
    least_communication,
    splitting_degrees,
    strategies,
)
from meshwright.profiles.inputs import shown

FOLLOW = "follow"


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Every choice of a block on one axis: strategies by operator name; states by value name, for
    activations (as handed to their readers) and parameters (as stored). Both are in the block's
    order: operators, their results, then parameters."""

    strategies: Mapping[str, Strategy]
    states: Mapping[str, Placement]

    @cached_property
    def choices(self) -> str:
        """The choices by position: equal for equal assignments of blocks of one class."""
        chosen = " ".join(strategy.name for strategy in self.strategies.values())
        return f"{chosen} -> {' '.join(map(str, self.states.values()))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A decision about one operator: its strategy, or the state of its (first) result, or both."""

    strategy: str | None = None
    state: Placement | None = None

    def __str__(self) -> str:
        arrow = f" -> {self.state}" if self.state else ""
        return f"{self.strategy or ''}{arrow}".strip()

    @staticmethod
    def parse(text: str) -> Entry:
        """`colwise`, `heads -> S(1)`, `-> R`, or `follow` (as if nothing were said)."""
        strategy, _, state = text.partition("->")
        if text.strip() == FOLLOW:
            return Entry()
        placement = Placement.parse(state) if state else None
        return Entry(strategy=strategy.strip() or None, state=placement)


@dataclass(slots=True)
class BlockLayouts:
    """One block on an axis of `degree` ranks; computes readers and strategies once."""

    graph: Graph
    table: FactorTable
    block: Block
    degree: int
    readers: dict[str, list[tuple[Op, int]]] = field(init=False, default_factory=dict)
    _options: Memo[str, list[Strategy]] = field(init=False, default_factory=Memo)

    def __post_init__(self) -> None:
        for op in self.block.ops:
            for i, name in enumerate(op.operands):
                self.readers.setdefault(name, []).append((op, i))

    def options(self, op: Op) -> list[Strategy]:
        new = partial(strategies, self.graph, self.table, op, self.degree)
        return self._options.of(op.name, new)

    def targets(self, value: str, chosen: Mapping[str, Strategy]) -> list[Placement]:
        """Distinct states in which the block's operators read a value."""
        states = dict.fromkeys(chosen[op.name].operands[i] for op, i in self.readers.get(value, []))
        return list(states)

    def fixed(self, value: str) -> bool:
        """Whether a value is raw, derived or a buffer: replicated, and free to slice."""
        return value in self.block.derived or value in self.graph.buffers

    # --- completing ---

    def complete(
        self,
        entries: Mapping[str, Entry],
        inputs: Mapping[str, Placement],
        leaving: Collection[str] = (),
    ) -> Assignment:
        """All choices from a few. `entries` by operator name (or parameter value name); `inputs`
        are the states of the block's input activations (R where absent). Values `leaving` the stage
        are replicated whatever their entry says, so that one glob serves all repeats of a block."""
        chosen: dict[str, Strategy] = {}
        at: dict[str, Placement] = {name: inputs.get(name, R) for name in self.block.inputs}
        decided: dict[str, Placement] = {}
        for op in self.block.ops:
            entry, first = entries.get(op.name, Entry()), op.results[0]
            strategy = self.named(op, entry.strategy) if entry.strategy else self._follow(op, at)
            chosen[op.name] = strategy
            at |= dict(zip(op.results, strategy.results, strict=True))
            if entry.state and first not in leaving:
                at[first] = decided[first] = entry.state
        for value in self.block.parameters:
            if stored := entries.get(value, Entry()).state:
                decided[value] = stored
        return Assignment(strategies=chosen, states={**self._defaults(chosen), **decided})

    def _defaults(self, chosen: Mapping[str, Strategy]) -> dict[str, Placement]:
        """The states of all results and parameters where nothing else is decided."""
        states = {
            value: default_state(state, self.targets(value, chosen), value in self.block.outputs)
            for op in self.block.ops
            for value, state in zip(op.results, chosen[op.name].results, strict=True)
        }
        stored = {v: stored_state(self.targets(v, chosen)) for v in self.block.parameters}
        return states | stored

    def named(self, op: Op, name: str) -> Strategy:
        """The strategy of that name; a factor's bare name means its first divisible atom."""
        options, factor = self.options(op), ALIASES.get(name, name)
        wanted = DISPLAY.get(name, name)
        for option in options:
            if option.name == wanted:
                return option
        for option in options:
            if option.name.split(".")[0] in (wanted, factor):
                return option
        legal = [o.name for o in options]
        near = difflib.get_close_matches(name, legal, n=1)
        raise ShardingError(
            f"not possible with tp={self.degree}{self._refused(op, factor.split('.')[0])}",
            place=f"sharding {shown(name)} of {op.key}",
            legal=legal,
            way_out=f"did you mean {near[0]!r}?" if near else "",
        )

    def _refused(self, op: Op, factor: str) -> str:
        """Size of a factor that can't be split so many ways, and the degrees that divide it."""
        if factor not in indivisible(self.table, op, self.degree):
            return ""
        degrees = map(str, splitting_degrees(self.graph, self.table, op, factor))
        size = self.table.ops[op.name].sizes[factor]
        return f" ({factor} = {size}; degrees that divide: {', '.join(degrees) or 'none'})"

    def _follow(self, op: Op, at: Mapping[str, Placement]) -> Strategy:
        """The strategy with the least communication for the activations as they come."""
        return least_communication(self.table, op, self.options(op), at)

    # --- compressing ---

    def compress(self, assignment: Assignment, inputs: Mapping[str, Placement]) -> dict[str, Entry]:
        """The decisions that `complete` would not find by itself."""
        entries: dict[str, Entry] = {}
        chosen = assignment.strategies
        defaults = self._defaults(chosen)
        at: dict[str, Placement] = {name: inputs.get(name, R) for name in self.block.inputs}
        for op in self.block.ops:
            follows = self._follow(op, at).name == chosen[op.name].name
            at |= dict(zip(op.results, chosen[op.name].results, strict=True))
            state, first = None, op.results[0]
            if assignment.states[first] != defaults[first]:
                state = at[first] = assignment.states[first]
            if state or not follows:
                name = None if follows else chosen[op.name].name
                entries[op.name] = Entry(strategy=name, state=state)
        for value in self.block.parameters:
            if assignment.states[value] != defaults[value]:
                entries[value] = Entry(state=assignment.states[value])
        return entries


def default_state(state: Placement, targets: Sequence[Placement], is_output: bool) -> Placement:
    """State in which a value waits for its readers, where nothing else is decided.

    Outputs of a block are replicated. A partial value is summed at once unless every reader takes
    it partial, or all want the same shard. A sharded value is gathered once if nobody reads a
    shard, and its gradients scattered back once if some readers leave them partial.
    """
    if is_output:
        return R
    kinds = {t.kind for t in targets}
    if state.kind == "P":
        if kinds == {"P"} or not targets:
            return state
        return targets[0] if len(targets) == 1 and targets[0].sharded else R
    if state.sharded and "P" in kinds:
        return R
    if state.sharded and len(targets) > 1 and kinds == {"R", "Rp"}:
        return RP
    return state


def stored_state(targets: Iterable[Placement]) -> Placement:
    """State in which a parameter is stored: as its first reader takes it."""
    first = next(iter(targets), R)
    return first if first.sharded else R


def translate(assignment: Assignment, source: Block, target: Block) -> Assignment:
    """An assignment of one block carried over to another of the same class, by position."""
    if source is target:
        return assignment
    names = dict(zip(source.parameters, target.parameters, strict=True))
    strategies = {}
    for a, b in zip(source.ops, target.ops, strict=True):
        strategies[b.name] = assignment.strategies[a.name]
        names |= dict(zip(a.results, b.results, strict=True))
    states = {names[value]: state for value, state in assignment.states.items()}
    return Assignment(strategies=strategies, states=states)
