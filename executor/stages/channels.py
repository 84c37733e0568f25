"""The channels of one rank's stages: per edge of the stage graph and value, both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.schedules import Action
from meshwright.costmodel.sharding import DataLayout
from meshwright.executor.lowering import boundary_placement
from meshwright.executor.ranks import BACKWARD, FORWARD, Edge, Place
from meshwright.executor.stages.transfer import Channel, held, slices

Channels = Mapping[tuple[Action, int], Mapping[str, Channel]]  # (instruction, peer stage) -> value


def stage_channels(
    k: int,
    edges: Mapping[Edge, Sequence[str]],
    graph: Graph,
    place: Place,
    outer_of: Callable[[int], Sequence[DataLayout]],
) -> Channels:
    """The channels of stage k to stages of other ranks; `edges` gives the values that travel,
    `outer_of` the layouts of a stage on its outer axes. Every value of every edge has its own
    tag."""
    found: dict[tuple[Action, int], dict[str, Channel]] = {}
    crossings = [(edge, name) for edge, names in edges.items() for name in names]
    for tag, (edge, name) in enumerate(crossings, start=1):
        source, target = (place.meshes[j] for j in edge)
        if k not in edge or source.ranks == target.ranks:
            continue
        meta = graph.values[name]
        ends = [
            (mesh, tuple(boundary_placement(graph, layout, name) for layout in outer_of(j)))
            for j, mesh in zip(edge, (source, target), strict=True)
        ]
        mesh, placements = ends[edge.index(k)]
        mine = held(meta.shape, placements, mesh, mesh.coordinate(place.rank)[0])
        sends = k == edge[0]
        peer = edge[1] if sends else edge[0]
        forward = Action.SEND_ACTIVATION if sends else Action.RECV_ACTIVATION
        backward = Action.RECV_GRADIENT if sends else Action.SEND_GRADIENT
        directions = [(forward, FORWARD, ends)]
        found.setdefault((backward, peer), {})
        if meta.requires_grad:
            directions.append((backward, BACKWARD, ends[::-1]))
        for action, direction, (start, end) in directions:
            moved = slices(tuple(meta.shape), *start, *end)
            group = place.edge_groups[edge, direction]
            channel = Channel(moved, place.rank, mine, meta.dtype, place.device, group, tag)
            found.setdefault((action, peer), {})[name] = channel
    return found
