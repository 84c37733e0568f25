"""Checks of what the user passed: each error names the value and the legal ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.costmodel.memory import optimizer_named
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import Plan, sized
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import ArgumentError, shown
from meshwright.profiles.inputs.limits import MAX_ROWS, is_number

if TYPE_CHECKING:
    import torch

OBJECTIVES = ("robust", "fastest")
ROWS_MEET = ("exact", "per_microbatch")
MEMORY_MARGIN = 0.05  # peaks are predicted within so much; the allocator's fragments come on top


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model in DistributedDataParallel, DataParallel or torch.compile: a plan says how it is
    replicated, and `compile=` whether it is compiled."""
    import torch

    while isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)) or (
        type(model).__name__ == "OptimizedModule" and isinstance(model._orig_mod, torch.nn.Module)
    ):
        wrapped = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        assert isinstance(wrapped, torch.nn.Module)
        model = wrapped
    return model


def check_types(*, model: Any, cluster: Any, overrides: Any, plan: Any) -> None:
    """ValueError for a value of another type, and for a plan beside overrides."""
    import torch

    for name, value, wanted, legal in (
        ("model", model, torch.nn.Module, "a torch.nn.Module"),
        ("cluster", cluster, Cluster, "a Cluster, e.g. Cluster.from_catalog('h100-sxm')"),
        ("overrides", overrides, (Overrides, type(None)), "Overrides(tp=..., ...) or None"),
        ("plan", plan, (Plan, str, Path, type(None)), "a Plan, a path or None"),
    ):
        if not isinstance(value, wanted):
            raise ArgumentError(
                f"={shown(value)} is a {type(value).__name__}", place=name, legal=legal
            )
    if plan is not None and overrides is not None and overrides.given():
        raise ArgumentError(
            f"={overrides.given()} were both given: a given plan leaves nothing to search",
            place="plan= and overrides",
            legal="one of the two",
            way_out="drop one, or edit the plan",
        )


def default_precision(cluster: Cluster) -> str:
    """Precision of a cluster's devices where nobody names one."""
    return "fp32" if cluster.backend == "gloo" else "bf16"


def check_values(
    global_batch_size: Any, precision: str, optimizer: str, time_limit_s: Any, tf32: bool
) -> None:
    """ValueError for a number or name that can't be."""
    batch = global_batch_size
    if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= MAX_ROWS:
        raise ArgumentError.refused(
            "global_batch_size",
            batch,
            legal=f"an integer from 1 to {MAX_ROWS}, rows per optimizer step",
        )
    if precision not in PRECISIONS:
        raise ArgumentError.refused("precision", precision, legal=PRECISIONS)
    optimizer_named(optimizer)
    if time_limit_s is not None:
        _check_time_limit(time_limit_s)
    if tf32 and precision != "fp32":
        raise ArgumentError(
            f"={shown(precision)} with tf32=True, which is about fp32 products",
            place="precision",
            legal="fp32",
            way_out="drop one of the two",
        )


def check_search(objective: Any, memory_margin: Any, rows_meet: Any, cluster: Cluster) -> None:
    """ValueError for an objective or consent that can't be, or a margin that leaves tensors no
    memory."""
    if rows_meet not in ROWS_MEET:
        raise ArgumentError.refused("rows_meet", rows_meet, legal=ROWS_MEET)
    if objective not in OBJECTIVES:
        raise ArgumentError.refused("objective", objective, legal=OBJECTIVES)
    check_margin(memory_margin, cluster)


def margin_of(memory_margin: float | None) -> float:
    """The part of a device's memory that a plan leaves free, if none was given the default."""
    return MEMORY_MARGIN if memory_margin is None else memory_margin


def check_margin(memory_margin: Any, cluster: Cluster) -> None:
    """ValueError for a margin that is none, or leaves tensors no memory."""
    if memory_margin is None:
        return
    if not is_number(memory_margin) or not 0 <= memory_margin < 1:
        raise ArgumentError.refused(
            "memory_margin",
            memory_margin,
            legal=(
                "the part of a device's memory to leave free, from 0 to less than 1, or None "
                f"for {MEMORY_MARGIN}"
            ),
        )
    device = cluster.device
    if memory_margin >= device.usable_bytes / device.memory_bytes:
        raise ArgumentError(
            f"={memory_margin}: of the {sized(device.memory_bytes)} of {device.name} it "
            f"keeps {sized(memory_margin * device.memory_bytes)} free, and driver and "
            f"communicators take {sized(device.reserved_bytes)}: tensors are left none",
            place="memory_margin",
            legal=f"less than {device.usable_bytes / device.memory_bytes:.3g}",
        )


def _check_time_limit(time_limit_s: Any) -> None:
    if not is_number(time_limit_s) or time_limit_s < 0:
        raise ArgumentError.refused(
            "time_limit_s", time_limit_s, legal="seconds, 0 or more, or None for no limit"
        )
