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
CELLS = tuple(map(Cell.parse, REGATHERED.strip().splitlines()))
