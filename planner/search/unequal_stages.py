"""Plans whose stages may have different meshes: the inter-op DP over all ways to run a stage.

Whatever the meshes, a stage on n of D devices that takes t per micro-batch uses n·t device-seconds,
and the step takes at least m·max t. So with w_b the least device-seconds of block b on any mesh

    step  >=  m · Σ n·t / D  >=  m · Σ w_b / D

and more, if block b is on a mesh where it takes more than w_b: a mesh on which every block takes so
much more that the bound exceeds the incumbent is in no better plan.

The DP minimises Σ t + max ((m-1)·t + once): Alpa's objective, with the once-per-step work of the
slowest stage, beside which that of the others passes. It knows the schedule by what it holds (1F1B;
other schedules without virtual stages hold more: the simulation judges between those in which the
cut fits). Its ways recompute all blocks of a stage by one policy; of the chosen stages only as many
as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.schedules.schedule import in_flight
from meshwright.planner.inter_op.partition import (
    InterOpSolution,
    MemoryShortfall,
    StageTable,
    minimal_shortfall,
    solve_inter_op,
)
from meshwright.planner.pricing.recompute_levels import recompute_levels
from meshwright.planner.search.equal_stages import Drafted, EqualStages, Way
from meshwright.planner.search.space import SPLIT_BACKWARD, Mesh, Space

DP_GAP = 0.002  # the DP may stop this close to its bound; its answer is priced by simulation anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a stage, all of its blocks under one recompute policy."""

    way: Way
    policy: str


@dataclass(slots=True)
class UnequalStages:
    """The inter-op DP for a number of micro-batches."""

    space: Space
    equal: EqualStages

    def meshes(self, m: int) -> list[Mesh]:
        return [mesh for n in self.space.sizes() for mesh in self.space.meshes(n, m)]

    def bounds(self, m: int, meshes: Sequence[Mesh]) -> np.ndarray:
        """Per mesh, no more than the step of any plan with m micro-batches that uses it."""
        if not meshes:
            return np.zeros(0)
        work = np.array([mesh.devices * self.equal.least(mesh, m) for mesh in meshes])
        least = work.min(axis=0)
        if np.isinf(least).any():  # a block that can run nowhere
            return np.full(len(meshes), np.inf)
        extra = (work - least).min(axis=1)
        return m * (least.sum() + extra) / self.space.cluster.num_devices

    def ways(self, m: int, meshes: Sequence[Mesh], below_s: float) -> list[Way]:
        """All ways to run a stage on meshes that a plan faster than this may use."""
        within = self.bounds(m, meshes) < below_s
        return [
            way
            for mesh, may in zip(meshes, within, strict=True)
            if may
            for way in self.equal.ways(mesh, m)
        ]

    def table(self, m: int, ways: Sequence[Way]) -> tuple[StageTable, list[Option]]:
        """Costs of every stage under every option: it fills the pipeline for one pass t; in time it
        is busy (m-1)·t more, and once per step."""
        policies = self.space.restrictions.policies
        options: list[Option] = []
        times, fills, static, active = [], [], [], []
        for way in ways:
            runs, send = way.chain.runs, self.equal.sent(way)
            index = runs.index
            legal = self.equal.legal & self.equal.allowed(way)
            steps = recompute_levels(runs.sums, way.setting, policies, runs.blocks)
            for policy, costs in zip(steps.policies, steps.costs, strict=True):
                pass_s = costs.forward_s + costs.backward_s
                once_s = costs.reduce_s + costs.optimizer_s
                ok = legal & np.isfinite(runs.seconds)[index]
                options.append(Option(way=way, policy=policy))
                turn = pass_s[index] + send
                fills.append(np.where(ok, turn, np.inf))
                times.append(np.where(ok, (m - 1) * turn + once_s[index], np.inf))
                static.append(costs.static_bytes[index])
                active.append(costs.activation_bytes[index])
        table = StageTable(
            devices=np.array([o.way.mesh.devices for o in options], dtype=np.int64),
            time_s=np.stack(times),
            fill_s=np.stack(fills),
            static_bytes=np.stack(static),
            activation_bytes=np.stack(active),
        )
        return table, options

    def solve(
        self, table: StageTable, m: int, cutoff_s: float, deadline: float | None
    ) -> InterOpSolution | None:
        return solve_inter_op(
            table,
            num_devices=self.space.cluster.num_devices,
            num_microbatches=2,  # the maximum of what the table calls time counts once
            memory_bytes=self.equal.room,
            in_flight=self._held(m),
            num_stages=self.space.restrictions.pp,
            relative_gap=DP_GAP,
            cutoff_s=cutoff_s,
            deadline=deadline,
        )

    def shortfall(self, table: StageTable, m: int) -> MemoryShortfall | None:
        """The partition that comes closest to fitting."""
        return minimal_shortfall(
            table,
            num_devices=self.space.cluster.num_devices,
            memory_bytes=self.equal.room,
            in_flight=self._held(m),
            num_stages=self.space.restrictions.pp,
        )

    def drafted(
        self, solution: InterOpSolution, options: Sequence[Option], m: int, schedule: str
    ) -> list[Drafted] | None:
        """The stages of a solution under a schedule, each with no more recompute than its place
        needs; None where one does not fit."""
        found, count = [], len(solution.stages)
        for k, choice in enumerate(solution.stages):
            way = options[choice.variant].way
            held = in_flight(schedule, stage=k, num_stages=count, num_microbatches=m)
            steps = self.equal.levels(way, schedule)
            drafted = Drafted(
                start=int(self.equal.cuts[choice.start]),
                stop=int(self.equal.cuts[choice.stop]),
                way=way,
                levels=steps,
                chosen=steps.choose(held, self.equal.room),
            )
            if not drafted.chosen.fits[drafted.run]:
                return None
            if way.zero > 1 and schedule in SPLIT_BACKWARD:
                return None
            found.append(drafted)
        return found

    def _held(self, m: int) -> Callable[[int], int]:
        """Micro-batches held by the stage at a position from the end (1 = last): what 1F1B holds,
        or GPipe where nothing else is left."""
        schedules = self.space.restrictions.schedules
        schedule = "gpipe" if set(schedules) == {"gpipe"} else "1f1b"
        return lambda position: in_flight(
            schedule, stage=0, num_stages=position, num_microbatches=m
        )
