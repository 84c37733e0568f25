"""Decisions that a target can't run: forbidden in a search for it, refused where a user asks."""

from __future__ import annotations

from dataclasses import replace

from meshwright.costmodel.recompute import REGATHERING
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import TARGETS
from meshwright.planner.decisions import CHOICES, DECISIONS, SHARING, forbids
from meshwright.planner.overrides.overrides import OverrideError, Overrides, left_schedules, spelled
from meshwright.planner.plan import Plan, PlanError


def for_target(overrides: Overrides, target: Target) -> Overrides:
    """The overrides with everything forbidden that the target can't run. Raises `OverrideError` for
    one that asks for it."""
    for name in (CHOICES.keys() | {forbids(f)[0] for f in excluded_by(target)}) - {""}:
        for pattern, value in overrides.items(name):
            if _excluded(target, name, value):
                raise OverrideError(
                    f"target {target.name!r} can't run it",
                    place=f"override {spelled(name, pattern, value)}",
                    legal=_left(target, name),
                    way_out=f"take one of these, {_another(target)}, or drop the override",
                )
    _check_zero(overrides, target)
    for name, decision in DECISIONS.items():
        value = getattr(overrides, name)
        if decision.of_train_step and decision.uses(value) and not target.gradients_come:
            raise OverrideError(
                f"target {target.name!r} is not priced with it",
                place=f"override {spelled(name, None, value)}",
                legal="target=None, what train_step runs",
                way_out="drop the override, or take that target",
            )
    more = [name for name in excluded_by(target) if name not in overrides.forbid]
    try:
        restricted = replace(overrides, forbid=(*overrides.forbid, *more))
        left_schedules(restricted)
    except OverrideError as error:
        if not more:  # the overrides alone leave none
            raise
        raise OverrideError(
            f"; target {target.name!r} can't run {', '.join(more)}",
            place=error,
            legal=_another(target),
            way_out="drop the override, or take another target",
        ) from None
    return restricted


def check_plan_for(plan: Plan, target: Target) -> None:
    """Raise `PlanError` for a plan that the target can't run."""
    pp = len(plan.devices)
    values = [("plan", "schedule", plan.schedule)] * (pp > 1) + [("plan", "pp", pp)]
    by_block = [name for name, decision in DECISIONS.items() if decision.acts == "block"]
    for k, stage in enumerate(plan.stages):
        place = f"plan: stage {k}"
        values += [(place, axis, getattr(stage, axis)) for axis in ("dp", "tp", "cp", "ep")]
        values += [(place, name, v) for name in by_block for v in dict.fromkeys(stage.values(name))]
        if stage.dp * stage.cp == 1:
            continue
        sharing = [(place, d.name, getattr(stage, d.name)) for d in SHARING]
        values += [entry for entry in sharing if entry[2] is not None]
        if not target.combines(stage.zero, tp=stage.tp, pp=pp):
            legal = [z for z in CHOICES["zero"] if target.combines(z, tp=stage.tp, pp=pp)]
            raise PlanError(
                f"={stage.zero} with tp={stage.tp}, pp={pp}: target {target.name!r} can't run it",
                place=f"{place}: zero",
                legal=legal,
                way_out=f"change the plan, or price it for {_another(target)}",
            )
    for name, decision in DECISIONS.items():
        used = any(decision.uses(getattr(holder, name)) for holder in plan.having(name))
        if decision.of_train_step and used and not target.gradients_come:
            raise PlanError(
                f"target {target.name!r} is not priced with it",
                place=f"plan: {name}",
                legal="target=None, what train_step runs",
                way_out="drop it from the plan, or take that target",
            )
    if len({(s.dp, s.cp, s.tp, s.ep) for s in plan.stages}) > 1:
        values.append(("plan", "unequal_meshes", True))
    for place, name, value in values:
        if _excluded(target, name, value):
            raise PlanError(
                f"={value!r}: target {target.name!r} can't run it",
                place=f"{place}: {name}",
                legal=_left(target, name),
                way_out=f"take one of these, or {_another(target)}",
            )


def excluded_by(target: Target) -> tuple[str, ...]:
    """Names that an override may forbid, of what the target can't run."""
    late = [name for name, record in SCHEDULES.items() if not record.flushes]
    own = [] if target.gradients_come else late
    return (*target.excludes, *own, *(() if target.regathers else REGATHERING))


def _excluded(target: Target, name: str, value: object) -> bool:
    """Whether a target excludes a value of a choice, or `name` whatever its value."""
    excluded = [(f, *forbids(f)) for f in excluded_by(target)]
    return any(value not in others for f, of, others in excluded if name == (of or f))


def _left(target: Target, name: str) -> list[object]:
    """The values of a choice that the target runs."""
    return [v for v in CHOICES.get(name, (1,)) if not _excluded(target, name, v)] or ["none"]


def _check_zero(overrides: Overrides, target: Target) -> None:
    """Raise for ZeRO for all blocks beside a tensor axis or a pipeline that it can't be with."""
    zero, tp, pp = (overrides.everywhere(name) for name in ("zero", "tp", "pp"))
    if zero is None or overrides.everywhere("dp") == 1:
        return
    legal = [z for z in CHOICES["zero"] if target.combines(z, tp=tp or 1, pp=pp or 1)]
    if zero not in legal:
        beside = ", ".join(f"{n}={v}" for n, v in (("tp", tp), ("pp", pp)) if v and v > 1)
        raise OverrideError(
            f"={zero} with {beside}: target {target.name!r} can't run both",
            place="override zero",
            legal=f"zero {', '.join(map(str, legal))}",
            way_out=f"drop one of the two, or take {_another(target)}",
        )


def _another(target: Target) -> str:
    return f"another target ({', '.join(name for name in TARGETS if name != target.name)})"
