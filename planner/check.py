"""A plan against its model: the fingerprint, globs to operators and back, the check of every plan.

`check_plan` is the one guard for solved, loaded and hand-written plans. `express_shardings` writes
decisions about operators as globs, `resolve_shardings` reads them: the second undoes the first.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from costmodel.factors import FactorTable
from costmodel.graph import Block, Graph
from costmodel.schedule import SCHEDULES
from costmodel.strategies import Placement, R, transition
from planner.layouts import FOLLOW, Assignment, BlockLayouts, Entry, default_state
from planner.plan import (
    PRECISIONS,
    RECOMPUTE,
    ZERO,
    Plan,
    PlanError,
    StagePlan,
    compress_names,
    compress_ranks,
)

# --- shardings: globs <-> operators --------------------------------------------------------------

# what `colwise` and the like mean for a module with several operators
MAIN_OPS = frozenset(
    ("linear", "addmm", "mm", "bmm", "matmul", "embedding", "conv1d", "conv2d", "conv3d")
)


def fingerprint(graph: Graph) -> str:
    """Hash of a model's parameters and program: the same for any batch size and precision."""
    parameters = sorted(
        f"{fqn}{graph.values[value].shape}" for value, fqn in graph.parameters.items()
    )
    program = [op.key for op in graph.ops if op.short not in ("to", "_to_copy")]
    text = "\n".join([*parameters, *program])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def glob(pattern: str) -> re.Pattern[str]:
    """A pattern over FQNs and operator keys: `*` stays within one component, `**` crosses dots."""
    parts = [
        {"**": ".*", "*": "[^.:]*", "?": "[^.:]"}.get(part, re.escape(part))
        for part in re.split(r"(\*\*|\*|\?)", pattern)
    ]
    return re.compile("".join(parts) + r"\Z")


def resolve_shardings(
    graph: Graph, blocks: Sequence[Block], shardings: Mapping[str, str], place: str = "plan"
) -> dict[str, Entry]:
    """Globs to entries by operator name or parameter value name; the longest pattern wins.

    `*` stays within one component of a name, `**` crosses dots. A pattern without `:` names a
    module (its matrix products and embeddings) or a parameter, a tied one by any of its full names.
    Raises `PlanError` with the nearest names where a pattern matches nothing, and for a decision
    that can't be read.
    """
    entries: dict[str, Entry] = {}
    unmatched = dict.fromkeys(shardings)
    order = sorted(shardings, key=lambda p: (len(p.replace("*", "")), p))
    compiled = [(p, glob(p), ":" in p) for p in order]
    for block in blocks:
        for op in block.ops:
            for pattern, regex, exact in compiled:
                named = op.key if exact else op.module if op.short in MAIN_OPS else ""
                if named and regex.match(named):
                    entries[op.name] = _entry(shardings[pattern], pattern, place)
                    unmatched.pop(pattern, None)
        for value in block.parameters:
            fqn = graph.parameters[value]
            for pattern, regex, exact in compiled:
                if pattern not in unmatched and not _is_state(shardings[pattern]):
                    continue  # a strategy for the operators that the pattern named
                if not exact and (regex.match(fqn) or graph.aliases.get(pattern) == fqn):
                    entries[value] = _parameter_entry(shardings[pattern], pattern, place)
                    unmatched.pop(pattern, None)
    for pattern in unmatched:
        raise PlanError(f"{place}: sharding {pattern!r} {_no_match(graph, blocks, pattern)}")
    return entries


def _no_match(graph: Graph, blocks: Sequence[Block], pattern: str) -> str:
    """Why a pattern matches nothing: a module without matrix product, or no such name."""
    ops = [op for block in blocks for op in block.ops]
    inside = [op.key for op in ops if glob(pattern).match(op.module)]
    if inside:
        return (
            "names a module without matrix product or embedding; name its operator instead, one "
            f"of {', '.join(dict.fromkeys(inside[:8]))}"
        )
    names = {op.key for op in ops} if ":" in pattern else {op.module for op in ops}
    names |= {graph.parameters[value] for block in blocks for value in block.parameters}
    if "*" in pattern:
        names = {re.sub(r"(?<=\.)\d+(?=[.:]|$)", "*", name) for name in names}
    near = difflib.get_close_matches(pattern, sorted(names - {""}), n=3, cutoff=0.3)
    return f"matches no module, operator or parameter; nearest: {', '.join(near) or 'none'}"


def _entry(text: str, pattern: str, place: str) -> Entry:
    wanted = re.sub(r"\s*->\s*", "->", text.replace("@tp", "").strip())
    if not wanted:
        raise PlanError(
            f"{place}: sharding {pattern!r} is empty; legal: a strategy (colwise), a state "
            f"(-> S(1)), both (colwise -> S(1)), or {FOLLOW}"
        )
    try:
        return Entry.parse(wanted)
    except ValueError as error:
        raise PlanError(f"{place}: sharding {pattern!r}: {error}") from None


def _is_state(text: str) -> bool:
    """Whether a decision is about how something is stored, not about a strategy."""
    return bool(re.fullmatch(r"\s*(->)?\s*(R|P|S\(.*\))(@tp)?\s*", text))


def _parameter_entry(text: str, pattern: str, place: str) -> Entry:
    """A parameter has no strategy: its text is the state it is stored in."""
    is_state = text.strip() not in ("", FOLLOW) and "->" not in text
    return _entry(f"-> {text.strip()}" if is_state else text, pattern, place)


