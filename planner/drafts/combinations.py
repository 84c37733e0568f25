"""The parts of a draft: setups of stages, meshes and combinations to choose from, cut stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.mesh import HostParts, Mesh
from meshwright.costmodel.operators import Setting
from meshwright.costmodel.recompute import segment_policy
from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.stages import InFlight, StageCosts, mixed, of_one, stage_costs
from meshwright.planner.drafts.reliefs import NO_RELIEF, Relief
from meshwright.planner.stages import Chain, ChosenLevel, RecomputeLevels


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSetup:
    """Mesh of a pipeline stage as it was asked for, how its states are shared out, what it gives up
    for memory, and the chain that gives its costs; `validated` as in `Setting`."""

    mesh: Mesh
    sharing: Sharing
    chain: Chain
    relief: Relief = NO_RELIEF
    validated: bool = False

    @property
    def setting(self) -> Setting:
        host = self.relief.host
        host = replace(host, weights=0.0, files=0.0) if self.sharing.gathers else host
        return replace(
            self.chain.setting, sharing=self.sharing, host=host, validated=self.validated
        )

    @property
    def paired(self) -> bool:
        """Whether a forward may run beside the backward of another micro-batch."""
        return self.chain.setting.target.overlap_passes and self.mesh.ep > 1

    def sending(self, part: float) -> StageSetup:
        """The same with the activations of such a part of its blocks in host memory."""
        host = replace(self.relief.host, activations=part)
        return replace(self, relief=replace(self.relief, host=host)) if part else self


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChoice:
    """One mesh for each of `groups` device groups, not priced yet; `bound_s` is a lower bound on
    the step of any plan on it."""

    mesh: Mesh
    num_microbatches: int
    groups: int
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Stage setup and pipeline: `estimate_s` of its step orders the search,
    `bound_s` is a lower bound on the step of any plan with it. Where stages are `tight`, equal ones
    don't fit; what `repeats` runs blocks again, or is tight."""

    setup: StageSetup
    pipeline: Pipeline
    estimate_s: float
    bound_s: float
    tight: bool
    repeats: bool

    @property
    def offered(self) -> tuple[Pipeline, ...]:
        """Its pipeline, alone."""
        return (self.pipeline,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Combinations of a setup that repeat blocks, or don't fit (some are `tight`), with each of
    the pipelines `offered`, of as many micro-batches and device groups: what they take at least
    once they are relieved. None of them takes less than `bound_s`."""

    setup: StageSetup
    offered: tuple[Pipeline, ...]
    estimate_s: float
    bound_s: float
    tight: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDraft:
    """Blocks start..stop-1 as a stage: its setup, recompute levels and the chosen one, with which
    `in_flight` micro-batches fit on its devices; `given` blocks in a segment, by the user."""

    start: int
    stop: int
    setup: StageSetup
    levels: RecomputeLevels
    chosen: ChosenLevel
    in_flight: InFlight
    given: int | None = None

    @property
    def run(self) -> int:
        """The stage's row in its levels."""
        at = list(self.setup.chain.at)
        return int(self.setup.chain.runs.index[at.index(self.start), at.index(self.stop)])

    @property
    def policies(self) -> tuple[str, ...]:
        """The recompute policy of each block, the first ones recomputing most."""
        return self.overridden([segment_policy(name)[0] for name in self._names()])

    @property
    def repeated(self) -> tuple[tuple[str, ...], int]:
        """Policies and blocks in a segment; all of a stage are on the level of one, or none."""
        return self.policies, self.given or segment_policy(self._names()[0])[1]

    @property
    def relieved(self) -> bool:
        """Whether any block runs again, or sends its activations to host memory."""
        return bool(self.chosen.level[self.run] or self.chosen.fraction[self.run])

    def harder(self, steps: int) -> tuple[tuple[str, ...], int]:
        """Policies and blocks in a segment, so many levels of segments beyond its own."""
        last = len(self.levels.policies) - 1
        names = [self.levels.policies[min(self._level() + steps, last)]] * (self.stop - self.start)
        policy, size = segment_policy(names[0])
        return self.overridden([policy] * len(names)), self.given or size

    @property
    def sent(self) -> float:
        """The part of its blocks that the levels send to host memory."""
        level, part = int(self.chosen.level[self.run]), float(self.chosen.fraction[self.run])
        own = self.levels.sent[level : level + 2]
        return float((1 - part) * own[0] + part * own[-1])

    @property
    def host(self) -> HostParts:
        """What lies in host memory."""
        own, sent = self.setup.setting.host, self.sent
        return replace(own, activations=sent) if sent else own

    def _level(self) -> int:
        """The level of the first block."""
        level, part = int(self.chosen.level[self.run]), float(self.chosen.fraction[self.run])
        more = round(part * (self.stop - self.start)) > 0
        return min(level + more, len(self.levels.policies) - 1)

    def _names(self) -> list[str]:
        where, count = self.run, self.stop - self.start
        level, more = (
            int(self.chosen.level[where]),
            round(float(self.chosen.fraction[where]) * count),
        )
        names = self.levels.policies
        return [names[min(level + (k < more), len(names) - 1)] for k in range(count)]

    def repriced(
        self, *, compute: float, communication: float, data_axis: float, host: float
    ) -> StageCosts[float]:
        """Costs of the stage with all seconds of each kind multiplied, as by `Sums.scaled`, and
        those of links to host memory that were not measured."""
        sums = self.setup.chain.runs.sums[self.run].scaled(
            compute=compute, communication=communication, data_axis=data_axis
        )
        level, part = int(self.chosen.level[self.run]), float(self.chosen.fraction[self.run])
        found = list[StageCosts[float]]()
        for k in range(level, level + 1 + (part > 0)):
            setting = self.setup.sending(self.levels.sent[k]).setting
            if self.host and host > 1 and (own := setting.cluster.host) is not None:
                slower = replace(setting.cluster, host=own.slower(host))
                setting = replace(setting, problem=replace(setting.problem, cluster=slower))
            found.append(of_one(stage_costs(sums, setting, self.levels.policies[k])))
        low, *high = found
        return mixed(low, high[0], part) if high else low

    def overridden(self, free: Sequence[str]) -> tuple[str, ...]:
        """The policy of each block: the user's, or else that of `free`."""
        forced = self.setup.chain.forced[self.start : self.stop]
        return tuple(own or policy for own, policy in zip(forced, free, strict=True))
