"""Data of a run: each rank loads its own rows of every global batch."""

from meshwright.data.loader import DataLoader, data_loader

__all__ = ["DataLoader", "data_loader"]
