"""Seconds and bytes of a block on one rank: the sum over the operators and re-shards of its steps,
as in the planner's program (`planner.intra_op.program`).

The price per micro-batch does not depend on the data axis (`price_pass`), that of the parameters
once per step does (`price_block`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.blocks.backward import Moment, backward_course, gathering
from meshwright.costmodel.blocks.block_memory import BlockMemory
from meshwright.costmodel.blocks.excess import Excess, excesses
from meshwright.costmodel.blocks.known_steps import KnownSteps
from meshwright.costmodel.blocks.repeated import Repeated, repeated_ops
from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.costmodel.memory import Storage
from meshwright.costmodel.operators import Cost, Pricer, Setting, splits_batch, total
from meshwright.costmodel.recompute import RECOMPUTE, regathering
from meshwright.costmodel.rules import recomputable, takes_batch_statistics, traits_of
from meshwright.costmodel.sharding import (
    Assignment,
    BlockLayouts,
    FactorTable,
    Move,
    Placement,
    R,
    Run,
    Step,
    Strategy,
    moves,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """Gathers begun `early` in a backward beside the weights' gradients of `runs`, slowed down."""

    early: tuple[Move, ...] = ()
    runs: tuple[Run, ...] = ()
    slowdown: float = 0.0

    def seconds(self, cost_of: Callable[[Run | Move], Cost]) -> float:
        """Seconds of gathers that are hidden, from the cost of each step."""
        window = sum(cost_of(run).weight_s for run in self.runs)
        gathers = sum(cost_of(move).forward_comm_s for move in self.early)
        slowed = self.slowdown * min(window, gathers)
        return gathers - (max(window + slowed, gathers) - window)


NOTHING_HIDDEN = Hiding()


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Repeats of a forward's `steps` under a recompute policy: seconds on the device (of which
    communication `comm_s`), without those of gathers that products hide (`hidden_s`), and on the
    host; and the bytes that it frees."""

    seconds: float
    comm_s: float
    host_s: float
    hidden_s: float
    freed_bytes: float
    steps: Sequence[Run | Move]
    hiding: Hiding

    @staticmethod
    def of(
        steps: Sequence[Run | Move],
        cost_of: Callable[[Run | Move], Cost],
        freed_bytes: float,
        hiding: Hiding = NOTHING_HIDDEN,
    ) -> Repeats:
        """Repeats from the cost of each step."""
        forward, hidden_s = total(map(cost_of, steps)), hiding.seconds(cost_of)
        return Repeats(
            seconds=forward.forward_s - hidden_s,
            comm_s=forward.forward_comm_s - hidden_s,
            host_s=forward.forward_host_s,
            hidden_s=hidden_s,
            freed_bytes=freed_bytes,
            steps=steps,
            hiding=hiding,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPrice:
    """Cost and memory of a block per micro-batch: `saved_bytes` kept for the backward without its
    inputs; `input_bytes` its inputs; `put_off_bytes` held where weights' gradients are put off, and
    those spared where gathers run again; whether it may be in a segment (`segmented`); by recompute
    policy the `excess` of its backward, and `repeats`, none of a block that can't run twice; the
    `course` of its backward, also where it gathers again (`parts`)."""

    cost: Cost
    saved_bytes: float
    input_bytes: float
    put_off_bytes: tuple[float, float]
    segmented: bool
    excess: Mapping[str, Excess]
    repeats: Mapping[str, Repeats]
    course: tuple[Moment, ...]
    parts: tuple[Moment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """Cost and memory of a block on one rank under an assignment.

    `cost` in seconds (see `Cost`), of its `passes` and parameters; `parameters` local element count
    of trained parameters, whose gradients take `gradient_bytes`, of which `shard_parameters` where
    ZeRO divides them, `unit_parameters` are moved at once and the largest has `largest_numel`, and
    whose `moments` take bytes, not divided and divided;
    `frozen_parameters` of the others, of `frozen_bytes`, or `frozen_shard_bytes` where ZeRO-3
    divides them, which moves `unit_gathered` of both at once.
    """

    passes: PassPrice
    cost: Cost
    parameters: float
    gradient_bytes: float
    shard_parameters: float
    moments: tuple[float, float]
    frozen_parameters: float
    frozen_bytes: float
    frozen_shard_bytes: float
    unit_parameters: float
    unit_gathered: float
    largest_numel: float


def price_block(
    pricer: Pricer,
    layouts: BlockLayouts,
    assignment: Assignment,
    inputs: Mapping[str, Placement],
    *,
    passes: PassPrice | None = None,
) -> BlockPrice:
    """Cost and memory of a block under an assignment, as the executor will run it; `passes` is its
    price per micro-batch, where it is known. Raises ValueError where a re-shard does not exist."""
    block, graph, states = layouts.block, layouts.graph, assignment.states
    passes = passes or price_pass(pricer, layouts, assignment, inputs)
    trained = [value for value in block.parameters if graph.values[value].requires_grad]
    frozen = [value for value in block.parameters if not graph.values[value].requires_grad]
    numels = [pricer.numel(value, states[value]) for value in trained]
    shards = [pricer.parameters.shard_count(value, states[value]) for value in trained]
    moments = [pricer.parameters.moment_bytes(value, states[value]) for value in trained]
    largest, parameters = max(numels, default=0.0), sum(numels)
    others = [pricer.numel(value, states[value]) for value in frozen]
    held = [pricer.parameters.frozen_bytes(value, states[value]) for value in frozen]
    by_parameter = pricer.setting.target.unit == "parameter"
    return BlockPrice(
        passes=passes,
        cost=total([passes.cost, *(pricer.parameter_cost(v, states[v]) for v in block.parameters)]),
        parameters=parameters,
        gradient_bytes=pricer.setting.kept_bytes * parameters,
        shard_parameters=sum(numel / count for numel, count in zip(numels, shards, strict=True)),
        moments=(sum(whole for whole, _ in moments), sum(part for _, part in moments)),
        frozen_parameters=sum(others),
        frozen_bytes=sum(nbytes for nbytes, _ in held),
        frozen_shard_bytes=sum(nbytes for _, nbytes in held),
        unit_parameters=largest if by_parameter else parameters,
        unit_gathered=max(largest, 0.0, *others) if by_parameter else parameters + sum(others),
        largest_numel=largest,
    )


def price_pass(
    pricer: Pricer,
    layouts: BlockLayouts,
    assignment: Assignment,
    inputs: Mapping[str, Placement],
    *,
    repeated: Repeated | None = None,
    known: KnownSteps | None = None,
) -> PassPrice:
    """Cost and memory of a block per micro-batch, with the re-shards of its parameters. `repeated`
    is its `repeated_by_policy`, `known` its steps under the assignment, where they are known.
    Raises ValueError where a re-shard does not exist."""
    block = layouts.block
    known = known or KnownSteps(moves(layouts, assignment, inputs))
    cost = total(map(pricer.step_cost, priced_steps(known.steps)))
    memory = known.memory(pricer)
    repeated = repeated_by_policy(pricer, block) if repeated is None else repeated
    repeats = _repeats(repeated, pricer, block, known.steps, memory)
    course = backward_course(pricer, known.steps, memory, block.parameters)
    parts = gathering(course)
    segmented = bool(repeats) and pricer.graph.loss not in block.outputs
    return PassPrice(
        cost=cost,
        saved_bytes=memory.saved_bytes,
        input_bytes=sum(pricer.nbytes(v, inputs.get(v, R)) for v in block.inputs),
        put_off_bytes=(
            sum(m.put_off for m in course),
            sum(m.regathered for m in course) if repeats else 0.0,
        ),
        segmented=segmented,
        excess=_excess(pricer, block, assignment, (course, parts), repeats, segmented=segmented),
        course=course,
        parts=parts,
        repeats=repeats,
    )


def repriced(passes: PassPrice, pricer: Pricer, steps: Sequence[Step]) -> PassPrice:
    """Price of a block's `steps` on another data axis, with the bytes of `passes`."""
    repeats = {
        policy: Repeats.of(r.steps, pricer.step_cost, r.freed_bytes, r.hiding)
        for policy, r in passes.repeats.items()
    }
    return replace(passes, cost=total(map(pricer.step_cost, priced_steps(steps))), repeats=repeats)


