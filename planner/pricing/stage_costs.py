"""Prices of blocks under the decisions of a plan or of block programs (`programs.py`); those of
stages are their sums. Nothing is decided here, and no solver is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from meshwright.costmodel import operators
from meshwright.costmodel.blocks import (
    KnownSteps,
    PassNeeds,
    PassPrice,
    Repeated,
    price_block,
    price_pass,
    repeated_by_policy,
    repriced,
)
from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.intervals import Quantiles, memory_quantiles, step_quantiles
from meshwright.costmodel.kernels import Hop, Hops, crosses_node, send_seconds
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.mesh import (
    CONTEXT_KINDS,
    NOT_AWAY,
    ULYSSES,
    Batch,
    ContextKind,
    HostParts,
    Mesh,
    Parts,
    Stepping,
)
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.sharding import (
    Assignment,
    BlockLayouts,
    ContextLayout,
    Placement,
    R,
    Step,
    context_layout,
    moves,
    strategies,
)
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.costmodel.stages import Floats, Sums, Walked, block_sums
from meshwright.planner.blocks import activations_at_cuts
from meshwright.planner.plan import (
    Plan,
    StagePlan,
    expert_weights,
    fingerprint,
    segments_of,
    ulysses_degrees,
)
from meshwright.profiles.cluster import Cluster

States: TypeAlias = tuple[Placement, ...]
Decided: TypeAlias = tuple[str, str, States]  # class of a block, its choices, its inputs' states

# the share of neighbours that lie so, and the ranks of two
Neighbours: TypeAlias = Mapping[Hop, tuple[float, tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A block of a stage, the states of its inputs, its steps, its price per micro-batch, its sums
    and its parameters in the states in which they are stored, those that may be `shared` with other
    blocks apart."""

    block: Block
    assignment: Assignment
    inputs: Mapping[str, Placement]
    steps: Sequence[Step]
    passes: PassPrice
    sums: Sums
    parameters: tuple[tuple[str, Placement], ...]
    shared: tuple[tuple[str, Placement], ...]

    def repeats(self, policy: str) -> float:
        """Bytes that it makes again under a policy."""
        repeats = self.passes.repeats.get(policy)
        return repeats.freed_bytes if repeats else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """A stage with its blocks as they run."""

    stage: StagePlan
    setting: operators.Setting
    pricer: operators.Pricer
    blocks: Sequence[Entered]

    @property
    def spans(self) -> list[range]:
        """Positions of the blocks in each segment."""
        if not self.stage.segmented:
            return []
        blocks = [entered.block for entered in self.blocks]
        return segments_of(blocks, self.stage.segments, self.pricer.graph.loss)


@dataclass(slots=True)
class _Known:
    """Prices that are known, for as long as the coster lives."""

    kinds: Memo[tuple[Mesh, Batch], ContextKind] = field(default_factory=Memo)
    contexts: Memo[tuple[int, ContextKind | None], ContextLayout] = field(default_factory=Memo)
    settings: dict[Parts, operators.Setting] = field(default_factory=dict)
    # prices of operators, by the setting of a pass, and by that of a step
    pricers_of_pass: Memo[tuple[Mesh, Batch], operators.Pricer] = field(default_factory=Memo)
    pricers: Memo[Parts, operators.Pricer] = field(default_factory=Memo)
    # of `ParameterPricer`
    parameters: Memo[Any, Memo[Any, operators.Priced]] = field(default_factory=Memo)
    blocks: Memo[tuple[Parts, Decided, bool], tuple[PassPrice, Sums]] = field(default_factory=Memo)
    # by the setting of a step: blocks by name and what was decided of them
    entered: Memo[Parts, Memo[Decided, Entered]] = field(default_factory=Memo)
    needs: Memo[str, PassNeeds] = field(default_factory=Memo)  # by class of a block
    passes: Memo[tuple[Mesh, Batch, Decided], PassPrice] = field(default_factory=Memo)
    # name of a block, tp: its layouts, its steps by choices and states of its inputs
    layouts: Memo[tuple[str, int], BlockLayouts] = field(default_factory=Memo)
    steps: Memo[tuple[str, int, str, States], KnownSteps] = field(default_factory=Memo)
    # bytes of the activations at each boundary, by the setting of a pass
    sent_bytes: Memo[tuple[Mesh, Batch, bool], list[float]] = field(default_factory=Memo)
    neighbours: Memo[Mesh, Neighbours] = field(default_factory=Memo)
    hops: Memo[tuple[Mesh, Pipeline], Hops] = field(default_factory=Memo)
    # class of a block: positions of the operators that each recompute policy repeats
    repeated: Memo[str, Repeated] = field(default_factory=Memo)


