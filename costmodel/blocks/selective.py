"""Selective recompute: which operators of a block are cheap to repeat for what they keep.

Attention written out in operators keeps tensors that grow with the square of the sequence, between
two products of activations: queries with keys, probabilities with values. A *core* is the first of
two such products and what lies between them, without a third; or an attention operator by itself.
It is repeated in the backward if that frees more bytes per FLOP than the block keeps on average:

    Σ bytes kept of what the core makes / Σ FLOPs of the core  >  the same of the whole block

Products with weights are in no core: they keep little for their FLOPs. A fused attention kernel
keeps next to nothing besides its operands and result, and is no core.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022.

The *alternate* policy keeps the results of fused attention and of every second product, and repeats
all the rest: per-operator checkpointing as PyTorch's `create_selective_checkpoint_contexts` is used
by torchtitan.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel.graph import Block, Graph, Op
from meshwright.costmodel.memory import Call, Local, fresh, keep
from meshwright.costmodel.operators import op_flops
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import FactorTable


def repeated_ops(
    policy: str,
    block: Block,
    graph: Graph,
    table: FactorTable,
    device: str = "cuda",
    counter_dropout: bool = True,
) -> frozenset[str]:
    """Names of the operators of a block that a recompute policy runs again in the backward."""
    if policy == "selective":
        return selective_ops(block, graph, table, device, counter_dropout)
    attention = {op.name for op in block.ops if traits_of(op).kernel == "attention"}
    products = [
        op.name for op in block.ops if table.ops[op.name].matmul and op.name not in attention
    ]
    kept = {*products[::2], *attention}
    return frozenset(op.name for op in block.ops) - kept


def selective_ops(
    block: Block,
    graph: Graph,
    table: FactorTable,
    device: str = "cuda",
    counter_dropout: bool = True,
) -> frozenset[str]:
    """Names of the operators of a block that selective recompute runs again in the backward, on a
    kind of device, with dropout as the target draws it. What reads their results keeps none of
    them: they are made again."""
    kept = _kept_values(block.ops, table)
    extra = {op.name: _extra_bytes(op, graph, table, device, counter_dropout) for op in block.ops}
    results = {
        op.name: sum(graph.values[v].nbytes for v in op.results if v in kept) for op in block.ops
    }
    flops = {op.name: op_flops(table, op) for op in block.ops}
    total = sum(flops.values())
    average = (sum(extra.values()) + sum(results.values())) / total if total else 0.0
    chosen: set[str] = set()
    for core in _cores(block, table):
        freed = sum(extra[name] for name in core)
        if len(core) > 1:  # else the result is all that is kept of it, and is read elsewhere
            freed += sum(results[name] for name in core)
        if freed > average * sum(flops[name] for name in core):
            chosen.update(core)
    return frozenset(chosen)


def _cores(block: Block, table: FactorTable) -> list[list[str]]:
    """Per product of activations: itself and what leads from it to others, products apart."""
    weights = _made_of_weights(block)
    products = [
        op
        for op in block.ops
        if table.ops[op.name].matmul and sum(v not in weights for v in op.operands) > 1
    ]
    leading: set[str] = {v for op in products for v in op.operands}
    for op in reversed(block.ops):
        if not table.ops[op.name].matmul and leading & set(op.results):
            leading |= set(op.operands)
    found = []
    for first in products:
        core, made = [first.name], set(first.results)
        for op in block.ops:
            inside = not table.ops[op.name].matmul and made & set(op.operands)
            if inside and leading & set(op.results):
                core.append(op.name)
                made |= set(op.results)
        found.append(core)
    return found


def _made_of_weights(block: Block) -> set[str]:
    """Values that depend on no activation."""
    active = set(block.inputs) | set(block.derived)
    for op in block.ops:
        if active & set(op.operands):
            active |= set(op.results)
    read = {v for op in block.ops for v in (*op.operands, *op.results)}
    return read - active


def _kept_values(ops: Sequence[Op], table: FactorTable) -> set[str]:
    """Values that some operator's backward needs; of a view, what it views."""
    root: dict[str, str] = {}
    kept: set[str] = set()
    for op in ops:
        made = table.ops[op.name]
        if made.view and op.operands:
            root |= dict.fromkeys(op.results, root.get(op.operands[0], op.operands[0]))
        for i in made.saves:
            value = op.operands[i] if i >= 0 else op.results[-1 - i]
            kept.add(root.get(value, value))
    return kept


def _extra_bytes(
    op: Op, graph: Graph, table: FactorTable, device: str, counter_dropout: bool
) -> float:
    """Bytes kept of what exists for the backward alone, at the traced sizes."""

    def local(value: str) -> Local:
        meta = graph.values[value]
        return Local(shape=meta.shape, dtype=meta.dtype, grad=meta.requires_grad)

    operands = {value: fresh(local(value)) for value in op.operands}
    call = Call(
        op=op,
        operands=tuple(operands[value] for value in op.operands),
        results=tuple(local(value) for value in op.results),
        saves=table.ops[op.name].saves,
        device=device,
        counter_dropout=counter_dropout,
    )
    made = keep(call)
    known = {x.storage for x in (*operands.values(), *made.results)}
    return sum(storage.nbytes for storage in made.storages if storage not in known)
