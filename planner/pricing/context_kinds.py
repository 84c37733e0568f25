"""The kind of context parallelism with the least seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.operators import (
    BACKWARD_S,
    FORWARD_S,
    LocalSizes,
    Setting,
    attention,
    context_exchange,
)
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import ContextKind, ContextLayout, FactorTable, strategies


def cheapest_kind(
    graph: Graph,
    table: FactorTable,
    setting: Setting,
    kinds: Iterable[ContextKind],
    layout_of: Callable[[Setting], ContextLayout | None] | None = None,
) -> ContextKind:
    """The kind with the least seconds in the graph's attention: one of `kinds`, of which the first
    is taken where they are equal. `layout_of` gives layouts of the context axis that are known."""
    found = [op for op in graph.ops if traits_of(op).kernel == "attention"]
    distinct = {tuple(graph.values[v].shape for v in op.operands): op for op in found}

    def seconds(kind: ContextKind) -> float:
        own = replace(setting, mesh=replace(setting.mesh, cp_kind=kind))
        known = layout_of(own) if layout_of else None
        sizes = LocalSizes(graph=graph, table=table, setting=own, context=known)
        return sum(_attention_seconds(sizes, op) for op in distinct.values())

    return min(kinds, key=seconds)


def _attention_seconds(sizes: LocalSizes, op: Op) -> float:
    options = strategies(sizes.graph, sizes.table, op, sizes.setting.mesh.tp)
    by_heads = next((x for x in options if x.split_factor == "heads"), options[0])
    found = attention(sizes, op, by_heads)
    computed = [sum(e.seconds for e in found if e.column == c) for c in (FORWARD_S, BACKWARD_S)]
    exchanged = context_exchange(sizes, op, by_heads, *computed)
    return sum(computed) + sum(entry.seconds for entry in exchanged)
