"""How ZeRO's weights and gradients may travel on a mesh: among which ranks, in how many bits."""

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
    found: dict[Sharing, list[Sharing]] = {}
    for plain in space.zeros(mesh):
        for choice in quantizations(space, mesh, plain):
            for hpz in secondaries(space, mesh, plain):
                own = replace(plain, hpz=hpz, quantized=choice)
                setting = Setting(
                    problem=space.problem, mesh=mesh, batch=Batch(rows=0.0), sharing=own
                )
                found.setdefault(setting.of_step.sharing, []).append(own)
    return found


def secondaries(space: Space, mesh: Mesh, plain: Sharing) -> list[int | None]:
    """Ranks among which a stage that shares its states out so may keep a secondary shard of its
    weights; None for none. By itself that is a node of them."""
    over, ranks = space.restrictions, mesh.dp * mesh.cp
    asked = {n for n in over.hpz if n}
    if not plain.gathers:  # asked for everywhere, it asks for ZeRO-3
        return [None] if None in over.hpz or ranks == 1 else []
    shards, found = plain.among(ranks), set[int]()
    none: list[int | None] = [None] * (None in over.hpz or shards in asked)
    if mesh.ep == 1 and not space.reliefs[0].host.states:
        found |= {n for n in asked if 1 < n < shards and shards % n == 0}
        node = _node(space, mesh)
        if over.secondary_shards and None in over.hpz and 1 < node < shards:
            found |= {node} if shards % node == 0 else set()
    return [*none, *sorted(found)]


def quantizations(space: Space, mesh: Mesh, plain: Sharing) -> list[str]:
    """What a stage that shares its states out so may send in quantised blocks."""
    over, ranks = space.restrictions, mesh.dp * mesh.cp
    left = {choice for choice in over.quantized if choice is not None}
    left |= set(over.quantizations) if None in over.quantized else set()
    if ranks == 1:  # nothing is sent
        return ["none"]
    may = plain.gathers and mesh.ep == 1 and not space.reliefs[0].host.states
    return [choice for choice in QUANTIZED if choice in left and (may or choice == "none")]


def _node(space: Space, mesh: Mesh) -> int:
    """Neighbours on the data axis that share a node."""
    return space.cluster.devices_per_node // (mesh.tp * mesh.spread)
