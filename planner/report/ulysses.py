"""Ulysses: attention whose ranks split the sequence before and after it, and its heads inside.

The intra-op program finds it without knowing the name: of what attention reads or gives, the tensor
axis moves from a dim that has tokens to one that has heads, or back, by an all-to-all (DeepSpeed
Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import FactorTable, Move, Placement
from meshwright.planner.pricing import Entered, PricedStage

TOKENS, HEADS = ("s", "t"), ("heads", "group")  # factors of attention, as its rule names them


def ulysses_notes(stages: Sequence[PricedStage]) -> list[str]:
    """A line for each tensor-parallel degree that moves attention between tokens and heads."""
    found: dict[int, list[bool]] = {}
    for own in stages:
        for each in own.blocks if own.stage.tp > 1 else ():
            if any(traits_of(op).kernel == "attention" for op in each.block.ops):
                found.setdefault(own.stage.tp, []).append(_exchanges(own.pricer.table, each))
    return [
        f"Ulysses on the tensor axis: tp {tp} splits the sequence around attention and the heads "
        f"inside, by all-to-all, in {sum(has)} of {len(has)} blocks with attention"
        for tp, has in sorted(found.items())
        if any(has)
    ]


def _exchanges(table: FactorTable, found: Entered) -> bool:
    """Whether a block moves a value from the tokens of its attention to the heads, or back."""
    tokens, heads = set[int](), set[int]()
    for op in found.block.ops:
        if traits_of(op).kernel == "attention":
            letters = table.letters[op.name]
            tokens.update(a for name in TOKENS for a in letters.get(name, ()))
            heads.update(a for name in HEADS for a in letters.get(name, ()))

    def split(move: Move, state: Placement) -> set[int]:
        return set(table.dims[move.value][state.dim]) if state.sharded else set()

    steps = (step for step in found.steps if isinstance(step, Move))
    ends = ((split(move, move.source), split(move, move.target)) for move in steps)
    return any(
        (not tokens.isdisjoint(a) and not heads.isdisjoint(b))
        or (not heads.isdisjoint(a) and not tokens.isdisjoint(b))
        for a, b in ends
    )
