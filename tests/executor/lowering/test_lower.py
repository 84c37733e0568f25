"""Blocks that share a lowered module, and those that may not."""

import torch

from meshwright.costmodel.sharding.data_axis import data_layout
from meshwright.costmodel.sharding.layouts import BlockLayouts
from meshwright.executor.lowering.context import Context
from meshwright.executor.lowering.lower import Lowering
from meshwright.executor.resharding.reshard import Axis
from meshwright.executor.stages.rank_parameters import parameter_states
from meshwright.planner.plan.check import check_plan
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.planning import linears


def test_a_block_whose_sum_counts_several_times_shares_no_module() -> None:
    of, one = linears(8, 5, 2), Axis("", 1, 0)
    graph, blocks = of.graph, of.graph.blocks[1:4]
    assert len({block.class_id for block in blocks}) == 1
    plan = build_plan(graph, Knobs(meshes=((1, 1),), rows=4, num_microbatches=2, shardings={}))
    (assignments,) = check_plan(plan, graph, of.table)
    layout = data_layout(graph, of.table, 1)
    context = Context(
        graph=graph, table=of.table, data=layout, data_axis=one, tensor_axis=one,
        device=torch.device("cpu"), microbatches=2, sums=frozenset({blocks[2].ops[-1].key}),
    )  # fmt: skip
    states = parameter_states(graph, graph.blocks, assignments, (layout,), (1,))
    lowering = Lowering(context=context)
    first, second, summed = (
        lowering.block(b, BlockLayouts(graph, of.table, b, 1), assignments[b.name], {}, states, {})
        for b in blocks
    )
    assert first.module is second.module
    given = [torch.randn(graph.values[name].shape) for name in first.arguments]
    torch.testing.assert_close(summed.module(*given), [2 * y for y in first.module(*given)])
