"""Patches of transformers while it is traced, and batches that its trace does not fit."""

from meshwright.planner.tracing.transformers.adapter import adapted, check_positions
