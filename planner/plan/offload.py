"""Which blocks' states and weights lie in host memory: a stage's part of them as whole blocks.

The last blocks are taken first: their gradients are made first in a backward, and their weights are
read last in a forward, so that both ways to the host have most to pass behind. Of the states there,
the last blocks' again lie in files on the node's flash (ZeRO-Infinity). What ZeRO-3 divides of a
block lies in one place, frozen parameters with the states of the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.costmodel.graph import Graph, TensorMeta
from meshwright.costmodel.memory import divides
from meshwright.planner.decisions import OFFLOADS
from meshwright.planner.plan.plan import StagePlan
from meshwright.planner.plan.ranges import PlanError
from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.profiles.inputs.limits import is_number

ROUNDING = 1e-9  # of a part that is written as a decimal


def first_offloaded(sizes: Sequence[float], part: float) -> int:
    """The first of the last blocks that together have this part of what all have, or more; `sizes`
    are those of the blocks in their order. Their number where there is none."""
    first, held, wanted = len(sizes), 0.0, part * sum(sizes) * (1 - ROUNDING)
    while first and held < wanted:
        first -= 1
        held += sizes[first]
    return first


def parts(sizes: Sequence[float]) -> list[float]:
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
    return meta.requires_grad or divides(stage.zero, trained=False)


def offloaded_parameters(stage: StagePlan, graph: Graph) -> frozenset[str]:
    """Values of the parameters whose states lie in host memory."""
    return _of_last_blocks(stage, graph, stage.host.states)


def offloaded_weights(stage: StagePlan, graph: Graph) -> frozenset[str]:
    """Values of the trained parameters whose weights lie in host memory but while their block runs:
    those that one block alone reads."""
    found = _of_last_blocks(stage, graph, stage.host.weights)
    if not found:
        return found
    readers = Counter(v for block in graph.blocks for v in {*block.parameters})
    return frozenset(v for v in found if readers[v] == 1)


def in_files(stage: StagePlan, graph: Graph) -> frozenset[str]:
    """Values of the trained parameters whose states lie in files, with the weights that the
    optimizer reads; their gradients lie in host memory."""
    return _of_last_blocks(stage, graph, stage.host.files)


def _of_last_blocks(stage: StagePlan, graph: Graph, part: float) -> frozenset[str]:
    """Values of the parameters that are first read by the last blocks with this part."""
    if not part:
        return frozenset()
    blocks = {block.name: block for block in graph.blocks}
    first = first_offloaded(moved_sizes(stage, graph), part)
    before = {v for name in stage.blocks[:first] for v in blocks[name].parameters}
    after = (v for name in stage.blocks[first:] for v in blocks[name].parameters)
    return frozenset(v for v in after if v not in before and _moves(stage, graph.values[v]))


def away_blocks(stage: StagePlan) -> int:
    """How many of a stage's blocks send what they save to host memory, from the first one on."""
    part = stage.host.activations
    return math.ceil(part * len(stage.blocks) * (1 - ROUNDING))


def check_offload(
    given: Mapping[str, Any], place: str, error: type[MeshwrightError] = PlanError
) -> None:
    """Raise unless these are parts, from 0 to 1, of what may lie in host memory."""
    for name, part in given.items():
        if name not in OFFLOADS:
            raise error(f"={shown(name)}", place=place, legal=OFFLOADS)
        if not is_number(part) or not 0 <= part <= 1:
            raise error(f"={shown(part)}", place=f"{place}: {name}", legal="a part, from 0 to 1")
    states = given.get("optimizer", 0.0)
    for name, why in (
        ("weights", "the optimizer steps weights in host memory there"),
        ("nvme", "it is a part of the optimizer states that are off devices"),
    ):
        if given.get(name, 0.0) > states:
            raise error(
                f"={shown(given[name])}: {why}",
                place=f"{place}: {name}",
                legal=f"0 to {shown(states)}, the part of the optimizer states",
                way_out="raise that of the optimizer, too",
            )
