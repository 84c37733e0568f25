"""Selective recompute in a lowered graph: groups of operators that the backward runs again.

Of a group, neither what its operators keep nor their results are held, so whatever reads a result
and keeps it belongs to the group, too. (It is not run again itself: recompute stops when the last
tensor that the backward needs is there.) A group must be one call of the graph: whatever lies
between two of its nodes is taken in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import networkx as nx
from torch import fx, nn
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions
from torch.utils.checkpoint import checkpoint

from meshwright.costmodel.graph import Op
from meshwright.costmodel.sharding import FactorTable


class Repeated(nn.Module):
    """Runs a graph, or a part of one, and again in the backward."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.part, *args, use_reentrant=False, preserve_rng_state=False)


def repeat_whole(module: fx.GraphModule) -> fx.GraphModule:
    """Make the whole graph one that the backward runs again."""
    graph = fx.Graph()
    given = [n for n in module.graph.nodes if n.op == "placeholder"]
    graph.output(graph.call_module("part", tuple(graph.placeholder(n.target) for n in given)))
    return fx.GraphModule({"part": Repeated(module)}, graph)


def with_keepers(ops: Sequence[Op], repeated: Collection[str], table: FactorTable) -> set[str]:
    """The names of `repeated` operators, and of those that keep one of their results."""
    made = {value for op in ops if op.name in repeated for value in op.results}
    found = set(repeated)
    for op in ops:
        saves = table.ops[op.name].saves
        if any(i >= 0 and op.operands[i] in made for i in saves):
            found.add(op.name)
    return found


def repeat(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> fx.GraphModule:
    """Make each connected group of `nodes` a part that the backward runs again."""
    flow = nx.DiGraph()
    for node in module.graph.nodes:
        flow.add_node(node)
        flow.add_edges_from((source, node) for source in node.all_input_nodes)
    inside = {n for n in nodes if n.op not in ("placeholder", "output")}
    groups = [
        _convex(flow, group)
        for group in nx.connected_components(flow.subgraph(inside).to_undirected())
    ]
    before = set(dict(module.named_children()))
    fused = fuse_by_partitions(module, [dict.fromkeys(group) for group in _merged(groups)])
    for name, part in list(fused.named_children()):
        if name not in before:
            setattr(fused, name, Repeated(part))
    fused.recompile()
    return fused


def _convex(flow: nx.DiGraph, group: set[fx.Node]) -> set[fx.Node]:
    """A group and whatever lies on a path between two of its nodes."""
    after = set().union(*(nx.descendants(flow, n) for n in group))
    before = set().union(*(nx.ancestors(flow, n) for n in group))
    return group | (after & before)


def _merged(groups: Iterable[set[fx.Node]]) -> list[set[fx.Node]]:
    """Groups with common nodes joined."""
    found: list[set[fx.Node]] = []
    for group in groups:
        apart = [other for other in found if not other & group]
        found = [*apart, group.union(*(other for other in found if other & group))]
    return found
