"""A batch as the rows that a rank reads: checked, cut, and only then moved to the device.

A global batch is the same on all ranks, and each takes its rows of every micro-batch. A local one
has only those of the rank's share: of micro-batch after micro-batch, in their order. Ranks of a
share (they differ in their tensor axis, or their stage) give the same.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import DataLayout
from meshwright.costmodel.user_rules import make_known
from meshwright.executor.errors import BatchError
from meshwright.executor.ranks import Place, launch, world_size
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
        """Shape of a batch of so many rows, the inputs (by value name) being of the shape that
        `tensors` have."""
        batched = graph.batched
        shapes = ((name, tuple(tensors[name].shape)) for name in graph.inputs)
        return BatchShape(rows, tuple(s[1:] if name in batched else s for name, s in shapes))


@dataclass(frozen=True, slots=True)
class Given:
    """The inputs of a batch by value name; `local` where they are those of the rank's share. A rank
    that reads none of them may give None."""

    tensors: Mapping[str, torch.Tensor] | None
    local: bool


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
        self.data_ranks = plan.data_ranks
        self.planned = BatchShape.of(graph, plan.global_batch_size, graph.values)

    def checked(self, batch: Any) -> dict[str, torch.Tensor]:
        """The inputs of a batch by value name. Raises ValueError for what is missing or of another
        kind than planned, which every rank that is given the same batch does."""
        leaves = dict(input_leaves(batch)[0])
        known = {*self.graph.inputs.values(), *self.graph.fixed}
        unknown = sorted(path for path in leaves.keys() - known if leaves[path] is not None)
        if unknown:
            raise BatchError(
                f": {unknown} were not among example_inputs; the model was planned with "
                f"inputs {sorted(known)}",
                place="batch",
                way_out="drop them, or plan again with them",
            )
        missing = sorted(set(self.graph.inputs.values()) - set(leaves))
        if missing:
            raise BatchError(
                f"missing {missing}; the model was planned with inputs "
                f"{sorted(self.graph.inputs.values())}",
                place="batch",
                way_out="give all of them, or plan again without",
            )
        self._check_fixed(leaves)
        return {
            name: self._tensor(name, path, leaves[path]) for name, path in self.graph.inputs.items()
        }

    @property
    def share(self) -> Sequence[int]:
        """Numbers of the rows of a global batch that this rank's share has, in their order."""
        return self.share_of(self.plan.global_batch_size)

    def share_of(self, total: int) -> Sequence[int]:
        """`share` of a global batch of `total` rows, of which there may be fewer than planned."""
        parts, axis = self.plan.microbatches_of(total), self.place.rows
        rows = total // parts
        row_range = torch.arange(rows).tensor_split(axis.size)[axis.rank].tolist()
        return [k * rows + n for k in range(parts) for n in row_range]

    def shape(self, inputs: Given) -> BatchShape:
        """The shape of the global batch as it is run, filled up where that can be and batches of
        other sizes, which are lowered anew, can't be shared out as they are. Raises
        ValueError for inputs of another number of dims, or of other rows than each other."""
        batched, tensors = self.graph.batched, inputs.tensors
        if tensors is None:
            return self.planned
        rows = {len(x) for name, x in tensors.items() if name in batched and x.dim()}
        for name in self.graph.inputs:
            x, dims = tensors[name], len(self.graph.values[name].shape)
            if x.dim() != dims or 0 in x.shape or (name in batched and len(rows) > 1):
                raise self.unlike(inputs, "pad or drop rows, or plan for this batch")
        planned = len(self.share) if inputs.local else self.planned.rows
        batch_rows = min(rows, default=planned)
        rows_in_all = batch_rows * (self.place.rows.size if inputs.local else 1)
        shape = BatchShape.of(self.graph, rows_in_all, tensors)
        apart = shape.sizes != self.planned.sizes and not rows_in_all % self.data_ranks
        if batch_rows == planned or (self.filling and batch_rows < planned and not apart):
            return replace(shape, rows=self.planned.rows)
        return shape

    def serves(self, inputs: Given) -> bool:
        """Whether the values that the forward asks for are in each micro-batch of a batch of the
        planned shape what they were when it was traced. Raises ValueError for a local batch where
        there are such values: a rank has only its part."""
        graph, rows = self.graph, self.plan.microbatch_rows
        if not graph.known or launch.rehearsed():  # in which tensors have no values
            return True
        if inputs.local and world_size() > 1:
            raise BatchError(
                f"the forward asks for values of it{self._asked_at}, of which a rank has only its "
                "part",
                place="batch",
                way_out="give every rank the global batch (local=False)",
            )
        assert inputs.tensors is not None, "only a local batch may be left out"
        behind = graph.behind(graph.known)
        ops = [op for op in graph.derived if not behind.isdisjoint(op.results)]
        dtypes = {n: graph.values[n].dtype for n in graph.inputs if n in behind}
        read = {n: inputs.tensors[n].to("cpu", dtype) for n, dtype in dtypes.items()}
        constants = {n: x.to("cpu") for n, x in graph.constants.items() if n in behind}
        differs = not behind.isdisjoint(graph.batched)
        for first in range(0, self.planned.rows if differs else rows, rows):
            part = slice(first, first + rows)
            values = {n: x[part] if n in graph.batched else x for n, x in read.items()} | constants
            if not make_known(ops, values, graph.known):
                return False
        return True

    @property
    def _asked_at(self) -> str:
        """The user's lines that ask for values, for messages."""
        return f" (at {', '.join(lines)})" if (lines := self.graph.asked_at) else ""

    def unserved(self) -> BatchError:
        """The error for a batch that even its own trace does not serve."""
        several = self.plan.num_microbatches > 1
        return BatchError(
            f"{'its micro-batches differ' if several else 'it differs from its trace'} in values "
            f"that the forward asks for{self._asked_at}",
            place="batch",
            way_out="plan with Overrides(num_microbatches=1), or batch samples alike"
            if several
            else "compute with tensors what depends on these values",
        )

    def _check_fixed(self, leaves: Mapping[str, Any]) -> None:
        """Raise ValueError for entries that are fixed in the plan and differ."""
        for path, planned in self.graph.fixed.items():
            leaf = leaves.get(path)
            if not same_entry(planned, leaf):
                raise BatchError(
                    f"{path!r} was {planned!r:.60} when the model was planned, and is "
                    f"{leaf!r:.60} now: the plan is for one value of it, because the forward's "
                    "course depends on it",
                    place="batch",
                    way_out="give that, or plan again",
                )

    def _tensor(self, name: str, path: str, leaf: Any) -> torch.Tensor:
        """An input as a tensor; numbers are 0-dim ones."""
        planned = self.graph.values[name]
        if isinstance(leaf, torch.Tensor):
            if _kind(leaf.dtype) != _kind(planned.dtype):
                raise BatchError(
                    f"{path!r} is {leaf.dtype}, but the model was planned with {planned.dtype}",
                    place="batch",
                    way_out="convert it, or plan with inputs like it",
                )
            if leaf.is_meta:
                raise BatchError(
                    f"{path!r} is on the meta device, without values",
                    place="batch",
                    way_out="give a tensor with values",
                )
            return leaf
        if not is_number(leaf) or planned.shape:
            rows = (self.planned.rows,) if name in self.graph.batched else planned.shape[:1]
            raise BatchError(
                f"{path!r} is a {type(leaf).__name__}; the model was planned with a "
                f"{planned.dtype} of shape {(*rows, *planned.shape[1:])}",
                place="batch",
                way_out="give such a tensor, or plan again with inputs like it",
            )
        if isinstance(leaf, float) and not planned.dtype.is_floating_point:
            raise BatchError(
                f"{path!r} is {leaf!r}, but the model was planned with an int",
                place="batch",
                way_out="give an int, or plan with a float in example_inputs",
            )
        return torch.tensor(leaf, dtype=planned.dtype)

    def filled(self, inputs: Given) -> Given:
        """The inputs with as many rows as planned: the first one repeated, counting nothing."""
        batched, tensors = self.graph.batched, inputs.tensors
        if tensors is None or not batched:
            return inputs
        planned = len(self.share) if inputs.local else self.planned.rows
        missing = planned - min(len(tensors[n]) for n in batched)
        if not missing:
            return inputs
        filled = {name: self._nothing(name, tensors[name][:1], missing) for name in batched}
        joined = {name: torch.cat([tensors[name], rows]) for name, rows in filled.items()}
        return Given({**tensors, **joined}, inputs.local)

    def _nothing(self, name: str, row: torch.Tensor, count: int) -> torch.Tensor:
        """So many rows like one of an input, that count nothing."""
        assert self.filling
        path = self.graph.inputs[name]
        rows = row.expand(count, *row.shape[1:])
        return torch.full_like(rows, self.filling[path]) if path in self.filling else rows

    def unlike(self, inputs: Given, why: str) -> BatchError:
        """The error for a batch that has not the planned shape, and can't be run for a reason."""
        tensors, shapes = inputs.tensors or {}, []
        planned = len(self.share) if inputs.local else self.planned.rows
        for name, path in self.graph.inputs.items():
            expected = self.graph.values[name].shape
            if name in self.graph.batched:
                expected = (planned, *expected[1:])
            if name in tensors and tuple(tensors[name].shape) != expected:
                shapes.append(
                    f"{path!r} has shape {tuple(tensors[name].shape)}; the plan expects {expected}"
                )
        local = f", of which {planned} are this rank's" if inputs.local else ""
        shown = shapes[0] if shapes else "it"
        return BatchError(
            f"{shown} (global_batch_size={self.planned.rows}{local}): {why}", place="batch"
        )

    def rows(self, inputs: Given, layout: DataLayout, read: Collection[str]) -> Rows:
        """This rank's rows of the inputs that a stage reads. Raises ValueError for a local batch
        where it must read rows of other shares."""
        axis, batched = self.place.rows, self.graph.batched
        parts: Rows = [{} for _ in range(self.plan.num_microbatches)]
        for name, tensor in (inputs.tensors or {}).items():
            if name not in read:
                continue
            if name not in batched:
                moved = self._moved(name, tensor)
                chunks: Sequence[torch.Tensor] = [moved] * len(parts)
            elif not inputs.local or axis.size == 1:
                chunks = tensor.split(self.plan.microbatch_rows)
                if layout.states[name].sharded:
                    chunks = [chunk.tensor_split(axis.size)[axis.rank] for chunk in chunks]
            elif layout.states[name].sharded:
                chunks = tensor.split(len(self.share) // len(parts))
            else:
                raise BatchError(
                    f"with local=True, but the plan has every rank read all rows of "
                    f"{self.graph.inputs[name]!r}, which don't divide among {axis.size}",
                    place="batch",
                    way_out="give the global batch, or plan with a global_batch_size that divides",
                )
            for part, chunk in zip(parts, chunks, strict=True):
                part[name] = self._moved(name, chunk)
        return parts

    def _moved(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.graph.values[name].dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self.place.device, dtype=dtype, non_blocking=True)


@contextmanager
def look_ups_named() -> Iterator[None]:
    """Around the operators of a step: an index that no table has is an error of the batch."""
    try:
        yield
    except IndexError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if frames[-1].filename != torch._ops.__file__:
            raise  # of the user's own code
        raise BatchError(
            f"holds an index that is not there: {error}",
            place="batch",
            legal="ids below the rows of their tables, labels below the number of classes",
            way_out="check the tokenizer's ids against the model's vocabulary",
        ) from error


def _kind(dtype: torch.dtype) -> str:
    """Properties of a tensor in which another must agree to stand in its place: integers may be of
    another width."""
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "int"
