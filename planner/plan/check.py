"""A plan against its model: the fingerprint, and the one guard of solved, loaded and hand-written
plans."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import Any

from meshwright.costmodel.blocks.policies import RECOMPUTE
from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.rules.traits import traits_of
from meshwright.costmodel.schedules.schedule import SCHEDULES
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.layouts import (
    Assignment,
    BlockLayouts,
    Entry,
    default_state,
    translate,
)
from meshwright.costmodel.sharding.strategies import Placement, R, can_hold, transition
from meshwright.planner.plan.divisors import divisors
from meshwright.planner.plan.expert_parallel import check_experts, runs_experts
from meshwright.planner.plan.plan import (
    PRECISIONS,
    RUNS,
    ZERO,
    Plan,
    PlanError,
    StagePlan,
    compress_names,
    compress_ranks,
)
from meshwright.planner.plan.ranks import check_ranks
from meshwright.planner.plan.shardings import check_matched, resolve_block
from meshwright.planner.plan.written_buffers import inseparable

Known = dict[Any, Any]


def fingerprint(graph: Graph) -> str:
    """Hash of a model's parameters and program: the same for any batch size and precision."""
    parameters = sorted(
        f"{fqn}{graph.values[value].shape}" for value, fqn in graph.parameters.items()
    )
    program = [op.key for op in graph.ops if not traits_of(op).casts]
    text = "\n".join([*parameters, *program])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- the check -----------------------------------------------------------------------------------


def check_plan(
    plan: Plan, graph: Graph, table: FactorTable, known: Known | None = None
) -> list[dict[str, Assignment]]:
    """Guard a solved, loaded or hand-written plan; returns per stage the assignments by block name.

    `graph` may be traced at any batch size. `known`, a dict that belongs to this graph, remembers
    blocks that were checked, for the next plan. Raises `PlanError` naming value, place, legal
    values.
    """
    _check_model(plan, graph, known)
    _check_step(plan)
    for k, stage in enumerate(plan.stages):
        _check_stage(plan, stage, f"plan: stage {k}")
    _check_blocks(plan, graph)
    check_ranks(plan)
    _check_context(plan, table)
    _check_parameters(plan, graph)
    _check_buffers(plan, graph)
    found = [stage_assignments(plan, k, graph, table, known) for k in range(len(plan.stages))]
    for k, stage in enumerate(plan.stages):
        check_experts(stage, graph, table, found[k], f"plan: stage {k}")
    return found


def check_runs(plan: Plan) -> None:
    """Refuse a legal plan that can be priced but not run yet."""
    _check_split(plan)
    found: list[tuple[str, str, Any, tuple[Any, ...]]] = []
    for k, stage in enumerate(plan.stages):
        found += [
            (f"plan: stage {k}", "cp", stage.cp, RUNS["cp"]),
            *(
                (f"plan: stage {k}", "recompute", policy, RUNS["recompute"])
                for policy in dict.fromkeys(stage.policies)
            ),
        ]
        first = next(s for s in plan.stages if s.ranks == stage.ranks)
        for name, own, other in (
            ("dp_shard", stage.shards, first.shards),
            ("ep", stage.ep, first.ep),
        ):
            if own != other:
                raise PlanError(
                    f"plan: stage {k}: {name}={own}, but another stage of ranks "
                    f"{compress_ranks(stage.ranks)} has {other}: stages of one device group "
                    "share its mesh; give them one"
                )
        if not runs_experts(dp=stage.dp, tp=stage.tp, ep=stage.ep):
            raise PlanError(
                f"plan: stage {k}: ep={stage.ep} can be priced, but not run yet; the executor runs "
                f"a divisor of dp={stage.dp}, or a multiple of tp={stage.tp}"
            )
    for place, name, value, legal in found:
        if value not in legal:
            raise PlanError(
                f"{place}: {name}={value!r} can be priced, but not run yet; the executor runs "
                f"{', '.join(map(str, legal))}"
            )


def _check_split(plan: Plan) -> None:
    """A backward in two parts gives wrong gradients where `fully_shard` scatters them after the
    first."""
    if not SCHEDULES[plan.schedule].splits_backward:
        return
    whole = ", ".join(name for name, s in SCHEDULES.items() if not s.splits_backward)
    for k, stage in enumerate(plan.stages):
        if stage.zero == 3:
            raise PlanError(
                f"plan: stage {k}: zero=3 with schedule={plan.schedule!r} can be priced, but not "
                "run: torch loses gradients where the backward is split in two; legal: zero 0, 1 "
                f"or 2, or a schedule with a whole backward: {whole}"
            )


def _check_buffers(plan: Plan, graph: Graph) -> None:
    owner = {name: k for k, stage in enumerate(plan.stages) for name in stage.blocks}
    for first, last in inseparable(graph):
        one, other = (graph.blocks[k].name for k in (first, last))
        if owner[one] != owner[other]:
            raise PlanError(
                f"plan: stages {owner[one]} and {owner[other]}: a buffer that the forward writes "
                f"is read or written in both {one} and {other}; put the blocks from {one} to "
                f"{other} into one stage"
            )


