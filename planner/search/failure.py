"""Why a search found no plan: memory is short, or the overrides leave nothing to choose from. What
would help is looked for where somebody asks (`planner/alternatives/ways_out.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner.drafts import Drafter, PlanDraft
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import InfeasibleError, describe, kept_together, sized
from meshwright.planner.search.least_memory import least_memory, least_memory_choices

LATE_MESHES = 2  # of those that need least memory, looked at when the time is over


def failure(drafter: Drafter, drafts: Sequence[PlanDraft]) -> InfeasibleError | OverrideError:
    """The error to raise where none of the `drafts` fits: by how much the closest plan does not; or
    which override leaves no plan."""
    cluster = drafter.problem.cluster
    if drafter.programs.time.over():
        return _late(drafter)
    closest = _closest(drafter, drafts)
    if closest is None and drafter.programs.refused:
        refused = drafter.programs.refused
        return OverrideError(f"override shardings: {refused[max(refused)]}")
    if closest is None or closest[0] <= 0:
        if error := next(drafter.overrides.ruled_out(given=False), None):
            return error
        return OverrideError(
            f"no plan exists on {cluster.describe()} for "
            f"global_batch_size={drafter.global_batch_size} with overrides "
            f"{drafter.overrides.given() or 'none'}: {_obstacle(drafter)}; "
            f"drop an override or change global_batch_size{_together(drafter)}"
        )
    excess, per_stage, how = closest
    short = ", ".join(f"stage {k}: {sized(max(x, 0))}" for k, x in enumerate(per_stage))
    return InfeasibleError(
        f"the model does not fit {cluster.describe()} "
        f"({sized(drafter.space.room_bytes)} usable per device{_margin(drafter)}). "
        f"The closest plan ({how}) lacks {sized(excess)} on its fullest stage; "
        f"shortfall by stage: {short}{_together(drafter)}.{_host(drafter, drafts)}",
        per_stage,
    )


def _late(drafter: Drafter) -> InfeasibleError:
    """What is known when the time was over before a plan was found."""
    said = f"no plan was found in the time given on {drafter.problem.cluster.describe()}"
    choices = least_memory_choices(drafter.space)[:LATE_MESHES]
    need = least_memory(drafter.equal, choices)
    if need is None or need.excess_bytes <= 0:
        return InfeasibleError(f"{said}; give it more: time_limit_s", ())
    groups, mesh, lacks = need.choice.groups, need.choice.mesh, need.excess_bytes
    return InfeasibleError(
        f"{said}: {groups} equal stages on dp{mesh.dp}×tp{mesh.tp}, the leanest looked "
        f"at, lack {sized(lacks)} a device; with more time (time_limit_s) the "
        f"way out is looked for",
        (lacks,),
    )


def _obstacle(drafter: Drafter) -> str:
    """Why no plan exists although memory is not short."""
    over, space = drafter.restrictions, drafter.space
    graph, devices = drafter.problem.graph, drafter.problem.cluster.num_devices
    if drafter.problem.factors.sequence is None and any((cp or 1) > 1 for cp in over.cp):
        return f"cp can't split the model's sequences: {drafter.problem.factors.tokens.why}"
    if over.uniform("zero") == 1:
        meshes = [mesh for m in space.microbatch_counts() for mesh in drafter.unequal.meshes(m)]
        whole = {space.undivided(mesh) for mesh in meshes if mesh.dp * mesh.cp > 1}
        if whole and None not in whole:
            return f"zero=1 can't divide {min(filter(None, whole))} among the data axis"
    if devices > 1 and space.own_draws:
        return space.own_draws
    if space.unshared_experts and any((ep or 1) > 1 for ep in over.ep):
        return space.unshared_experts
    if devices == 1 or over.pp == 1:
        return (
            "one device group has no virtual stages, no second placement and no use for a "
            "backward in two parts"
        )
    if all(SCHEDULES[name].copies > 1 for name in over.schedules):
        return (
            f"{over.schedules[0]} runs two copies of the model: it needs an even number of device "
            "groups and of micro-batches, of equal meshes"
        )
    blocks = graph.blocks
    trained = sum(any(graph.values[v].requires_grad for v in b.parameters) for b in blocks)
    if over.pp is not None and over.pp * (over.virtual_stages or 1) > trained:
        return (
            f"only {trained} of the model's {len(blocks)} blocks hold a trained parameter, and "
            f"every stage needs one; legal: at most {trained} stages"
        )
    return (
        f"the degrees must multiply to {devices} devices, dp must divide a micro-batch, and "
        "stages of different meshes run under schedules without virtual stages"
    )


def _closest(
    drafter: Drafter, drafts: Sequence[PlanDraft]
) -> tuple[float, Sequence[float], str] | None:
    """Of the plan that comes closest to fitting, the bytes that its fullest stage and each of its
    stages lack, and how it runs; None where there is no plan at all."""
    unequal = drafter.unequal
    found: list[tuple[float, Sequence[float], str]] = []
    for m in drafter.space.microbatch_counts():
        setups = unequal.setups(m, unequal.meshes(m), math.inf)
        if not setups:
            continue
        table, *_ = unequal.tables(m, setups)[0].values()
        short = unequal.shortfall(table, m)
        if short is not None:
            how = f"{len(short.stages)} stages, {m} micro-batches"
            found.append((short.excess_bytes, short.stage_excess_bytes, how))
    for draft in drafts:
        peaks = draft.evaluation.prediction.peak_memory_bytes
        lacking = [max(0.0, peak - drafter.space.memory_bytes) for peak in peaks]
        found.append((max(lacking), lacking, describe(draft.evaluation.plan)))
    if any(draft.lacks_bytes > 0 for draft in drafts):  # what the table says fits was tried
        found = [one for one in found if one[0] > 0]
    closest = min(found, key=lambda item: item[0], default=None)
    if closest is not None and closest[0] <= 0:  # but not under the schedules that are left
        need = least_memory(drafter.equal, least_memory_choices(drafter.space))
        if need is not None and need.excess_bytes > 0:
            groups, m = need.choice.groups, need.choice.num_microbatches
            how = f"{groups} equal stages, {m} micro-batches"
            return need.excess_bytes, (need.excess_bytes,), how
    return closest


def _together(drafter: Drafter) -> str:
    """Why there is one micro-batch, and the way out."""
    meetings = drafter.problem.meetings
    return f". All plans have one micro-batch: {kept_together(meetings)}" if meetings else ""


def _host(drafter: Drafter, drafts: Sequence[PlanDraft]) -> str:
    """Why host memory doesn't help."""
    cluster, tried = drafter.problem.cluster, drafter.space.most_away
    if cluster.host is None or not tried or tried == drafter.space.reliefs[0].host:
        return ""
    part, host = tried.states, cluster.host
    said = f" With {'all' if part == 1 else f'{part:.0%}'} of the optimizer states "
    said += f"{'and all weights ' if tried.weights else ''}in host memory"
    said += f"{' and files on flash' if tried.files else ''} nothing fits, either"
    lacks = [draft.evaluation.prediction for draft in drafts]
    short = [p.host_shortfall(cluster) for p in lacks if p.host_shortfall(cluster)]
    filed = [p.flash_shortfall(cluster) for p in lacks if p.flash_shortfall(cluster)]
    if part < 1:
        lacking = host.room_bytes * (1 / part - 1)
        said += f": for all of them a host lacks {sized(lacking)}"
    elif short:
        said += f": the closest plan lacks {sized(min(short))} of a host's memory"
    elif filed:
        said += f": the closest plan lacks {sized(min(filed))} of a node's flash"
    said += f" ({sized(host.room_bytes)} a node"
    said += f", {sized(host.flash_room_bytes)} of flash)" if host.has_flash else ")"
    return f"{said}."


def _margin(drafter: Drafter) -> str:
    margin = drafter.memory_margin
    return f" with memory_margin={margin:g}" if margin else ""
