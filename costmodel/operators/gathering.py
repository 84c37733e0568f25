"""What it costs that an operator can't split the batch.

It gets the whole micro-batch on every data-parallel rank, gathered, and runs on all of it; of its
results each rank keeps its rows, whose gradients are gathered again in the backward.
"""

from __future__ import annotations

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.operators.cost import Cost, Setting
from meshwright.costmodel.sharding.factors import FactorTable
from meshwright.costmodel.sharding.strategies import strategies


def splits_batch(graph: Graph, table: FactorTable, op: Op) -> bool:
    """Whether the data axis can split the batch of an operator, where it takes one."""
    if table.batch is None or not any(map(table.has_batch, op.operands)):
        return True
    return len(strategies(graph, table, op, table.sizes[table.batch], only=table.batch)) > 1


def whole_batch(setting: Setting, once: Cost, taken: float, given: float) -> Cost:
    """What it costs more than `once`, its cost on this rank's rows, to run an operator on all rows:
    `taken` and `given` are the bytes of those rows among its operands and results."""
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
