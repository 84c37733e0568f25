"""nn.DataParallel beside ranks: what devices of a node exchange in a step, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.costmodel.kernels import Group, collective_time
from meshwright.costmodel.kernels.collectives import p2p_time
from meshwright.profiles.cluster import Cluster
from scripts.drawing.svg import COLOURS, Axis, Picture, curve, frame, legend

PARAMETERS, MICROBATCHES = 1.3e9, 1
NBYTES = 4 * PARAMETERS  # of weights and of gradients, in single precision
DEVICES = range(2, 9)


def _ranks(devices: int, cluster: Cluster) -> float:
    return collective_time("all_reduce", NBYTES, Group(size=devices, per_node=devices), cluster)


def _by_rings(devices: int, cluster: Cluster) -> float:
    """Weights by NCCL's broadcast, gradients by its reduce, which moves as many bytes."""
    group = Group(size=devices, per_node=devices)
    return 2 * collective_time("broadcast", NBYTES, group, cluster)


def _by_copies(devices: int, cluster: Cluster) -> float:
    return 2 * (devices - 1) * p2p_time(NBYTES, cluster, crosses_node=False)


WAYS: Mapping[str, Callable[[int, Cluster], float]] = {
    "ranks: one all-reduce, mostly hidden": _ranks,
    "nn.DataParallel: broadcast, reduce": _by_rings,
    "nn.DataParallel without NCCL: copies": _by_copies,
}


def exchanges() -> str:
    """Seconds of a step's exchanges over the devices of a node."""
    cluster = Cluster.from_catalog("a100-80gb")
    title = f"Exchanges of a step with {PARAMETERS / 1e9:g} B parameters, one node of A100"
    picture = Picture(700, 330, title)
    picture.text(12, 20, title)
    x = Axis(low=2, high=8, start=62, end=420, ticks=[(n, str(n)) for n in DEVICES])
    ticks = [(ms / 1e3, f"{ms} ms") for ms in (0, 100, 200, 300, 400)]
    y = Axis(low=0, high=0.4, start=280, end=58, ticks=ticks)
    frame(picture, x, y, ("devices", "seconds"))
    for k, way in enumerate(WAYS.values()):
        curve(picture, x, y, [(n, way(n, cluster)) for n in DEVICES], stroke=COLOURS[k])
    legend(picture, 440, 66, dict(zip(WAYS, COLOURS, strict=False)))
    return picture.svg()
