"""Cells whose plans split the sequence, in the words of `parity_cells.py`.

Four models (causal, with shared keys, windows, both directions), each kind of attention, 2 and 4
ranks; beside tensor, data and pipeline parallelism, ZeRO, recompute, a split backward. `tokens`
is what decoders have beside attention: shifts, learned positions and biases, means over tokens.
"""

from __future__ import annotations

from functools import cache

from tests.parity.parity_cells import Cell

CELLS = """
gpt2_tied    cp2              ring m4
llama        cp2              all_gather m4 zero1
llama        cp2              ring m4 zero3
mistral      cp2              ulysses m4
mistral      cp2              ring m4
bert         cp2              all_gather m4
tokens       cp2              all_gather m4
tokens       cp2              ulysses m2 zero2
moe          cp2              ring m4
plain_gpt    cp2              all_gather m4 bf16
gpt2_tied    cp4              ulysses m2 mixed
gpt2_tied    cp2xtp2          ulysses m4 sequence
gpt2_tied    cp2xtp2          ring m4 sequence
gpt2_tied    dp2xcp2          ring m2 zero1
gpt2_tied    pp2xcp2          all_gather m4 mixed
llama        cp4              ring m4 zero3
llama        cp4              all_gather m2 zero2 full
llama        cp2xtp2          all_gather m4 sequence
llama        dp2xcp2          ulysses m2 zero3
llama        pp2xcp2          ring zb_h1 m4 zero1 bf16
mistral      cp4              ring m4
mistral      cp2xtp2          all_gather m4 zero1
mistral      dp2xcp2          ring m4 zero3
mistral      pp2xcp2          ulysses m4 full
bert         cp4              ulysses m4 full
bert         cp4              ring m2 zero1
bert         cp2xtp2          ring m4
bert         dp2xcp2          all_gather m4 zero3 shard2
bert         pp2xcp2          ulysses interleaved_1f1b v2 m4 fp16
tokens       cp4              ring m4
tokens       cp2xtp2          ring m4
tokens       pp2xcp2          all_gather zb_v m4
llama        pp2xdp2xcp2      ring m2 zero1 spread
gpt2_tied    dp2xcp2xtp2      ulysses m2 zero3 sequence
mistral      pp2xcp2xtp2      all_gather interleaved_1f1b v2 m4 zero1
"""


@cache
def context_cells(world: int | None = None) -> tuple[Cell, ...]:
    """The cells that run on `world` ranks, or all."""
    cells = (Cell.parse(line) for line in CELLS.strip().splitlines())
    return tuple(cell for cell in cells if world in (None, cell.world))