@dataclass
class StageCoster:
    """Prices blocks of one problem; blocks of one class with equal decisions are priced once."""

    problem: operators.Problem
    walks: Memo[Any, Walked] = field(default_factory=Memo, init=False)  # `walked_stages`
    _known: _Known = field(default_factory=_Known, init=False)

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    @property
    def cluster(self) -> Cluster:
        return self.problem.cluster

    @cached_property
    def blocks(self) -> dict[str, Block]:
        """The graph's blocks by name."""
        return {block.name: block for block in self.graph.blocks}

    @cached_property
    def model_flops(self) -> operators.ModelFlops:
        return operators.model_flops(self.graph, self.problem.factors)

    @cached_property
    def errors(self) -> tuple[Quantiles, Quantiles]:
        """Quantiles of measured over predicted steps and memory, of such models and devices."""
        target, experts = self.problem.target, bool(expert_weights(self.graph))
        return (
            step_quantiles(self.cluster.device.name, target.name, experts=experts),
            memory_quantiles(target.name, executed=target.gradients_come),
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model, as plans name it."""
        return fingerprint(self.graph)

    @cached_property
    def activations_at_cuts(self) -> list[tuple[str, ...]]:
        """Values that are sent where a stage ends before block k, for k = 0..K."""
        return [*activations_at_cuts(self.graph), ()]

    @cached_property
    def _passed_at_cuts(self) -> list[tuple[str, ...]]:
        """Values that block k-1 makes and block k reads, for k = 0..K."""
        pairs = pairwise(self.graph.blocks)
        passed = (tuple(v for v in a.outputs if v in b.inputs) for a, b in pairs)
        return [(), *passed, ()]

    @cached_property
    def message_s(self) -> Callable[..., float]:
        """`send_seconds` between ranks of this problem's cluster."""
        p = self.problem
        return partial(send_seconds, cluster=p.cluster, target=p.target, profile=p.profile)

    @cached_property
    def _fusion(self) -> operators.Fusion:
        return operators.fuse(self.graph, self.problem.factors, self.problem.target.fusion)

    def setting(
        self,
        mesh: Mesh,
        batch: Batch,
        sharing: Sharing = UNSHARED,
        host: HostParts = NOT_AWAY,
        stepping: Stepping = "at_end",
    ) -> operators.Setting:
        """A stage of this problem; where the kind of attention is open, it is the cheapest."""
        if mesh.is_open:
            mesh = mesh.of_kind(self._cheapest_kind(mesh, batch))
        setting = operators.Setting(
            problem=self.problem,
            mesh=mesh,
            batch=batch,
            sharing=sharing,
            host=host,
            stepping=stepping,
        )
        # the first of equal settings knows its narrower ones
        return self._known.settings.setdefault(setting.parts, setting)

    def _cheapest_kind(self, mesh: Mesh, batch: Batch) -> ContextKind:
        """The kind of attention over the context axis that takes least."""
        mesh = replace(mesh, ep=1)
        setting = operators.Setting(problem=self.problem, mesh=mesh, batch=batch).of_pass

        def cheapest() -> ContextKind:
            by_heads = mesh.cp in ulysses_degrees(self.graph, mesh.tp)
            kinds = [kind for kind in CONTEXT_KINDS if kind != ULYSSES or by_heads]
            return min(kinds, key=lambda kind: self._attention_s(setting, kind))

        return self._known.kinds.of((setting.mesh, setting.batch), cheapest)

    def _attention_s(self, setting: operators.Setting, kind: ContextKind) -> float:
        """Seconds of the graph's attention by a kind of context parallelism."""
        graph, table = self.graph, self.problem.factors
        setting = replace(setting, mesh=setting.mesh.of_kind(kind))
        sizes = operators.LocalSizes(
            graph=graph, table=table, setting=setting, context=self._context(setting)
        )
        attention = [op for op in graph.ops if traits_of(op).kernel == "attention"]
        distinct = {tuple(graph.values[v].shape for v in op.operands): op for op in attention}
        seconds = 0.0
        for op in distinct.values():
            options = strategies(graph, table, op, setting.mesh.tp)
            by_heads = next((x for x in options if x.split_factor == "heads"), options[0])
            entries = operators.attention(sizes, op, by_heads)
            computed = [
                sum(e.seconds for e in entries if e.column == c) for c in operators.PASS_COLUMNS
            ]
            exchanged = operators.context_exchange(sizes, op, by_heads, *computed)
            seconds += sum(computed) + sum(entry.seconds for entry in exchanged)
        return seconds

    def _context(self, setting: operators.Setting) -> ContextLayout | None:
        """The layout of the context axis, if there is one."""
        table, contexts = self.problem.factors, self._known.contexts
        if setting.mesh.cp == 1 or table.sequence is None:
            return None
        key = setting.mesh.cp, setting.mesh.kind
        return contexts.of(key, lambda: context_layout(self.graph, table, *key))

    def pricer(self, setting: operators.Setting) -> operators.Pricer:
        """Prices of operators and re-shards in a setting."""
        known = self._known.pricers
        return known.of(setting.parts, lambda: self._of_pass(setting.of_pass).once(setting))

    def _of_pass(self, setting: operators.Setting) -> operators.Pricer:
        return self._known.pricers_of_pass.of(
            (setting.mesh, setting.batch),
            lambda: operators.Pricer(
                graph=self.graph,
                table=self.problem.factors,
                setting=setting,
                fusion=self._fusion,
                known_parameters=self._known.parameters,
                context=self._context(setting),
            ),
        )

    def block(
        self,
        pricer: operators.Pricer,
        block: Block,
        assignment: Assignment,
        inputs: Mapping[str, Placement],
    ) -> tuple[PassPrice, Sums]:
        """The price of a block per micro-batch, and its contribution to the sums of its stage."""
        setting = pricer.step.of_step
        decided = block.class_id, assignment.choices, tuple(inputs.values())
        twice = not self.graph.gathered_twice.isdisjoint(block.parameters)

        def price() -> tuple[PassPrice, Sums]:
            layouts = self.layouts(block, setting.mesh.tp)
            passes = self._pass(setting, layouts, assignment, inputs)
            of_step = price_block(self.pricer(setting), layouts, assignment, inputs, passes=passes)
            return passes, block_sums(of_step)

        key = setting.parts, decided, twice
        return self._known.blocks.of(key, price)

    def _pass(
        self,
        setting: operators.Setting,
        layouts: BlockLayouts,
        assignment: Assignment,
        inputs: Mapping[str, Placement],
    ) -> PassPrice:
        """The price of a block per micro-batch, the same for all data axes of equal rows."""
        block, known = layouts.block, self._known
        setting = self.needs(block).narrowed(setting)
        mesh, alone = setting.mesh, setting.mesh.alone
        # saved bytes depend on whether there are several ranks on the data axis
        alike = replace(setting, mesh=replace(alone, dp=max(alone.dp, min(mesh.dp, 2))))

        def price() -> PassPrice:
            pricer, steps = self.pricer(setting), self._steps(layouts, assignment, inputs)
            if alike != setting:
                return repriced(self._pass(alike, layouts, assignment, inputs), pricer, steps.steps)
            repeated = known.repeated.of(block.class_id, lambda: repeated_by_policy(pricer, block))
            return price_pass(pricer, layouts, assignment, inputs, repeated=repeated, known=steps)

        decided = block.class_id, assignment.choices, tuple(inputs.values())
        return known.passes.of((mesh, setting.batch, decided), price)

    def needs(self, block: Block) -> PassNeeds:
        """The needs of a pass of a block."""
        graph, factors = self.graph, self.problem.factors
        return self._known.needs.of(block.class_id, lambda: PassNeeds.of(block, graph, factors))

    def layouts(self, block: Block, tp: int) -> BlockLayouts:
        """The layouts of a block on a tensor axis."""
        key, factors = (block.name, tp), self.problem.factors
        return self._known.layouts.of(key, lambda: BlockLayouts(self.graph, factors, block, tp))

    def entered(
        self,
        pricer: operators.Pricer,
        stage: StagePlan,
        assignments: Mapping[str, Assignment],
        arriving: Mapping[str, Placement],
    ) -> Iterator[Entered]:
        """The blocks of a stage in their order, whose inputs enter as a block before left them, or
        from another stage: whole, but for those `arriving` in parts."""
        setting, states = pricer.step.of_step, dict(arriving)
        known = self._known.entered.of(setting.parts, Memo)
        for name in stage.blocks:
            block, assignment = self.blocks[name], assignments[name]
            inputs = {value: states.get(value, R) for value in block.inputs}
            key = name, assignment.choices, tuple(inputs.values())
            if key not in known:
                passes, sums = self.block(pricer, block, assignment, inputs)
                stored = tuple((v, assignment.states[v]) for v in block.parameters)
                known[key] = Entered(
                    block=block,
                    assignment=assignment,
                    inputs=inputs,
                    steps=self.steps(block, assignment, inputs, setting.mesh.tp),
                    passes=passes,
                    sums=sums,
                    parameters=stored,
                    shared=tuple((v, s) for v, s in stored if v not in self.graph.read_once),
                )
            yield known[key]
            states |= {value: assignment.states[value] for value in block.outputs}

    def steps(
        self, block: Block, assignment: Assignment, inputs: Mapping[str, Placement], tp: int
    ) -> Sequence[Step]:
        """Steps of a rank in a block, one after the other."""
        return self._steps(self.layouts(block, tp), assignment, inputs).steps

    def _steps(
        self, layouts: BlockLayouts, assignment: Assignment, inputs: Mapping[str, Placement]
    ) -> KnownSteps:
        known, block = self._known.steps, layouts.block
        key = (block.name, layouts.degree, assignment.choices, tuple(inputs.values()))
        return known.of(key, lambda: KnownSteps(moves(layouts, assignment, inputs)))

    def send_seconds(
        self, setting: operators.Setting, split: Sequence[bool], hop: Hop | None = None
    ) -> Floats:
        """(K+1,): seconds to send the activations at each boundary, one micro-batch, one direction,
        between two stages with this mesh, in parts over the tensor axis where they are `split`: on
        average over all neighbours, or over a `hop` the least that is sent there, what the block
        before makes and the one behind reads."""
        pricer, tp = self.pricer(setting), setting.mesh.tp
        values = self._passed_at_cuts if hop else self.activations_at_cuts
        sent = self._known.sent_bytes.of(
            (pricer.setting.mesh, pricer.setting.batch, hop is None),
            lambda: [sum(map(pricer.nbytes, names)) for names in values],
        )
        neighbours = self._neighbours(setting.mesh)
        shares = {hop: 1.0} if hop else {each: share for each, (share, *_) in neighbours.items()}

        def seconds(nbytes: float, in_parts: bool) -> float:
            of_rank = (nbytes / tp, 1) if in_parts else (nbytes, tp)
            return sum(
                share * self.message_s(of_rank[0], *neighbours[each][1:], tp=of_rank[1])
                for each, share in shares.items()
            )

        sends = [*zip(sent, split, strict=True)]
        known = {send: seconds(*send) for send in set(sends)}
        return np.array([known[send] for send in sends])

    def hops(self, mesh: Mesh, pipeline: Pipeline) -> Hops:
        """The hop from each of a copy's equal stages to the next; None where both are on one device
        group."""

        def found() -> Hops:
            pairs = pairwise(pipeline.device_of[: pipeline.num_stages // pipeline.record.copies])
            return tuple(self._hop(mesh, a, b) if a != b else None for a, b in pairs)

        of = pipeline._replace(num_microbatches=pipeline.slices)
        return self._known.hops.of((mesh, of), found)

    def _hop(self, mesh: Mesh, here: int, there: int) -> Hop:
        ends, on = (mesh.ranks_of(here), mesh.ranks_of(there)), self.cluster
        over_pools = on.num_pools > 1 and crosses_node(*ends, on.pool_devices)
        return Hop(crosses_node(*ends, on.devices_per_node), over_pools)

    def _neighbours(self, mesh: Mesh) -> Neighbours:
        """The neighbours in the order of a pipeline: their hops, with the share of all that lie so,
        and the ranks of two of them; last what lies between the two ends alone."""

        def found() -> Neighbours:
            groups = self.cluster.num_devices // mesh.devices
            if groups == 1:
                return {}
            pairs = [*pairwise(range(groups)), (groups - 1, 0)]
            hops = [self._hop(mesh, *pair) for pair in pairs]
            count = Counter(hops[:-1])
            of_hop: dict[Hop, tuple[int, int]] = {}
            for hop, pair in zip(hops, pairs, strict=True):
                of_hop.setdefault(hop, pair)
            return {
                hop: (count[hop] / (groups - 1), mesh.ranks_of(here), mesh.ranks_of(there))
                for hop, (here, there) in of_hop.items()
            }

        return self._known.neighbours.of(mesh, found)


def stage_setting(plan: Plan, k: int, coster: StageCoster) -> operators.Setting:
    """The mesh of stage k of a plan, with its rows, ZeRO and micro-batches."""
    return coster.setting(*plan.parts(k))


def stage_blocks(
    plan: Plan,
    k: int,
    coster: StageCoster,
    assignments: Mapping[str, Assignment],
    arriving: Mapping[str, Placement] = MappingProxyType({}),
) -> StageBlocks:
    """The blocks of stage k of a plan, at which activations are `arriving` in parts."""
    stage, setting = plan.stages[k], stage_setting(plan, k, coster)
    pricer = coster.pricer(setting)
    blocks = [*coster.entered(pricer, stage, assignments, arriving)]
    return StageBlocks(stage=stage, setting=setting, pricer=pricer, blocks=blocks)
