"""Ulysses: attention whose ranks split the sequence before and after it, and its heads inside.

The intra-op program finds it without knowing the name: of what attention reads or gives, the tensor
axis moves from a dim that has tokens to one that has heads, or back, by an all-to-all (DeepSpeed
Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import (
    Assignment,
    BlockLayouts,
    FactorTable,
    Move,
    Placement,
    R,
    moves,
)
from meshwright.planner.plan import Plan

TOKENS, HEADS = ("s", "t"), ("heads", "group")  # factors of attention, as its rule names them


def ulysses_notes(
    plan: Plan, graph: Graph, table: FactorTable, assignments: Sequence[Mapping[str, Assignment]]
) -> list[str]:
    """A line for each tensor-parallel degree that moves attention between tokens and heads;
    `assignments` as of `check_plan`."""
    blocks = {block.name: block for block in graph.blocks}
    found: dict[int, list[bool]] = {}
    known: dict[tuple[int, str, str, tuple[Placement, ...]], bool] = {}
    for stage, chosen in zip(plan.stages, assignments, strict=True):
        states: dict[str, Placement] = {}
        for name in stage.blocks if stage.tp > 1 else ():
            block, assignment = blocks[name], chosen[name]
            entering = {value: states.get(value, R) for value in block.inputs}
            states |= {value: assignment.states[value] for value in block.outputs}
            if not any(traits_of(op).kernel == "attention" for op in block.ops):
                continue
            key = (stage.tp, block.class_id, assignment.choices, tuple(entering.values()))
            if key not in known:
                layouts = BlockLayouts(graph, table, block, stage.tp)
                steps = moves(layouts, assignment, entering)
                known[key] = _exchanges(block, table, [s for s in steps if isinstance(s, Move)])
            found.setdefault(stage.tp, []).append(known[key])
    return [
        f"Ulysses on the tensor axis: tp {tp} splits the sequence around attention and the heads "
        f"inside, by all-to-all, in {sum(has)} of {len(has)} blocks with attention"
        for tp, has in sorted(found.items())
        if any(has)
    ]


def _exchanges(block: Block, table: FactorTable, found: Sequence[Move]) -> bool:
    """Whether a block moves a value from the tokens of its attention to the heads, or back."""
    tokens, heads = set[int](), set[int]()
    for op in block.ops:
        if traits_of(op).kernel == "attention":
            letters = table.letters[op.name]
            tokens.update(a for name in TOKENS for a in letters.get(name, ()))
            heads.update(a for name in HEADS for a in letters.get(name, ()))

    def split(move: Move, state: Placement) -> set[int]:
        return set(table.dims[move.value][state.dim]) if state.sharded else set()

    ends = ((split(move, move.source), split(move, move.target)) for move in found)
    return any(
        (not tokens.isdisjoint(a) and not heads.isdisjoint(b))
        or (not heads.isdisjoint(a) and not tokens.isdisjoint(b))
        for a, b in ends
    )
