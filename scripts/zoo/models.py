"""Models that people train, by name, built from their configs with random weights.

Each comes in a small size, to be run, and in a published one, to be planned (build it under
`torch.device("meta")`). No line of the planner or the executor knows any of them.
"""

from __future__ import annotations

from scripts.zoo import (  # noqa: F401 - an import adds to the zoo
    dense,
    fields,
    from_torchvision,
    from_transformers,
    more_transformers,
    more_written,
    multimodal,
    written,
)
from scripts.zoo.registry import PUBLISHED, SIZES, SMALL, ZOO, Built, Entry

__all__ = ["PUBLISHED", "SIZES", "SMALL", "ZOO", "Built", "Entry"]
