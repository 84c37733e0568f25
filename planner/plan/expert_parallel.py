"""Expert parallelism of a stage: the meshes that are legal, and those that the executor runs.

The expert axis is laid over the others: ep neighbours of the stage's dp × cp × tp ranks hold 1/ep
of the experts each. The tensor axis counts where it splits the tokens (sequence parallelism) and
not the experts' matrices. The executor runs ep that divides dp, at each tensor coordinate by
itself, or that is a multiple of tp, over neighbours on both axes (`folds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.costmodel import rules, sharding
from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.planner.plan.expert_legs import legs, refused
from meshwright.planner.plan.plan import StagePlan
from meshwright.planner.plan.ranges import PlanError


def has_experts(graph: Graph) -> bool:
    """Whether any operator has weights of several experts."""
    return any(map(_is_product, graph.ops))


def _is_product(op: Op) -> bool:
    return rules.traits_of(op).experts == "product"


def fewest_experts(graph: Graph, factors: sharding.FactorTable) -> int:
    """The fewest experts that any operator has weights of; 1 without such operators."""
    sizes = (factors.ops[op.name].sizes for op in graph.ops if _is_product(op))
    return min((size[rules.EXPERT_FACTOR] for size in sizes), default=1)


def expert_weights(graph: Graph) -> frozenset[str]:
    """The values that grouped products read as matrices or biases."""
    return frozenset(value for op in graph.ops for value in _weights(op))


def _weights(op: Op) -> tuple[str, ...]:
    """The matrices among a grouped product's operands and, where it has them, the biases."""
    return (op.operands[1], *op.operands[3:]) if _is_product(op) else ()


def folds(stage: StagePlan, graph: Graph, assignments: Mapping[str, sharding.Assignment]) -> bool:
    """Whether the expert axis covers the tensor axis too: all tensor ranks have tokens of their
    own, read and hold whole matrices. `assignments`, by block name, are those of all stages on the
    ranks of `stage`."""
    if stage.ep == 1 or stage.tp == 1 or stage.ep % stage.tp:
        return False
    weights = expert_weights(graph)
    for block in graph.blocks:
        if (assignment := assignments.get(block.name)) is None:
            continue
        if any(assignment.states[value].sharded for value in weights & {*block.parameters}):
            return False
        for op in block.ops:
            strategy, role = assignment.strategies[op.name], rules.traits_of(op).experts
            if role == "dispatch" and strategy.split_factor not in rules.TOKEN_FACTORS:
                return False
            if role == "product" and strategy.operands[1].sharded:
                return False
    return True


def check_blocks(blocks: Sequence[Block], graph: Graph, factors: sharding.FactorTable) -> None:
    """Raise `PlanError` unless the executor can share out the experts of blocks, on any mesh."""
    weights = expert_weights(graph)
    for block in blocks:
        legs(block.ops, graph, factors, block.outputs)
        for op in block.ops:
            for value in op.operands:
                allowed = value in _weights(op) and value in graph.parameters
                if value in weights and not allowed:
                    raise refused(
                        op,
                        f"it takes the experts' matrices {graph.parameters.get(value, value)}, "
                        "which must be a parameter that grouped products alone read",
                    )


def check_experts_run(
    stage: StagePlan, graph: Graph, factors: sharding.FactorTable, *, folded: bool, place: str
) -> None:
    """Raise `PlanError` unless the executor can share the experts of a stage out as planned."""
    if stage.ep == 1:
        return
    neighbours = stage.ep // stage.tp if folded else stage.ep
    if stage.holders % neighbours:
        raise PlanError(
            f"={stage.ep} can be priced, but not run: it does not divide dp·cp={stage.holders}",
            place=f"{place}: ep",
            legal=(
                f"a divisor of it, or, where the tp={stage.tp} ranks have tokens of their own "
                "and whole matrices, a multiple of tp"
            ),
        )
    if stage.shards % neighbours and neighbours % stage.shards:
        raise PlanError(
            f"={stage.ep} can be priced, but not run: the {neighbours} data ranks that share the "
            f"experts out are no part of the {stage.shards} that ZeRO divides among, nor the "
            "reverse",
            place=f"{place}: ep",
            legal="one a multiple of the other",
        )
    names = set(stage.blocks)
    check_blocks([block for block in graph.blocks if block.name in names], graph, factors)


def check_experts(
    stage: StagePlan,
    graph: Graph,
    factors: sharding.FactorTable,
    assignments: Mapping[str, sharding.Assignment],
    place: str,
) -> None:
    """Raise `PlanError` unless ep divides the experts and the ranks that they are shared over."""
    if stage.ep == 1:
        return
    if not has_experts(graph):
        raise PlanError(f"={stage.ep}: the model has no experts", place=f"{place}: ep", legal="1")
    ops = [op for block in graph.blocks if block.name in assignments for op in block.ops]
    strategies = {name: s for a in assignments.values() for name, s in a.strategies.items()}
    states = {value: state for a in assignments.values() for value, state in a.states.items()}
    _check_moves(ops, factors, strategies, states, f"{place}: ep={stage.ep}")

    def check(number: int, what: str, legal: str) -> None:
        if number % stage.ep:
            what = f"={stage.ep} does not divide {what}"
            raise PlanError(what, place=f"{place}: ep", legal=legal)

    data, ranks = f"dp={stage.dp} × cp={stage.cp}", stage.holders * stage.tp
    for op in ops:
        strategy = strategies[op.name]
        if _is_product(op):
            count = factors.ops[op.name].sizes[rules.EXPERT_FACTOR]
            check(count, f"the {count} experts of {op.module}", f"a divisor of {count}")
            if strategy.operands[1].sharded:
                split = f"the tp={stage.tp} ranks split the matrices of {op.module}"
                legal = "a divisor of it, or whole matrices"
                check(stage.holders, f"{data}, and {split}", legal)
        if rules.traits_of(op).experts == "dispatch":
            token_ranks = stage.tp if strategy.split_factor in rules.TOKEN_FACTORS else 1
            ranks = stage.holders * token_ranks
            axes = f"{data} × {token_ranks} of tp={stage.tp}"
            have = f"the {ranks} ranks that have tokens of their own at {op.key} ({axes})"
            check(ranks, have, "a divisor of it, or split the sequence over tp")
    every = f"its {data} × tp={stage.tp} ranks"
    check(stage.holders * stage.tp, every, f"a divisor of {ranks}")


def _check_moves(
    ops: Sequence[Op],
    factors: sharding.FactorTable,
    strategies: Mapping[str, sharding.Strategy],
    states: Mapping[str, sharding.Placement],
    place: str,
) -> None:
    """Raise `PlanError` for a re-shard of copies of tokens, which stay with their experts."""
    for op in ops:
        chosen = strategies[op.name]
        moves = [
            *((v, states.get(v), p) for v, p in zip(op.operands, chosen.operands, strict=True)),
            *((v, p, states.get(v)) for v, p in zip(op.results, chosen.results, strict=True)),
        ]
        for value, source, target in moves:
            if source and target and sharding.stays_with_experts(factors, value, source, target):
                raise PlanError(
                    f"{value} goes from {source} to {target} at {op.key}, but copies of tokens "
                    "stay with their experts",
                    place=place,
                    legal="one state, or ep=1",
                )
