"""The sum of gradients over two copies of the model, once per step, in `train_step`'s way.

Stage k and its copy lie on different ranks, which hold the same part of every parameter. After the
reductions on the data axis each pair of ranks swaps the gradients of one trained parameter after
the other, both ways at once, and adds them up. Of n parameters with b bytes of fp32 gradients on a
rank together (their ZeRO shards, where ZeRO divides) that takes

    send(b) + (n - 1) send(0)

which nothing hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshwright.costmodel.kernels import send_seconds
from meshwright.costmodel.stages import StageCosts
from meshwright.planner.plan import Plan, pipelines
from meshwright.planner.pricing.stage_costs import StageCoster

GRADIENT_BYTES = 4  # of an element, as the reductions leave it


def with_exchange(
    plan: Plan, coster: StageCoster, stages: Sequence[StageCosts[float]]
) -> tuple[StageCosts[float], ...]:
    """The costs of a plan's stages with the sum over copies; as they are where there is one."""
    first, *others = pipelines(plan)
    if not others:
        return tuple(stages)
    mates = dict(zip((*first, *others[0]), (*others[0], *first), strict=True))
    return tuple(
        replace(own, reduce_s=own.reduce_s + _exchange_s(plan, coster, own, k, mates[k]))
        for k, own in enumerate(stages)
    )


def _exchange_s(
    plan: Plan, coster: StageCoster, own: StageCosts[float], k: int, mate: int
) -> float:
    graph, stage = coster.graph, plan.stages[k]
    held = dict.fromkeys(v for name in stage.blocks for v in coster.blocks[name].parameters)
    sizes = {v: math.prod(graph.values[v].shape) for v in held}
    trained = [v for v in held if graph.values[v].requires_grad]
    part = sum(sizes[v] for v in trained) / max(1, sum(sizes.values()))
    elements = own.parameters * part / (stage.shards if stage.zero else 1)

    def seconds(nbytes: float) -> float:
        return send_seconds(
            nbytes,
            stage.ranks,
            plan.stages[mate].ranks,
            tp=1,
            cluster=coster.cluster,
            target=coster.problem.target,
            profile=coster.problem.profile,
        )

    return seconds(elements * GRADIENT_BYTES) + max(0, len(trained) - 1) * seconds(1.0)
