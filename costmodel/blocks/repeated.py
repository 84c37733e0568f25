"""Operators of a block that each recompute policy runs again, decided from the traced sizes alone,
so that a plan's words mean the same to whoever reads it.

**selective** (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
2022). Attention written out in operators keeps tensors that grow with the square of the sequence,
between two products of activations: queries with keys, probabilities with values. A *core* is the
first of two such products and what lies between them, without a third; or an attention operator by
itself. It is repeated if that frees more bytes per FLOP than the block keeps on average.

**pointwise, widening, products** may repeat ever more operators: those that are no product, those
whose result is larger than what they read, too, and all but fused attention. Of what it may, a
policy repeats the set S that minimises

    bytes kept (S)  +  Σ over S: bytes of activations that the operator reads and writes / RATE

where what S makes is not kept, and what it reads is. That is a minimum cut: an operator is on the
side of the source if it is repeated, and pays its cost to the sink; an allocation that the backward
needs pays its bytes where its maker isn't repeated, any other where one of its readers is and its
maker isn't. As costs fall and more may be repeated, cuts grow: each policy's set holds those before
it.

**alternate** keeps the results of fused attention and of every second product, and repeats all the
rest: per-operator checkpointing as torchtitan uses PyTorch's
`create_selective_checkpoint_contexts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

import networkx as nx

from meshwright.costmodel.blocks.block_memory import BlockMemory
from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.memory import Call, Held, Local, Storage, fresh, keep
from meshwright.costmodel.operators import op_flops
from meshwright.costmodel.recompute import PARTIAL
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import FactorTable

RATE = 4  # bytes moved that freeing a byte is worth

Repeated: TypeAlias = Mapping[str, frozenset[int]]  # policy: positions of operators in their block


def repeated_ops(
    block: Block,
    graph: Graph,
    table: FactorTable,
    device: str = "cuda",
    counter_dropout: bool = True,
) -> Repeated:
    """Positions of the operators that each partial policy runs again in a block's backward, on a
    kind of device, with dropout as the target draws it; the same for blocks of one class."""
    memory = _traced_memory(block, graph, table, device, counter_dropout)
    cores = selective_ops(block, graph, table, memory)
    kernels = {op.name for op in block.ops if traits_of(op).kernel == "attention"}
    heavy = {o.name for o in block.ops if table.ops[o.name].matmul or traits_of(o).leaf} - kernels
    widening = {op.name for op in block.ops if op.name in heavy and _widens(op, graph)}
    every = {op.name: _moved_bytes(op, memory) // RATE for op in block.ops}
    every |= dict.fromkeys(cores, 0)

    def cut(without: set[str]) -> frozenset[str]:
        return least_kept(memory, {n: c for n, c in every.items() if n not in without - cores})

    ordered = [op.name for op in block.ops if op.name in heavy]
    names = {
        "selective": cores,
        "pointwise": cut(heavy | kernels),
        "widening": cut((heavy - widening) | kernels),
        "alternate": frozenset(every) - kernels - {*ordered[::2]},
        "products": cut(kernels),
    }
    return {
        policy: frozenset(k for k, op in enumerate(block.ops) if op.name in names[policy])
        for policy in PARTIAL
    }


def least_kept(memory: BlockMemory, costs: Mapping[str, int]) -> frozenset[str]:
    """The fewest operators with a cost whose repeats make bytes kept and costs together least."""
    flow = nx.DiGraph()  # from the sink to the source, of whose cuts the one nearest it is found
    flow.add_nodes_from(("source", "sink"))
    readers: dict[Storage, list[str]] = {}
    for name, read in memory.reads.items():
        for storage in read:
            readers.setdefault(storage, []).append(name)
        flow.add_edge("sink", name, **({"capacity": costs[name]} if name in costs else {}))
    for storage, maker in memory.makers.items():
        nbytes = round(storage.nbytes)
        if storage in memory.outside or not nbytes:
            continue
        if storage in memory.kept:
            known = flow.get_edge_data(maker, "source", {"capacity": 0})["capacity"]
            flow.add_edge(maker, "source", capacity=known + nbytes)
        elif storage in readers:
            flow.add_edge(maker, storage, capacity=nbytes)
            flow.add_edges_from((storage, name) for name in readers[storage])
    _, (_, repeated) = nx.minimum_cut(flow, "sink", "source")
    return frozenset(name for name in memory.reads if name in repeated)


# --- attention that is written out ----------------------------------------------------------------


def selective_ops(
    block: Block, graph: Graph, table: FactorTable, memory: BlockMemory
) -> frozenset[str]:
    """Names of the operators of the cores that are worth repeating."""
    flops = {op.name: op_flops(table, op) for op in block.ops}
    bytes_made = {op.name: 0.0 for op in block.ops}
    results = dict(bytes_made)
    # what is read is some operator's result; the rest exists for the backward alone
    read = {storage for reads in memory.reads.values() for storage in reads}
    read |= {held.storage for held in memory.leaving.values()}
    for storage in memory.kept:
        if maker := memory.makers.get(storage):
            bytes_made[maker] += storage.nbytes
            results[maker] += storage.nbytes * (storage in read)
    total = sum(flops.values())
    average = sum(bytes_made.values()) / total if total else 0.0
    chosen: set[str] = set()
    for core in _cores(block, graph, table):
        freed = sum(bytes_made[name] for name in core)
        if len(core) == 1:  # its result is kept for what reads it elsewhere
            freed -= results[core[0]]
        if freed > average * sum(flops[name] for name in core):
            chosen.update(core)
    return frozenset(chosen)


def _cores(block: Block, graph: Graph, table: FactorTable) -> list[list[str]]:
    """Per product of activations: itself and what leads from it to others, products apart."""
    active = _activations(block, graph)
    products = [
        op
        for op in block.ops
        if table.ops[op.name].matmul and sum(v in active for v in op.operands) > 1
    ]
    leading: set[str] = {v for op in products for v in op.operands}
    for op in reversed(block.ops):
        if not table.ops[op.name].matmul and leading & set(op.results):
            leading |= set(op.operands)
    cores = []
    for first in products:
        core, values = [first.name], set(first.results)
        for op in block.ops:
            inside = not table.ops[op.name].matmul and values & set(op.operands)
            if inside and leading & set(op.results):
                core.append(op.name)
                values |= set(op.results)
        cores.append(core)
    return cores


def _activations(block: Block, graph: Graph) -> set[str]:
    """Values of floating point that depend on an activation."""
    active = set(block.inputs) | set(block.derived)
    for op in block.ops:
        if active & set(op.operands):
            active |= set(op.results)
    return {v for v in active if graph.values[v].dtype.is_floating_point}


# --- at the traced sizes --------------------------------------------------------------------------


def _widens(op: Op, graph: Graph) -> bool:
    """Whether the result of a product is larger than any activation that it reads."""
    read = [graph.values[v] for v in op.operands if v not in graph.parameters]
    return all(graph.values[op.results[0]].numel > meta.numel for meta in read)


def _moved_bytes(op: Op, memory: BlockMemory) -> int:
    """Bytes of activations that an operator reads and writes; a view moves none."""
    written = [storage for storage, maker in memory.makers.items() if maker == op.name]
    if not written:
        return 0
    read = dict.fromkeys(s for s in memory.reads[op.name] if s.origin != "stored")
    return round(math.fsum(storage.nbytes for storage in (*read, *written)))


def _traced_memory(
    block: Block, graph: Graph, table: FactorTable, device: str, counter_dropout: bool
) -> BlockMemory:
    """Memory of a block on one device."""
    held = Memo[str, Held]()

    def local(value: str) -> Local:
        meta = graph.values[value]
        return Local(shape=meta.shape, dtype=meta.dtype, grad=meta.requires_grad)

    def entered(value: str) -> Held:
        stored = value in graph.parameters or value in graph.buffers
        return fresh(local(value), origin="stored" if stored else "input")

    storages: set[Storage] = set()
    makers: dict[Storage, str] = {}
    reads: dict[str, tuple[Storage, ...]] = {}
    for op in block.ops:
        call = Call(
            op=op,
            operands=tuple(held.of(value, partial(entered, value)) for value in op.operands),
            results=tuple(map(local, op.results)),
            saves=table.ops[op.name].saves,
            device=device,
            counter_dropout=counter_dropout,
        )
        saved = keep(call)
        storages.update(saved.storages)
        reads[op.name] = tuple(x.storage for x in call.operands)
        for storage in (*saved.storages, *(x.storage for x in saved.results)):
            if storage not in reads[op.name]:
                makers.setdefault(storage, op.name)
        held.update(zip(op.results, saved.results, strict=True))
    leaving = {value: held[value] for value in block.outputs if value in held}
    met = storages.union(*reads.values())
    return BlockMemory(
        kept=frozenset(storages),
        leaving=leaving,
        outside=frozenset((met - makers.keys()) | {x.storage for x in leaving.values()}),
        makers=makers,
        reads=reads,
    )
