"""Buffers of a stage: their placement on the tensor axis, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.sharding import (
    Assignment,
    BlockLayouts,
    Placement,
    R,
    buffer_state,
    running_statistics,
)
from meshwright.executor.errors import StateError
from meshwright.executor.host_values import share_memory
from meshwright.executor.lowering import Lowered
from meshwright.executor.ranks import Place
from meshwright.executor.resharding import all_gather, local_part
from meshwright.executor.stages.user_model import UserModel


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
    written = [n for n in (*prologue.arguments, *updates) if n in graph.buffers]
    wanted: dict[str, set[Placement]] = {n: {R} for n in written}
    for block in blocks:
        for name in block.buffers:
            state = buffer_state(layouts[block.name], name, chosen[block.name])
            wanted.setdefault(name, set()).add(state)
    return {
        name: (graph.buffers[name], states.pop() if len(states) == 1 else R)
        for name, states in wanted.items()
    }


@dataclass(slots=True, kw_only=True, eq=False)
class HeldBuffer:
    """A buffer that a stage reads, by the name of its `value`.

    `whole` is the module's own tensor, on the rank's device. The graphs read it, or, where they
    read a part or another dtype, a copy that follows its `version`. `updated`: the forward writes
    it, in `tensors` during a step and in `whole` at its end.
    """

    value: str
    fqn: str
    whole: torch.Tensor
    placement: Placement
    dtype: torch.dtype
    updated: bool
    place: Place
    version: int = -1

    def read(self) -> torch.Tensor:
        """Values that the graphs read."""
        self.version = self.whole._version
        local = self.whole.detach()
        if self.placement.sharded:
            axis = self.place.tensor
            local = local_part(local, self.placement, axis.size, axis.rank).clone()
        return local.to(self.dtype)

    def follow(self, user: UserModel, tensors: dict[str, torch.Tensor]) -> None:
        """Before a step: read what was written to since, where that is a copy; what was put in the
        buffer's place; and anew what the forward writes, of which a step that failed left half.
        Raises ValueError for a buffer of another shape."""
        now = user.tensor(self.fqn)
        if now is not self.whole:
            if now.shape != self.whole.shape:
                raise StateError(
                    f" was replaced by one of shape {tuple(now.shape)}, planned "
                    f"{tuple(self.whole.shape)}",
                    place=f"buffer {self.fqn!r}",
                    way_out="keep its shape, or call auto_parallelize again",
                )
            self.whole.copy_(now)
            user.put(self.fqn, self.whole)
        if self.updated or self.version != self.whole._version:
            tensors[self.value] = self.read()

    def settle(self, tensors: dict[str, torch.Tensor], written: dict[str, torch.Tensor]) -> None:
        """After a step: the module's own tensor takes what the forward made of it, in `written` or
        in `tensors`. Collective over the tensor axis where that holds parts."""
        if not self.updated:
            return
        now = written.pop(self.value, tensors[self.value])
        if self.placement.sharded:
            size = self.whole.shape[self.placement.dim]
            now = all_gather(now, self.placement, self.place.tensor, size)
        if not share_memory(now, self.whole):
            self.whole.copy_(now)
        tensors[self.value] = self.read()


def hold_buffers(
    graph: Graph,
    buffers: Mapping[str, tuple[str, Placement]],
    updates: Mapping[str, str],
    user: UserModel,
    place: Place,
) -> list[HeldBuffer]:
    """The stage's buffers, the model's own moved to the device; zeros for those on meta."""
    written = {*updates, *(b for op in graph.ops for b in running_statistics(op))}
    held = []
    for value, (fqn, placement) in buffers.items():
        local = user.tensor(fqn)
        if local.is_meta:
            local = torch.zeros(local.shape, dtype=local.dtype, device=place.device)
            user.replace(fqn, local)
        elif local.device != place.device:
            local.data = local.to(place.device)
        held.append(
            HeldBuffer(
                value=value,
                fqn=fqn,
                whole=local,
                placement=placement,
                dtype=graph.values[value].dtype,  # the trace may compute in another
                updated=value in written,
                place=place,
            )
        )
    return held
