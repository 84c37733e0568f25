"""ZeRO's ways to send weights and gradients on a mesh: among which ranks, in how many bits."""

from __future__ import annotations

from dataclasses import replace

from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import Setting
from meshwright.costmodel.quantized import QUANTIZED
from meshwright.costmodel.sharing import Sharing
from meshwright.planner.drafts.space import Space


def transports(space: Space, mesh: Mesh) -> dict[Sharing, list[Sharing]]:
    """The ways to share states out that a mesh may have, by what prices of its data axis depend on
    (`Setting.of_step`). Gathers within a node are priced beside those of all. What comes from the
    host is neither kept twice nor sent in blocks."""
    ways: dict[Sharing, list[Sharing]] = {}
    setting = Setting(problem=space.problem, mesh=mesh, batch=Batch(rows=0.0))
    for plain in space.zeros(mesh):
        for choice in quantizations(space, mesh, plain):
            for hpz in secondaries(space, mesh, plain):
                sharing = replace(plain, hpz=hpz, quantized=choice)
                transport = replace(setting, sharing=sharing).of_step.sharing
                ways.setdefault(transport, []).append(sharing)
    return ways


def secondaries(space: Space, mesh: Mesh, plain: Sharing) -> list[int | None]:
    """Ranks among which a stage with this sharing may keep a secondary shard of its weights, None
    for none; those of a node unless the user asks for others."""
    over, ranks = space.restrictions, mesh.dp * mesh.cp
    asked = {n for n in over.hpz if n}
    if not plain.gathers:  # asked for everywhere, it asks for ZeRO-3
        return [None] if None in over.hpz or ranks == 1 else []
    shards = plain.among(ranks)
    none: list[int | None] = [None] * (None in over.hpz or shards in asked)
    if mesh.ep > 1 or space.reliefs[0].host.states:
        return none
    if over.secondary_shards and None in over.hpz:
        asked.add(space.cluster.devices_per_node // (mesh.tp * mesh.spread))  # a node
    return [*none, *sorted(n for n in asked if 1 < n < shards and shards % n == 0)]


def quantizations(space: Space, mesh: Mesh, plain: Sharing) -> list[str]:
    """Collectives that a stage with this sharing may send in quantised blocks."""
    over = space.restrictions
    if mesh.dp * mesh.cp == 1:  # nothing is sent
        return ["none"]
    legal = set(over.quantized) | set(over.quantizations if None in over.quantized else ())
    may = plain.gathers and mesh.ep == 1 and not space.reliefs[0].host.states
    return [choice for choice in QUANTIZED if choice in legal and (may or choice == "none")]
