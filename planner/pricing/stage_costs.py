"""What stages cost: block programs solved once per class and setting, priced once per decision.

The coster owns what prices have in common: programs, prices of operators, memory of blocks. `chain`
gives all stages of one setting (`chain.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from meshwright.costmodel.blocks.price import (
    PassPrice,
    pass_depends_on,
    price_block,
    price_pass,
    repeated_by_policy,
)
from meshwright.costmodel.blocks.stage import components, parameter_sums
from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.kernels.measured import OpProfile
from meshwright.costmodel.kernels.transfers import send_seconds
from meshwright.costmodel.operators.cost import Setting
from meshwright.costmodel.operators.flops import ModelFlops, model_flops, op_flops
from meshwright.costmodel.operators.fusion import Fusion, fuse
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.rules.traits import traits_of
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, Entry
from meshwright.costmodel.sharding.strategies import Placement, R, Strategy, divides
from meshwright.costmodel.target import EAGER, Target
from meshwright.planner.blocks.cut import crossing
from meshwright.planner.intra_op.program import BlockProgram, BlockTable
from meshwright.planner.plan.check import fingerprint
from meshwright.planner.pricing.chain import Chain
from meshwright.profiles.cluster import Cluster

MODES = ("fast", "lean")  # lean: matrices are split over the tensor axis wherever they can be


@dataclass(slots=True)
class StageCoster:
    """Prices stages of one graph on one cluster; owns the caches that make repeats free.

    `target` is the software that will run the plan, `profile` what was measured of it; `entries`
    are sharding decisions forced by the user, by operator or parameter value name. Stages start and
    end at the boundaries `cut_at`, by default at all. `refused` tells, by tensor-parallel degree,
    why a sharding that the user decided is impossible.
    """

    graph: Graph
    table: FactorTable
    cluster: Cluster
    precision: str
    optimizer: str
    entries: Mapping[str, Entry] = field(default_factory=dict)
    target: Target = EAGER
    profile: OpProfile | None = None
    cut_at: Sequence[int] = ()
    _programs: dict[Any, BlockProgram] = field(default_factory=dict)
    _pricers: dict[tuple[int, int, int, int, float], Pricer] = field(default_factory=dict)
    _states: dict[tuple[str, int], list[Placement]] = field(default_factory=dict)
    _shared: frozenset[str] = frozenset()
    _crossing: list[tuple[str, ...]] = field(default_factory=list)
    _order: list[int] = field(default_factory=list)
    _sums_statistics: bool = False
    _fusion: Fusion = field(init=False)
    _components: dict[Any, np.ndarray] = field(default_factory=dict)
    _passes: dict[Any, PassPrice] = field(default_factory=dict)
    _repeated: dict[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    _keys: dict[tuple[int, int], Any] = field(default_factory=dict)
    _least: dict[Any, np.ndarray] = field(default_factory=dict)
    _fingerprint: str = ""
    _chains: dict[Any, Chain] = field(default_factory=dict)
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
        self._sums_statistics = any(traits_of(op).batch_statistics for op in self.graph.ops)
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
        dp_shard: int = 0,
        spread: int = 1,
    ) -> Setting:
        return Setting(
            cluster=self.cluster,
            dp=dp,
            tp=tp,
            rows=rows,
            num_microbatches=microbatches,
            precision=self.precision,
            optimizer=self.optimizer,
            zero=zero,
            cp=cp,
            ep=ep,
            dp_shard=dp_shard,
            spread=spread,
            target=self.target,
            profile=self.profile,
        )

    def pricer(self, setting: Setting) -> Pricer:
        key = (setting.tp, setting.cp, setting.ep, setting.spread, setting.rows)
        if key not in self._pricers:
            self._pricers[key] = Pricer(
                graph=self.graph, table=self.table, setting=setting, fusion=self._fusion
            )
        return self._pricers[key].once(setting)

    def components(
        self, pricer: Pricer, block: Block, assignment: Assignment, inputs: Mapping[str, Placement]
    ) -> np.ndarray:
        """What a block adds to the sums of its stage; blocks of one class with equal decisions are
        priced once per setting."""
        setting = pricer.setting
        where = _where(setting)
        several = setting.num_microbatches > 1
        decided = self.decided(block, assignment)
        key = (block.class_id, where, several, decided, tuple(inputs.values()))
        if key not in self._components:
            layouts = BlockLayouts(self.graph, self.table, block, pricer.setting.tp)
            passes = self._pass(pricer, layouts, assignment, inputs)
            self._components[key] = components(
                price_block(pricer, layouts, assignment, inputs, passes=passes), block
            )
        return self._components[key]

    def _pass(
        self,
        pricer: Pricer,
        layouts: BlockLayouts,
        assignment: Assignment,
        inputs: Mapping[str, Placement],
    ) -> PassPrice:
        """What a block costs per micro-batch, found once for all data axes with the same rows per
        device."""
        block = layouts.block
        where = pass_depends_on(pricer.setting, block)
        key = (block.class_id, where, self.decided(block, assignment), tuple(inputs.values()))
        if key not in self._passes:
            if block.name not in self._repeated:
                self._repeated[block.name] = repeated_by_policy(pricer, block)
            self._passes[key] = price_pass(
                pricer, layouts, assignment, inputs, repeated=self._repeated[block.name]
            )
        return self._passes[key]

    def decided(self, block: Block, assignment: Assignment) -> int:
        """A number that equal decisions about blocks of one class share."""
        known = self._numbers.get(id(assignment))
        if known is None:
            found = _decisions(block, assignment)
            number = self._decisions.setdefault(found, len(self._decisions))
            known = self._numbers[id(assignment)] = (number, assignment)  # kept: ids are reused
        return known[0]

    def deciding(self, entries: Mapping[str, Entry], cut_at: Sequence[int]) -> StageCoster:
        """The same prices under other sharding decisions of the user, with stages that start and
        end elsewhere; caches are shared."""
        if entries == self.entries and tuple(cut_at) == tuple(self.cut_at):
            return self
        return replace(
            self, entries=entries, cut_at=cut_at, _chains={}, _least={}, _keys={}, refused={}
        )

    @property
    def fingerprint(self) -> str:
        """The model's, found once."""
        if not self._fingerprint:
            self._fingerprint = fingerprint(self.graph)
        return self._fingerprint

    # --- boundary states ---

    def cut_states(self, k: int, tp: int) -> list[Placement]:
        """States that the one value crossing cut k may have; replicated where several cross, or the
        value other cuts too (a skip connection): what leaves a stage is whole, wherever it ends."""
        values = self._crossing[k]
        if tp == 1 or len(values) != 1 or sum(values[0] in cut for cut in self._crossing) > 1:
            return [R]
        return self.value_states(values[0], tp)

    def value_states(self, value: str, tp: int) -> list[Placement]:
        key = (value, tp)
        if key not in self._states:
            found = [R]
            for atoms in self.table.dims[value]:
                for atom in atoms:
                    at = self.table.find(value, atom)
                    if atom != self.table.batch and divides(self.table, atom, tp) and at:
                        found.append(Placement("S", *at))
            self._states[key] = found
        return self._states[key]

    # --- one setting ---

    def chain(
        self, setting: Setting, mode: str = "fast", forced: Sequence[str | None] = ()
    ) -> Chain:
        """Costs of all stages in one setting; none is legal that has a block without a legal
        assignment. `forced` are recompute policies that the user decided, by block."""
        forced = tuple(forced) or (None,) * len(self.graph.blocks)
        key = (*_where(setting), setting.num_microbatches, mode, forced)
        if key not in self._chains:
            self._chains[key] = self._chain(replace(setting, zero=0), mode, forced)
        return self._chains[key]

    def _chain(self, setting: Setting, mode: str, forced: tuple[str | None, ...]) -> Chain:
        pricer = self.pricer(setting)
        alike = replace(setting, dp_shard=0, spread=1)
        cuts = [self.cut_states(k, setting.tp) for k in range(len(self.graph.blocks) + 1)]
        stored: dict[str, Placement] = {}
        if alike != setting:  # where the data axis lies changes prices, not what is decided
            base = self.chain(alike, mode, forced)
            tables = list(base.tables)
            stored |= base.stored
        else:
            tables = self._tables(setting, mode, cuts, stored)
        return Chain(
            setting=setting,
            mode=mode,
            blocks=self.graph.blocks,
            forced=forced,
            tables=tables,
            at=self.cut_at or range(len(self.graph.blocks) + 1),
            cuts=cuts,
            stored=stored,
            send_s=self.send_seconds(setting),
            again=self._read_again(pricer, stored, setting.num_microbatches),
            price=partial(self._priced, pricer),
        )

    def _tables(
        self,
        setting: Setting,
        mode: str,
        cuts: Sequence[Sequence[Placement]],
        stored: dict[str, Placement],
    ) -> list[BlockTable | None]:
        """Solved programs in block order, None for blocks without a legal assignment. Parameters
        read by several blocks are stored as the heaviest of them wants: `stored`, filled here."""
        pricer = self.pricer(setting)
        solved: dict[Any, BlockTable | None] = {}
        found: dict[int, BlockTable | None] = {}
        for k in self._order:
            block = self.graph.blocks[k]
            key = self._key(k, setting.tp)
            if key not in solved:
                table = self._solve(k, setting, pricer, mode, cuts, stored)
                solved[key] = table
                if table is not None and self._remember(block, table, stored):
                    solved[key] = self._solve(k, setting, pricer, mode, cuts, stored) or table
            found[k] = solved[key]
        return [found[k] for k in range(len(self.graph.blocks))]

    def _key(self, k: int, tp: int) -> Any:
        """What makes two blocks' programs the same on a tensor axis."""
        if (k, tp) not in self._keys:
            self._keys[k, tp] = self._make_key(k, tp)
        return self._keys[k, tp]

    def _make_key(self, k: int, tp: int) -> Any:
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
        self,
        k: int,
        setting: Setting,
        pricer: Pricer,
        mode: str,
        cuts: Sequence[Sequence[Placement]],
        stored: Mapping[str, Placement],
    ) -> BlockTable | None:
        program = self._program(k, setting, pricer, cuts)
        if program is None:
            return None

        def allowed(value: str, state: Placement) -> bool:
            if value in stored:
                return state == stored[value]
            if mode == "lean" and state == R and len(self.graph.values[value].shape) > 1:
                return all(not s.sharded for s in program.stored_states(value))
            return True

        return program.solve(pricer, allowed)

    def _program(
        self, k: int, setting: Setting, pricer: Pricer, cuts: Sequence[Sequence[Placement]]
    ) -> BlockProgram | None:
        """None where a sharding that the user decided is impossible: `refused` says why."""
        block = self.graph.blocks[k]
        # statistics of a batch that the data axis splits are summed over it
        summed = setting.dp if any(traits_of(op).batch_statistics for op in block.ops) else 1
        # with tp = 1 nothing is re-sharded, and the program is the same for all ep > 1
        ep = min(setting.ep, 2) if setting.tp == 1 else setting.ep
        where = (setting.tp, setting.cp, ep, setting.rows, summed)
        key = (self._key(k, setting.tp), *where)
        if key not in self._programs:
            layouts = BlockLayouts(self.graph, self.table, block, setting.tp)
            try:
                allowed = self._forced(layouts)
            except ValueError as error:
                self.refused.setdefault(setting.tp, str(error))
                return None
            self._programs[key] = BlockProgram(
                pricer,
                layouts,
                inputs=dict.fromkeys(block.inputs, cuts[k]),
                # new values of buffers go nowhere: they are whole
                outputs={
                    v: cuts[k + 1] if v in self._crossing[k + 1] else [R] for v in block.outputs
                },
                allowed=allowed,
            )
        return self._programs[key]

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

    def _priced(self, pricer: Pricer, table: BlockTable, index: tuple[int, ...]) -> np.ndarray:
        """Components of a block between the boundary states of `index`."""
        program = table.program
        inputs = {
            value: program.inputs[value][table.choices[index][f"in:{value}"]]
            for value in program.block.inputs
        }
        return self.components(pricer, program.block, program.assignment(table, index), inputs)

    def least_of_blocks(self, setting: Setting) -> np.ndarray:
        """(K,): no more than each block's seconds of forward and backward per micro-batch, in any
        stage, for any data axis with these rows, under any ZeRO stage: what is paid once per step
        left out."""
        several = setting.num_microbatches > 1
        summed = setting.dp if self._sums_statistics else 1
        where = (setting.tp, setting.cp, setting.ep, setting.rows, several, summed)
        if where not in self._least:
            pricer = self.pricer(setting)
            cuts = [self.cut_states(k, setting.tp) for k in range(len(self.graph.blocks) + 1)]
            found: dict[Any, float] = {}
            for k in range(len(self.graph.blocks)):
                key = self._key(k, setting.tp)
                if key not in found:
                    program = self._program(k, setting, pricer, cuts)
                    table = program.solve(pricer, microbatches=math.inf) if program else None
                    found[key] = math.inf if table is None else float(table.costs.min())
            self._least[where] = np.array(
                [found[self._key(k, setting.tp)] for k in range(len(self.graph.blocks))]
            )
        return self._least[where]

    def _read_again(
        self, pricer: Pricer, stored: Mapping[str, Placement], microbatches: int
    ) -> list[tuple[list[bool], np.ndarray, float]]:
        """A stage holds one copy of a parameter that several of its blocks read. They store it
        alike, so that taking the others off moves no optimum."""
        return [
            (
                [value in block.parameters for block in self.graph.blocks],
                parameter_sums(pricer, value, state),
                pricer.parameter_cost(value, state).seconds(microbatches),
            )
            for value, state in sorted(stored.items())
        ]

    def send_seconds(self, setting: Setting) -> np.ndarray:
        """Seconds to send what crosses each boundary, one micro-batch, one direction, between two
        stages with this mesh; where some neighbours share a node and others don't, on average."""
        pricer, node = self.pricer(setting), self.cluster.devices_per_node
        devices = setting.dp * setting.cp * setting.tp
        # of the stages that share a node in pipeline order, one sends to the next node
        share = min(1.0, devices / node) if self.cluster.num_nodes > 1 else 0.0
        if setting.spread > 1:  # so many neighbours lie in one node
            share = 1.0 / setting.spread
        inside, border = min(devices, max(1, node // 2)), max(node, devices)
        pairs = (
            (share, range(border - devices, border), range(border, border + devices)),
            (1 - share, range(inside), range(inside, 2 * inside)),
        )

        def seconds(nbytes: float) -> float:
            return sum(
                part
                * send_seconds(
                    nbytes,
                    source,
                    destination,
                    tp=setting.tp,
                    cluster=self.cluster,
                    target=self.target,
                    profile=self.profile,
                )
                for part, source, destination in pairs
                if part
            )

        crossing = [sum(pricer.nbytes(v) for v in values) for values in self._crossing]
        known = {nbytes: seconds(nbytes) for nbytes in set(crossing)}
        return np.array([known[nbytes] for nbytes in crossing])


def _where(setting: Setting) -> tuple[Any, ...]:
    """What prices of a block depend on, but for the number of micro-batches."""
    return (
        setting.dp,
        setting.tp,
        setting.cp,
        setting.ep,
        setting.rows,
        setting.dp_shard,
        setting.spread,
    )


def _decisions(block: Block, assignment: Assignment) -> tuple[Any, ...]:
    """An assignment by position, equal for equal decisions about blocks of one class."""
    chosen = tuple(assignment.strategies[op.name].name for op in block.ops)
    names = (*(r for op in block.ops for r in op.results), *block.parameters)
    return chosen, tuple(assignment.states[name] for name in names)
