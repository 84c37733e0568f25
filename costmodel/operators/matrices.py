"""Parameters that an optimizer steps as matrices."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.memory import Optimizer, Sides
from meshwright.costmodel.operators.setting import Problem
from meshwright.costmodel.rules import traits_of


def ends_of(graph: Graph) -> frozenset[str]:
    """Tables of which rows are looked up, and the weights of the last product: no matrices to Muon
    (Jordan et al. 2024)."""
    tables, last = set[str](), frozenset[str]()
    for op in graph.ops:
        traits = traits_of(op)
        read = graph.parameters.keys() & set(op.operands)
        if traits.kernel == "lookup":
            tables |= read
        elif traits.main and (weights := {v for v in read if len(graph.values[v].shape) > 1}):
            last = frozenset(weights)
    return frozenset(tables) | last


def matrices_of(graph: Graph, optimizer: Optimizer) -> Mapping[str, Sides]:
    """Sides of the trained parameters that an optimizer steps as matrices, by value."""
    if optimizer.matrices is None:
        return {}
    ends = ends_of(graph) if optimizer.matrices.but_ends else frozenset()
    values = {value: graph.values[value] for value in graph.parameters if value not in ends}
    sides = {value: Sides.of(x.shape) for value, x in values.items() if x.requires_grad}
    return {value: found for value, found in sides.items() if found}


def mean_moments(problem: Problem) -> float:
    """Bytes of moments of a trained element, of all on average."""
    graph, optimizer = problem.graph, problem.stepped
    if optimizer.matrices is None:
        return optimizer.moments
    matrices = matrices_of(graph, optimizer)
    trained = [value for value in graph.parameters if graph.values[value].requires_grad]
    nbytes = (optimizer.moment_bytes(graph.values[v].numel, matrices.get(v)) for v in trained)
    return sum(nbytes) / max(graph.num_trained(), 1)
