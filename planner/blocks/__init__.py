"""Blocks: the graph cut where little crosses, repeats found by structure."""

from meshwright.planner.blocks.cut import activations_at_cuts, cut_blocks
