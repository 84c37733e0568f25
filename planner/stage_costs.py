"""Costs of every run of blocks as a pipeline stage, by exact composition of block programs.

A block's program gives its cost for every pair of boundary states. A stage is a chain of blocks:
its cost is the min-plus product of theirs, starting and ending replicated on the tensor axis (that
is how tensors cross stages). All runs i..j-1 are composed at once, one block at a time, and carry
their components (seconds, parameters, saved bytes) along. Blocks of one class are solved once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from costmodel.collectives import p2p_time
from costmodel.cost import OpProfile, Setting
from costmodel.factors import FactorTable
from costmodel.fusion import Fusion, fuse
from costmodel.graph import Block, Graph
from costmodel.pricing import Pricer
from costmodel.strategies import Placement, R, Strategy
from costmodel.target import EAGER, Target
from planner.block_price import BlockPrice, price_block
from planner.blocks import ModelFlops, crossing, model_flops, op_flops
from planner.intra_op import BlockProgram, BlockTable
from planner.layouts import Assignment, BlockLayouts, Entry, translate
from planner.saved import BlockMemory, block_memory
from planner.stage_sums import FIELDS, components, joined, parameter_sums
from profiles.cluster import Cluster

MODES = ("fast", "lean")  # lean: matrices are split over the tensor axis wherever they can be


@dataclass(slots=True, kw_only=True)
class ChainCosts:
    """Every stage i..j-1 for one (dp, tp, rows, m, mode): `sums[i, j]` and seconds to send over
    each cut."""

    setting: Setting
    mode: str
    sums: np.ndarray
    seconds: np.ndarray
    send_s: np.ndarray
    tables: Sequence[BlockTable]
    cuts: Sequence[Sequence[Placement]]
    costs: Sequence[np.ndarray]


@dataclass(slots=True)
class StageCoster:
    """Prices stages of one graph on one cluster; owns the caches that make repeats free.

    `target` is the software that will run the plan, `profile` what was measured of it; `entries`
    are sharding decisions forced by the user, by operator or parameter value name.
    """

    graph: Graph
    table: FactorTable
    cluster: Cluster
    precision: str
    optimizer: str
    entries: Mapping[str, Entry] = field(default_factory=dict)
    target: Target = EAGER
    profile: OpProfile | None = None
    _programs: dict[Any, BlockProgram] = field(default_factory=dict)
    _pricers: dict[tuple[int, int, int, float], Pricer] = field(default_factory=dict)
    _states: dict[tuple[str, int], list[Placement]] = field(default_factory=dict)
    _shared: frozenset[str] = frozenset()
    _crossing: list[tuple[str, ...]] = field(default_factory=list)
    _order: list[int] = field(default_factory=list)
    _fusion: Fusion = field(init=False)
    _components: dict[Any, np.ndarray] = field(default_factory=dict)
    _memory: dict[Any, BlockMemory] = field(default_factory=dict)
    _decisions: dict[Any, int] = field(default_factory=dict)
    _numbers: dict[int, tuple[int, Assignment]] = field(default_factory=dict)
    blocks: dict[str, Block] = field(init=False)
    model_flops: ModelFlops = field(init=False)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        shared: set[str] = set()
        for block in self.graph.blocks:
            shared |= seen & set(block.parameters)
            seen |= set(block.parameters)
        self.model_flops = model_flops(self.graph, self.table)
        self.blocks = {block.name: block for block in self.graph.blocks}
        self._shared = frozenset(shared)
        self._fusion = fuse(self.graph, self.table, self.target.fusion)
        self._crossing = [*crossing(self.graph), ()]
        work = [sum(op_flops(self.table, op) for op in block.ops) for block in self.graph.blocks]
        self._order = sorted(range(len(work)), key=lambda k: -work[k])

    def setting(
        self,
        *,
        dp: int,
        tp: int,
        rows: float,
        microbatches: int,
        zero: int = 0,
        cp: int = 1,
        ep: int = 1,
    ) -> Setting:
        return Setting(
            cluster=self.cluster, dp=dp, tp=tp, rows=rows, num_microbatches=microbatches,
            precision=self.precision, optimizer=self.optimizer, zero=zero, cp=cp, ep=ep,
            target=self.target, profile=self.profile,
        )  # fmt: skip

    def pricer(self, setting: Setting) -> Pricer:
        key = (setting.tp, setting.cp, setting.ep, setting.rows)
        if key not in self._pricers:
            self._pricers[key] = Pricer(
                graph=self.graph, table=self.table, setting=setting, fusion=self._fusion
            )
        return self._pricers[key].once(setting)

    def components(
        self, pricer: Pricer, block: Block, assignment: Assignment,
        inputs: Mapping[str, Placement],
    ) -> np.ndarray:  # fmt: skip
        """What a block adds to the sums of its stage; blocks of one class with equal decisions are
        priced once per setting."""
        setting = pricer.setting
        where = (setting.dp, setting.tp, setting.cp, setting.ep, setting.rows)
        several = setting.num_microbatches > 1
        decided = self._decided(block, assignment)
        key = (block.class_id, where, several, decided, tuple(inputs.values()))
        if key not in self._components:
            layouts = BlockLayouts(self.graph, self.table, block, pricer.setting.tp)
            memory = self._memory_of(pricer, layouts, assignment, inputs)
            self._components[key] = components(
                price_block(pricer, layouts, assignment, inputs, memory=memory), block
            )
        return self._components[key]

    def _memory_of(
        self, pricer: Pricer, layouts: BlockLayouts, assignment: Assignment,
        inputs: Mapping[str, Placement],
    ) -> BlockMemory:  # fmt: skip
        """What a block keeps, found once for all data axes with the same rows per device: only
        whether the batch is split and cut into several micro-batches counts of them."""
        setting, block = pricer.setting, layouts.block
        split = setting.dp > 1, setting.num_microbatches > 1
        where = (setting.tp, setting.cp, setting.ep, setting.rows, *split)
        # by name: it tells which operator keeps what
        key = (block.name, where, _decisions(block, assignment), tuple(inputs.values()))
        if key not in self._memory:
            self._memory[key] = block_memory(pricer, layouts, assignment, inputs)
        return self._memory[key]

    def _decided(self, block: Block, assignment: Assignment) -> int:
        """A number that equal decisions about blocks of one class share."""
        known = self._numbers.get(id(assignment))
        if known is None:
            found = _decisions(block, assignment)
            number = self._decisions.setdefault(found, len(self._decisions))
            known = self._numbers[id(assignment)] = (number, assignment)  # kept: ids are reused
        return known[0]

    # --- boundary states ---

    def cut_states(self, k: int, tp: int) -> list[Placement]:
        """States that the one value crossing cut k may have; replicated where several cross."""
        values = self._crossing[k]
        if len(values) != 1 or tp == 1:
            return [R]
        return self.value_states(values[0], tp)

    def value_states(self, value: str, tp: int) -> list[Placement]:
        key = (value, tp)
        if key not in self._states:
            found = [R]
            for atoms in self.table.dims[value]:
                for atom in atoms:
                    at = self.table.find(value, atom)
                    if atom != self.table.batch and self.table.sizes[atom] % tp == 0 and at:
                        found.append(Placement("S", *at))
            self._states[key] = found
        return self._states[key]

    # --- one setting ---

    def chain(self, setting: Setting, mode: str = "fast") -> ChainCosts | None:
        """Costs of all stages in one setting; None where some block has no legal assignment."""
        blocks = self.graph.blocks
        cuts = [self.cut_states(k, setting.tp) for k in range(len(blocks) + 1)]
        stored: dict[str, Placement] = {}
        tables = self._tables(setting, mode, cuts, stored)
        if tables is None:
            return None
        matrices: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for j, table in enumerate(tables):
            if id(table) not in matrices:
                shape = len(cuts[j]), len(cuts[j + 1])
                matrices[id(table)] = self._matrix(table, *shape, setting)
        steps = [matrices[id(table)] for table in tables]
        sums, seconds = self._compose(steps)
        self._count_once(sums, seconds, stored, setting)
        return ChainCosts(
            setting=setting, mode=mode, sums=sums, seconds=seconds,
            send_s=self.send_seconds(setting),
            tables=tables, cuts=cuts, costs=[cost for cost, _ in steps],
        )  # fmt: skip

    def _tables(
        self, setting: Setting, mode: str, cuts: Sequence[Sequence[Placement]],
        stored: dict[str, Placement],
    ) -> list[BlockTable] | None:  # fmt: skip
        """Solved programs in block order. Parameters read by several blocks are stored as the
        heaviest of them wants: `stored`, filled here."""
        pricer = self.pricer(setting)
        solved: dict[Any, BlockTable] = {}
        found: dict[int, BlockTable] = {}
        for k in self._order:
            block = self.graph.blocks[k]
            key = self._key(k, setting.tp)
            if key not in solved:
                table = self._solve(k, setting, pricer, mode, cuts, stored)
                if table is None:
                    return None
                solved[key] = table
                if self._remember(block, table, stored):
                    solved[key] = self._solve(k, setting, pricer, mode, cuts, stored) or table
            found[k] = solved[key]
        return [found[k] for k in range(len(self.graph.blocks))]

    def _key(self, k: int, tp: int) -> Any:
        block = self.graph.blocks[k]
        shared = tuple(sorted(self._shared & set(block.parameters)))
        forced = tuple(
            (i, str(self.entries[name]))
            for i, name in enumerate([*(op.name for op in block.ops), *block.parameters])
            if name in self.entries
        )
        free = (len(self.cut_states(k, tp)) > 1, len(self.cut_states(k + 1, tp)) > 1)
        return block.class_id, shared, forced, free

    def _solve(
        self, k: int, setting: Setting, pricer: Pricer, mode: str,
        cuts: Sequence[Sequence[Placement]], stored: Mapping[str, Placement],
    ) -> BlockTable | None:  # fmt: skip
        block = self.graph.blocks[k]
        # statistics of a batch that the data axis splits are summed over it
        summed = setting.dp if any(op.short == "batch_norm" for op in block.ops) else 1
        where = (setting.tp, setting.cp, setting.ep, setting.rows, summed)
        key = (self._key(k, setting.tp), *where)
        if key not in self._programs:
            layouts = BlockLayouts(self.graph, self.table, block, setting.tp)
            self._programs[key] = BlockProgram(
                pricer,
                layouts,
                inputs=dict.fromkeys(block.inputs, cuts[k]),
                outputs=dict.fromkeys(block.outputs, cuts[k + 1]),
                allowed=self._forced(layouts),
            )
        program = self._programs[key]

        def allowed(value: str, state: Placement) -> bool:
            if value in stored:
                return state == stored[value]
            if mode == "lean" and state == R and len(self.graph.values[value].shape) > 1:
                return all(not s.sharded for s in program.stored_states(value))
            return True

        return program.solve(pricer, allowed)

    def _forced(self, layouts: BlockLayouts) -> Any:
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

    # --- composition ---

    def _compose(
        self, steps: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(sums, seconds) of every stage: `[i, j]` for blocks i..j-1, replicated at both ends."""
        count = len(steps)
        sums = np.zeros((count + 1, count + 1, len(FIELDS)))
        seconds = np.full((count + 1, count + 1), np.inf)
        best = np.full((count, 1), np.inf)  # [start, state at the current cut]
        carried = np.zeros((count, 1, len(FIELDS)))
        for j, (cost, parts) in enumerate(steps):
            best[j], carried[j] = np.inf, 0.0
            best[j, 0] = 0.0
            options = best[:, :, None] + cost[None]
            pick = options.argmin(axis=1)
            best = np.take_along_axis(options, pick[:, None, :], axis=1)[:, 0, :]
            carried = self._carry(carried, parts, pick)
            seconds[: j + 1, j + 1] = best[: j + 1, 0]
            sums[: j + 1, j + 1] = carried[: j + 1, 0]
        return sums, seconds

    def _carry(self, carried: np.ndarray, parts: np.ndarray, pick: np.ndarray) -> np.ndarray:
        starts = np.arange(len(carried))[:, None]
        ends = np.arange(parts.shape[1])[None, :]
        before, added = carried[starts, pick], parts[pick, ends]
        return joined(before, added)

    def _count_once(
        self, sums: np.ndarray, seconds: np.ndarray, stored: Mapping[str, Placement],
        setting: Setting,
    ) -> None:  # fmt: skip
        """A stage holds one copy of a parameter that several of its blocks read. They store it
        alike, so that taking the others off moves no optimum."""
        pricer = self.pricer(setting)
        for value, state in sorted(stored.items()):
            readers = [value in block.parameters for block in self.graph.blocks]
            before = np.concatenate([[0], np.cumsum(readers)])
            extra = np.maximum(before[None, :] - before[:, None] - 1, 0)
            sums -= extra[:, :, None] * parameter_sums(pricer, value, state)
            once = pricer.parameter_cost(value, state).seconds(setting.num_microbatches)
            seconds -= extra * once

    def _matrix(
        self, table: BlockTable, ins: int, outs: int, setting: Setting
    ) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, components) of a block over its boundary states, priced from the
        assignments."""
        cost = np.full((ins, outs), np.inf)
        parts = np.zeros((ins, outs, len(FIELDS)))
        pricer = self.pricer(setting)
        for s in range(ins):
            for t in range(outs):
                index = boundary_index(table, s, t)
                if index not in table.choices:
                    continue
                price = self.price(pricer, table, index)
                parts[s, t] = components(price, table.program.block)
                cost[s, t] = price.cost.seconds(setting.num_microbatches)
        return cost, parts

    def price(self, pricer: Pricer, table: BlockTable, index: tuple[int, ...]) -> BlockPrice:
        program = table.program
        assignment = program.assignment(table, index)
        inputs = {
            value: program.inputs[value][table.choices[index][f"in:{value}"]]
            for value in program.block.inputs
        }
        # the search recomputes all of a block or nothing
        memory = self._memory_of(pricer, program.layouts, assignment, inputs)
        return price_block(pricer, program.layouts, assignment, inputs, memory=memory, policies=())

    def send_seconds(self, setting: Setting) -> np.ndarray:
        """Seconds to send what crosses each cut, one micro-batch, one direction: every rank its own
        rows."""
        pricer = self.pricer(setting)
        devices = setting.dp * setting.tp
        node = self.cluster.devices_per_node
        # of the stages that share a node in pipeline order, one sends to the next node
        share = min(1.0, devices / node) if self.cluster.num_nodes > 1 else 0.0
        out = np.zeros(len(self._crossing))
        for k, values in enumerate(self._crossing):
            nbytes = sum(pricer.nbytes(v) for v in values)
            for crosses, part in ((True, share), (False, 1 - share)):
                if nbytes and part:
                    out[k] += part * p2p_time(
                        nbytes, self.cluster, crosses_node=crosses, concurrent=min(devices, node)
                    )
        return out

    # --- the way back ---

    def assignments(self, chain: ChainCosts, start: int, stop: int) -> dict[str, Assignment]:
        """The assignments behind stage `start..stop-1` of a chain, by block name."""
        best = np.array([0.0])
        trail: list[np.ndarray] = []
        for j in range(start, stop):
            first = chain.costs[j][:1] if j == start else chain.costs[j]
            options = best[:, None] + first
            trail.append(options.argmin(axis=0))
            best = options.min(axis=0)
        states = [0]
        for pick in reversed(trail):
            states.append(int(pick[states[-1]]))
        states.reverse()
        found = {}
        for j in range(start, stop):
            table, block = chain.tables[j], self.graph.blocks[j]
            index = boundary_index(table, states[j - start], states[j - start + 1])
            assignment = table.program.assignment(table, index)
            found[block.name] = translate(assignment, table.program.block, block)
        return found


def boundary_index(table: BlockTable, s: int, t: int) -> tuple[int, ...]:
    """Index into a block table for input state `s` and output state `t`."""
    return tuple(s if name.startswith("in:") else t for name in table.keep)


def _decisions(block: Block, assignment: Assignment) -> tuple[Any, ...]:
    """An assignment by position, equal for equal decisions about blocks of one class."""
    chosen = tuple(assignment.strategies[op.name].name for op in block.ops)
    names = (*(r for op in block.ops for r in op.results), *block.parameters)
    return chosen, tuple(assignment.states[name] for name in names)