def _excess(
    pricer: Pricer,
    block: Block,
    assignment: Assignment,
    courses: tuple[Sequence[Moment], Sequence[Moment]],
    repeats: Mapping[str, Repeats],
    *,
    segmented: bool,
) -> dict[str, Excess]:
    """Excess by policy; where the target's step is not followed, of each kind the most at once."""
    target = pricer.setting.target
    freed = {policy: repeated.freed_bytes for policy, repeated in repeats.items()}
    if target.gradients_come:
        return excesses(
            *courses,
            [pricer.numel(value, assignment.states[value]) for value in block.parameters],
            freed,
            weight_bytes=pricer.setting.weight_bytes,
            kept_bytes=pricer.setting.kept_bytes,
            alone_bytes=target.alone_bytes,
            segmented=segmented,
        )
    chosen = assignment.strategies
    held = _logits(pricer, block) if target.loss_in_place else frozenset[str]()
    most = max((_gradient_bytes(pricer, op, chosen[op.name], held) for op in block.ops), default=0)
    later = {policy: most + freed.get(policy, 0.0) for policy in RECOMPUTE}
    return {policy: Excess(later=n, inner=n * segmented) for policy, n in later.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassNeeds:
    """Needs of a block's price per micro-batch from a setting: batches are `met` by the data axis,
    statistics being summed over it or rows gathered, a `loss` is divided by a count over it,
    `experts` are shared out."""

    met: bool
    loss: bool
    experts: bool

    @staticmethod
    def of(block: Block, graph: Graph, table: FactorTable) -> PassNeeds:
        traits = [traits_of(op) for op in block.ops]
        values = {v for op in block.ops for v in (*op.operands, *op.results)}
        return PassNeeds(
            met=any(
                takes_batch_statistics(op) or not splits_batch(graph, table, op) for op in block.ops
            ),
            loss=any(t.loss for t in traits),
            experts=any(t.experts for t in traits) or any(map(table.has_experts, values)),
        )

    def narrowed(self, setting: Setting) -> Setting:
        """The setting that blocks with the same needs are priced in."""
        mesh, several = setting.mesh, min(setting.batch.microbatches, 2)
        mesh = replace(mesh, ep=mesh.ep if self.experts else min(mesh.ep, 2))
        batch = replace(setting.batch, microbatches=several if self.loss else 1)
        if not self.met:
            ranks = min(mesh.dp, 2) if self.loss else 1
            mesh = replace(mesh.alone, dp=max(mesh.alone.dp, ranks))
        return Setting(problem=setting.problem, mesh=mesh, batch=batch)


def priced_steps(steps: Sequence[Step]) -> list[Run | Move]:
    """Steps of a block that take time."""
    return [step for step in steps if isinstance(step, (Run, Move))]


def repeated_by_policy(pricer: Pricer, block: Block) -> Repeated:
    """Operators of a block that each policy runs again; none where it can't run twice."""
    device, target = pricer.setting.cluster.device.kind, pricer.setting.target
    if not recomputable(block, pure=target.pure):
        return {}
    return repeated_ops(block, pricer.graph, pricer.table, device, target.counter_dropout)


def _repeats(
    repeated: Repeated, pricer: Pricer, block: Block, steps: Sequence[Step], memory: BlockMemory
) -> dict[str, Repeats]:
    """Repeats of each policy's operators and gathers; of all that a backward needs under `full`."""
    if not repeated:
        return {}
    runs = [step for step in steps if isinstance(step, Run)]
    cost_of, by_policy = pricer.step_cost, dict[str, Repeats]()

    def again(names: Collection[str], between: Collection[Storage]) -> list[Run | Move]:
        gathers = (memory.moved[storage][0] for storage in between)
        return [*(run for run in runs if run.op.name in names), *gathers]

    for policy, positions in {"none": frozenset[int](), **repeated}.items():
        names = {block.ops[k].name for k in positions}
        freed = memory.saved_bytes - memory.saved_bytes_repeating(names) if names else 0.0
        repeats = Repeats.of(again(memory.needed(names)[0], ()), cost_of, max(0.0, freed))
        by_policy[policy] = repeats
        if regathering(policy) not in RECOMPUTE:
            continue
        if memory.gathered:
            needed, between = memory.needed(names, regather=True)
            freed = memory.saved_bytes - memory.saved_bytes_repeating(names, regather=True)
            hiding = _hiding(pricer, runs, memory, between, names)
            repeats = Repeats.of(again(needed, between), cost_of, max(0.0, freed), hiding)
        by_policy[regathering(policy)] = repeats
    del by_policy["none"]
    repeats_all = pricer.setting.target.repeats_whole
    all_of_it = priced_steps(steps) if repeats_all else again(*memory.needed())
    freed = memory.saved_bytes - memory.unfreed_bytes
    return {**by_policy, "full": Repeats.of(all_of_it, cost_of, freed)}


def _hiding(
    pricer: Pricer,
    runs: Sequence[Run],
    memory: BlockMemory,
    between: Collection[Storage],
    repeated: Collection[str],
) -> Hiding:
    """Hiding of gathers in a backward: those whose operand no operator makes again begin with the
    block's backward (`executor/backward/repeated.py`), beside the gradients of the weights behind
    their last reader, the part that a split backward has, too."""
    device = pricer.setting.cluster.device
    early = [s for s in between if memory.makers.get(memory.moved[s][1]) not in repeated]
    if device.kind == "cpu" or not early:
        return NOTHING_HIDDEN
    read = set(early)
    readers = (k for k, run in enumerate(runs) if not read.isdisjoint(memory.keeps[run.op.name]))
    return Hiding(
        early=tuple(memory.moved[storage][0] for storage in early),
        runs=tuple(runs[max(readers, default=-1) + 1 :]),
        slowdown=device.overlap_slowdown,
    )


def _logits(pricer: Pricer, block: Block) -> frozenset[str]:
    """Operands of the block's cross-entropies that are trained, and the tensors that these view."""
    logits: set[str] = set()
    for op in reversed(block.ops):
        viewed = pricer.table.ops[op.name].view and logits.intersection(op.results)
        loss = traits_of(op).loss
        if viewed or (loss is not None and loss.kind == "cross_entropy"):
            logits.add(op.operands[0])
    return frozenset(logits)


def _gradient_bytes(pricer: Pricer, op: Op, strategy: Strategy, held: Collection[str]) -> float:
    """Bytes of activations' gradients in one operator's backward, but for those `held` anyway."""
    graph, factors = pricer.graph, pricer.table.ops[op.name]
    placed = [*zip(op.results, strategy.results, strict=True)]
    if factors.matmul or not factors.view or traits_of(op).copies:
        placed += zip(op.operands, strategy.operands, strict=True)
    return sum(
        pricer.nbytes(value, placement)
        for value, placement in placed
        if graph.values[value].requires_grad and value not in graph.parameters and value not in held
    )
