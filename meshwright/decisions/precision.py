"""Products in 8 and 4 bits, on a cluster's devices and in a model; fp32 products in TF32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.precisions import NARROW, PRECISIONS, SIDE
from meshwright.costmodel.rules import is_narrow
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.catalog_reader import catalog_names, read_entry
from meshwright.profiles.inputs import ArgumentError
from meshwright.profiles.steps import NO_CORRECTIONS


def check_units(precision: str, cluster: Cluster) -> None:
    """ValueError for 8 or 4 bits on a GPU without units for them; CPUs emulate them."""
    device, narrow = cluster.device, PRECISIONS[precision].narrow
    if not narrow or device.kind == "cpu" or narrow in device.peak_flops:
        return
    devices = (n for n in catalog_names() if f"peak_flops.{narrow}" in read_entry(n).quantities)
    raise ArgumentError(
        f"={precision!r}: {device.name} has no units for {NARROW[narrow]}-bit floats",
        place="precision",
        legal=f"bf16, fp16 or fp32; {precision} on {', '.join(devices)}",
        way_out="choose another precision, or such a device",
    )


def check_products(problem: Problem) -> Problem:
    """The problem. Raises ValueError where none of its products would be in few bits."""
    graph, narrow = problem.graph, PRECISIONS[problem.precision].narrow
    if not narrow or any(is_narrow(graph, op) for op in graph.ops):
        return problem
    raise ArgumentError(
        f"={problem.precision!r}: no product of the model would be in {NARROW[narrow]} bits",
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
