"""The optimizer that steps, and the one that the plan was made for."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.costmodel.memory import FUSED
from meshwright.costmodel.operators import Problem
from meshwright.planner.plan import Plan, sized
from meshwright.planner.pricing import Evaluator

DIFFERS = 0.01  # of the planned peak: less is not said


def name_of(optimizer: torch.optim.Optimizer) -> str | None:
    """How plans name an optimizer; None for one that they don't know."""
    group, kind = optimizer.param_groups[0], type(optimizer).__name__.lower()
    if "8bit" in kind:
        return "adamw8bit"
    if isinstance(optimizer, torch.optim.Adam):  # AdamW too
        plain = "adamw" if isinstance(optimizer, torch.optim.AdamW) else "adam"
        return plain + FUSED * bool(group.get("fused"))
    if isinstance(optimizer, torch.optim.SGD):
        return "momentum" if group["momentum"] else "sgd"
    return "adagrad" if isinstance(optimizer, torch.optim.Adagrad) else None


def other_than_counted(
    optimizer: torch.optim.Optimizer, plan: Plan, problem: Problem
) -> str | None:
    """What to say of an optimizer whose step takes other memory than was planned with; None where
    there is nothing to say."""
    name = name_of(optimizer)
    if name is None:
        return (
            f"the plan counts an optimizer like {problem.optimizer!r}; what "
            f"{type(optimizer).__name__} keeps and makes is not known: rehearse(optimizer=) tells"
        )
    if name == problem.optimizer:
        return None
    planned, here = (
        Evaluator(replace(problem, optimizer=own)).price(plan).prediction.fullest_bytes
        for own in (problem.optimizer, name)
    )
    if abs(here - planned) <= DIFFERS * planned:
        return None
    return (
        f"planned with optimizer={problem.optimizer!r}, a peak of {sized(planned)}; this one is "
        f"{name!r}, {sized(here)}: plan with optimizer={name!r} to have it counted"
    )
