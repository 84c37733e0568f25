"""Ranks of a plan: the legal device groups, and the placement that gives them.

A stage lists its ranks (dp, cp, tp), tp innermost, on a regular grid: rank (d, c, t) is
r0 + d·s_dp + c·s_cp + t·s_tp. Placements say where the pipeline lies among these axes. With
u = tp·cp, "tp,dp,pp" gives a device group consecutive ranks. "tp,pp,dp" takes s groups that follow
each other in the pipeline together, on s·dp·u consecutive ranks: group g, the (g mod s)-th of them,
has ranks r + d·s·u + (g mod s)·u + i, 0 <= i < u, with r = (g div s)·s·dp·u. Its neighbours in the
pipeline are u away, on dp s·u.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from meshwright.planner.decisions import PLACEMENTS
from meshwright.planner.plan.plan import Plan, StagePlan
from meshwright.planner.plan.ranges import PlanError, compress_ranks


def check_ranks(plan: Plan) -> None:
    """Raise `PlanError` unless every rank is used once and device groups fit the schedule."""
    for k, stage in enumerate(plan.stages):
        needed = stage.holders * stage.tp
        if len(stage.ranks) != needed:
            raise PlanError(
                f" {compress_ranks(stage.ranks) or 'none'} are {len(stage.ranks)}, its mesh "
                f"{_mesh(stage)} needs {needed}",
                place=f"plan: stage {k}: ranks",
                legal=f"{needed} ranks",
                way_out="change the ranks or the mesh",
            )
    counts = Counter(rank for ranks in plan.devices for rank in ranks)
    twice = sorted(rank for rank, count in counts.items() if count > 1)
    missing = sorted(set(range(plan.first_worker, plan.num_ranks)) - set(counts))
    served = sorted(rank for rank in counts if rank < plan.first_worker)
    if served:
        raise PlanError(
            f" {compress_ranks(served)} are parameter servers",
            place="plan: stage 0: ranks",
            legal=f"{plan.first_worker} to {plan.num_ranks - 1}",
            way_out="servers are the first ranks: list those behind them",
        )
    if twice or missing:
        raise PlanError(
            f" used twice: {compress_ranks(twice) or 'none'}; missing: "
            f"{compress_ranks(missing) or 'none'}",
            place="plan: ranks",
            legal=f"{plan.first_worker} to {plan.num_ranks - 1}, each in one stage",
            way_out="list every rank once",
        )
    for k, stage in enumerate(plan.stages):
        _check_grid(stage, f"plan: stage {k}")
    try:
        placed = plan.pipeline.placed
    except ValueError as error:
        raise PlanError.of(error, "plan") from None
    for device, stages in enumerate(placed):
        first = plan.stages[stages[0]]
        for k in stages:
            stage = plan.stages[k]
            if stage.ranks == first.ranks and _mesh(stage) != _mesh(first):
                raise PlanError(
                    f"{_mesh(stage)} on the ranks of stage {stages[0]}, which has "
                    f"{_mesh(first)}: stages of one device group share its mesh",
                    place=f"plan: stage {k}",
                    legal=_mesh(first),
                    way_out="give them one",
                )
            if stage.ranks != plan.devices[device]:
                raise PlanError(
                    f" {compress_ranks(stage.ranks)}: schedule={plan.schedule!r} runs stages "
                    f"{stages} on one group of ranks",
                    place=f"plan: stage {k}: ranks",
                    legal=compress_ranks(plan.devices[device]),
                    way_out="give them these ranks, or change the schedule",
                )


def _mesh(stage: StagePlan) -> str:
    return f"dp={stage.dp} × cp={stage.cp} × tp={stage.tp}"


def _check_grid(stage: StagePlan, place: str) -> None:
    """Raise `PlanError` unless neighbours on each axis are equally far apart, as in the groups that
    collectives are priced for."""
    grid = np.array(stage.ranks).reshape(stage.dp, stage.cp, stage.tp)
    for axis, name in enumerate(("dp", "cp", "tp")):
        steps = np.unique(np.diff(grid, axis=axis))
        if len(steps) > 1 or (steps < 1).any():
            raise PlanError(
                f"ranks {compress_ranks(stage.ranks)}, listed (dp, cp, tp) with tp innermost, "
                f"are no regular grid: neighbours on {name} are "
                f"{', '.join(map(str, steps.tolist()))} apart",
                place=place,
                legal="one distance from 1 per axis",
            )


def placement_of(plan: Plan) -> str:
    """The placement (of `PLACEMENTS`) that gives the device groups of the pipeline their ranks.
    Raises `PlanError` where none does."""
    groups = [next(s for s in plan.stages if s.ranks == ranks) for ranks in plan.devices]
    if _consecutive(groups):
        return PLACEMENTS[0]
    if _alternating(groups):
        return PLACEMENTS[1]
    ranks = "; ".join(map(compress_ranks, plan.devices))
    raise PlanError(
        f"the device groups have ranks {ranks}, which no placement gives",
        place="plan",
        legal=(
            f"{PLACEMENTS[0]} (each group consecutive, groups of one size in the order of the "
            f"pipeline) or {PLACEMENTS[1]} (equal groups of one node take turns, tp·cp ranks "
            "each)"
        ),
    )


def _consecutive(groups: Sequence[StagePlan]) -> bool:
    """Whether each group has consecutive ranks, and groups of one size are in the order of the
    pipeline. Groups of different sizes may come in any order: the larger are placed first."""
    last: dict[int, int] = {}
    for stage in groups:
        first, size = stage.ranks[0], len(stage.ranks)
        if stage.ranks != tuple(range(first, first + size)) or first < last.get(size, 0):
            return False
        last[size] = first
    return True


def _alternating(groups: Sequence[StagePlan]) -> bool:
    """Whether equal groups take turns, as many of them together as lie between neighbours on dp."""
    group = groups[0]
    inner, size = group.tp * group.cp, len(group.ranks)
    if group.dp == 1:
        return False
    together = (group.ranks[inner] - group.ranks[0]) // inner
    if together < 1 or len(groups) % together:
        return False
    firsts = [g // together * together * size + g % together * inner for g in range(len(groups))]
    return all(
        (stage.dp, stage.cp, stage.tp) == (group.dp, group.cp, group.tp)
        and stage.ranks
        == tuple(first + d * together * inner + i for d in range(stage.dp) for i in range(inner))
        for stage, first in zip(groups, firsts, strict=True)
    )
