"""Plans whose stages may have different meshes: the inter-op DP over all setups of a stage.

Whatever the meshes, a stage on n of D devices that takes t per micro-batch uses n·t
device-seconds, and the step takes at least m·max t. So with w_b the least device-seconds of
block b on any mesh

    step  >=  m · Σ n·t / D  >=  m · Σ w_b / D

and more, if block b is on a mesh where it takes more than w_b: a mesh on which every block takes
so much more that the bound exceeds the incumbent is in no better plan.

The DP minimises Σ t + max ((m-1)·t + once): Alpa's objective, with the once-per-step work of the
slowest stage, beside which that of the others passes. It is solved for each way in which
schedules fill a pipeline, with the micro-batches in flight of the one that has fewest; the
simulation judges between all in which the cut fits. Its options recompute all blocks of a stage
by one policy, the chosen stages only as many as needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.memo import Memo
from meshwright.costmodel.mesh import Mesh
from meshwright.costmodel.schedules import SCHEDULES, Pipeline, PipelineShape, in_flight
from meshwright.costmodel.stages import used_bytes
from meshwright.planner import inter_op
from meshwright.planner.drafts.combinations import StageDraft, StageSetup
from meshwright.planner.drafts.equal_stages import EqualStages
from meshwright.planner.drafts.fills import held_at_peak
from meshwright.planner.drafts.reliefs import given_segments
from meshwright.planner.drafts.space import Space
from meshwright.planner.stages import Chain, Runs, recompute_levels

COARSE_CUTS = 20  # of more cuts so many are looked at first
COARSE_EXCESS = 1.05  # by which the best partition at few cuts may exceed the best at all
DP_GAP = 0.002  # the DP may stop this close to its bound; its answer is priced by simulation anyway

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A variant of the stage table: a setup with one recompute policy for all blocks."""

    setup: StageSetup
    policy: str


