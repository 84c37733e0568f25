"""What transformers needs while it is traced, undone afterwards."""

from meshwright.planner.tracing.transformers.adapter import adapted

__all__ = ["adapted"]
