"""A global batch as the rows that a rank reads: checked whole, cut, and only then moved to the
device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import DataLayout
from meshwright.executor.ranks import Place
from meshwright.planner.batch import input_leaves, is_number, same_entry
from meshwright.planner.plan import Plan

Rows = list[dict[str, torch.Tensor]]  # per micro-batch, by value name


class Batches:
    """Cuts batches for the stages of one rank. A batch of fewer rows is filled up with rows that
    count nothing, where the inputs of `filling` can say so, each by a value of its own."""

    def __init__(
        self, plan: Plan, graph: Graph, place: Place, filling: Mapping[str, int] | None = None
    ) -> None:
        self.plan = plan
        self.filling = filling
        self.graph = graph
        self.place = place

    def checked(self, batch: Any) -> dict[str, torch.Tensor]:
        """The inputs of a batch by value name. Raises ValueError for what is missing or not as
        planned, which every rank that is given the same batch does."""
        leaves = dict(input_leaves(batch)[0])
        missing = sorted(set(self.graph.inputs.values()) - set(leaves))
        if missing:
            raise ValueError(
                f"batch: missing {missing}; the model was planned with inputs "
                f"{sorted(self.graph.inputs.values())}"
            )
        self._check_fixed(leaves)
        tensors = {
            name: self._tensor(name, path, leaves[path]) for name, path in self.graph.inputs.items()
        }
        if self.filling:
            tensors |= self._filled_up(tensors)
        for name, path in self.graph.inputs.items():
            self._check(name, path, tensors[name])
        return tensors

    def _check_fixed(self, leaves: Mapping[str, Any]) -> None:
        """Raise ValueError for entries that are fixed in the plan and differ, or are unknown."""
        for path, planned in self.graph.fixed.items():
            given = leaves.get(path)
            if not same_entry(planned, given):
                raise ValueError(
                    f"batch: {path!r} was {planned!r:.60} when the model was planned, and is "
                    f"{given!r:.60} now: the plan is for one value of it, because the forward's "
                    "course depends on it; give that, or plan again"
                )
        known = {*self.graph.inputs.values(), *self.graph.fixed}
        unknown = sorted(path for path in leaves.keys() - known if leaves[path] is not None)
        if unknown:
            raise ValueError(
                f"batch: {unknown} were not among example_inputs, which had {sorted(known)}: drop "
                "them, or plan again with them"
            )

    def _tensor(self, name: str, path: str, given: Any) -> torch.Tensor:
        """An input as a tensor; numbers are 0-dim ones."""
        planned = self.graph.values[name]
        if isinstance(given, torch.Tensor):
            return given
        if not is_number(given) or planned.shape:
            raise ValueError(
                f"batch: {path!r} is a {type(given).__name__}; the model was planned with a "
                f"{planned.dtype} of shape {planned.shape}"
            )
        if isinstance(given, float) and not planned.dtype.is_floating_point:
            raise ValueError(
                f"batch: {path!r} is {given!r}, but the model was planned with an int; give an "
                "int, or plan with a float in example_inputs"
            )
        return torch.tensor(given, dtype=planned.dtype)

    def _filled_up(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batched inputs of a smaller batch, its first row repeated."""
        assert self.filling is not None
        batched = self.graph.batched
        sizes = {len(tensors[name]) if tensors[name].dim() else 0 for name in batched}
        missing = self.plan.global_batch_size - min(sizes)
        if len(sizes) > 1 or not 0 < missing < self.plan.global_batch_size:
            return {}
        filled = {}
        for name in batched:
            given, path = tensors[name], self.graph.inputs[name]
            rows = given[:1].expand(missing, *given.shape[1:])
            if path in self.filling:
                rows = torch.full_like(rows, self.filling[path])
            filled[name] = torch.cat([given, rows])
        return filled

    def _check(self, name: str, path: str, tensor: torch.Tensor) -> None:
        planned = self.graph.values[name]
        expected = list(planned.shape)
        if name in self.graph.batched:
            expected[0] = self.plan.global_batch_size
        if list(tensor.shape) != expected:
            raise ValueError(
                f"batch: {path!r} has shape {tuple(tensor.shape)}; the plan expects "
                f"{tuple(expected)} (global_batch_size={self.plan.global_batch_size}); pad or drop "
                f"rows, or plan for this batch{self._why_whole()}"
            )
        if tensor.is_floating_point() != planned.dtype.is_floating_point:
            raise ValueError(
                f"batch: {path!r} is {tensor.dtype}, but the model was planned with "
                f"{planned.dtype}; convert it, or plan with inputs like it"
            )

    def _why_whole(self) -> str:
        """Why a batch of fewer rows is not taken."""
        if self.filling:
            return ""
        return (
            " (fewer rows are taken where the loss is of cross-entropies of labels among the "
            "inputs, which can be ignored, or of sums under a mask)"
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
