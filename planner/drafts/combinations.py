"""The parts of a draft: setups of stages, meshes and combinations to choose from, cut stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.mesh import HostParts, Mesh, Stepping
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
    for memory, and the chain that gives its costs; `stepping` as in `Setting`."""

    mesh: Mesh
    sharing: Sharing
    chain: Chain
    relief: Relief = NO_RELIEF
    stepping: Stepping = "at_end"

    @property
    def setting(self) -> Setting:
        host = self.relief.host
        host = replace(host, weights=0.0, files=0.0) if self.sharing.gathers else host
        return replace(self.chain.setting, sharing=self.sharing, host=host, stepping=self.stepping)

    @property
    def validated(self) -> bool:
        """Whether steps are validated afterwards."""
        return self.stepping == "validated"

    @property
    def paired(self) -> bool:
        """Whether a forward may run beside the backward of another micro-batch."""
        return self.chain.setting.target.overlap_passes and self.mesh.ep > 1

    def sending(self, part: float) -> StageSetup:
        """The setup with the activations of such a part of its blocks in host memory."""
        host = replace(self.relief.host, activations=part)
        return replace(self, relief=replace(self.relief, host=host)) if part else self


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChoice:
    """One mesh for each of `groups` device groups; `bound_s` bounds the step of its plans."""

    mesh: Mesh
    num_microbatches: int
    groups: int
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Stage setup and pipeline. `estimate_s` of its step orders the search, `bound_s` is a lower
    bound on it. `tight`: equal stages don't fit; `repeats`: it runs blocks again, or is tight."""

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
    the pipelines `offered`, of as many micro-batches and device groups; with the seconds that they
    take at least once they are relieved."""

    setup: StageSetup
    offered: tuple[Pipeline, ...]
    estimate_s: float
    bound_s: float
    tight: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDraft:
    """Blocks start..stop-1 as a stage: its setup, recompute levels and the chosen one, with which
    `in_flight` micro-batches fit on its devices; `segment_size` is that of the user."""

    start: int
    stop: int
    setup: StageSetup
    levels: RecomputeLevels
    chosen: ChosenLevel
    in_flight: InFlight
    segment_size: int | None = None

    @property
    def run(self) -> int:
        """The stage's row in its levels."""
        at = list(self.setup.chain.at)
        return int(self.setup.chain.runs.index[at.index(self.start), at.index(self.stop)])

    @property
    def costs(self) -> StageCosts[float]:
        """Costs on its level."""
        return self.levels.at(self.run, self.chosen)

    @property
    def _place(self) -> tuple[int, float]:
        """Its level, and the part of its blocks on the next one."""
        run = self.run
        return int(self.chosen.level[run]), float(self.chosen.fraction[run])

    @property
    def policies(self) -> tuple[str, ...]:
        """The recompute policy of each block, the first ones recomputing most."""
        levels = self._block_levels()
        return self.overridden([segment_policy(self.levels.policies[n])[0] for n in levels])

    @property
    def repeated(self) -> tuple[tuple[str, ...], int]:
        """Policies and blocks in a segment; all of a stage are on the level of one, or none."""
        return self.policies, self.harder(0)[1]

    @property
    def relieved(self) -> bool:
        """Whether any block runs again, or sends its activations to host memory."""
        return any(self._place)

    def harder(self, steps: int) -> tuple[tuple[str, ...], int]:
        """Policies and blocks in a segment, so many levels of segments beyond its own."""
        level = min(self._block_levels()[0] + steps, len(self.levels.policies) - 1)
        policy, size = segment_policy(self.levels.policies[level])
        return self.overridden([policy] * (self.stop - self.start)), self.segment_size or size

    @property
    def sent(self) -> float:
        """The part of its blocks that the levels send to host memory."""
        level, part = self._place
        sent = self.levels.sent[level : level + 2]
        return float((1 - part) * sent[0] + part * sent[-1])

    @property
    def host(self) -> HostParts:
        """Parts of the stage in host memory."""
        host, sent = self.setup.setting.host, self.sent
        return replace(host, activations=sent) if sent else host

    def _block_levels(self) -> list[int]:
        """The level of each block."""
        (level, part), count = self._place, self.stop - self.start
        more, last = round(part * count), len(self.levels.policies) - 1
        return [min(level + (k < more), last) for k in range(count)]

    def repriced(
        self, *, compute: float, communication: float, data_axis: float, host: float
    ) -> StageCosts[float]:
        """Costs of the stage with all seconds of each kind multiplied, as by `Sums.scaled`."""
        sums = self.setup.chain.runs.sums[self.run].scaled(
            compute=compute, communication=communication, data_axis=data_axis
        )
        level, part = self._place
        costs = list[StageCosts[float]]()
        for k in range(level, level + 1 + (part > 0)):
            setting = self.setup.sending(self.levels.sent[k]).setting
            if self.host and host > 1 and (node := setting.cluster.host) is not None:
                slower = replace(setting.cluster, host=node.slower(host))
                setting = replace(setting, problem=replace(setting.problem, cluster=slower))
            costs.append(of_one(stage_costs(sums, setting, self.levels.policies[k])))
        low, *high = costs
        return mixed(low, high[0], part) if high else low

    def overridden(self, free: Sequence[str]) -> tuple[str, ...]:
        """The policy of each block: the user's, or else that of `free`."""
        forced = self.setup.chain.forced[self.start : self.stop]
        return tuple(user or policy for user, policy in zip(forced, free, strict=True))
