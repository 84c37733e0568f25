"""Problems of what-if questions: the same model with less to hold, for advice. Those that change
shapes are asked for bytes only; their seconds are the old ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.rules import traits_of

CHUNKS = 8
RANK = 16


def with_adapters(problem: Problem) -> Problem | None:
    """The problem with frozen matrices, whose adapters of low rank (LoRA, arXiv 2106.09685) are
    counted apart; None where nothing else is trained, or most are frozen as it is."""
    graph = problem.graph
    trained = [graph.values[v] for v in graph.parameters if graph.values[v].requires_grad]
    if sum(meta.numel for meta in trained) < 0.5 * graph.num_parameters():
        return None
    frozen = {
        value: replace(meta, requires_grad=False)
        for value in graph.parameters
        if (meta := graph.values[value]).requires_grad and len(meta.shape) > 1
    }
    if not frozen or len(frozen) == len(trained):
        return None
    return replace(problem, graph=replace(graph, values={**graph.values, **frozen}))


def adapter_numel(problem: Problem) -> int:
    """Parameters of an adapter of rank `RANK` beside every matrix of a product."""
    graph, table = problem.graph, problem.factors
    read = {v for op in graph.ops if table.ops[op.name].matmul for v in op.operands}
    shapes = (graph.values[v].shape for v in read & set(graph.parameters))
    return sum(RANK * (shape[0] + shape[-1]) for shape in shapes if len(shape) > 1)


def with_chunked_loss(problem: Problem) -> Problem | None:
    """The problem with its loss and logits in `CHUNKS` parts, one at a time; None where no loss has
    classes."""
    classes = set[int]()
    for op in problem.graph.ops:
        loss = traits_of(op).loss
        if loss is not None and loss.kind != "chunked":
            scores, targets = (problem.factors.dims[v] for v in op.operands[:2])
            classes |= {a for d in scores for a in d} - {a for d in targets for a in d}
    return _resized(problem, classes, lambda size: -(-size // CHUNKS)) if classes else None


def logits_bytes(problem: Problem) -> float:
    """Bytes of what losses of classes read for a row of the batch."""
    graph = problem.graph
    scores = (graph.values[op.operands[0]] for op in graph.ops if traits_of(op).loss)
    return sum(meta.numel * meta.dtype.itemsize for meta in scores) / graph.batch_size


def with_half_sequences(problem: Problem) -> Problem | None:
    """The problem with half of the tokens; None where there is no sequence, or no half."""
    tokens = problem.factors.context
    if any(problem.factors.sizes[atom] < 4 for atom in tokens):
        return None
    return with_sequences(problem, lambda size: -(-size // 2))


def with_sequences(problem: Problem, length: Callable[[int], int]) -> Problem | None:
    """The problem with sequences of another length, a function of theirs; None without any."""
    tokens = problem.factors.context
    return _resized(problem, tokens, length) if tokens else None


def _resized(problem: Problem, atoms: Collection[int], resized: Callable[[int], int]) -> Problem:
    """The problem with other sizes in those dims of activations that have one of the atoms."""
    graph, table, atoms = problem.graph, problem.factors, set(atoms)
    values = dict(graph.values)
    for value in values.keys() - graph.parameters.keys() - graph.buffers.keys():
        shape = tuple(
            size if atoms.isdisjoint(dim) else resized(size)
            for size, dim in zip(values[value].shape, table.dims[value], strict=True)
        )
        values[value] = replace(values[value], shape=shape)
    return replace(problem, graph=replace(graph, values=values))
