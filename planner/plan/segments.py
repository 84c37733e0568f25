"""Segments of a stage: neighbours that keep only their inputs; their forward runs again in the
backward, which then goes through them as each block's own recompute policy says.

With n blocks in segments of k a stage keeps the inputs of n/k blocks of each micro-batch in flight,
and of one segment at a time what its k blocks keep: least for k near √n, where those keep their
inputs, too (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from meshwright.costmodel.graph import Block
from meshwright.costmodel.rules import recomputable


def segments_of(blocks: Sequence[Block], size: int, loss: str | None) -> list[range]:
    """Positions of the blocks in each segment of a stage: as many as `size` neighbours, two at
    least, none of which has the loss, whose backward follows at once, or can't run twice."""
    once = [k for k, b in enumerate(blocks) if loss in b.outputs or not recomputable(b)]
    runs = [range(a + 1, b) for a, b in pairwise([-1, *once, len(blocks)])]
    spans = [run[k : k + size] for run in runs for k in range(0, len(run), size)]
    return [span for span in spans if len(span) > 1]
