"""A global batch as the rows that a rank reads: checked whole, cut, and only then moved to the
device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import DataLayout
from meshwright.executor.ranks import Place
from meshwright.planner.batch import input_leaves
from meshwright.planner.plan import Plan

Rows = list[dict[str, torch.Tensor]]  # per micro-batch, by value name


class Batches:
    """Cuts batches for the stages of one rank."""

    def __init__(self, plan: Plan, graph: Graph, place: Place) -> None:
        self.plan = plan
        self.graph = graph
        self.place = place

    def checked(self, batch: Any) -> dict[str, torch.Tensor]:
        """The inputs of a batch by value name. Raises ValueError for what is missing or not as
        planned, which every rank that is given the same batch does."""
        leaves = {path: x for path, x in input_leaves(batch)[0] if isinstance(x, torch.Tensor)}
        missing = sorted(set(self.graph.inputs.values()) - set(leaves))
        if missing:
            raise ValueError(
                f"batch: missing {missing}; the model was planned with inputs "
                f"{sorted(self.graph.inputs.values())}"
            )
        for name, path in self.graph.inputs.items():
            self._check(name, path, leaves[path])
        return {name: leaves[path] for name, path in self.graph.inputs.items()}

    def _check(self, name: str, path: str, tensor: torch.Tensor) -> None:
        planned = self.graph.values[name]
        expected = list(planned.shape)
        if name in self.graph.batched:
            expected[0] = self.plan.global_batch_size
        if list(tensor.shape) != expected:
            raise ValueError(
                f"batch: {path!r} has shape {tuple(tensor.shape)}; the plan expects "
                f"{tuple(expected)} (global_batch_size={self.plan.global_batch_size}); pad or drop "
                "rows, or plan for this batch"
            )
        if tensor.is_floating_point() != planned.dtype.is_floating_point:
            raise ValueError(
                f"batch: {path!r} is {tensor.dtype}, but the model was planned with "
                f"{planned.dtype}; convert it, or plan with inputs like it"
            )

    def rows(
        self, inputs: Mapping[str, torch.Tensor], layout: DataLayout, read: Collection[str]
    ) -> Rows:
        """This rank's rows of the inputs that a stage reads."""
        rows, axis = self.plan.microbatch_rows, self.place.data
        parts: Rows = [{} for _ in range(self.plan.num_microbatches)]
        for name, tensor in inputs.items():
            if name not in read:
                continue
            whole = None if name in self.graph.batched else self._moved(name, tensor)
            split = layout.states[name].sharded
            for k, part in enumerate(parts):
                if whole is not None:
                    part[name] = whole
                    continue
                chunk = tensor[k * rows : (k + 1) * rows]
                own = chunk.tensor_split(axis.size)[axis.rank] if split else chunk
                part[name] = self._moved(name, own)
        return parts

    def _moved(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.graph.values[name].dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self.place.device, dtype=dtype, non_blocking=True)
