"""Communication inside an operator: batch statistics, gathered batches, copies of tokens between
experts; on the context axis: `context.py`.

An operator that can't split the batch runs on the whole micro-batch, gathered on every
data-parallel rank; of its results each rank keeps its rows, whose gradients are gathered again in
the backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.kernels import exchange_seconds, exchanged_bytes, stream_seconds
from meshwright.costmodel.operators import cost
from meshwright.costmodel.operators.setting import Setting
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.rules import TOKEN_FACTORS, traits_of
from meshwright.costmodel.sharding import FactorTable, Strategy, strategies

PASSES = 4  # over a tensor, of operators that make batch statistics of it, beyond one kernel's


def batch_statistics(sizes: LocalSizes, op: Op, setting: Setting) -> list[cost.Entry]:
    """Statistics of a batch split over the data axis: sums and squares are added up in both passes,
    by operators that pass over the tensor some four times more than one kernel."""
    channels = sizes.graph.values[op.operands[-1]].numel
    group = setting.group(size=setting.mesh.dp, stride=setting.mesh.tp)
    nbytes = PASSES * sizes.nbytes(op.operands[0])
    streamed, entries = stream_seconds(setting.cluster.device, nbytes), list[cost.Entry]()
    for column in cost.PASS_COLUMNS:
        seconds = streamed * setting.correction(cost.COMPUTING[column])
        entries.append(setting.collective(column, "all_reduce", 4.0 * channels, group, calls=2))
        entries.append(cost.Entry(column, "stream", seconds, moved_bytes=nbytes))
    return entries


def splits_batch(graph: Graph, table: FactorTable, op: Op) -> bool:
    """Whether the data axis can split the batch of an operator, where it takes one."""
    if table.batch is None or not any(map(table.has_batch, op.operands)):
        return True
    return len(strategies(graph, table, op, table.sizes[table.batch], only=table.batch)) > 1


def gathered_batch(
    sizes: LocalSizes, op: Op, once: Sequence[cost.Entry], setting: Setting
) -> list[cost.Entry]:
    """Seconds of an operator on all rows beyond `once`, on this rank's rows."""
    group = setting.group(size=setting.mesh.dp, stride=setting.mesh.tp)
    entries = computed_again(once, setting.mesh.dp - 1)
    for column, values in zip(cost.PASS_COLUMNS, (op.operands, op.results), strict=True):
        nbytes = sum(sizes.nbytes(v) for v in values if sizes.table.has_batch(v))
        if nbytes and (column == cost.FORWARD_S or runs_backward(once)):
            full = setting.mesh.dp * nbytes
            entries.append(setting.collective(column, "all_gather", full, group))
    return entries


def computed_again(once: Sequence[cost.Entry], times: float) -> list[cost.Entry]:
    """Computing entries of an operator, run so many times by kernels of that size."""
    return [
        entry.times(times)._replace(weight_s=0.0, host_s=0.0)
        for entry in once
        if entry.axis is None and entry.seconds
    ]


def runs_backward(entries: Sequence[cost.Entry]) -> bool:
    """Whether the backward takes time."""
    return any(entry.seconds for entry in entries if entry.column == cost.BACKWARD_S)


def expert_exchange(sizes: LocalSizes, op: Op, strategy: Strategy) -> list[cost.Entry]:
    """All-to-all of tokens' copies to their experts, or back; none for other operators."""
    setting, role = sizes.setting, traits_of(op).experts
    if setting.mesh.ep == 1 or role not in ("dispatch", "combine"):
        return []
    sends = role == "dispatch"
    wide = (op.results if sends else op.operands)[0]
    placed = (strategy.results if sends else strategy.operands)[0]
    folded = strategy.split_factor in TOKEN_FACTORS  # the tensor axis has tokens of its own
    shape = sizes.graph.values[wide].shape
    group = setting.group(size=setting.mesh.ep, stride=1 if folded else setting.mesh.tp)
    nbytes, once_per_node = sizes.nbytes(wide, placed), setting.target.dispatch == "per_node"
    seconds = exchange_seconds(
        nbytes,
        shape[2],
        group,
        setting.cluster,
        once_per_node=once_per_node,
        message_s=setting.target.message_s,
        tokens=sizes.numel(wide, placed) / math.prod(shape[2:]),
    )
    return [
        cost.Entry(
            column,
            "collective",
            seconds,
            axis="experts",
            collective="all_to_all",
            calls=1,
            sent_bytes=exchanged_bytes(nbytes, shape[2], group, once_per_node=once_per_node),
            crosses=group.nodes > 1,
        )
        for column in cost.PASS_COLUMNS
    ]
