"""Buffers of a stage: their placement on the tensor axis, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.sharding import Assignment, BlockLayouts, Placement, R, buffer_state
from meshwright.executor.lowering import Lowered, local_part
from meshwright.executor.ranks import Place


def buffer_placements(
    graph: Graph,
    blocks: Sequence[Block],
    layouts: Mapping[str, BlockLayouts],
    chosen: Mapping[str, Assignment],
    prologue: Lowered,
    updates: Mapping[str, str],
) -> dict[str, tuple[str, Placement]]:
    """Value name -> (FQN, placement on the tensor axis) of the stage's buffers: as the blocks read
    them if they agree and nothing else reads them, else replicated."""
    whole = [n for n in (*prologue.arguments, *updates) if n in graph.buffers]
    wanted: dict[str, set[Placement]] = {n: {R} for n in whole}
    for block in blocks:
        for name in block.buffers:
            state = buffer_state(layouts[block.name], name, chosen[block.name])
            wanted.setdefault(name, set()).add(state)
    return {
        name: (graph.buffers[name], states.pop() if len(states) == 1 else R)
        for name, states in wanted.items()
    }


def load_buffers(
    graph: Graph, buffers: Mapping[str, tuple[str, Placement]], model: nn.Module, place: Place
) -> dict[str, torch.Tensor]:
    """Value name -> this rank's copy on its device; zeros where the model's is on meta."""
    named = dict(model.named_buffers(remove_duplicate=False))
    loaded = {}
    for value, (fqn, state) in buffers.items():
        source = named[fqn].detach()
        if source.is_meta:
            source = torch.zeros(source.shape, dtype=source.dtype, device=place.device)
        if state.sharded:
            source = local_part(source, state, place.tensor.size, place.tensor.rank)
        dtype = graph.values[value].dtype  # the trace may have cast it to the compute dtype
        loaded[value] = source.to(place.device, dtype).clone()
    return loaded
