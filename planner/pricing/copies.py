"""The sum of gradients over two copies of the model, once per step, in `train_step`'s way.

Stage k and its copy lie on different ranks, which hold the same part of every parameter. After the
reductions on the data axis each pair of ranks swaps the gradients of one trained parameter after
the other, both ways at once, and adds them up. Of n parameters with b bytes of fp32 gradients on a
rank together (their ZeRO shards, where ZeRO divides) that takes

    send(b) + (n - 1) send(0)

which nothing hides.
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
    return {k: _exchange(plan, coster, own, k, mates[k]) for k, own in enumerate(stages)}


def with_exchanges(
    stages: Sequence[StageCosts[float]], exchanged: Mapping[int, Entry]
) -> tuple[StageCosts[float], ...]:
    """The costs of stages with that sum."""
    more = {k: entry.seconds for k, entry in exchanged.items()}
    return tuple(
        replace(own, reduce_s=own.reduce_s + more[k]) if k in more else own
        for k, own in enumerate(stages)
    )


def _exchange(plan: Plan, coster: StageCoster, own: StageCosts[float], k: int, mate: int) -> Entry:
    graph, stage = coster.graph, plan.stages[k]
    held = dict.fromkeys(v for name in stage.blocks for v in coster.blocks[name].parameters)
    trained = [v for v in held if graph.values[v].requires_grad]
    elements = own.parameters / stage.parts(stage.shards)
    ends = stage.ranks, plan.stages[mate].ranks

    nbytes, more = elements * GRADIENT_BYTES, max(0, len(trained) - 1)
    return Entry(
        column="reduce_s",
        kind="collective",
        seconds=coster.message_s(nbytes, *ends, tp=1) + more * coster.message_s(1.0, *ends, tp=1),
        axis="pipeline",
        collective="exchange",
        calls=len(trained),
        sent_bytes=nbytes,
        crosses=crosses_node(*ends, coster.cluster.devices_per_node),
    )