def express_shardings(
    graph: Graph, blocks: Sequence[Block], entries: Mapping[str, Entry]
) -> dict[str, str]:
    """Entries as globs: a decision taken alike in most repeats of a block is written once with `*`,
    what differs after it under its own name (the longest pattern wins)."""
    texts: dict[str, str | None] = {}
    groups: dict[str, list[str]] = {}
    for block in blocks:
        stem = re.fullmatch(r"(.*\.)\d+", block.name)
        keyed = {op.name: op.key for op in block.ops} | {
            v: graph.parameters[v] for v in block.parameters
        }
        for name, key in keyed.items():
            entry = entries.get(name)
            text = None if entry is None else _written(entry, name in graph.parameters)
            texts[key] = text
            if stem and key.startswith(block.name):
                groups.setdefault(f"{stem[1]}*{key.removeprefix(block.name)}", []).append(key)
    out: dict[str, str] = {}
    done: set[str] = set()
    for pattern, keys in groups.items():
        regex = glob(pattern)
        if len(keys) < 2 or {key for key in texts if regex.match(key)} != set(keys):
            continue
        common, count = Counter(texts[key] for key in keys).most_common(1)[0]
        if common is None or count < 2:
            continue
        out[pattern] = common
        exceptions = {key: texts[key] or FOLLOW for key in keys if texts[key] != common}
        out |= exceptions
        done |= set(keys)
    out |= {key: text for key, text in texts.items() if text is not None and key not in done}
    return out


def _written(entry: Entry, parameter: bool) -> str:
    return f"{entry.state}@tp" if parameter else str(entry)


# --- the check -----------------------------------------------------------------------------------


def check_plan(plan: Plan, graph: Graph, table: FactorTable) -> list[dict[str, Assignment]]:
    """Guard a solved, loaded or hand-written plan; returns per stage the assignments by block name.

    `graph` may be traced at any batch size. Raises `PlanError` naming value, place, legal values.
    """
    _check_model(plan, graph)
    _check_step(plan)
    for k, stage in enumerate(plan.stages):
        _check_stage(plan, stage, f"plan: stage {k}")
    _check_blocks(plan, graph)
    _check_ranks(plan)
    _check_parameters(plan, graph)
    return [stage_assignments(plan, k, graph, table) for k in range(len(plan.stages))]


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


def _check_model(plan: Plan, graph: Graph) -> None:
    found = fingerprint(graph)
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
    for name, value, legal in (
        ("zero", stage.zero, ZERO),
        ("recompute", stage.recompute, RECOMPUTE),
    ):
        if isinstance(value, bool) or value not in legal:
            raise PlanError(f"{place}: {name}={value!r}; legal: {', '.join(map(str, legal))}")
    for axis in ("dp", "tp"):
        _check_whole(getattr(stage, axis), f"{place}: {axis}")
    if plan.microbatch_rows % stage.dp:
        raise PlanError(
            f"{place}: dp={stage.dp} does not divide a micro-batch of {plan.microbatch_rows} rows "
            f"(global_batch_size={plan.global_batch_size} / "
            f"num_microbatches={plan.num_microbatches}); "
            f"legal: {_divisors(plan.microbatch_rows)}, or fewer micro-batches"
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


def _check_ranks(plan: Plan) -> None:
    for k, stage in enumerate(plan.stages):
        if len(stage.ranks) != stage.dp * stage.tp:
            raise PlanError(
                f"plan: stage {k}: ranks {compress_ranks(stage.ranks) or 'none'} are "
                f"{len(stage.ranks)}, its mesh dp={stage.dp} × tp={stage.tp} "
                f"needs {stage.dp * stage.tp}"
            )
    counts = Counter(rank for stage in plan.stages for rank in stage.ranks)
    twice = sorted(rank for rank, count in counts.items() if count > 1)
    missing = sorted(set(range(plan.num_ranks)) - set(counts))
    if twice or missing:
        raise PlanError(
            f"plan: ranks must be 0 to {plan.num_ranks - 1}, each in one stage; "
            f"used twice: {compress_ranks(twice) or 'none'}; "
            f"missing: {compress_ranks(missing) or 'none'}"
        )


def stage_assignments(
    plan: Plan, k: int, graph: Graph, table: FactorTable
) -> dict[str, Assignment]:
    """Every choice on the tensor axis of stage `k`, by block name."""
    stage = plan.stages[k]
    blocks = [block for block in graph.blocks if block.name in set(stage.blocks)]
    place = f"plan: stage {k}"
    entries = resolve_shardings(graph, blocks, stage.shardings, place)
    later = {n for b in graph.blocks if b.name not in set(stage.blocks) for n in b.inputs}
    found: dict[str, Assignment] = {}
    states: dict[str, Placement] = {}
    for block in blocks:
        layouts = BlockLayouts(graph, table, block, stage.tp)
        inputs = {name: states[name] for name in block.inputs if name in states}
        try:
            found[block.name] = layouts.complete(entries, inputs, later)
        except ValueError as error:
            raise PlanError(f"{place}: {error}") from None
        _check_states(layouts, found[block.name], inputs, place)
        states |= {name: found[block.name].states[name] for name in block.outputs}
    return found


def _check_states(
    layouts: BlockLayouts,
    assignment: Assignment,
    inputs: Mapping[str, Placement],
    place: str,
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
    """Whether the tensor divides; rows of the batch depend on the micro-batch and are not asked."""
    if not state.sharded:
        return True
    shape, table = layouts.graph.values[value].shape, layouts.table
    if state.dim >= len(shape):
        return False
    if table.batch is not None and table.batch in table.dims[value][state.dim]:
        return True
    return shape[state.dim] % (state.split * layouts.degree) == 0


def _legal_states(layouts: BlockLayouts, value: str) -> str:
    shape = layouts.graph.values[value].shape
    shards = [Placement("S", d) for d in range(len(shape))]
    return ", ".join(map(str, [R, *(s for s in shards if _possible(layouts, value, s))]))


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
