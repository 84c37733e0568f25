"""Parameters that an optimizer steps as matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.memory import Optimizer, Sides
from meshwright.costmodel.operators.setting import Problem
from meshwright.costmodel.rules import traits_of


def ends_of(graph: Graph) -> frozenset[str]:
    """Tables of which rows are looked up, and the weights of the last product: no matrices to Muon
    (Jordan et al. 2024)."""
    looked_up, products = _readers(graph)
    return looked_up | (products[-1] if products else frozenset())


def _readers(graph: Graph) -> tuple[frozenset[str], list[frozenset[str]]]:
    """Parameters that are looked up, and those of each product, in order; also as casts, views and
    products with numbers have them."""
    source = {value: value for value in graph.parameters}
    looked_up, products = set[str](), list[frozenset[str]]()
    for op in graph.ops:
        traits = traits_of(op)
        read = {source[value] for value in op.operands if value in source}
        weights = frozenset(value for value in read if len(graph.values[value].shape) > 1)
        if traits.kernel == "lookup":
            looked_up |= read
        elif (traits.main or traits.product or traits.experts == "product") and weights:
            products.append(weights)
        elif len(op.operands) == 1 and read:
            source |= dict.fromkeys(op.results, *read)
    return frozenset(looked_up), products


def matrices_of(graph: Graph, optimizer: Optimizer) -> Mapping[str, Sides]:
    """Sides of the trained parameters that an optimizer steps as matrices, by value: of one that
    leaves ends out, what products read but for these; of others all."""
    matrices = optimizer.matrices
    if matrices is None:
        return {}
    chosen = set(graph.parameters)
    if matrices.but_ends:
        looked_up, products = _readers(graph)
        chosen = set[str]().union(*products[:-1]) - looked_up - ends_of(graph)
    values = {value: x for value, x in graph.values.items() if value in chosen}
    sides = {v: Sides.of(x.shape, flat=matrices.flat) for v, x in values.items() if x.requires_grad}
    return {value: found for value, found in sides.items() if found}


def owners_of(sizes: Sequence[float], ranks: int) -> list[int]:
    """The owner of each matrix: the largest first, to the rank that has the fewest elements."""
    owners, loads = [0] * len(sizes), [0.0] * ranks
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        owners[k] = loads.index(min(loads))
        loads[owners[k]] += sizes[k]
    return owners


def fullest(sizes: Sequence[float], owners: Sequence[int]) -> float:
    """The most that one owner has of these sizes."""
    loads = dict[int, float]()
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] = loads.get(owner, 0.0) + size
    return max(loads.values(), default=0.0)


def mean_moments(problem: Problem) -> float:
    """Bytes of moments of a trained element, of all on average."""
    graph, optimizer = problem.graph, problem.stepped
    if optimizer.matrices is None:
        return optimizer.moments
    matrices = matrices_of(graph, optimizer)
    trained = [value for value in graph.parameters if graph.values[value].requires_grad]
    nbytes = (optimizer.moment_bytes(graph.values[v].numel, matrices.get(v)) for v in trained)
    return sum(nbytes) / max(graph.num_trained(), 1)
