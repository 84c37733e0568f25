"""The sum of gradients over two copies of the model, once per step.

Stage k and its copy hold the same part of every parameter on different ranks. After the reductions
on the data axis each pair of ranks swaps the gradients of one trained parameter after the other,
both ways at once: of n parameters with b bytes of fp32 gradients on a rank (of their ZeRO shards)
in send(b) + (n - 1) send(0), which nothing hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.costmodel.kernels import crosses_node
from meshwright.costmodel.operators import Entry
from meshwright.costmodel.stages import StageCosts
from meshwright.planner.plan import Plan, pipelines
from meshwright.planner.pricing.stage_costs import StageCoster

GRADIENT_BYTES = 4  # of an element, as the reductions leave it


def exchanges(
    plan: Plan, coster: StageCoster, stages: Sequence[StageCosts[float]]
) -> dict[int, Entry]:
    """The sum over copies of the model, by stage; nothing where there is one."""
    first, *others = pipelines(plan)
    if not others:
        return {}
    mates = dict(zip((*first, *others[0]), (*others[0], *first), strict=True))
    return {k: _exchange(plan, coster, costs, k, mates[k]) for k, costs in enumerate(stages)}


def with_exchanges(
    stages: Sequence[StageCosts[float]], exchanged: Mapping[int, Entry]
) -> tuple[StageCosts[float], ...]:
    """The costs of stages with that sum."""
    return tuple(
        replace(costs, reduce_s=costs.reduce_s + exchanged[k].seconds) if k in exchanged else costs
        for k, costs in enumerate(stages)
    )


def _exchange(
    plan: Plan, coster: StageCoster, costs: StageCosts[float], k: int, mate: int
) -> Entry:
    graph, stage = coster.graph, plan.stages[k]
    parameters = {v for name in stage.blocks for v in coster.blocks[name].parameters}
    trained = [v for v in parameters if graph.values[v].requires_grad]
    ends = stage.ranks, plan.stages[mate].ranks
    nbytes = costs.parameters / stage.parts(stage.shards) * GRADIENT_BYTES
    others_s = max(0, len(trained) - 1) * coster.message_s(1.0, *ends, tp=1)
    return Entry(
        column="reduce_s",
        kind="collective",
        seconds=coster.message_s(nbytes, *ends, tp=1) + others_s,
        axis="pipeline",
        collective="exchange",
        calls=len(trained),
        sent_bytes=nbytes,
        crosses=crosses_node(*ends, coster.cluster.devices_per_node),
    )
