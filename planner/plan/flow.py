"""Data flow between stages: the activations sent, the stages of parameters, their distances."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.written_buffers import updates_of
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.ranges import PlanError


def pipelines(plan: Plan) -> tuple[range, ...]:
    """The stages of each copy of the model that the schedule holds."""
    return plan.record.pipelines(len(plan.stages))


def check_copies(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` unless a schedule's copies of the model are alike, share the micro-batches
    out, and hold nothing that is not built for several."""
    if plan.record.copies == 1:
        return
    place = f"plan: schedule={plan.schedule!r}"
    first, second = pipelines(plan)
    for k, copy in zip(first, second, strict=True):
        if plan.stages[k].as_copy != plan.stages[copy].as_copy:
            raise PlanError(
                f": stages {k} and {copy} are copies of one stage, and differ",
                place=place,
                legal="equal stages but for their ranks and recompute",
                way_out=f"give stage {copy} the blocks and decisions of stage {k}",
            )
    if updated := updates_of(graph, graph.blocks):
        raise PlanError(
            f" with a buffer that the forward writes ({next(iter(updated))}): two copies of the "
            "model are not built for it",
            place=place,
            legal="buffers that stay",
            way_out="take a schedule with one copy (1f1b, zb_v, dualpipe_v)",
        )


def stage_of(plan: Plan, copy: int = 0) -> dict[str, int]:
    """Block name -> index of its stage, in a copy of the model."""
    return {name: k for k in pipelines(plan)[copy] for name in plan.stages[k].blocks}


def crossings(plan: Plan, graph: Graph) -> dict[tuple[int, int], tuple[str, ...]]:
    """(source stage, target stage) -> the activations sent from one to the other."""
    sent: dict[tuple[int, int], dict[str, None]] = {}
    for copy in range(len(pipelines(plan))):
        owner = stage_of(plan, copy)
        source = {value: owner[b.name] for b in graph.blocks for value in b.outputs}
        for block in graph.blocks:
            for value in block.inputs:
                edge = (source[value], owner[block.name])
                if edge[0] != edge[1]:
                    sent.setdefault(edge, {})[value] = None
    return {edge: tuple(values) for edge, values in sorted(sent.items())}


def depths(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """Depth of each stage, the device groups on the longest way from it to the end, its own
    included; nothing where a way comes back to a group that it left."""
    groups = [plan.devices.index(stage.ranks) for stage in plan.stages]
    after: dict[int, set[int]] = {group: set() for group in groups}
    for source, target in crossings(plan, graph):
        if groups[source] != groups[target]:
            after[groups[source]].add(groups[target])
    depth: dict[int, int] = {}
    try:
        for group in TopologicalSorter(after).static_order():  # the last ones first
            depth[group] = 1 + max((depth[g] for g in after[group]), default=0)
    except CycleError:
        return ()
    return tuple(depth[group] for group in groups)


def check_branches(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` unless the branches of a plan, if any, lie apart, as deep as it says, each
    stage."""
    count = len(plan.stages)
    shared = plan.record.branched and 1 < len(plan.devices) < count
    if not plan.branches and not shared:
        return
    deep = depths(plan, graph)
    if shared and deep and len(plan.branches) != count:
        raise PlanError(
            f"={list(plan.branches)}: its {count} stages share {len(plan.devices)} device groups",
            place="plan: branches",
            legal=f"{list(deep)}, how deep each stage is",
            way_out="say it, or give each stage ranks of its own",
        )
    if not plan.branches:
        return
    if deep == tuple(range(len(plan.stages), 0, -1)):
        raise PlanError(
            f"={list(plan.branches)}: each stage waits for the one before it",
            place="plan: branches",
            legal="none",
            way_out="drop branches, or put stages that don't depend on each other on ranks of "
            "their own",
        )
    if plan.branches != deep:
        legal = str(list(deep)) if deep else "ranks that no way through the model comes back to"
        raise PlanError.refused("plan: branches", list(plan.branches), legal=legal)


def sent_in_parts(plan: Plan, graph: Graph) -> frozenset[str]:
    """Activations that are sent as their block leaves them on the tensor axis, each rank its part
    to its counterpart: all stages that make and read them have the same degrees, so that whatever
    the part is of, rows of other ranks or tokens, it is that of the counterpart."""
    degrees: dict[str, set[tuple[int, int, int]]] = {}
    for edge, values in crossings(plan, graph).items():
        for value in values:
            of_edge = ((s.tp, s.dp, s.cp) for s in (plan.stages[k] for k in edge))
            degrees.setdefault(value, set()).update(of_edge)
    return frozenset(
        value for value, of in degrees.items() if len(of) == 1 and all(tp > 1 for tp, *_ in of)
    )


def stages_of_parameters(plan: Plan, graph: Graph) -> dict[str, tuple[int, ...]]:
    """Parameter value -> the stages that hold it, ascending."""
    owners = [stage_of(plan, copy) for copy in range(len(pipelines(plan)))]
    holders: dict[str, set[int]] = {}
    for block in graph.blocks:
        for value in block.parameters:
            holders.setdefault(value, set()).update(owner[block.name] for owner in owners)
    return {value: tuple(sorted(stages)) for value, stages in holders.items()}


def shared_apart(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Parameters on different ranks, whose gradients meet before a step."""
    return tuple(
        graph.parameters[value]
        for value, stages in stages_of_parameters(plan, graph).items()
        if len({plan.stages[k].ranks for k in stages}) > 1
    )
