"""What recompute may do with a block, by name."""

from __future__ import annotations

RECOMPUTE = ("none", "selective", "alternate", "full")
