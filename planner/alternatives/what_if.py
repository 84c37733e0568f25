"""What-if problems: the same model with less to hold, for advice. Only bytes are asked of those
that change the shapes; their seconds are the old ones.

    adapters          matrices frozen: no gradients and states but those of adapters of low rank
                      (LoRA, arXiv 2106.09685), which are counted apart
    chunked loss      the loss and its logits in `CHUNKS` parts, one at a time
    sequences         fewer or more tokens in each row
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from meshwright.costmodel.graph import TensorMeta
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.rules import traits_of

CHUNKS = 8
RANK = 16


def with_adapters(problem: Problem) -> Problem | None:
    """Trained but for its matrices; None where nothing else is trained, or most are frozen as it
    is."""
    graph = problem.graph
    metas = {value: graph.values[value] for value in graph.parameters}
    trained = {value: meta for value, meta in metas.items() if meta.requires_grad}
    matrices = {value for value, meta in trained.items() if len(meta.shape) > 1}
    if sum(meta.numel for meta in trained.values()) < 0.5 * graph.num_parameters():
        return None
    if not matrices or len(matrices) == len(trained):
        return None
    frozen = {value: replace(metas[value], requires_grad=False) for value in matrices}
    return replace(problem, graph=replace(graph, values={**graph.values, **frozen}))


def adapter_numel(problem: Problem) -> int:
    """Parameters of an adapter of rank `RANK` beside every matrix of a product."""
    graph, table = problem.graph, problem.factors
    read = {v for op in graph.ops if table.ops[op.name].matmul for v in op.operands}
    shapes = (graph.values[v].shape for v in read & set(graph.parameters))
    return sum(RANK * (shape[0] + shape[-1]) for shape in shapes if len(shape) > 1)


def with_chunked_loss(problem: Problem) -> Problem | None:
    """Without most of the logits; None where no loss has classes."""
    classes = set[int]()
    for op in problem.graph.ops:
        if traits_of(op).loss is not None:
            scores, targets = (problem.factors.dims[v] for v in op.operands[:2])
            classes |= {a for d in scores for a in d} - {a for d in targets for a in d}
    return _resized(problem, classes, lambda size: -(-size // CHUNKS)) if classes else None


def with_half_sequences(problem: Problem) -> Problem | None:
    """With half of the tokens; None where there is no sequence, or no half."""
    tokens = problem.factors.context
    if any(problem.factors.sizes[atom] < 4 for atom in tokens):
        return None
    return with_sequences(problem, lambda size: -(-size // 2))


def with_sequences(problem: Problem, length: Callable[[int], int]) -> Problem | None:
    """With sequences of another length, a function of their own; None where there is none."""
    tokens = problem.factors.context
    return _resized(problem, tokens, length) if tokens else None


def _resized(problem: Problem, atoms: Collection[int], resized: Callable[[int], int]) -> Problem:
    """With activations of other sizes in the dims that have an atom."""
    graph, table = problem.graph, problem.factors
    weights = {*graph.parameters, *graph.buffers}

    def other(value: str, meta: TensorMeta) -> TensorMeta:
        if value in weights:
            return meta
        sizes = zip(meta.shape, table.dims[value], strict=True)
        shape = tuple(
            resized(size) if not own.isdisjoint(atoms) else size
            for size, own in ((size, set(dim)) for size, dim in sizes)
        )
        return replace(meta, shape=shape)

    values = {value: other(value, meta) for value, meta in graph.values.items()}
    return replace(problem, graph=replace(graph, values=values))
