"""Cells of schedules with two copies of the model, which run in opposite directions."""

from __future__ import annotations

from functools import cache

from tests.parity.parity_cells import Cell

COPIES = """
gpt2_tied    pp2          chimera m4
gpt2_untied  pp2          chimera m2 bf16
llama        pp2          chimera m4 full
gpt2_tied    pp2          dualpipe m4 bf16
llama        pp2          dualpipe m8
gpt2_tied    pp4          chimera m8
gpt2_tied    pp2xdp2      chimera m4 zero1
gpt2_tied    pp2xdp2      chimera m4 fp16 pointwise spread
gpt2_tied    pp2xtp2      chimera m4
llama        pp2xdp2      chimera m4 zero2 bf16
llama        pp4          chimera m4
gpt2_untied  pp4          dualpipe m8
gpt2_tied    pp2xdp2      dualpipe m4 zero1
llama        pp2xtp2      dualpipe m4 fp16
gpt2_untied  pp2xdp2      dualpipe m2 zero1
"""


@cache
def copies_cells(world: int | None = None) -> tuple[Cell, ...]:
    """The cells of a number of ranks, or all."""
    cells = [Cell.parse(line) for line in COPIES.strip().splitlines()]
    return tuple(cell for cell in cells if world in (None, cell.world))
