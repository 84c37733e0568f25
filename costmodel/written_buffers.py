"""Buffers that the forward writes: the stages that keep them, and blocks that must share one.

A micro-batch reads what the one before it left. Where a buffer's new value follows from raw inputs
and other such buffers alone (a counter, a mean of the batch), every stage that reads the buffer
keeps one and makes the value itself. Any other buffer is written by the stage whose block makes the
value, and read there too: blocks between the two are not to be cut apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel.graph import Block, Graph


def updates_of(graph: Graph, blocks: Sequence[Block]) -> dict[str, str]:
    """Buffer -> its new value, of the buffers that the stage of these blocks keeps."""
    if not graph.updates:
        return {}
    outputs = {v for b in graph.blocks for v in b.outputs}
    stage_outputs = {v for b in blocks for v in b.outputs}
    buffers = _buffers(graph, blocks)
    return {
        buffer: value
        for buffer, value in graph.updates.items()
        if (value in stage_outputs if value in outputs else buffer in buffers)
    }


def inseparable(graph: Graph) -> list[tuple[int, int]]:
    """First and last block of every run that must lie in one stage."""
    maker = {v: k for k, b in enumerate(graph.blocks) for v in b.outputs}
    writer = {b: maker[v] for b, v in graph.updates.items() if v in maker}
    if not writer:
        return []
    users = {buffer: [k] for buffer, k in writer.items()}
    for k, block in enumerate(graph.blocks):
        for buffer in _buffers(graph, [block]) & writer.keys():
            users[buffer].append(k)
    return [(min(ks), max(ks)) for ks in users.values() if min(ks) < max(ks)]


def _buffers(graph: Graph, blocks: Sequence[Block]) -> set[str]:
    """The buffers that these blocks read, directly or to compute the new value of one that they do.
    A buffer without reader belongs to the first block of its module, or to the first of all."""
    sources: dict[str, set[str]] = {name: {name} for name in graph.buffers}
    for op in graph.derived:  # the buffers that derived values are computed from
        reads = {b for v in op.operands for b in sources.get(v, ())}
        sources |= dict.fromkeys(op.results, reads)
    read = _read(blocks, sources)
    unread = graph.updates.keys() - _read(graph.blocks, sources)
    home: dict[str, str] = {}
    for block in reversed(graph.blocks):
        home |= dict.fromkeys((op.module for op in block.ops), block.name)
    names = {b.name for b in blocks}
    for buffer in unread:
        module = graph.buffers[buffer].rpartition(".")[0]
        if home.get(module, graph.blocks[0].name) in names:
            read.add(buffer)
    buffers: set[str] = set()
    while read - buffers:
        buffers |= read
        read = {b for x in buffers for b in sources.get(graph.updates.get(x, ""), ())}
    return buffers


def _read(blocks: Sequence[Block], sources: dict[str, set[str]]) -> set[str]:
    """The buffers that blocks read, directly or through derived values."""
    return {s for b in blocks for v in (*b.buffers, *b.derived) for s in sources.get(v, ())}
