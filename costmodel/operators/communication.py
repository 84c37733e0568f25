"""Seconds that an operator communicates inside: batch statistics, gathered batches, copies of
tokens between experts. What the context axis takes is in `context.py`.

An operator that can't split the batch gets the whole micro-batch on every data-parallel rank,
gathered, and runs on all of it; of its results each rank keeps its rows, whose gradients are
gathered again in the backward.
"""

from __future__ import annotations

import math

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.kernels import exchange_seconds, stream_seconds
from meshwright.costmodel.operators.cost import Cost
from meshwright.costmodel.operators.setting import Setting
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.rules import TOKEN_FACTORS, traits_of
from meshwright.costmodel.sharding import FactorTable, Strategy, strategies


def batch_statistics(sizes: LocalSizes, op: Op, setting: Setting) -> Cost:
    """Statistics of a batch split over the data axis: sums and squares are added up in both
    directions, by operators that pass over the tensor some four times more than one kernel."""
    channels = sizes.graph.values[op.operands[-1]].numel
    group = setting.group(size=setting.mesh.dp, stride=setting.mesh.tp)
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


def gathered_batch(sizes: LocalSizes, op: Op, once: Cost, setting: Setting) -> Cost:
    """The cost of an operator on all rows beyond `once`, its cost on this rank's rows."""
    taken, given = (
        sum(sizes.nbytes(v) for v in values if sizes.table.has_batch(v))
        for values in (op.operands, op.results)
    )
    group = setting.group(size=setting.mesh.dp, stride=setting.mesh.tp)
    gather_s, scatter_s = (
        setting.collective_s("all_gather", setting.mesh.dp * nbytes, group) if nbytes else 0.0
        for nbytes in (taken, given)
    )
    backward_s = (setting.mesh.dp - 1) * once.backward_s + scatter_s * bool(once.backward_s)
    return Cost(
        forward_s=(setting.mesh.dp - 1) * once.forward_s + gather_s,
        backward_s=backward_s,
        forward_comm_s=gather_s,
        backward_comm_s=scatter_s * bool(once.backward_s),
    )


def expert_exchange(sizes: LocalSizes, op: Op, strategy: Strategy) -> float:
    """Seconds of bringing each token's copies to their experts, or back; 0 for other operators."""
    setting, role = sizes.setting, traits_of(op).experts
    if setting.mesh.ep == 1 or role not in ("dispatch", "combine"):
        return 0.0
    sends = role == "dispatch"
    wide = (op.results if sends else op.operands)[0]
    placed = (strategy.results if sends else strategy.operands)[0]
    folded = strategy.split_factor in TOKEN_FACTORS  # the tensor axis has tokens of its own
    shape = sizes.graph.values[wide].shape
    return exchange_seconds(
        sizes.nbytes(wide, placed),
        shape[2],
        setting.group(size=setting.mesh.ep, stride=1 if folded else setting.mesh.tp),
        setting.cluster,
        once_per_node=setting.target.dispatch == "per_node",
        message_s=setting.target.message_s,
        tokens=sizes.numel(wide, placed) / math.prod(shape[2:]),
    )
