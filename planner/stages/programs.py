"""Block programs, solved once per class of blocks and setting: the shardings of stages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np

from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.mesh import Batch, Mesh, Stepping
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
ChainKey: TypeAlias = tuple[Mesh, Batch, Sharing, Stepping, str, tuple[str | None, ...]]


@dataclass
class BlockPrograms:
    """The block programs of one problem, and the chains of blocks that they make.

    `entries` are sharding decisions forced by the user, by operator or parameter value name. Stages
    start and end at the boundaries `cut_at`, by default at all. Planning goes on until `time` is
    over, and then only as far as it must. `refused` says, by tensor-parallel degree, why a sharding
    that the user decided is impossible.
    """

    coster: StageCoster
    entries: Mapping[str, Entry] = field(default_factory=dict)
    cut_at: Sequence[int] = ()
    time: TimeLimit = field(default_factory=TimeLimit)
    refused: dict[int, str] = field(default_factory=dict, init=False)
    unproved: set[str] = field(default_factory=set, init=False)  # blocks too large to be proved
    # programs by what they depend on, states by value and tp, the solver's time by class: the same
    # under all entries
    _programs: dict[tuple[BlockKey, Mesh, Batch], BlockProgram] = field(default_factory=dict)
    _states: Memo[tuple[str, int], list[Placement]] = field(default_factory=Memo)
    _times: dict[str, SolverTime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._boundaries = Memo[int, list[list[Placement]]]()  # by tp: states at every boundary
        self._block_keys = Memo[tuple[int, int], BlockKey]()  # by block and tp
        # by tp and the policies that the user decided
        self._chain_kinds = Memo[tuple[int, tuple[str | None, ...]], list[int]]()
        self._chains: dict[ChainKey, Chain] = {}
        self._hurried: set[ChainKey] = set()
        self._least: dict[tuple[Mesh, Batch], Floats] = {}
        self._same_for_experts = Memo[int, bool]()

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
        value other cuts too (a skip connection): values leave stages whole, wherever they end."""
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

        def states() -> list[Placement]:
            factors = self.coster.problem.factors
            atoms = [atom for dim in factors.dims[value] for atom in dim if atom != factors.batch]
            places = [factors.find(value, atom) for atom in atoms if divides(factors, atom, tp)]
            return [R, *(Placement("S", *at) for at in places if at)]

        return self._states.of((value, tp), states)

    def _cuts(self, tp: int) -> list[list[Placement]]:
        places = range(len(self.graph.blocks) + 1)
        return self._boundaries.of(tp, lambda: [self.cut_states(k, tp) for k in places])

    # --- one setting ---

    def chain(
        self, setting: Setting, mode: str = "fast", forced: Sequence[str | None] = ()
    ) -> Chain:
        """Costs of all stages in one setting; none is legal that has a block without a legal
        assignment. `forced` are recompute policies that the user decided, by block."""
        forced = tuple(forced) or (None,) * len(self.graph.blocks)
        of_step = replace(setting.of_step, batch=setting.batch)
        key = of_step.mesh, of_step.batch, of_step.sharing, of_step.stepping, mode, forced
        if key not in self._chains:
            self._chains[key] = self._chain(of_step, mode, forced)
            if self.time.over():
                self._hurried.add(key)
        return self._chains[key]

    def _chain(self, setting: Setting, mode: str, forced: tuple[str | None, ...]) -> Chain:
        pricer = self.coster.pricer(setting)
        alike = replace(setting, sharing=UNSHARED, mesh=replace(setting.mesh, spread=1))
        tables: Sequence[BlockTable | None]
        stored: Mapping[str, Placement]
        if alike != setting:  # where the data axis lies changes prices, not what is decided
            base = self.chain(alike, mode, forced)
            tables, stored = base.tables, base.stored
        else:
            tables, stored = self._tables(setting, mode)
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
            sends=partial(self.coster.send_seconds, setting),
            shared=self._copies(pricer, stored, setting.batch.microbatches),
            price=partial(self._priced, pricer),
        )

    def forget_hurried(self) -> None:
        """Forget chains that were solved when the time was over: there may be more next time."""
        for key in self._hurried:
            del self._chains[key]
        self._hurried.clear()

    def _tables(
        self, setting: Setting, mode: str
    ) -> tuple[list[BlockTable | None], dict[str, Placement]]:
        """Solved programs of the blocks, None without a legal assignment, and the states in which
        parameters read by several blocks are stored: as the heaviest of them wants."""
        solved: dict[BlockKey, BlockTable | None] = {}
        stored: dict[str, Placement] = {}
        for k in self._heaviest_first:
            key = self._key(k, setting.mesh.tp)
            if key not in solved:
                table = self._solve(k, setting, mode, stored)
                solved[key] = table
                if table is not None and self._remember(self.graph.blocks[k], table, stored):
                    solved[key] = self._solve(k, setting, mode, stored) or table
        return [solved[key] for key in self._keys(setting.mesh.tp)], stored

    def _key(self, k: int, tp: int) -> BlockKey:
        """Key of blocks whose programs are the same on a tensor axis."""

        def key() -> BlockKey:
            block = self.graph.blocks[k]
            names = [*(op.name for op in block.ops), *block.parameters]
            return (
                block.class_id,
                tuple(sorted(self._shared & set(block.parameters))),
                tuple((i, str(self.entries[n])) for i, n in enumerate(names) if n in self.entries),
                (len(self.cut_states(k, tp)) > 1, len(self.cut_states(k + 1, tp)) > 1),
            )

        return self._block_keys.of((k, tp), key)

    def _keys(self, tp: int) -> list[BlockKey]:
        return [self._key(k, tp) for k in range(len(self.graph.blocks))]

    def _kinds(self, tp: int, forced: tuple[str | None, ...]) -> list[int]:
        """The kinds of a chain's blocks."""

        def kinds() -> list[int]:
            ends = [len(states) for states in self._cuts(tp)]
            rows = zip(self._keys(tp), forced, ends, ends[1:], strict=False)
            numbers: dict[tuple[BlockKey, str | None, int, int], int] = {}
            return [numbers.setdefault(row, len(numbers)) for row in rows]

        return self._chain_kinds.of((tp, forced), kinds)

    def _solve(
        self, k: int, setting: Setting, mode: str, stored: Mapping[str, Placement]
    ) -> BlockTable | None:
        program = self._program(k, setting)
        if program is None:
            return None

        def allowed(value: str, state: Placement) -> bool:
            if value in stored:
                return state == stored[value]
            if mode == "lean" and state == R and len(self.graph.values[value].shape) > 1:
                return all(not s.sharded for s in program.storable[value])
            return True

        table = program.solve(self.coster.pricer(setting), allowed, time=self._solver_time(k))
        if table is not None and not table.proved and not self.time.over():
            self.unproved.add(self.graph.blocks[k].name)
        return table

    def _program(self, k: int, setting: Setting) -> BlockProgram | None:
        """The program of block k, or None: `refused` says why the user's sharding is impossible."""
        block = self.graph.blocks[k]
        # its factors are seconds alone: a loss takes as many on any data axis, what meets the batch
        # there is priced anew
        needs = replace(self.coster.needs(block), loss=False, met=False)
        if self._prices_experts(k, setting.mesh.tp):
            needs = replace(needs, experts=False)
        narrowed = needs.narrowed(setting)
        key = self._key(k, setting.mesh.tp), narrowed.mesh, narrowed.batch
        if key not in self._programs:
            layouts = self.coster.layouts(block, setting.mesh.tp)
            try:
                allowed = self._forced(layouts)
            except ValueError as error:
                self.refused.setdefault(setting.mesh.tp, str(error))
                return None
            leaving, cuts = self.coster.activations_at_cuts[k + 1], self._cuts(setting.mesh.tp)
            self._programs[key] = BlockProgram(
                self.coster.pricer(narrowed),
                layouts,
                inputs=dict.fromkeys(block.inputs, cuts[k]),
                # new values of buffers go nowhere: they are whole
                outputs={v: cuts[k + 1] if v in leaving else [R] for v in block.outputs},
                allowed=allowed,
            )
        return self._programs[key]

    def _prices_experts(self, k: int, tp: int) -> bool:
        """Whether a block's program is the same for all ep > 1: no value with a part for each
        expert is re-sharded but parameters, each for one operator."""

        def same() -> bool:
            block, experts = self.graph.blocks[k], self.coster.problem.factors.has_experts
            reads = Counter(name for op in block.ops for name in op.operands)
            values = {name for op in block.ops for name in op.results} | set(block.inputs)
            return not any(map(experts, values)) and all(
                reads[name] == 1 for name in block.parameters if experts(name)
            )

        return tp == 1 or self._same_for_experts.of(k, same)

    def _forced(self, layouts: BlockLayouts) -> Callable[[str, Strategy | Placement], bool]:
        """Restriction to the user's sharding entries."""
        # apart: an operator and its first result have one name
        named: dict[str, str] = {}
        states: dict[str, Placement] = {}
        for op in layouts.block.ops:
            entry = self.entries.get(op.name, Entry())
            if entry.strategy:
                named[op.name] = layouts.named(op, entry.strategy).name
            if entry.state:
                states[op.results[0]] = entry.state
        for parameter in layouts.block.parameters:
            if state := self.entries.get(parameter, Entry()).state:
                states[parameter] = state

        def allowed(name: str, state: Strategy | Placement) -> bool:
            if isinstance(state, Strategy):
                return named.get(name, state.name) == state.name
            return states.get(name, state) == state

        return allowed

    def _remember(self, block: Block, table: BlockTable, stored: dict[str, Placement]) -> bool:
        """Decide how shared parameters are stored; whether any was new."""
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
        """Shared parameters: which blocks read each, the sums and seconds of one copy. A stage
        holds one copy; its blocks store it alike, so that taking the others off moves no
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
        """Whether each block reads a shared parameter, by parameter."""
        blocks = self.graph.blocks
        return {value: [value in block.parameters for block in blocks] for value in self._shared}

    def least_of_blocks(self, setting: Setting) -> Floats:
        """(K,): lower bound on each block's seconds of forward and backward per micro-batch, in any
        stage, for any data axis with these rows, under any ZeRO stage, without what is paid once
        per step. Zeros where no time is left to find out."""
        mesh, batch = setting.mesh, setting.batch
        mesh = mesh if self._meets else mesh.alone
        batch = replace(batch, microbatches=min(batch.microbatches, 2))
        if (mesh, batch) not in self._least:
            setting = Setting(problem=setting.problem, mesh=mesh, batch=batch)
            pricer, keys = self.coster.pricer(setting), self._keys(mesh.tp)
            least = Memo[BlockKey, float]()
            for k, key in enumerate(keys):
                if self.time.over():
                    return np.zeros(len(keys))
                least.of(key, partial(self._bound_s, k, pricer))
            self._least[mesh, batch] = np.array([least[key] for key in keys])
        return self._least[mesh, batch]

    def _bound_s(self, k: int, pricer: Pricer) -> float:
        program = self._program(k, pricer.setting)
        return program.bound_s(pricer, self._solver_time(k)) if program else math.inf

    def _solver_time(self, k: int) -> SolverTime:
        """Seconds left to the solver for a block's class."""
        return self._times.setdefault(self.graph.blocks[k].class_id, SolverTime(self.time))


def _several(groups: Iterable[Iterable[str]]) -> frozenset[str]:
    """The names that are in several groups."""
    times = Counter(name for group in groups for name in set(group))
    return frozenset(name for name, count in times.items() if count > 1)
