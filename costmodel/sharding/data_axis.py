"""The batch on the data axis: one pass over the graph, no search.

Every operator that can split the batch does. Values that don't depend on it (position embeddings)
are computed on every rank with partial gradients, reduced once per step with the weights'. An
operator that can't split it gets the whole micro-batch gathered, and its result is sliced again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.strategies import (
    REPLICATE,
    RP,
    P,
    Placement,
    R,
    Strategy,
    least_communication,
    strategies,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLayout:
    """Per operator its strategy on the data axis, per value its state, and the keys of operators
    that need the whole micro-batch on every rank (more of it than a number of each row)."""

    strategies: Mapping[str, Strategy]
    states: Mapping[str, Placement]
    gathered: tuple[str, ...]


def data_layout(graph: Graph, table: FactorTable, degree: int) -> DataLayout:
    """States of every value on a data axis of `degree` ranks."""
    at: dict[str, Placement] = {name: R for name in graph.values}
    if table.batch is not None and degree > 1:
        for name in graph.batched:
            place = table.find(name, table.batch)
            at[name] = Placement("S", *place) if place else R
    chosen: dict[str, Strategy] = {}
    gathered: list[str] = []
    for op in (*graph.derived, *graph.ops):
        options = strategies(graph, table, op, degree, only=table.batch if degree > 1 else -1)
        strategy = least_communication(table, op, options, activations_of(graph, op, at))
        chosen[op.name] = strategy
        at |= dict(zip(op.results, strategy.results, strict=True))
        if strategy.name == REPLICATE and any(at[v].sharded for v in op.operands):
            if any(graph.values[v].numel > graph.batch_size for v in op.operands):
                gathered.append(op.key)  # of more than a number of each row
            at |= sliced_results(graph, table, op, table.batch)
    leave_gradients_partial(graph, chosen, at)
    return DataLayout(strategies=chosen, states=at, gathered=tuple(gathered))


def sliced_results(
    graph: Graph, table: FactorTable, op: Op, atom: int | None
) -> dict[str, Placement]:
    """States of results that have the atom, as each rank goes on with its part."""
    results = [v for v in op.results if v not in graph.updates.values()]
    places = {v: table.find(v, atom) for v in results if atom is not None}
    return {v: Placement("S", *place) for v, place in places.items() if place is not None}


def activations_of(graph: Graph, op: Op, at: Mapping[str, Placement]) -> dict[str, Placement]:
    """States of an operator's operands but for parameters."""
    return {value: at[value] for value in op.operands if value not in graph.parameters}


def leave_gradients_partial(
    graph: Graph, chosen: dict[str, Strategy], at: dict[str, Placement]
) -> None:
    """Let replicated operators pass on partial gradients where all their readers leave them so."""
    crossing = {name for block in graph.blocks for name in block.inputs}
    readers: dict[str, list[Placement]] = {}
    for op in reversed((*graph.derived, *graph.ops)):
        strategy = chosen[op.name]
        passes = (
            strategy.name == REPLICATE
            and any(graph.values[v].requires_grad for v in op.results)
            and all(at[v] in (R, RP) for v in op.operands)
            and all(readers.get(v) and set(readers[v]) == {RP} for v in op.results)
            and not crossing & set(op.results)
        )
        if passes:
            operands = tuple(RP if graph.values[v].requires_grad else R for v in op.operands)
            strategy = Strategy(name="reduced", operands=operands, results=(RP,) * len(op.results))
            chosen[op.name] = strategy
            at |= dict.fromkeys(op.results, RP)
        for value, target in zip(op.operands, strategy.operands, strict=True):
            readers.setdefault(value, []).append(target)


def loss_is_summed(layout: DataLayout, graph: Graph) -> bool:
    """Whether each data rank holds its share of the loss, rather than all of it."""
    return layout.states[graph.loss] == P
