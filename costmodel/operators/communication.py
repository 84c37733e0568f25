"""Seconds that an operator communicates inside: batch statistics, gathered batches, keys and values
over the context axis, copies of tokens between experts.

An operator that can't split the batch gets the whole micro-batch on every data-parallel rank,
gathered, and runs on all of it; of its results each rank keeps its rows, whose gradients are
gathered again in the backward.
"""

from __future__ import annotations

import math

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.kernels import (
    Group,
    collective_time,
    exchange_seconds,
    p2p_time,
    stream_seconds,
)
from meshwright.costmodel.operators.cost import Cost
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.rules import TOKEN_FACTORS, traits_of
from meshwright.costmodel.sharding import FactorTable, Placement, Strategy, strategies


def batch_statistics(sizes: LocalSizes, op: Op) -> Cost:
    """Statistics of a batch split over the data axis: sums and squares are added up in both
    directions, by operators that pass over the tensor some four times more than one kernel."""
    setting, channels = sizes.setting, sizes.graph.values[op.operands[-1]].numel
    group = setting.group(size=setting.dp, stride=setting.tp)
    each = setting.collective_s("all_reduce", 4.0 * channels, group)
    passes = stream_seconds(setting.cluster.device, 4 * sizes.nbytes(op.operands[0]))
    return Cost(
        forward_s=2 * each + passes,
        backward_s=2 * each + passes,
        forward_comm_s=2 * each,
        backward_comm_s=2 * each,
    )


def splits_batch(graph: Graph, table: FactorTable, op: Op) -> bool:
    """Whether the data axis can split the batch of an operator, where it takes one."""
    if table.batch is None or not any(map(table.has_batch, op.operands)):
        return True
    return len(strategies(graph, table, op, table.sizes[table.batch], only=table.batch)) > 1


def gathered_batch(sizes: LocalSizes, op: Op, once: Cost) -> Cost:
    """The cost of an operator on all rows beyond `once`, its cost on this rank's rows."""
    setting = sizes.setting
    taken, given = (
        sum(sizes.nbytes(v) for v in values if sizes.table.has_batch(v))
        for values in (op.operands, op.results)
    )
    group = setting.group(size=setting.dp, stride=setting.tp)
    gather_s, scatter_s = (
        setting.collective_s("all_gather", setting.dp * nbytes, group) if nbytes else 0.0
        for nbytes in (taken, given)
    )
    backward_s = (setting.dp - 1) * once.backward_s + scatter_s * bool(once.backward_s)
    return Cost(
        forward_s=(setting.dp - 1) * once.forward_s + gather_s,
        backward_s=backward_s,
        forward_comm_s=gather_s,
        backward_comm_s=scatter_s * bool(once.backward_s),
    )


def context_exchange(
    sizes: LocalSizes, op: Op, strategy: Strategy, compute_s: float
) -> tuple[float, float]:
    """Exposed seconds over the context axis, forward and backward: a shift sends a token to a
    neighbour; attention gathers keys and values (and scatters their gradients in the backward),
    which ring attention hides behind the scores."""
    setting = sizes.setting
    if not sizes.context:
        return 0.0, 0.0
    group = setting.group(size=setting.cp, stride=setting.tp)
    if op.name in sizes.table.tokens.halos:
        each = _token_s(sizes, op.operands[0], strategy.operands[0], group)
        return each, each
    if traits_of(op).kernel != "attention":
        return 0.0, 0.0
    whole = setting.cp * sum(
        sizes.nbytes(v, p) for v, p in zip(op.operands[1:3], strategy.operands[1:3], strict=True)
    )
    each = float(collective_time("all_gather", whole, group, setting.cluster))
    if not setting.target.overlap_parameters:
        return each, 2 * each
    return max(0.0, each - compute_s), max(0.0, 2 * each - 2.5 * compute_s)


def _token_s(sizes: LocalSizes, value: str, placement: Placement, group: Group) -> float:
    """Seconds of sending one token of each row to the next rank of the context axis."""
    table, setting = sizes.table, sizes.setting
    (length,) = {table.sizes[a] for d in table.dims[value] for a in d if a in sizes.context}
    kept = length / setting.cp
    return float(
        p2p_time(
            sizes.nbytes(value, placement) / kept,
            setting.cluster,
            crosses_node=group.per_node < group.size,
            concurrent=group.concurrent,
        )
    )


def expert_exchange(sizes: LocalSizes, op: Op, strategy: Strategy) -> float:
    """Seconds of bringing each token's copies to their experts, or back; 0 for other operators."""
    setting, role = sizes.setting, traits_of(op).experts
    if setting.ep == 1 or role not in ("dispatch", "combine"):
        return 0.0
    sends = role == "dispatch"
    wide = (op.results if sends else op.operands)[0]
    placed = (strategy.results if sends else strategy.operands)[0]
    folded = strategy.split_factor in TOKEN_FACTORS  # the tensor axis has tokens of its own
    shape = sizes.graph.values[wide].shape
    return exchange_seconds(
        sizes.nbytes(wide, placed),
        shape[2],
        setting.group(size=setting.ep, stride=1 if folded else setting.tp),
        setting.cluster,
        once_per_node=setting.target.dispatch == "per_node",
        message_s=setting.target.message_s,
        tokens=sizes.numel(wide, placed) / math.prod(shape[2:]),
    )
