"""Prices of blocks under given decisions: what stages are summed up from.

Nothing is decided here, and no solver is loaded: the shardings are a plan's, or those of the block
programs (`programs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
from meshwright.costmodel.kernels import send_seconds
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
)
from meshwright.costmodel.rules import traits_of
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
from meshwright.planner.plan import Plan, StagePlan, expert_weights, fingerprint, ulysses_degrees
from meshwright.profiles.cluster import Cluster

States: TypeAlias = tuple[Placement, ...]
Decided: TypeAlias = tuple[str, str, States]  # class of a block, its choices, its inputs' states


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A block of a stage, what it reads in which states, its steps, its price per micro-batch,
    its sums and its parameters, each in the state in which it is stored, those that may be `shared`
    with other blocks apart."""

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
        own = self.passes.repeats.get(policy)
        return own.freed_bytes if own else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """A stage with its blocks as they run."""

    stage: StagePlan
    setting: operators.Setting
    pricer: operators.Pricer
    blocks: Sequence[Entered]


@dataclass(slots=True)
class _Known:
    """What was priced before, kept as long as the coster."""

    kinds: Memo[tuple[Mesh, Batch], ContextKind] = field(default_factory=Memo)
    contexts: Memo[tuple[int, ContextKind | None], ContextLayout] = field(default_factory=Memo)
    settings: dict[Parts, operators.Setting] = field(default_factory=dict)
    # prices of operators, by the setting of a pass, and by that of a step
    pricers_of_pass: Memo[tuple[Mesh, Batch], operators.Pricer] = field(default_factory=Memo)
    pricers: Memo[Parts, operators.Pricer] = field(default_factory=Memo)
    # of `ParameterPricer`
    parameters: Memo[Any, Memo[Any, operators.Priced]] = field(default_factory=Memo)
    blocks: Memo[tuple[Mesh, Batch, Sharing, Decided, bool], tuple[PassPrice, Sums]] = field(
        default_factory=Memo
    )
    # by the setting of a step: blocks by name and what was decided of them
    entered: Memo[tuple[Mesh, Batch, Sharing], Memo[Decided, Entered]] = field(default_factory=Memo)
    needs: Memo[str, PassNeeds] = field(default_factory=Memo)  # by class of a block
    passes: Memo[tuple[Mesh, Batch, Decided], PassPrice] = field(default_factory=Memo)
    # name of a block, tp: its layouts, its steps by choices and states of its inputs
    layouts: Memo[tuple[str, int], BlockLayouts] = field(default_factory=Memo)
    steps: Memo[tuple[str, int, str, States], KnownSteps] = field(default_factory=Memo)
    # bytes of the activations at each boundary, by the setting of a pass
    sent_bytes: Memo[tuple[Mesh, Batch], list[float]] = field(default_factory=Memo)
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
        """How far step times and peak memory are off, of such models on such devices."""
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
    def message_s(self) -> Callable[..., float]:
        """`send_seconds` between ranks of this problem's cluster."""
        own = self.problem
        return partial(send_seconds, cluster=own.cluster, target=own.target, profile=own.profile)

    @cached_property
    def _fusion(self) -> operators.Fusion:
        return operators.fuse(self.graph, self.problem.factors, self.problem.target.fusion)

    def setting(
        self,
        mesh: Mesh,
        batch: Batch,
        sharing: Sharing = UNSHARED,
        host: HostParts = NOT_AWAY,
        validated: bool = False,
    ) -> operators.Setting:
        """A stage of this problem; where the kind of attention is open, it is the cheapest."""
        if mesh.is_open:
            mesh = mesh.of_kind(self._cheapest_kind(mesh, batch))
        own = operators.Setting(
            problem=self.problem,
            mesh=mesh,
            batch=batch,
            sharing=sharing,
            host=host,
            validated=validated,
        )
        return self._known.settings.setdefault(own.parts, own)  # which knows its narrower ones

    def _cheapest_kind(self, mesh: Mesh, batch: Batch) -> ContextKind:
        """The kind of attention over the context axis that takes least."""
        own = operators.Setting(problem=self.problem, mesh=replace(mesh, ep=1), batch=batch).of_pass

        def cheapest() -> ContextKind:
            by_heads = mesh.cp in ulysses_degrees(self.graph, mesh.tp)
            kinds = [kind for kind in CONTEXT_KINDS if kind != ULYSSES or by_heads]
            return min(kinds, key=lambda kind: self._attention_s(own, kind))

        return self._known.kinds.of((own.mesh, own.batch), cheapest)

    def _attention_s(self, setting: operators.Setting, kind: ContextKind) -> float:
        """Seconds of the graph's attention by a kind of context parallelism."""
        graph, table = self.graph, self.problem.factors
        own = replace(setting, mesh=setting.mesh.of_kind(kind))
        sizes = operators.LocalSizes(
            graph=graph, table=table, setting=own, context=self._context(own)
        )
        found = [op for op in graph.ops if traits_of(op).kernel == "attention"]
        distinct = {tuple(graph.values[v].shape for v in op.operands): op for op in found}
        seconds = 0.0
        for op in distinct.values():
            options = strategies(graph, table, op, own.mesh.tp)
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
        return contexts.of(
            key, lambda: context_layout(self.graph, table, setting.mesh.cp, setting.mesh.kind)
        )

    def pricer(self, setting: operators.Setting) -> operators.Pricer:
        """Prices of operators and re-shards in a setting."""
        key, pricers = setting.parts, self._known.pricers
        return pricers.of(key, lambda: self._of_pass(setting.of_pass).once(setting))

    def _of_pass(self, own: operators.Setting) -> operators.Pricer:
        key, pricers = (own.mesh, own.batch), self._known.pricers_of_pass
        return pricers.of(
            key,
            lambda: operators.Pricer(
                graph=self.graph,
                table=self.problem.factors,
                setting=own,
                fusion=self._fusion,
                known_parameters=self._known.parameters,
                context=self._context(own),
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
        own, known = pricer.step.of_step, self._known.blocks
        decided = block.class_id, assignment.choices, tuple(inputs.values())
        twice = not self.graph.gathered_twice.isdisjoint(block.parameters)
        key = own.mesh, own.batch, own.sharing, decided, twice
        if key not in known:
            layouts = self.layouts(block, own.mesh.tp)
            passes = self._pass(own, layouts, assignment, inputs)
            pricer = self.pricer(own)
            price = price_block(pricer, layouts, assignment, inputs, passes=passes)
            known[key] = passes, block_sums(price)
        return known[key]

    def _pass(
        self,
        setting: operators.Setting,
        layouts: BlockLayouts,
        assignment: Assignment,
        inputs: Mapping[str, Placement],
    ) -> PassPrice:
        """The price of a block per micro-batch, the same for all data axes of equal rows."""
        block, known = layouts.block, self._known
        own = self.needs(block).narrowed(setting)
        key = own.mesh, own.batch, (block.class_id, assignment.choices, tuple(inputs.values()))
        alone = own.mesh.alone
        # what is kept depends on whether there are several ranks on the data axis
        alike = replace(own, mesh=replace(alone, dp=max(alone.dp, min(own.mesh.dp, 2))))
        if key not in known.passes and alike != own:
            passes = self._pass(alike, layouts, assignment, inputs)
            steps = self._steps(layouts, assignment, inputs).steps
            known.passes[key] = repriced(passes, self.pricer(own), steps)
        elif key not in known.passes:
            pricer = self.pricer(own)
            known.passes[key] = price_pass(
                pricer,
                layouts,
                assignment,
                inputs,
                repeated=known.repeated.of(
                    block.class_id, lambda: repeated_by_policy(pricer, block)
                ),
                known=self._steps(layouts, assignment, inputs),
            )
        return known.passes[key]

    def needs(self, block: Block) -> PassNeeds:
        """What the price of a pass of a block depends on."""
        known = self._known.needs
        return known.of(
            block.class_id, lambda: PassNeeds.of(block, self.graph, self.problem.factors)
        )

    def layouts(self, block: Block, tp: int) -> BlockLayouts:
        """The layouts of a block on a tensor axis."""
        known = self._known.layouts
        return known.of(
            (block.name, tp), lambda: BlockLayouts(self.graph, self.problem.factors, block, tp)
        )

    def entered(
        self, pricer: operators.Pricer, stage: StagePlan, assignments: Mapping[str, Assignment]
    ) -> Iterator[Entered]:
        """The blocks of a stage in their order, whose inputs enter as a block before left them, or
        whole from another stage."""
        own, states = pricer.step.of_step, dict[str, Placement]()
        known = self._known.entered.of((own.mesh, own.batch, own.sharing), Memo)
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
                    steps=self.steps(block, assignment, inputs, own.mesh.tp),
                    passes=passes,
                    sums=sums,
                    parameters=stored,
                    shared=tuple(each for each in stored if each[0] not in self.graph.read_once),
                )
            yield known[key]
            states |= {value: assignment.states[value] for value in block.outputs}

    def steps(
        self, block: Block, assignment: Assignment, inputs: Mapping[str, Placement], tp: int
    ) -> Sequence[Step]:
        """What a rank does in a block, one after the other."""
        return self._steps(self.layouts(block, tp), assignment, inputs).steps

    def _steps(
        self, layouts: BlockLayouts, assignment: Assignment, inputs: Mapping[str, Placement]
    ) -> KnownSteps:
        known, block = self._known.steps, layouts.block
        key = (block.name, layouts.degree, assignment.choices, tuple(inputs.values()))
        return known.of(key, lambda: KnownSteps(moves(layouts, assignment, inputs)))

    def send_seconds(self, setting: operators.Setting) -> Floats:
        """(K+1,): seconds to send the activations at each boundary, one micro-batch, one direction,
        between two stages with this mesh; where some neighbours share a node and others don't, on
        average."""
        node, devices = self.cluster.devices_per_node, setting.mesh.devices
        # of the stages that share a node in pipeline order, one sends to the next node
        share = min(1.0, devices / node) if self.cluster.num_nodes > 1 else 0.0
        if setting.mesh.spread > 1:  # so many neighbours lie in one node
            share = 1.0 / setting.mesh.spread
        inside, border = min(devices, max(1, node // 2)), max(node, devices)
        pairs = (
            (share, range(border - devices, border), range(border, border + devices)),
            (1 - share, range(inside), range(inside, 2 * inside)),
        )

        def seconds(nbytes: float) -> float:
            return sum(
                part * self.message_s(nbytes, *ends, tp=setting.mesh.tp)
                for part, *ends in pairs
                if part
            )

        sent = self._sent_bytes(self.pricer(setting))
        known = {nbytes: seconds(nbytes) for nbytes in set(sent)}
        return np.array([known[nbytes] for nbytes in sent])

    def _sent_bytes(self, pricer: operators.Pricer) -> list[float]:
        """Bytes of the activations at each boundary."""
        setting, known = pricer.setting, self._known.sent_bytes
        key = setting.mesh, setting.batch
        return known.of(
            key, lambda: [sum(map(pricer.nbytes, values)) for values in self.activations_at_cuts]
        )


def stage_setting(plan: Plan, k: int, coster: StageCoster) -> operators.Setting:
    """The mesh of stage k of a plan, with its rows, ZeRO and micro-batches."""
    return coster.setting(*plan.parts(k))


def stage_blocks(
    plan: Plan, k: int, coster: StageCoster, assignments: Mapping[str, Assignment]
) -> StageBlocks:
    """The blocks of stage k of a plan."""
    stage, setting = plan.stages[k], stage_setting(plan, k, coster)
    pricer = coster.pricer(setting)
    blocks = [*coster.entered(pricer, stage, assignments)]
    return StageBlocks(stage=stage, setting=setting, pricer=pricer, blocks=blocks)
