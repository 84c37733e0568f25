"""Block programs, solved once per class of blocks and setting: the shardings that stages are made
of.

The only part of pricing that imports the intra-op program and its solver.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np

from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import Pricer, Setting, op_flops
from meshwright.costmodel.sharding import BlockLayouts, Entry, Placement, R, Strategy, divides
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.costmodel.stages import Floats, Sums, parameter_sums
from meshwright.planner.intra_op import BlockProgram, BlockTable, SolverTime, TimeLimit
from meshwright.planner.pricing import StageCoster
from meshwright.planner.stages.chain import Chain

MODES = ("fast", "lean")  # lean: matrices are split over the tensor axis wherever they can be

# class of a block, its shared parameters, entries by position, whether its ends have a choice
BlockKey: TypeAlias = tuple[str, tuple[str, ...], tuple[tuple[int, str], ...], tuple[bool, bool]]
# parts of a setting, mode, policies that the user decided
ChainKey: TypeAlias = tuple[Mesh, Batch, Sharing, str, tuple[str | None, ...]]


@dataclass(slots=True)
class _Solved:
    """What was solved under one set of entries and cuts; kept as long as the programs."""

    # tp: states at every boundary
    cuts: dict[int, list[list[Placement]]] = field(default_factory=dict)
    # block, tp: what its program depends on
    keys: dict[tuple[int, int], BlockKey] = field(default_factory=dict)
    # tp, policies that the user decided: the kinds of the blocks
    kinds: dict[tuple[int, tuple[str | None, ...]], list[int]] = field(default_factory=dict)
    chains: dict[ChainKey, Chain] = field(default_factory=dict)
    least: dict[tuple[Mesh, Batch], Floats] = field(default_factory=dict)  # seconds of every block


@dataclass
class BlockPrograms:
    """The block programs of one problem, and the chains of blocks that they make.

    `entries` are sharding decisions forced by the user, by operator or parameter value name. Stages
    start and end at the boundaries `cut_at`, by default at all. Planning goes on until `time` is
    over, and then only as far as it must. `refused` says, by tensor-parallel
    degree, why a sharding that the user decided is impossible.
    """

    coster: StageCoster
    entries: Mapping[str, Entry] = field(default_factory=dict)
    cut_at: Sequence[int] = ()
    time: TimeLimit = field(default_factory=TimeLimit)
    refused: dict[int, str] = field(default_factory=dict, init=False)
    unproved: set[str] = field(default_factory=set, init=False)  # blocks too large to be proved
    _solved: _Solved = field(default_factory=_Solved, init=False)
    # programs by what they depend on, states by value and tp, the solver's time by class: the same
    # under all entries
    _programs: dict[tuple[BlockKey, Mesh, Batch], BlockProgram] = field(default_factory=dict)
    _states: dict[tuple[str, int], list[Placement]] = field(default_factory=dict)
    _times: dict[str, SolverTime] = field(default_factory=dict)
    _same_for_experts: dict[int, bool] = field(default_factory=dict, init=False)
    _hurried: set[ChainKey] = field(default_factory=set, init=False)

    def deciding(self, entries: Mapping[str, Entry], cut_at: Sequence[int]) -> BlockPrograms:
        """The programs under other sharding decisions of the user, with stages that start and end
        elsewhere; prices and unsolved programs are shared."""
        if entries == self.entries and tuple(cut_at) == tuple(self.cut_at):
            return self
        return BlockPrograms(
            self.coster, entries, cut_at, self.time, self._programs, self._states, self._times
        )

    @property
    def graph(self) -> Graph:
        return self.coster.graph

    @cached_property
    def _shared(self) -> frozenset[str]:
        """Parameters that several blocks read."""
        return _several(block.parameters for block in self.graph.blocks)

    @cached_property
    def _heaviest_first(self) -> list[int]:
        """Indices of the blocks by falling FLOPs."""
        factors = self.coster.problem.factors
        work = [sum(op_flops(factors, op) for op in block.ops) for block in self.graph.blocks]
        return sorted(range(len(work)), key=lambda k: -work[k])

    @cached_property
    def _meets(self) -> bool:
        """Whether the data axis meets a batch in any block."""
        return any(self.coster.needs(block).met for block in self.graph.blocks)

    # --- boundary states ---

    def cut_states(self, k: int, tp: int) -> list[Placement]:
        """States that the one value crossing cut k may have; replicated where several cross, or the
        value other cuts too (a skip connection): what leaves a stage is whole, wherever it ends."""
        crossing = self.coster.activations_at_cuts[k]
        if tp == 1 or len(crossing) != 1 or crossing[0] in self._crossing_several:
            return [R]
        return self.value_states(crossing[0], tp)

    @cached_property
    def _crossing_several(self) -> frozenset[str]:
        """Values that cross several cuts."""
        return _several(self.coster.activations_at_cuts)

    def value_states(self, value: str, tp: int) -> list[Placement]:
        """Replicated, or split along any dim but the batch that tp divides."""
        key = (value, tp)
        if key not in self._states:
            found, factors = [R], self.coster.problem.factors
            for atoms in factors.dims[value]:
                for atom in atoms:
                    at = factors.find(value, atom)
                    if atom != factors.batch and divides(factors, atom, tp) and at:
                        found.append(Placement("S", *at))
            self._states[key] = found
        return self._states[key]

    def _cuts(self, tp: int) -> list[list[Placement]]:
        if tp not in self._solved.cuts:
            places = range(len(self.graph.blocks) + 1)
            self._solved.cuts[tp] = [self.cut_states(k, tp) for k in places]
        return self._solved.cuts[tp]

    # --- one setting ---

    def chain(
        self, setting: Setting, mode: str = "fast", forced: Sequence[str | None] = ()
    ) -> Chain:
        """Costs of all stages in one setting; none is legal that has a block without a legal
        assignment. `forced` are recompute policies that the user decided, by block."""
        forced = tuple(forced) or (None,) * len(self.graph.blocks)
        own = replace(setting.of_step, batch=setting.batch)
        key = own.mesh, own.batch, own.sharing, mode, forced
        if key not in self._solved.chains:
            self._solved.chains[key] = self._chain(own, mode, forced)
            if self.time.over():
                self._hurried.add(key)
        return self._solved.chains[key]

    def _chain(self, setting: Setting, mode: str, forced: tuple[str | None, ...]) -> Chain:
        pricer = self.coster.pricer(setting)
        alike = replace(setting, sharing=UNSHARED, mesh=replace(setting.mesh, spread=1))
        stored: dict[str, Placement] = {}
        if alike != setting:  # where the data axis lies changes prices, not what is decided
            base = self.chain(alike, mode, forced)
            tables = base.tables
            stored |= base.stored
        else:
            solved = self._tables(setting, mode, stored)
            tables = [solved[key] for key in self._keys(setting.mesh.tp)]
        return Chain(
            setting=setting,
            mode=mode,
            blocks=self.graph.blocks,
            forced=forced,
            tables=tables,
            kinds=self._kinds(setting.mesh.tp, forced),
            at=self.cut_at or range(len(self.graph.blocks) + 1),
            cuts=self._cuts(setting.mesh.tp),
            stored=stored,
            send_s=self.coster.send_seconds(setting),
            shared=self._copies(pricer, stored, setting.batch.microbatches),
            price=partial(self._priced, pricer),
        )

    def forget_hurried(self) -> None:
        """Forget the chains that were solved when the time was over: the next search may have more
        of it."""
        for key in self._hurried:
            del self._solved.chains[key]
        self._hurried.clear()

    def _tables(
        self, setting: Setting, mode: str, stored: dict[str, Placement]
    ) -> dict[BlockKey, BlockTable | None]:
        """Solved programs by block key, None without a legal assignment. Parameters read by several
        blocks are stored as the heaviest of them wants: `stored`, filled here."""
        solved: dict[BlockKey, BlockTable | None] = {}
        for k in self._heaviest_first:
            key = self._key(k, setting.mesh.tp)
            if key not in solved:
                table = self._solve(k, setting, mode, stored)
                solved[key] = table
                if table is not None and self._remember(self.graph.blocks[k], table, stored):
                    solved[key] = self._solve(k, setting, mode, stored) or table
        return solved

    def _key(self, k: int, tp: int) -> BlockKey:
        """What makes two blocks' programs the same on a tensor axis."""
        if (k, tp) not in self._solved.keys:
            block = self.graph.blocks[k]
            names = [*(op.name for op in block.ops), *block.parameters]
            self._solved.keys[k, tp] = (
                block.class_id,
                tuple(sorted(self._shared & set(block.parameters))),
                tuple((i, str(self.entries[n])) for i, n in enumerate(names) if n in self.entries),
                (len(self.cut_states(k, tp)) > 1, len(self.cut_states(k + 1, tp)) > 1),
            )
        return self._solved.keys[k, tp]

    def _keys(self, tp: int) -> list[BlockKey]:
        return [self._key(k, tp) for k in range(len(self.graph.blocks))]

    def _kinds(self, tp: int, forced: tuple[str | None, ...]) -> list[int]:
        """The kinds of a chain's blocks."""
        if (tp, forced) not in self._solved.kinds:
            ends = [len(states) for states in self._cuts(tp)]
            rows = zip(self._keys(tp), forced, ends, ends[1:], strict=False)
            numbers: dict[tuple[BlockKey, str | None, int, int], int] = {}
            kinds = [numbers.setdefault(row, len(numbers)) for row in rows]
            self._solved.kinds[tp, forced] = kinds
        return self._solved.kinds[tp, forced]

    def _solve(
        self, k: int, setting: Setting, mode: str, stored: Mapping[str, Placement]
    ) -> BlockTable | None:
        pricer = self.coster.pricer(setting)
        program = self._program(k, setting)
        if program is None:
            return None

        def allowed(value: str, state: Placement) -> bool:
            if value in stored:
                return state == stored[value]
            if mode == "lean" and state == R and len(self.graph.values[value].shape) > 1:
                return all(not s.sharded for s in program.storable[value])
            return True

        table = program.solve(pricer, allowed, time=self._solver_time(k))
        if table is not None and not table.proved and not self.time.over():
            self.unproved.add(self.graph.blocks[k].name)
        return table

    def _program(self, k: int, setting: Setting) -> BlockProgram | None:
        """None where a sharding that the user decided is impossible: `refused` says why."""
        block = self.graph.blocks[k]
        # its factors are seconds alone: a loss takes as many on any data axis, what meets the batch
        # there is priced anew
        needs = replace(self.coster.needs(block), loss=False, met=False)
        if self._prices_experts(k, setting.mesh.tp):
            needs = replace(needs, experts=False)
        own = needs.narrowed(setting)
        key = self._key(k, setting.mesh.tp), own.mesh, own.batch
        if key not in self._programs:
            layouts = self.coster.layouts(block, setting.mesh.tp)
            try:
                allowed = self._forced(layouts)
            except ValueError as error:
                self.refused.setdefault(setting.mesh.tp, str(error))
                return None
            leaving, cuts = self.coster.activations_at_cuts[k + 1], self._cuts(setting.mesh.tp)
            self._programs[key] = BlockProgram(
                self.coster.pricer(own),
                layouts,
                inputs=dict.fromkeys(block.inputs, cuts[k]),
                # new values of buffers go nowhere: they are whole
                outputs={v: cuts[k + 1] if v in leaving else [R] for v in block.outputs},
                allowed=allowed,
            )
        return self._programs[key]

    def _prices_experts(self, k: int, tp: int) -> bool:
        """Whether a block's program is the same for all ep > 1: where of what has a part for each
        expert nothing is re-sharded but parameters, each for one operator."""
        if tp > 1 and k not in self._same_for_experts:
            block, experts = self.graph.blocks[k], self.coster.problem.factors.has_experts
            reads = Counter(value for op in block.ops for value in op.operands)
            made = {value for op in block.ops for value in op.results} | set(block.inputs)
            self._same_for_experts[k] = not any(map(experts, made)) and all(
                reads[value] == 1 for value in block.parameters if experts(value)
            )
        return tp == 1 or self._same_for_experts[k]

    def _forced(self, layouts: BlockLayouts) -> Callable[[str, Strategy | Placement], bool]:
        """Restriction to the user's sharding entries."""
        # apart: an operator and its first result have one name
        named: dict[str, str] = {}
        states: dict[str, Placement] = {}
        for op in layouts.block.ops:
            entry = self.entries.get(op.name)
            if entry and entry.strategy:
                named[op.name] = layouts.named(op, entry.strategy).name
            if entry and entry.state:
                states[op.results[0]] = entry.state
        for value in layouts.block.parameters:
            entry = self.entries.get(value)
            if entry and entry.state:
                states[value] = entry.state

        def allowed(name: str, state: Strategy | Placement) -> bool:
            if isinstance(state, Strategy):
                return named.get(name, state.name) == state.name
            return states.get(name, state) == state

        return allowed

    def _remember(self, block: Block, table: BlockTable, stored: dict[str, Placement]) -> bool:
        """Decide how shared parameters are stored; whether that was news. The block itself may have
        others in mind for other boundary states, and is solved again."""
        best = min(table.choices, key=lambda index: (table.costs[index], index))
        new = self._shared.intersection(block.parameters).difference(stored)
        stored.update({value: table.stored(best, value) for value in new})
        return bool(new)

    def _priced(self, pricer: Pricer, table: BlockTable, index: tuple[int, ...]) -> Sums:
        """Sums of a block between the boundary states of `index`."""
        program = table.program
        inputs = {
            value: program.inputs[value][table.choices[index][f"in:{value}"]]
            for value in program.block.inputs
        }
        assignment = program.assignment(table, index)
        return self.coster.block(pricer, program.block, assignment, inputs)[1]

    def _copies(
        self, pricer: Pricer, stored: Mapping[str, Placement], microbatches: int
    ) -> list[tuple[list[bool], Sums, float]]:
        """Of each shared parameter which blocks read it, and the sums and seconds of one copy. A
        stage holds one copy; its blocks store it alike, so that taking the others off moves no
        optimum."""
        return [
            (
                self._readers[value],
                parameter_sums(pricer, value, state),
                pricer.parameter_cost(value, state).seconds(microbatches),
            )
            for value, state in sorted(stored.items())
        ]

    @cached_property
    def _readers(self) -> dict[str, list[bool]]:
        """Of each shared parameter, which blocks read it."""
        blocks = self.graph.blocks
        return {value: [value in block.parameters for block in blocks] for value in self._shared}

    def least_of_blocks(self, setting: Setting) -> Floats:
        """(K,): no more than each block's seconds of forward and backward per micro-batch, in any
        stage, for any data axis with these rows, under any ZeRO stage: without what is paid once
        per step. Zeros where no time is left to find out."""
        mesh, batch = setting.mesh, setting.batch
        mesh = mesh if self._meets else mesh.alone
        batch = replace(batch, microbatches=min(batch.microbatches, 2))
        if (mesh, batch) not in self._solved.least:
            own = Setting(problem=setting.problem, mesh=mesh, batch=batch)
            pricer = self.coster.pricer(own)
            found: dict[BlockKey, float] = {}
            keys = self._keys(mesh.tp)
            for k, key in enumerate(keys):
                if self.time.over():
                    return np.zeros(len(keys))
                if key not in found:
                    program = self._program(k, own)
                    found[key] = (
                        program.bound_s(pricer, self._solver_time(k)) if program else math.inf
                    )
            self._solved.least[mesh, batch] = np.array([found[key] for key in keys])
        return self._solved.least[mesh, batch]

    def _solver_time(self, k: int) -> SolverTime:
        """What is left of the solver's time for a block's class."""
        return self._times.setdefault(self.graph.blocks[k].class_id, SolverTime(self.time))


def _several(groups: Iterable[Iterable[str]]) -> frozenset[str]:
    """The names that are in several groups."""
    times = Counter(name for group in groups for name in set(group))
    return frozenset(name for name, count in times.items() if count > 1)