def _check_parameters(plan: Plan, graph: Graph) -> None:
    blocks = {block.name: block for block in graph.blocks}
    for k, stage in enumerate(plan.stages):
        values = [v for name in stage.blocks for v in blocks[name].parameters]
        if not any(graph.values[v].requires_grad for v in values):
            raise PlanError(
                f"plan: stage {k}: blocks {compress_names(stage.blocks)} hold no trained "
                f"parameter, so "
                "its ranks would have nothing to optimize; move them to the stage before or after"
            )


def _check_model(plan: Plan, graph: Graph, known: Known | None) -> None:
    known = {} if known is None else known
    found = known.setdefault("fingerprint", None) or fingerprint(graph)
    known["fingerprint"] = found
    if plan.model != found:
        raise PlanError(
            f"plan: made for model {plan.model}, but this model is {found} (other layers, sizes or "
            "operators); plan again, or use the model it was made for"
        )


def _check_step(plan: Plan) -> None:
    for name, value, legal in (
        ("schedule", plan.schedule, tuple(SCHEDULES)),
        ("precision", plan.precision, PRECISIONS),
    ):
        if value not in legal:
            raise PlanError(f"plan: {name}={value!r}; legal: {', '.join(legal)}")
    for name in ("global_batch_size", "num_microbatches"):
        _check_whole(getattr(plan, name), f"plan: {name}")
    if plan.global_batch_size % plan.num_microbatches:
        raise PlanError(
            f"plan: num_microbatches={plan.num_microbatches} does not divide "
            f"global_batch_size={plan.global_batch_size}; "
            f"legal: {_divisors(plan.global_batch_size)}"
        )
    if not plan.stages:
        raise PlanError("plan: no stages; every block of the model needs one")


def _check_stage(plan: Plan, stage: StagePlan, place: str) -> None:
    named = [stage.recompute] if isinstance(stage.recompute, str) else list(stage.recompute)
    for name, value, legal in (
        ("zero", stage.zero, ZERO),
        *(("recompute", policy, RECOMPUTE) for policy in named),
    ):
        if isinstance(value, bool) or value not in legal:
            raise PlanError(f"{place}: {name}={value!r}; legal: {', '.join(map(str, legal))}")
    _check_recompute(stage, place)
    for axis in ("dp", "cp", "tp", "ep"):
        _check_whole(getattr(stage, axis), f"{place}: {axis}")
    _check_shards(stage, place)
    if plan.microbatch_rows % stage.dp:
        raise PlanError(
            f"{place}: dp={stage.dp} does not divide a micro-batch of {plan.microbatch_rows} rows "
            f"(global_batch_size={plan.global_batch_size} / "
            f"num_microbatches={plan.num_microbatches}); "
            f"legal: {_divisors(plan.microbatch_rows)}, or fewer micro-batches"
        )


def _check_recompute(stage: StagePlan, place: str) -> None:
    """Blocks named by a policy are the stage's, each once."""
    if isinstance(stage.recompute, str):
        return
    count = Counter(name for names in stage.recompute.values() for name in names)
    legal = ", ".join(compress_names(stage.blocks))
    for name, times in count.items():
        if name not in stage.blocks:
            raise PlanError(f"{place}: recompute: {name!r} is no block of it; legal: {legal}")
        if times > 1:
            raise PlanError(f"{place}: recompute: block {name!r} has {times} policies; legal: one")


def _check_shards(stage: StagePlan, place: str) -> None:
    if stage.dp_shard is None:
        return
    _check_whole(stage.dp_shard, f"{place}: dp_shard")
    ranks = stage.dp * stage.cp
    if ranks % stage.dp_shard:
        raise PlanError(
            f"{place}: dp_shard={stage.dp_shard} does not divide the {ranks} ranks of the data "
            f"axis (dp·cp); legal: {_divisors(ranks)}"
        )
    if not stage.zero:
        raise PlanError(
            f"{place}: dp_shard={stage.dp_shard} with zero=0: nothing is divided; choose zero 1, 2 "
            "or 3, or drop dp_shard"
        )


def _check_context(plan: Plan, table: FactorTable) -> None:
    for k, stage in enumerate(plan.stages):
        if stage.cp == 1:
            continue
        if table.sequence is None:
            raise PlanError(
                f"plan: stage {k}: cp={stage.cp}: the model's inputs have no one sequence dim to "
                "split; legal: 1"
            )
        if table.sizes[table.sequence] % stage.cp:
            raise PlanError(
                f"plan: stage {k}: cp={stage.cp} does not divide sequences of "
                f"{table.sizes[table.sequence]}; legal: {_divisors(table.sizes[table.sequence])}"
            )


