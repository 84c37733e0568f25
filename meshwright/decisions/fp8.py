"""Whether products can be in 8 bits: on a cluster's devices, and in a model."""

from __future__ import annotations

from meshwright.costmodel.fp8 import FP8, SIDE
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.rules import is_fp8
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.hardware.catalog_reader import catalog_names, read_entry
from meshwright.profiles.inputs import MeshwrightError


def check_units(precision: str, cluster: Cluster) -> None:
    """ValueError for 8 bits on a GPU without units for them; CPUs emulate them."""
    device = cluster.device
    if precision not in FP8 or device.kind == "cpu" or "fp8" in device.peak_flops:
        return
    raise MeshwrightError(
        f"={precision!r}: {device.name} has no units for 8-bit floats",
        place="precision",
        legal=f"bf16, fp16 or fp32; {precision} on {', '.join(_devices())}",
        way_out="choose another precision, or such a device",
    )


def _devices() -> list[str]:
    """Those of the catalog that have them."""
    return [name for name in catalog_names() if "peak_flops.fp8" in read_entry(name).quantities]


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
