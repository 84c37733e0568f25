"""Prices of blocks under given decisions: what stages are summed up from.

Nothing is decided here, and no solver is loaded: the shardings are a plan's, or those of the block
programs (`programs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeAlias

import numpy as np

from meshwright.costmodel.blocks import (
    Floats,
    PassPrice,
    Sums,
    block_sums,
    pass_depends_on,
    price_block,
    price_pass,
    repeated_by_policy,
)
from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.kernels import send_seconds
from meshwright.costmodel.operators import (
    Fusion,
    ModelFlops,
    Pricer,
    Problem,
    Setting,
    fuse,
    model_flops,
)
from meshwright.costmodel.sharding import Assignment, BlockLayouts, Placement
from meshwright.planner.blocks import activations_at_cuts
from meshwright.planner.plan import fingerprint
from meshwright.profiles.cluster import Cluster

States: TypeAlias = tuple[Placement, ...]
MeshKey: TypeAlias = tuple[int, int, int, int, float, int, int]


class Degrees(Protocol):
    """The parallel degrees of a mesh, such as `StagePlan` or the search's `Mesh`."""

    @property
    def dp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def ep(self) -> int: ...


@dataclass(slots=True)
class _Known:
    """What was priced before, kept as long as the coster."""

    # (tp, cp, ep, spread, rows): prices of operators, the same for all data axes
    pricers: dict[tuple[int, int, int, int, float], Pricer] = field(default_factory=dict)
    # class of a block, mesh, several micro-batches, choices, states of its inputs: its sums
    blocks: dict[tuple[str, MeshKey, bool, str, States], Sums] = field(default_factory=dict)
    # class of a block, what of the setting a pass depends on, choices, states of its inputs
    passes: dict[tuple[str, tuple[float, ...], str, States], PassPrice] = field(
        default_factory=dict
    )
    # name of a block: operators that each recompute policy repeats
    repeated: dict[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)


@dataclass
class StageCoster:
    """Prices blocks of one problem; blocks of one class with equal decisions are priced once."""

    problem: Problem
    _known: _Known = field(default_factory=_Known, init=False)

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    @property
    def cluster(self) -> Cluster:
        return self.problem.cluster

    @cached_property
    def blocks(self) -> dict[str, Block]:
        """The graph's blocks by name."""
        return {block.name: block for block in self.graph.blocks}

    @cached_property
    def model_flops(self) -> ModelFlops:
        return model_flops(self.graph, self.problem.factors)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the model, as plans name it."""
        return fingerprint(self.graph)

    @cached_property
    def activations_at_cuts(self) -> list[tuple[str, ...]]:
        """Values that are sent where a stage ends before block k, for k = 0..K."""
        return [*activations_at_cuts(self.graph), ()]

    @cached_property
    def _fusion(self) -> Fusion:
        return fuse(self.graph, self.problem.factors, self.problem.target.fusion)

    def setting(
        self,
        mesh: Degrees,
        *,
        rows: float,
        microbatches: int,
        zero: int = 0,
        dp_shard: int = 0,
        spread: int = 1,
    ) -> Setting:
        """A mesh on this problem's cluster, in its precision; `rows` per device."""
        problem = self.problem
        return Setting(
            cluster=problem.cluster,
            dp=mesh.dp,
            tp=mesh.tp,
            rows=rows,
            num_microbatches=microbatches,
            precision=problem.precision,
            optimizer=problem.optimizer,
            zero=zero,
            cp=mesh.cp,
            ep=mesh.ep,
            dp_shard=dp_shard,
            spread=spread,
            target=problem.target,
            profile=problem.profile,
        )

    def pricer(self, setting: Setting) -> Pricer:
        """Prices of operators and re-shards in a setting."""
        key = (setting.tp, setting.cp, setting.ep, setting.spread, setting.rows)
        pricers = self._known.pricers
        if key not in pricers:
            pricers[key] = Pricer(
                graph=self.graph, table=self.problem.factors, setting=setting, fusion=self._fusion
            )
        return pricers[key].once(setting)

    def block_sums(
        self, pricer: Pricer, block: Block, assignment: Assignment, inputs: Mapping[str, Placement]
    ) -> Sums:
        """A block's contribution to the sums of its stage."""
        setting = pricer.setting
        several, states = setting.num_microbatches > 1, tuple(inputs.values())
        key = (block.class_id, mesh_key(setting), several, assignment.choices, states)
        known = self._known.blocks
        if key not in known:
            layouts = BlockLayouts(self.graph, self.problem.factors, block, setting.tp)
            passes = self._pass(pricer, layouts, assignment, inputs)
            price = price_block(pricer, layouts, assignment, inputs, passes=passes)
            known[key] = block_sums(price, block, pure=self.problem.target.pure)
        return known[key]

    def _pass(
        self,
        pricer: Pricer,
        layouts: BlockLayouts,
        assignment: Assignment,
        inputs: Mapping[str, Placement],
    ) -> PassPrice:
        """The price of a block per micro-batch, the same for all data axes with equal rows per
        device."""
        block, known = layouts.block, self._known
        where = pass_depends_on(pricer.setting, block)
        key = (block.class_id, where, assignment.choices, tuple(inputs.values()))
        if key not in known.passes:
            if block.name not in known.repeated:
                known.repeated[block.name] = repeated_by_policy(pricer, block)
            known.passes[key] = price_pass(
                pricer, layouts, assignment, inputs, repeated=known.repeated[block.name]
            )
        return known.passes[key]

    def send_seconds(self, setting: Setting) -> Floats:
        """(K+1,): seconds to send the activations at each boundary, one micro-batch, one direction,
        between two stages with this mesh; where some neighbours share a node and others don't, on
        average."""
        pricer, problem = self.pricer(setting), self.problem
        node, devices = problem.cluster.devices_per_node, setting.dp * setting.cp * setting.tp
        # of the stages that share a node in pipeline order, one sends to the next node
        share = min(1.0, devices / node) if problem.cluster.num_nodes > 1 else 0.0
        if setting.spread > 1:  # so many neighbours lie in one node
            share = 1.0 / setting.spread
        inside, border = min(devices, max(1, node // 2)), max(node, devices)
        pairs = (
            (share, range(border - devices, border), range(border, border + devices)),
            (1 - share, range(inside), range(inside, 2 * inside)),
        )

        def seconds(nbytes: float) -> float:
            return sum(
                part
                * send_seconds(
                    nbytes,
                    source,
                    destination,
                    tp=setting.tp,
                    cluster=problem.cluster,
                    target=problem.target,
                    profile=problem.profile,
                )
                for part, source, destination in pairs
                if part
            )

        sent = [sum(pricer.nbytes(v) for v in values) for values in self.activations_at_cuts]
        known = {nbytes: seconds(nbytes) for nbytes in set(sent)}
        return np.array([known[nbytes] for nbytes in sent])


def mesh_key(setting: Setting) -> MeshKey:
    """What prices of a block depend on, but for the number of micro-batches."""
    return (
        setting.dp,
        setting.tp,
        setting.cp,
        setting.ep,
        setting.rows,
        setting.dp_shard,
        setting.spread,
    )
