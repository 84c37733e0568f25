"""Which blocks' states and weights lie in host memory: a stage's part of them as whole blocks.

The last blocks are taken first: their gradients are made first in a backward, and their weights are
read last in a forward, so that both ways to the host have most to pass behind. Of the states there,
the last blocks' again lie in files on the node's flash (ZeRO-Infinity). What ZeRO-3 divides of a
block lies in one place, frozen parameters with the states of the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.costmodel.graph import Graph, TensorMeta
from meshwright.planner.plan.plan import StagePlan

ROUNDING = 1e-9  # of a part that is written as a decimal


@dataclass(frozen=True, slots=True)
class OffDevice:
    """Values of the parameters of which something lies off the device: `states` in host memory, of
    those in `files` but the gradients; of the trained ones in `weights`, which one block alone
    reads, the weights, too, but while it runs."""

    states: frozenset[str]
    weights: frozenset[str]
    files: frozenset[str]


def first_moved(sizes: Sequence[float], part: float) -> int:
    """The first of the last blocks that together have this part of what all have, or more; `sizes`
    are those of the blocks in their order. Their number where there is none."""
    first, held, wanted = len(sizes), 0.0, part * sum(sizes) * (1 - ROUNDING)
    while first and held < wanted:
        first -= 1
        held += sizes[first]
    return first


def moved_parts(sizes: Sequence[float]) -> list[float]:
    """The parts that there are, from 0 to 1: those of the last block, of the last two, ..."""
    total, held, found = sum(sizes), 0.0, [0.0]
    for size in reversed(sizes):
        held += size
        if size:
            found.append(held / total)
    return found


def moved_sizes(stage: StagePlan, graph: Graph) -> list[float]:
    """Elements of the parameters of each block of a stage that may lie in host memory, each counted
    with the first block that reads it."""
    blocks = {block.name: block for block in graph.blocks}
    seen: set[str] = set()
    sizes = []
    for name in stage.blocks:
        own = [v for v in blocks[name].parameters if _moves(stage, graph.values[v])]
        sizes.append(float(sum(math.prod(graph.values[v].shape) for v in {*own} - seen)))
        seen.update(own)
    return sizes


def _moves(stage: StagePlan, meta: TensorMeta) -> bool:
    """Whether a parameter may lie in host memory."""
    return meta.requires_grad or stage.gathers


def off_device(stage: StagePlan, graph: Graph) -> OffDevice:
    """What of a stage's parameters does."""
    host = stage.host
    parts = host.states, host.weights, host.files
    states, weights, files = (_of_last_blocks(stage, graph, part) for part in parts)
    readers = Counter(v for block in graph.blocks if weights for v in {*block.parameters})
    return OffDevice(states, frozenset(v for v in weights if readers[v] == 1), files)


def _of_last_blocks(stage: StagePlan, graph: Graph, part: float) -> frozenset[str]:
    """Values of the parameters that are first read by the last blocks with this part."""
    if not part:
        return frozenset()
    blocks = {block.name: block for block in graph.blocks}
    first = first_moved(moved_sizes(stage, graph), part)
    before = {v for name in stage.blocks[:first] for v in blocks[name].parameters}
    after = (v for name in stage.blocks[first:] for v in blocks[name].parameters)
    return frozenset(v for v in after if v not in before and _moves(stage, graph.values[v]))


def away_blocks(stage: StagePlan) -> int:
    """How many of a stage's blocks send what they save to host memory, from the first one on."""
    part = stage.host.activations
    return math.ceil(part * len(stage.blocks) * (1 - ROUNDING))
