"""Tokens of a context-parallel row: the scores that each rank computes under a causal mask."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.executor.resharding import zigzag_chunks
from scripts.drawing.svg import COLOURS, Picture

RANKS, CELL = 4, 22.0


def owners(*, zigzag: bool) -> list[int]:
    """The rank of each of 2n chunks of a sequence."""
    chunks = zigzag_chunks(RANKS) if zigzag else [*range(2 * RANKS)]
    ranks = {chunk: k // 2 for k, chunk in enumerate(chunks)}
    return [ranks[chunk] for chunk in range(2 * RANKS)]


def scores(of: Sequence[int]) -> list[float]:
    """Blocks of scores of each rank, on the diagonal halves."""
    return [sum(at + 0.5 for at, rank in enumerate(of) if rank == r) for r in range(RANKS)]


def causal() -> str:
    """Blocks of the scores coloured by rank, tokens in their order and in zigzag."""
    side = 2 * RANKS * CELL
    picture = Picture(2 * side + 250, side + 90, f"Causal scores of {RANKS} ranks")
    for k, (words, zigzag) in enumerate((("in order", False), ("zigzag", True))):
        left, of = 20 + k * (side + 120), owners(zigzag=zigzag)
        picture.text(left, 24, words)
        for row, rank in enumerate(of):
            y = 36 + row * CELL
            picture.box(left, y, (row + 1) * CELL - 1, CELL - 1, fill=COLOURS[rank])
            picture.box(
                left + (row + 1) * CELL, y, side - (row + 1) * CELL, CELL - 1, class_="idle"
            )
        for rank, blocks in enumerate(scores(of)):
            y = 36 + 22 * rank
            picture.box(left + side + 10, y, 12, 12, fill=COLOURS[rank])
            picture.text(left + side + 28, y + 10, f"rank {rank}: {blocks:g}")
        picture.text(left + side / 2, side + 54, "keys", anchor="middle", class_="dim")
    return picture.svg()
