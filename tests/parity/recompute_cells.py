"""Cells of parity for recompute that the matrix's policies aren't, on four ranks."""

from __future__ import annotations

from tests.parity.parity_cells import Cell

REGATHERED = """
gpt2_deep  tp4       1f1b m2 sequence regather
gpt2_deep  dp2xtp2   1f1b m4 zero3 sequence pointwise+regather
gpt2_deep  pp2xtp2   zb_v m4 sequence regather
gpt2_deep  pp2xtp2   interleaved_1f1b m4 v2 sequence selective+regather
gpt2_tied  dp2xtp2   gpipe m2 zero2 sequence widening+regather bf16
llama      tp4       1f1b m2 sequence regather
llama      dp2xtp2   1f1b m2 zero3 sequence products+regather
llama      pp2xtp2   zb_h2 m4 sequence regather front
"""
SEGMENTED = """
gpt2_deep  dp4       1f1b m2 zero3 seg3 full
gpt2_deep  dp2xtp2   1f1b m2 zero2 seg4 sequence pointwise+regather
gpt2_deep  pp2xdp2   1f1b m4 zero3 seg2
gpt2_deep  pp2xtp2   interleaved_1f1b m4 v2 seg2 pointwise bf16
gpt2_tied  pp2xdp2   eager_1f1b m4 zero1 seg2 mixed
llama      pp2xdp2   1f1b m4 zero1 seg2 full
t5         pp2xdp2   gpipe m4 zero3 seg4 full
moe        dp4       1f1b m2 zero3 seg2
resnet     dp4       1f1b m2 zero1 seg2
"""
CELLS = tuple(map(Cell.parse, (REGATHERED.strip() + SEGMENTED).splitlines()))
DROPOUT = tuple(
    map(Cell.parse, ("gpt2_dropout pp2xdp2 m4 front", "gpt2_dropout pp2xdp2 m4 front seg2 full"))
)
