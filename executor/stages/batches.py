"""A global batch as the rows that a rank reads: checked whole, cut, and only then moved to the
device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import DataLayout
from meshwright.executor.errors import BatchError
from meshwright.executor.ranks import Place
from meshwright.planner.batch import input_leaves, is_number, same_entry
from meshwright.planner.plan import Plan

Rows = list[dict[str, torch.Tensor]]  # per micro-batch, by value name


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The rows of a batch, and the other sizes of each input, in their order."""

    rows: int
    sizes: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(graph: Graph, rows: int, tensors: Mapping[str, Any]) -> BatchShape:
        """Of so many rows, the inputs (by value name) being of the shape that `tensors` have."""
        batched = graph.batched
        shapes = ((name, tuple(tensors[name].shape)) for name in graph.inputs)
        return BatchShape(rows, tuple(s[1:] if name in batched else s for name, s in shapes))


class Batches:
    """Cuts batches for the stages of one rank. A batch of fewer rows is filled up with rows that
    count nothing, where the inputs of `filling` can say so, each by a value of its own. `planned`
    is the shape that the graph was traced at."""

    def __init__(
        self, plan: Plan, graph: Graph, place: Place, filling: Mapping[str, int] | None = None
    ) -> None:
        self.plan = plan
        self.filling = filling
        self.graph = graph
        self.place = place
        self.planned = BatchShape.of(graph, plan.global_batch_size, graph.values)

    def checked(self, batch: Any) -> dict[str, torch.Tensor]:
        """The inputs of a batch by value name. Raises ValueError for what is missing or of another
        kind than planned, which every rank that is given the same batch does."""
        leaves = dict(input_leaves(batch)[0])
        known = {*self.graph.inputs.values(), *self.graph.fixed}
        unknown = sorted(path for path in leaves.keys() - known if leaves[path] is not None)
        if unknown:
            raise BatchError(
                f"batch: {unknown} were not among example_inputs; the model was planned with "
                f"inputs {sorted(known)}: drop them, or plan again with them"
            )
        missing = sorted(set(self.graph.inputs.values()) - set(leaves))
        if missing:
            raise BatchError(
                f"batch: missing {missing}; the model was planned with inputs "
                f"{sorted(self.graph.inputs.values())}: give all of them, or plan again without"
            )
        self._check_fixed(leaves)
        return {
            name: self._tensor(name, path, leaves[path]) for name, path in self.graph.inputs.items()
        }

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> BatchShape:
        """The shape of a batch as it is run, filled up where that can be. Raises ValueError for
        inputs of another number of dims, or of other rows than each other."""
        batched = self.graph.batched
        rows = {len(x) for name, x in tensors.items() if name in batched and x.dim()}
        for name in self.graph.inputs:
            given, dims = tensors[name], len(self.graph.values[name].shape)
            if given.dim() != dims or 0 in given.shape or (name in batched and len(rows) > 1):
                raise self.unlike(tensors, "pad or drop rows, or plan for this batch")
        fewer = min(rows, default=self.planned.rows)
        filled = self.filling and fewer < self.planned.rows
        return BatchShape.of(self.graph, self.planned.rows if filled else fewer, tensors)

    def _check_fixed(self, leaves: Mapping[str, Any]) -> None:
        """Raise ValueError for entries that are fixed in the plan and differ."""
        for path, planned in self.graph.fixed.items():
            given = leaves.get(path)
            if not same_entry(planned, given):
                raise BatchError(
                    f"batch: {path!r} was {planned!r:.60} when the model was planned, and is "
                    f"{given!r:.60} now: the plan is for one value of it, because the forward's "
                    "course depends on it; give that, or plan again"
                )

    def _tensor(self, name: str, path: str, given: Any) -> torch.Tensor:
        """An input as a tensor; numbers are 0-dim ones."""
        planned = self.graph.values[name]
        if isinstance(given, torch.Tensor):
            if given.is_floating_point() != planned.dtype.is_floating_point:
                raise BatchError(
                    f"batch: {path!r} is {given.dtype}, but the model was planned with "
                    f"{planned.dtype}; convert it, or plan with inputs like it"
                )
            return given
        if not is_number(given) or planned.shape:
            raise BatchError(
                f"batch: {path!r} is a {type(given).__name__}; the model was planned with a "
                f"{planned.dtype} of shape {planned.shape}"
            )
        if isinstance(given, float) and not planned.dtype.is_floating_point:
            raise BatchError(
                f"batch: {path!r} is {given!r}, but the model was planned with an int; give an "
                "int, or plan with a float in example_inputs"
            )
        return torch.tensor(given, dtype=planned.dtype)

    def filled(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The inputs with as many rows as planned: the first one repeated, counting nothing."""
        batched = self.graph.batched
        missing = self.planned.rows - min((len(tensors[n]) for n in batched), default=0)
        if not missing or not batched:
            return tensors
        assert self.filling
        filled = {}
        for name in batched:
            given, path = tensors[name], self.graph.inputs[name]
            rows = given[:1].expand(missing, *given.shape[1:])
            if path in self.filling:
                rows = torch.full_like(rows, self.filling[path])
            filled[name] = torch.cat([given, rows])
        return {**tensors, **filled}

    def unlike(self, tensors: Mapping[str, torch.Tensor], why: str) -> ValueError:
        """The error for a batch that has not the planned shape, and can't be run for a reason."""
        shapes = []
        for name, path in self.graph.inputs.items():
            expected = self.graph.values[name].shape
            if name in self.graph.batched:
                expected = (self.planned.rows, *expected[1:])
            if tuple(tensors[name].shape) != expected:
                shapes.append(
                    f"{path!r} has shape {tuple(tensors[name].shape)}; the plan expects {expected}"
                )
        return ValueError(f"batch: {shapes[0]} (global_batch_size={self.planned.rows}): {why}")

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
