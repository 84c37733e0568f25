"""A batch for a forward: what only the loss reads may be missing, and is made up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.costmodel.graph import Graph
from meshwright.planner.batch import input_leaves
from meshwright.traced import TracedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A batch that has every input, its own `rows`, and whether some input was `invented`."""

    batch: Any
    rows: int
    invented: bool


def completed(batch: Any, traced: TracedModel, values: Collection[str], *, rows: int) -> Completed:
    """The batch with zeros for what is missing and the `values` of the graph are not made of; then
    also with as many rows as planned where it has fewer, its first repeated."""
    graph = traced.graph
    leaves = {path: x for path, x in input_leaves(batch)[0] if x is not None}
    sized = (leaves[p] for p in traced.batched if isinstance(leaves.get(p), torch.Tensor))
    row_count = next((len(x) for x in sized if x.dim()), rows)
    needed = {graph.inputs[name] for name in behind(graph, values) if name in graph.inputs}
    missing = [n for n, path in graph.inputs.items() if path not in leaves and path not in needed]
    if not missing or any("." in graph.inputs[name] for name in missing):
        return Completed(batch=batch, rows=row_count, invented=False)
    for name in missing:
        path, meta = graph.inputs[name], graph.values[name]
        shape = _shape(traced, name, leaves)
        if name in graph.batched:
            shape[0] = row_count
        batch = _with(batch, path, torch.zeros(shape, dtype=meta.dtype))
    if row_count < rows and not traced.use.meetings:
        batch = _repeated(batch, traced.batched, rows)
    return Completed(batch=batch, rows=row_count, invented=True)


def behind(graph: Graph, values: Collection[str]) -> set[str]:
    """The values that some values of a graph are made of, with those themselves."""
    reached = set(values)
    for op in reversed((*graph.derived, *graph.ops)):
        if not reached.isdisjoint(op.results):
            reached.update(op.operands)
    return reached


def _shape(traced: TracedModel, name: str, leaves: Mapping[str, Any]) -> list[int]:
    """The shape of a missing input beside those given: a dim is as long as theirs that is the same
    factor, or was planned as long in the same place; else as planned."""
    graph, dims = traced.graph, traced.factors.dims
    sizes = list(graph.values[name].shape)
    alike: list[tuple[int, int, int]] = []  # how sure, dim, size
    for other, path in graph.inputs.items():
        if not isinstance(x := leaves.get(path), torch.Tensor):
            continue
        planned = graph.values[other].shape
        for d, atoms in enumerate(dims[name]):
            alike += [(2, d, x.shape[k]) for k, dim in enumerate(dims[other]) if dim == atoms]
            if planned[d : d + 1] == (sizes[d],):
                alike.append((1, d, x.shape[d]))
    for _, d, size in sorted(alike):
        sizes[d] = size
    return sizes


def _with(batch: Any, path: str, x: torch.Tensor) -> Any:
    """A batch with one more entry: by name, or the next one."""
    if isinstance(batch, Mapping):
        return {**batch, path: x}
    entries = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    at = int(path)
    return (*entries[:at], x, *entries[at + 1 :])


def _repeated(batch: Any, batched: Collection[str], rows: int) -> Any:
    """A batch of so many rows, its first repeated at the end."""
    leaves, spec = input_leaves(batch)

    def more(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x[:1].expand(rows - len(x), *x.shape[1:])])

    return pytree.tree_unflatten([more(x) if p in batched else x for p, x in leaves], spec)