@dataclass(slots=True)
class UnequalStages:
    """The inter-op DP for a number of micro-batches."""

    space: Space
    equal: EqualStages
    _coarse: Memo[Chain, Runs] = field(default_factory=Memo)

    def meshes(self, m: int) -> list[Mesh]:
        """All meshes; tokens lie on all stages in one order, on as many ranks."""
        cp = self.space.restrictions.uniform("cp") or 1
        meshes = (mesh for n in self.space.sizes() for mesh in self.space.meshes(n, m))
        return [mesh.of_kind(mesh.kind) for mesh in meshes if mesh.cp == cp]

    def fitting(self, m: int) -> list[Mesh]:
        """Meshes on which m micro-batches of some block may fit."""
        return [mesh for mesh in self.meshes(m) if self.equal.floor.allows_some(mesh, m)]

    def bounds(self, m: int, meshes: Sequence[Mesh]) -> np.ndarray:
        """Per mesh, a lower bound on the step of any plan with m micro-batches that uses it."""
        if not meshes:
            return np.zeros(0)
        work = np.array([mesh.devices * self.equal.least(mesh, m) for mesh in meshes])
        least = work.min(axis=0)
        if np.isinf(least).any():  # a block that can run nowhere
            return np.full(len(meshes), np.inf)
        extra = (work - least).min(axis=1)
        return np.asarray(m * (least.sum() + extra) / self.space.cluster.num_devices)

    def setups(self, m: int, meshes: Sequence[Mesh], below_s: float) -> list[StageSetup]:
        """All setups of a stage on meshes that a plan faster than `below_s` may use."""
        within = self.bounds(m, meshes) < below_s
        return [
            setup
            for mesh, may in zip(meshes, within, strict=True)
            if may
            for setup in self.equal.setups(mesh, m)
        ]

    def coarse(self) -> Positions:
        """(c,): few ends of stages among the cuts, evenly spaced, and where the user cut."""
        count = len(self.equal.cuts)
        at = {0, 1, count - 2, count - 1}
        at |= {round(k * (count - 1) / (COARSE_CUTS - 1)) for k in range(COARSE_CUTS)}
        asked = np.isin(self.equal.cuts, self.space.restrictions.cuts or ())
        at |= set(np.flatnonzero(asked).tolist())
        return np.array(sorted(k for k in at if 0 <= k < count))

    def schedules(self) -> list[str]:
        """Schedules that stages of different meshes may have."""
        late = self.space.restrictions.steppings[0] == "stale"
        alike = ((name, record) for name, record in SCHEDULES.items() if record.flushes != late)
        names = [name for name, record in alike if record.unequal_meshes]
        return [name for name in names if name in self.space.restrictions.schedules] or names

    def tables(
        self,
        m: int,
        setups: Sequence[StageSetup],
        at: Positions | None = None,
        legal: NDArray[np.bool_] | None = None,
    ) -> tuple[dict[tuple[str, ...], inter_op.StageTable], list[Option]]:
        """Costs of every stage under every option, roughly where its ends are only those `at`, a
        table for those `schedules` that fill pipelines in one way: with a pass t it is busy
        (m-1)·t besides, and once per step. `legal` are other stages than those of a chain."""
        legal = self.equal.legal if legal is None else legal
        ways: dict[Any, tuple[str, ...]] = {}
        for name in self.schedules():
            way = SCHEDULES[name].fill_s
            ways[way] = (*ways.get(way, ()), name)
        policies = self.space.restrictions.policies
        places = np.arange(len(self.equal.cuts)) if at is None else at
        grid = np.ix_(places, places)
        options: list[Option] = []
        times, fills, static, active = [], [], [], []
        shape = PipelineShape(m, 2, 1)  # how many groups there will be is not known
        for setup in setups:
            chain = setup.chain
            rough = partial(chain.typical_runs, self.equal.cuts[places].tolist())
            runs = chain.runs if at is None else self._coarse.of(chain, rough)
            index, send = runs.index, self.equal.sent(setup)[grid]
            ok = (legal & self.equal.allowed(setup))[grid]
            ok &= np.isfinite(runs.seconds)[index] & chain.legal_whole[grid]
            levels = recompute_levels(runs.sums, setup.setting, policies, runs.blocks)
            for policy, costs in zip(levels.policies, levels.costs, strict=True):
                options.append(Option(setup=setup, policy=policy))
                f, b, w = costs.forward_s, costs.backward_s, costs.weight_s
                filled = (way(f, b, w, shape)[index] + send for way in ways)
                fills.append([np.where(ok, fill, np.inf) for fill in filled])
                turn, once_s = (f + b)[index] + send, costs.reduce_s + costs.optimizer_s
                times.append(np.where(ok, (m - 1) * turn + once_s[index], np.inf))
                static.append((costs.static_bytes + costs.late_bytes)[index])
                active.append(costs.activation_bytes[index])
        table = inter_op.StageTable(
            devices=np.array([o.setup.mesh.devices for o in options], dtype=np.int64),
            time_s=np.stack(times),
            static_bytes=np.stack(static),
            activation_bytes=np.stack(active),
        )
        of_ways = zip(ways.values(), zip(*fills, strict=True), strict=True)
        tables = {names: replace(table, fill_s=np.stack(fill_s)) for names, fill_s in of_ways}
        return tables, options

    def promising(
        self, m: int, setups: Sequence[StageSetup], cutoff_s: float, deadline: float | None
    ) -> list[StageSetup]:
        """Setups on the meshes of the best partition at few cuts, if nearly below the cutoff."""
        tables, options = self.tables(m, setups, self.coarse())
        cutoff_s *= COARSE_EXCESS
        solutions = (self.solve(*names, m, cutoff_s, deadline) for names in tables.items())
        chosen = [choice for solution in solutions if solution for choice in solution.stages]
        meshes = {options[choice.variant].setup.mesh for choice in chosen}
        return [setup for setup in setups if setup.mesh in meshes]

    def solve(
        self,
        schedules: Sequence[str],
        table: inter_op.StageTable,
        m: int,
        cutoff_s: float,
        deadline: float | None,
    ) -> inter_op.InterOpSolution | None:
        """The best partition with an objective below the cutoff, where some of the schedules holds
        it; None where there is none, or none was found by the deadline (a time.monotonic())."""
        return inter_op.solve_inter_op(
            table,
            self._constraints(schedules, m),
            num_microbatches=2,  # the maximum of what the table calls time counts once
            relative_gap=DP_GAP,
            cutoff_s=cutoff_s,
            deadline=deadline,
        )

    def shortfall(self, table: inter_op.StageTable, m: int) -> inter_op.MemoryShortfall | None:
        """The partition that comes closest to fitting."""
        return inter_op.minimal_shortfall(table, self._constraints(self.schedules(), m))

    def stage_drafts(
        self, choices: Sequence[inter_op.StageChoice], options: Sequence[Option], pipeline: Pipeline
    ) -> list[StageDraft] | None:
        """Stages in a pipeline, with least recompute; None where one is illegal. Of stages on one
        device the last one has its memory first."""
        drafts: list[StageDraft] = []
        rooms = [self.space.room_bytes] * pipeline.num_devices
        of_stages = zip(choices, held_at_peak(pipeline), pipeline.device_of, strict=True)
        for choice, held, device in reversed([*of_stages]):
            setup = options[choice.variant].setup
            levels = self.equal.levels(setup, pipeline)
            start, stop = (int(self.equal.cuts[at]) for at in (choice.start, choice.stop))
            draft = StageDraft(
                start=start,
                stop=stop,
                setup=setup,
                levels=levels,
                chosen=levels.choose(held, rooms[device]),
                segment_size=given_segments(self.space.restrictions, start, stop),
                in_flight=held,
            )
            refused = setup.sharing.gathers and not pipeline.record.gathers
            if refused or not draft.chosen.fits[draft.run]:
                return None
            rooms[device] -= float(used_bytes(draft.costs, held))
            drafts.append(draft)
        return drafts[::-1]

    def _constraints(self, schedules: Sequence[str], m: int) -> inter_op.Constraints:
        return inter_op.Constraints(
            num_devices=self.space.cluster.num_devices,
            memory_bytes=self.space.room_bytes,
            in_flight=lambda position: min(
                in_flight(Pipeline(name, position, m, position), 0) for name in schedules
            ),
            num_stages=self.space.restrictions.pp,
        )
