"""Cells of parity for products in 8 bits, on four ranks."""

from __future__ import annotations

from tests.parity.parity_cells import Cell

CELLS = tuple(
    map(
        Cell.parse,
        """
gpt2_tied    tp4        1f1b m2 sequence fp8
gpt2_tied    dp2xtp2    1f1b m2 zero2 mixed sequence fp8_rowwise
gpt2_untied  dp4        1f1b m2 zero3 full fp8
gpt2_untied  pp2xdp2    zb_h1 m4 zero1 fp8
llama        pp2xtp2    zb_v m4 sequence regather fp8_rowwise
llama        dp2xcp2    1f1b m2 zero3 ring fp8
llama        dp2|tp2    eager_1f1b m4 fp8
t5           dp4        gpipe m2 zero1 fp8_rowwise
""".strip().splitlines(),
    )
)