def _check_whole(value: Any, place: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{place}={value!r}; legal: an integer from 1")


def _check_blocks(plan: Plan, graph: Graph) -> None:
    names = [block.name for block in graph.blocks]
    planned = [name for stage in plan.stages for name in stage.blocks]
    legal = ", ".join(compress_names(names))
    known = set(names)
    for name in planned:
        if name not in known:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
            raise PlanError(
                f"plan: block {name!r} is not in the model; nearest: {', '.join(near) or 'none'}; "
                f"legal: {legal}"
            )
    for k, stage in enumerate(plan.stages):
        if not stage.blocks:
            raise PlanError(f"plan: stage {k}: no blocks; every stage needs one; legal: {legal}")
    for position, (found, expected) in enumerate(zip_longest(planned, names)):
        if found != expected:
            raise PlanError(
                f"plan: stages must cover the blocks once, in order; position {position} is "
                f"{found or 'missing'!r}, expected {expected or 'nothing'!r}; legal order: {legal}"
            )


def stage_assignments(
    plan: Plan, k: int, graph: Graph, table: FactorTable, known: Known | None = None
) -> dict[str, Assignment]:
    """Every choice on the tensor axis of stage `k`, by block name; `known` as for `check_plan`."""
    stage = plan.stages[k]
    place = f"plan: stage {k}"
    known = {} if known is None else known
    own = set(stage.blocks)
    blocks = [block for block in graph.blocks if block.name in own]
    later = {n for b in graph.blocks if b.name not in own for n in b.inputs}
    decisions = frozenset(stage.shardings.items())
    found: dict[str, Assignment] = {}
    matched: set[str] = set()
    states: dict[str, Placement] = {}
    for block in blocks:
        inputs = {name: states[name] for name in block.inputs if name in states}
        leaving = frozenset(later.intersection(block.outputs))
        key = (block.name, stage.tp, decisions, tuple(inputs.items()), leaving)
        if key not in known:
            entries, patterns = resolve_block(graph, block, stage.shardings, place)
            names = (*(op.name for op in block.ops), *block.parameters)
            alike = (
                block.class_id,
                stage.tp,
                tuple((i, entries[name]) for i, name in enumerate(names) if name in entries),
                tuple(inputs.get(name) for name in block.inputs),
                tuple(name in leaving for name in block.outputs),
            )
            if alike in known:
                known[key] = translate(*known[alike], block), patterns
            else:
                assignment = _completed(
                    graph, table, block, stage.tp, entries, inputs, leaving, place
                )
                known[alike] = assignment, block
                known[key] = assignment, patterns
        found[block.name], patterns = known[key]
        matched |= patterns
        states |= {name: found[block.name].states[name] for name in block.outputs}
    check_matched(graph, blocks, stage.shardings, matched, place)
    return found


def _completed(
    graph: Graph,
    table: FactorTable,
    block: Block,
    tp: int,
    entries: Mapping[str, Entry],
    inputs: Mapping[str, Placement],
    leaving: Collection[str],
    place: str,
) -> Assignment:
    layouts = BlockLayouts(graph, table, block, tp)
    try:
        assignment = layouts.complete(entries, inputs, leaving)
    except ValueError as error:
        raise PlanError(f"{place}: {error}") from None
    _check_states(layouts, assignment, inputs, place)
    return assignment


def _check_states(
    layouts: BlockLayouts, assignment: Assignment, inputs: Mapping[str, Placement], place: str
) -> None:
    """Every state is a layout its tensor can have, reachable from its maker and to its readers."""
    graph, made = layouts.graph, {**inputs}
    keys: dict[str, str] = {}
    for op in layouts.block.ops:
        placements = assignment.strategies[op.name].results
        made |= dict(zip(op.results, placements, strict=True))
        keys |= dict.fromkeys(op.results, op.key)
    for value, state in {**inputs, **assignment.states}.items():
        name = graph.parameters.get(value) or keys.get(value, value)
        legal = _legal_states(layouts, value)
        parameter = value in graph.parameters
        if not _possible(layouts, value, state) or (parameter and state.kind not in "RS"):
            raise PlanError(
                f"{place}: state {state} of {name}, shape {graph.values[value].shape}: not "
                f"possible with tp={layouts.degree}; legal: {legal}"
            )
        targets = layouts.targets(value, assignment.strategies)
        crosses = value in inputs or value in layouts.block.outputs
        inside = default_state(state, targets, False) if crosses else state
        wanted = [(state, inside), *((inside, target) for target in targets)]
        if value in made:
            wanted.append((made[value], state))
        for source, target in wanted:
            if transition(source, target) is None:
                raise PlanError(
                    f"{place}: state {state} of {name}: {source} can't become {target}; "
                    f"legal: {legal}, or leave it to follow"
                )


def _possible(layouts: BlockLayouts, value: str, state: Placement) -> bool:
    """Whether it can be split; rows of the batch depend on the micro-batch and are not asked."""
    table = layouts.table
    dims = table.dims[value]
    if state.sharded and state.dim < len(dims) and table.batch in dims[state.dim]:
        return True
    return can_hold(layouts.graph, table, value, state, layouts.degree)


def _legal_states(layouts: BlockLayouts, value: str) -> str:
    shape = layouts.graph.values[value].shape
    shards = [Placement("S", d) for d in range(len(shape))]
    return ", ".join(map(str, [R, *(s for s in shards if _possible(layouts, value, s))]))


def _divisors(n: int) -> str:
    return ", ".join(map(str, divisors(n)))
