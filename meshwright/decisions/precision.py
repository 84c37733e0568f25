"""Products in 8 bits, on a cluster's devices and in a model; fp32 products in TF32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.precisions import FP8, SIDE
from meshwright.costmodel.rules import is_fp8
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.catalog_reader import catalog_names, read_entry
from meshwright.profiles.inputs import MeshwrightError
from meshwright.profiles.steps import NO_CORRECTIONS


def check_units(precision: str, cluster: Cluster) -> None:
    """ValueError for 8 bits on a GPU without units for them; CPUs emulate them."""
    device = cluster.device
    if precision not in FP8 or device.kind == "cpu" or "fp8" in device.peak_flops:
        return
    devices = (n for n in catalog_names() if "peak_flops.fp8" in read_entry(n).quantities)
    raise MeshwrightError(
        f"={precision!r}: {device.name} has no units for 8-bit floats",
        place="precision",
        legal=f"bf16, fp16 or fp32; {precision} on {', '.join(devices)}",
        way_out="choose another precision, or such a device",
    )


def check_products(problem: Problem) -> Problem:
    """The problem. Raises ValueError where none of its products would be in 8 bits."""
    graph = problem.graph
    if problem.precision not in FP8 or any(is_fp8(graph, op) for op in graph.ops):
        return problem
    raise MeshwrightError(
        f"={problem.precision!r}: no product of the model would be in 8 bits",
        place="precision",
        legal=(
            "models with layers (blocks that are one program on several parameters) that multiply "
            f"by parameters whose sides are multiples of {SIDE}"
        ),
        way_out="choose precision='bf16'",
    )


def in_tf32(problem: Problem) -> Problem:
    """The problem with fp32 products in TF32; itself where its devices have none. Measurements of
    operators, which are of fp32, and corrections, which hold beside those alone, are left out."""
    device = problem.cluster.device.in_tf32()
    if device is problem.cluster.device or problem.precision != "fp32":
        return problem
    profile: Any = problem.profile  # loaded from the cache, if anything
    if profile:
        measurements = replace(profile.measurements, operators={})
        profile = replace(profile, measurements=measurements, corrections=NO_CORRECTIONS)
    cluster = replace(problem.cluster, device=device)
    return replace(problem, cluster=cluster, tf32=True, profile=profile or None)
