"""Blocks whose states and weights lie in host memory: a stage's part of them as whole blocks.

The last blocks are taken first: their gradients come first in a backward, and their weights are
read last in a forward, so that both ways to the host have most to pass behind. Of the states there,
the last blocks' again lie in files on the node's flash (ZeRO-Infinity).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from meshwright.costmodel.graph import Graph
from meshwright.planner.plan.plan import StagePlan

ROUNDING = 1e-9  # of a part that is written as a decimal


@dataclass(frozen=True, slots=True)
class OffDevice:
    """Parameter values with something off the device: `states` in host memory, of those in `files`
    but the gradients; of the trained ones in `weights`, which one block alone reads, the weights,
    too, but while it runs."""

    states: frozenset[str]
    weights: frozenset[str]
    files: frozenset[str]


def first_moved(sizes: Sequence[float], part: float) -> int:
    """The first of the last blocks that together have this part of all `sizes`, or more; their
    number for no part."""
    first, moved, wanted = len(sizes), 0.0, part * sum(sizes) * (1 - ROUNDING)
    while first and moved < wanted:
        first -= 1
        moved += sizes[first]
    return first


def moved_parts(sizes: Sequence[float]) -> list[float]:
    """Parts that whole blocks make, from 0 to 1: those of the last block, of the last two, ..."""
    total = sum(sizes)
    return [0.0, *(moved / total for moved in accumulate(filter(None, reversed(sizes))))]


def moved_sizes(stage: StagePlan, graph: Graph) -> list[float]:
    """Elements of the parameters of each block of a stage that may lie in host memory, each counted
    with the first block that reads it."""
    by_block = _moved_by_block(stage, graph)
    return [float(sum(math.prod(graph.values[v].shape) for v in values)) for values in by_block]


def _moved_by_block(stage: StagePlan, graph: Graph) -> list[list[str]]:
    """Parameters of each block that may lie in host memory, each with the first that reads it."""
    blocks = {block.name: block for block in graph.blocks}
    by_block, seen = list[list[str]](), set[str]()
    for name in stage.blocks:
        values = dict.fromkeys(v for v in blocks[name].parameters if v not in seen)
        by_block.append([v for v in values if graph.values[v].requires_grad or stage.gathers])
        seen.update(values)
    return by_block


def off_device(stage: StagePlan, graph: Graph) -> OffDevice:
    """Parameters of a stage that lie off the device."""
    host = stage.host
    parts = host.states, host.weights, host.files
    states, weights, files = (_of_last_blocks(stage, graph, part) for part in parts)
    readers = Counter(v for block in graph.blocks if weights for v in {*block.parameters})
    return OffDevice(states, frozenset(v for v in weights if readers[v] == 1), files)


def _of_last_blocks(stage: StagePlan, graph: Graph, part: float) -> frozenset[str]:
    """Values of the parameters that are first read by the last blocks with this part."""
    if not part:
        return frozenset()
    first = first_moved(moved_sizes(stage, graph), part)
    return frozenset(v for values in _moved_by_block(stage, graph)[first:] for v in values)


def away_blocks(stage: StagePlan) -> int:
    """The number of a stage's first blocks that send what they save to host memory."""
    part = stage.host.activations
    return math.ceil(part * len(stage.blocks) * (1 - ROUNDING))
