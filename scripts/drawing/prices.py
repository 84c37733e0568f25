"""Prices over sizes: collectives by algorithm, products by shape; states by ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.costmodel.kernels import Group, collective_time, matmul_seconds
from meshwright.costmodel.kernels.collectives import routes
from meshwright.costmodel.memory import model_states, optimizer_named
from meshwright.costmodel.sharing import Sharing
from meshwright.profiles.cluster import Cluster
from scripts.drawing.svg import COLOURS, Axis, Picture, curve, frame, legend

KIB, MIB, GIB = 2**10, 2**20, 2**30
BYTES = [KIB * 2 ** (k / 2) for k in range(43)]  # to 2 GiB
SIZES = range(256, 8193, 64)
GROUPS = {"8 ranks of a node": (1, 8), "64 ranks on 8 nodes": (8, 8)}
ALGORITHMS = ("ring", "tree", "switch")
PARAMETERS, RANKS = 7.5e9, 64


def all_reduce() -> str:
    """Seconds of an all-reduce over bytes, by algorithm, in a node and over nodes."""
    picture = Picture(760, 330, "Seconds of an all-reduce on H100 over the bytes of the tensor")
    picture.text(12, 20, picture.title)
    for k, (words, (nodes, per_node)) in enumerate(GROUPS.items()):
        cluster = Cluster.from_catalog("h100-sxm", num_nodes=nodes)
        group = Group(size=nodes * per_node, per_node=per_node)
        left = 62 + 370 * k
        sizes = [(KIB, "1 KiB"), (MIB, "1 MiB"), (GIB, "1 GiB")]
        times = [(1e-5, "10 µs"), (1e-4, "100 µs"), (1e-3, "1 ms"), (1e-2, "10 ms")]
        x = Axis(low=KIB, high=BYTES[-1], start=left, end=left + 300, ticks=sizes, logarithmic=True)
        y = Axis(low=8e-6, high=3e-2, start=280, end=58, ticks=times, logarithmic=True)
        frame(picture, x, y, ("bytes of the tensor", words))
        named = dict(zip(_algorithms(nodes), routes("all_reduce", group, cluster), strict=True))
        for name, route in named.items():
            points = [(n, route.seconds(n)) for n in BYTES]
            curve(picture, x, y, points, stroke=COLOURS[ALGORITHMS.index(name)])
        cheapest = [(n, collective_time("all_reduce", n, group, cluster)) for n in BYTES]
        dotted = {"stroke_dasharray": "2 5", "stroke_linecap": "round"}
        curve(picture, x, y, cheapest, stroke="#888", **dotted)
        colours = {name: COLOURS[ALGORITHMS.index(name)] for name in named}
        legend(picture, left + 12, 66, {**colours, "the price": "#888"})
    return picture.svg()


def _algorithms(nodes: int) -> tuple[str, ...]:
    """Those of `routes`, in its order."""
    return ALGORITHMS if nodes > 1 else ("ring", "switch")


def products() -> str:
    """Rate of square bf16 products over their size: few tiles, and waves that are not full."""
    devices = ("h100-sxm", "a100-80gb", "v100-32gb")
    picture = Picture(560, 330, "TFLOP/s of a 16-bit product n × n × n, by price, launch included")
    picture.text(12, 20, picture.title)
    sizes = [(n, str(n)) for n in (256, 1024, 2048, 4096, 8192)]
    rates = [(r, str(r)) for r in (0, 200, 400, 600, 800)]
    x = Axis(low=256, high=8192, start=62, end=540, ticks=sizes, logarithmic=True)
    y = Axis(low=0, high=800, start=280, end=58, ticks=rates)
    frame(picture, x, y, ("n", "TFLOP/s"))
    for k, name in enumerate(devices):
        curve(picture, x, y, _rates(name), stroke=COLOURS[k])
    legend(picture, 76, 66, {name: COLOURS[k] for k, name in enumerate(devices)})
    return picture.svg()


def _rates(name: str) -> Iterator[tuple[float, float]]:
    device = Cluster.from_catalog(name).device
    for n in SIZES:
        took_s = matmul_seconds(device, "fp16", n, n, n, 1, 3 * 2 * n * n)
        yield n, 2 * n**3 / (took_s + device.launch_overhead_s) / 1e12


def states() -> str:
    """Bytes of a rank's weights, gradients and optimizer states by ZeRO stage."""
    title = (
        f"States of {PARAMETERS / 1e9:g} B parameters in bf16 with AdamW on each of {RANKS} ranks"
    )
    picture = Picture(700, 190, title)
    picture.text(12, 20, title)
    ticks = [(gib * GIB, f"{gib} GiB") for gib in (0, 30, 60, 90, 120)]
    x = Axis(low=0, high=130 * GIB, start=72, end=520, ticks=ticks)
    frame(picture, x, Axis(low=0, high=1, start=160, end=36, ticks=()), ("", ""))
    parts = dict(zip(("weights", "gradients", "optimizer"), COLOURS, strict=False))
    plain = Sharing()
    for zero in range(4):
        of = model_states(
            PARAMETERS,
            weight_bytes=2,
            sharing=replace(plain, zero=zero),
            dp=RANKS,
            optimizer=optimizer_named("adamw_fused"),
        )
        y, before = 40 + 30 * zero, 0.0
        picture.text(12, y + 15, f"ZeRO-{zero}")
        for part, colour in parts.items():
            nbytes = getattr(of, part)
            picture.box(x(before), y, x(before + nbytes) - x(before), 22, fill=colour)
            before += nbytes
        picture.text(x(before) + 6, y + 15, f"{before / GIB:.1f} GiB")
    legend(picture, 590, 74, parts)
    return picture.svg()
