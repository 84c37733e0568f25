"""The sequence on the context axis: one pass over the graph, no search.

Every operator that can split the tokens does; raw inputs, and what is made of them alone, are whole
on every rank, and free to slice. An operator that needs whole sequences gets them gathered, and its
result is split again. Attention is split by one of three *kinds*:

    all_gather   each rank has its queries, and gathers keys and values (Llama 3, arXiv 2407.21783)
    ring         each rank has its queries; keys and values go round, from rank to rank, while the
                 scores of those at hand are computed (Ring Attention, arXiv 2310.01889)
    ulysses      an all-to-all before attention turns tokens into heads, one after it turns them
                 back (DeepSpeed Ulysses, arXiv 2309.14509)

Causal scores of n parts in their order are unequal work: the first rank has 1/n of the last one's.
In the order *zigzag* a sequence is cut into 2n chunks, and rank r has the chunks r and 2n-1-r: all
have the same (Llama 3; ring attention of Brandon et al., arXiv 2311.09431, stripes them to the same
end).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.mesh import ULYSSES, ContextKind
from meshwright.costmodel.rules import draws, is_causal, traits_of
from meshwright.costmodel.sharding import data_axis
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.sequence import shift_of
from meshwright.costmodel.sharding.strategies import (
    REPLICATE,
    RP,
    Placement,
    R,
    Strategy,
    divides,
    least_communication,
    replicated,
    strategies,
)

BY_BLOCKS = "attention by blocks"  # the implementation of attention over tokens of other ranks
BY_HALO = "halo"  # the implementation of a shift by one token
Q, K, V, MASK = range(4)  # operands of attention


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLayout(data_axis.DataLayout):
    """States of every value on the context axis, `kind` of attention, tokens in `zigzag` or not."""

    kind: ContextKind
    zigzag: bool


def context_layout(
    graph: Graph, table: FactorTable, degree: int, kind: ContextKind
) -> ContextLayout:
    """States of every value on a context axis of `degree` ranks."""
    at: dict[str, Placement] = dict.fromkeys(graph.values, R)
    chosen: dict[str, Strategy] = {op.name: replicated(op) for op in graph.derived}
    gathered: list[str] = []
    for op in graph.ops:
        strategy = _attention(graph, table, op, degree, kind) or _shifted(graph, table, op)
        strategy = strategy or _choose(graph, table, op, degree, at)
        chosen[op.name] = strategy
        at |= dict(zip(op.results, strategy.results, strict=True))
        if strategy.name == REPLICATE and any(at[v].sharded for v in op.operands):
            gathered.append(op.key)
            if table.sequence is not None and divides(table, table.sequence, degree):
                at |= data_axis.sliced_results(graph, table, op, table.sequence)
        elif attends_by_heads(table, op, strategy):
            at |= data_axis.sliced_results(graph, table, op, table.sequence)
    data_axis.leave_gradients_partial(graph, chosen, at)
    return ContextLayout(
        strategies=chosen,
        states=at,
        gathered=tuple(gathered),
        kind=kind,
        zigzag=lies_in_zigzag(graph, table, degree),
    )


def lies_in_zigzag(graph: Graph, table: FactorTable, degree: int) -> bool:
    """Whether tokens lie in zigzag: where some attention is causal, and 2n chunks are equal."""
    if table.sequence is None or table.length % (2 * degree):
        return False
    return any(is_causal(op) for op in graph.ops if traits_of(op).kernel == "attention")


def token_dim(table: FactorTable, value: str, placement: Placement) -> bool:
    """Whether a placement splits the tokens of a value."""
    return (
        placement.sharded
        and table.sequence is not None
        and table.sequence in table.dims[value][placement.dim]
    )


def attends_by_blocks(graph: Graph, op: Op) -> bool:
    """Whether attention is joined from blocks of keys: no dropout, no gradient of its mask."""
    masked = len(op.operands) > MASK and graph.values[op.operands[MASK]].requires_grad
    return not draws(op) and not masked and len(graph.values[op.operands[Q]].shape) == 4


def attends_by_heads(table: FactorTable, op: Op, strategy: Strategy) -> bool:
    """Whether an operator is attention that runs by heads, between two all-to-alls."""
    if traits_of(op).kernel != "attention" or not strategy.results[0].sharded:
        return False
    return not token_dim(table, op.results[0], strategy.results[0])


def head_counts(graph: Graph, op: Op) -> tuple[int, int]:
    """Heads of the queries, and of keys and values."""
    query, key = (graph.values[op.operands[k]].shape for k in (Q, K))
    return query[-3], key[-3]


def _attention(
    graph: Graph, table: FactorTable, op: Op, degree: int, kind: ContextKind
) -> Strategy | None:
    """Strategy of attention over split tokens; None where its keys are not those."""
    if traits_of(op).kernel != "attention" or table.sequence is None:
        return None
    places = [table.find(v, table.sequence) for v in op.operands[: V + 1]]
    if len(graph.values[op.operands[Q]].shape) != 4 or places != [(2, 1)] * 3:
        return None
    if kind == ULYSSES:
        options = strategies(graph, table, op, degree)
        return next((option for option in options if option.split_factor == "heads"), None)
    tokens = Placement("S", 2)
    masks = tuple(_mask_state(graph, table, value) for value in op.operands[MASK:])
    by_blocks = attends_by_blocks(graph, op)  # else probabilities are written out, keys gathered
    keys = tokens if by_blocks else RP
    return Strategy(
        name=kind if by_blocks else "queries",
        operands=(tokens, keys, keys, *masks),
        results=(tokens,),
        split_factor="s",
        implementation=BY_BLOCKS if by_blocks else "",
    )


def _shifted(graph: Graph, table: FactorTable, op: Op) -> Strategy | None:
    """Strategy of a shift of tokens by one; None for others, and where a token is dropped."""
    shift = shift_of(graph, op)
    if shift is None or not shift.by or table.sequence is None:
        return None
    if table.find(op.operands[0], table.sequence) != (shift.dim, 1):
        return None
    tokens = Placement("S", shift.dim)
    return Strategy(name=BY_HALO, operands=(tokens,), results=(tokens,), implementation=BY_HALO)


def _mask_state(graph: Graph, table: FactorTable, value: str) -> Placement:
    """State of a mask, which is split by its queries, its last dim but one."""
    dim = len(graph.values[value].shape) - 2
    split = table.sequence in table.dims[value][dim]
    return Placement("S", dim) if split else R


def _choose(
    graph: Graph, table: FactorTable, op: Op, degree: int, at: Mapping[str, Placement]
) -> Strategy:
    """Strategy of least communication; of as much, one that splits the tokens."""
    only = -1 if table.sequence is None else table.sequence
    return least_communication(
        table,
        op,
        strategies(graph, table, op, degree, only=only),
        data_axis.activations_of(graph, op, at),
        gradients=[value for value in op.operands if graph.values[value].requires_grad],
        splitting=True,
    )
