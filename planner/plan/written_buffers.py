"""Buffers that the forward writes, and the stages of a pipeline.

A micro-batch reads what the one before it left. Where a buffer's new value follows from raw inputs
and other such buffers alone (a counter, a mean of the batch), every stage that reads the buffer
keeps one and makes the value itself. Any other buffer is written by the stage whose block makes the
value, and read there too: blocks between the two are not to be cut apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from meshwright.costmodel.graph import Block, Graph


def updates_of(graph: Graph, blocks: Sequence[Block]) -> dict[str, str]:
    """Buffer -> its new value, of those that the stage of these blocks keeps."""
    if not graph.updates:
        return {}
    made = {v for b in graph.blocks for v in b.outputs}
    here = {v for b in blocks for v in b.outputs}
    kept = _kept(graph, blocks)
    return {
        buffer: value
        for buffer, value in graph.updates.items()
        if (value in here if value in made else buffer in kept)
    }


def inseparable(graph: Graph) -> list[tuple[int, int]]:
    """First and last block of every run that must lie in one stage."""
    maker = {v: k for k, b in enumerate(graph.blocks) for v in b.outputs}
    apart = {b: maker[v] for b, v in graph.updates.items() if v in maker}
    if not apart:
        return []
    places = {buffer: [k] for buffer, k in apart.items()}
    for k, block in enumerate(graph.blocks):
        for buffer in _kept(graph, [block]) & apart.keys():
            places[buffer].append(k)
    return [(min(ks), max(ks)) for ks in places.values() if min(ks) < max(ks)]


def _kept(graph: Graph, blocks: Sequence[Block]) -> set[str]:
    """The buffers whose values these blocks need, directly or to renew one that they do; those that
    nobody reads belong to the first block of their module, or to the first of all."""
    behind = _behind(graph)
    read = _read(blocks, behind)
    unread = graph.updates.keys() - _read(graph.blocks, behind)
    home: dict[str, str] = {}
    for block in reversed(graph.blocks):
        home |= dict.fromkeys((op.module for op in block.ops), block.name)
    names = {b.name for b in blocks}
    for buffer in unread:
        module = graph.buffers[buffer].rpartition(".")[0]
        if home.get(module, graph.blocks[0].name) in names:
            read.add(buffer)
    found: set[str] = set()
    while read - found:
        found |= read
        read = {b for x in found for b in behind.get(graph.updates.get(x, ""), ())}
    return found


def _behind(graph: Graph) -> dict[str, set[str]]:
    """The buffers that each value made of raw inputs alone reads."""
    found: dict[str, set[str]] = {name: {name} for name in graph.buffers}
    for op in graph.derived:
        reads = {b for v in op.operands for b in found.get(v, ())}
        found |= {result: reads for result in op.results}
    return found


def _read(blocks: Iterable[Block], behind: dict[str, set[str]]) -> set[str]:
    values: Collection[str] = {v for b in blocks for v in (*b.buffers, *b.derived)}
    return {buffer for v in values for buffer in behind.get(v, ())}
