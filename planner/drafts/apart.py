"""Drafts whose branches lie apart: each branch a chain of stages on device groups of its own.

Of D devices branch b takes n_b, the trunk n_0, or none where it lies beside the last stage of a
branch, its host, on whose devices both run one after the other:

    Σ n_b + n_0 = D,       step  ≈  max_b fill_b + fill_0  +  max over devices of their time

with fill and time of a stage as in `UnequalStages.tables`. n_b is near the branch's part of the
work; the cuts and meshes of each branch are those of the inter-op DP on its blocks and n_b devices
alone, as branches meet in the two maxima only.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from meshwright.costmodel.memo import Memo
from meshwright.costmodel.schedules import SCHEDULES, Pipeline, in_flight
from meshwright.planner import inter_op
from meshwright.planner.branches import Shape, compositions, shapes_of
from meshwright.planner.drafts.combinations import StageDraft, StageSetup
from meshwright.planner.drafts.unequal import DP_GAP, Option, UnequalStages

UNITS = 16  # parts of the cluster in which devices are shared out, at most
NEAR = 5  # numbers of devices that are tried for a branch, next to its part of the work
DRAFTS = 10  # of the best shares, for each way in which schedules fill a pipeline
ALIKE = 5  # of these with the same depths

Run = tuple[int, int]  # of blocks, as positions among the cuts
Counts = tuple[int | None, ...]  # of stages, None where they are free
Solution = inter_op.InterOpSolution


class Share(NamedTuple):
    """Stages of each branch, and of the trunk, which is one stage beside the last one of its
    `host`, by number, where it has one."""

    objective_s: float
    branches: tuple[tuple[inter_op.StageChoice, ...], ...]
    trunk: tuple[inter_op.StageChoice, ...]
    host: int | None

    @property
    def stages(self) -> tuple[inter_op.StageChoice, ...]:
        """All stages, in the order of the model."""
        return (*itertools.chain(*self.branches), *self.trunk)

    @property
    def groups(self) -> tuple[int, ...]:
        """The device group of each stage."""
        ends = [*itertools.accumulate(map(len, self.branches))]
        if self.host is None:
            return tuple(range(len(self.stages)))
        return (*range(ends[-1]), ends[self.host] - 1)

    @property
    def depths(self) -> tuple[int, ...]:
        """The device groups from each stage to the end."""
        return Shape(tuple(map(len, self.branches)), len(self.trunk), self.host).depths


@dataclass(slots=True, kw_only=True)
class Shares:
    """Shares of the devices among a model's branches: m micro-batches under schedules that fill a
    pipeline as the `table` says, with objectives below `cutoff_s`, found by the `deadline`."""

    unequal: UnequalStages
    schedules: Sequence[str]
    table: inter_op.StageTable
    m: int
    cutoff_s: float
    deadline: float | None = None
    _chains: Memo[tuple[object, ...], Solution | None] = field(default_factory=Memo)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The run of each branch, the trunk's last."""
        cuts = self.unequal.equal.cuts.tolist()
        runs = [
            (cuts.index(run.start), cuts.index(run.stop)) for run in self.unequal.space.branches
        ]
        return (*runs, (runs[-1][1], len(cuts) - 1))

    def best(self) -> list[Share]:
        """The best shares, of stages that fit each alone."""
        *branches, trunk = self.runs
        shares = list[Share]()
        for counts, hosts in self._counts():
            for sizes in self._sizes(counts):
                of_branches = zip(branches, sizes, counts, strict=False)
                chains = [self._chain(run, n, count, not hosts) for run, n, count in of_branches]
                if not all(chains):
                    continue
                solved = [chain for chain in chains if chain]
                if hosts:
                    shares += self._beside(solved, trunk, hosts)
                else:
                    shares += self._behind(solved, self._chain(trunk, sizes[-1], counts[-1], False))
        shares.sort(key=lambda share: share.objective_s)
        alike = Counter[tuple[int, ...]]()
        best = list[Share]()
        for share in shares:
            alike[share.depths] += 1
            if alike[share.depths] <= ALIKE and share.objective_s < self.cutoff_s:
                best.append(share)
        return best[:DRAFTS]

    def _behind(self, chains: Sequence[Solution], trunk: Solution | None) -> Iterator[Share]:
        """The share with the trunk on devices of its own."""
        if trunk is not None:
            objective_s = max(chain.sum_s for chain in chains) + trunk.sum_s
            objective_s += max(chain.t_max_s for chain in (*chains, trunk))
            yield Share(objective_s, tuple(chain.stages for chain in chains), trunk.stages, None)

    def _beside(
        self, chains: Sequence[Solution], trunk: Run, hosts: Sequence[int]
    ) -> Iterator[Share]:
        """Shares with the trunk beside the last stage of each of the `hosts` that can have it."""
        table = self.table
        assert table.fill_s is not None
        for host in hosts:
            last = chains[host].stages[-1]
            time_s = float(table.time_s[last.variant, *trunk])
            if math.isinf(time_s):
                continue
            busy_s = float(table.time_s[last.variant, last.start, last.stop]) + time_s
            objective_s = max(chain.sum_s for chain in chains)
            objective_s += float(table.fill_s[last.variant, *trunk])
            objective_s += max(busy_s, *(chain.t_max_s for chain in chains))
            stage = replace(last, start=trunk[0], stop=trunk[1])
            yield Share(objective_s, tuple(chain.stages for chain in chains), (stage,), host)

    def _chain(self, run: Run, devices: int, count: int | None, behind: bool) -> Solution | None:
        """The best stages of a run on so many devices, `behind` which at least one group comes."""

        def solved() -> Solution | None:
            first, last = run
            part = (slice(None), slice(first, last + 1), slice(first, last + 1))
            table = self.table
            assert table.fill_s is not None
            solution = inter_op.solve_inter_op(
                inter_op.StageTable(
                    devices=table.devices,
                    time_s=table.time_s[part],
                    fill_s=table.fill_s[part],
                    static_bytes=table.static_bytes[part],
                    activation_bytes=table.activation_bytes[part],
                ),
                inter_op.Constraints(
                    num_devices=devices,
                    memory_bytes=self.unequal.space.room_bytes,
                    in_flight=lambda place: self._in_flight(place + behind),
                    num_stages=count,
                ),
                num_microbatches=2,  # as in `UnequalStages.solve`
                relative_gap=DP_GAP,
                cutoff_s=self.cutoff_s,
                deadline=self.deadline,
            )
            return solution and replace(
                solution,
                stages=tuple(
                    replace(stage, start=stage.start + first, stop=stage.stop + first)
                    for stage in solution.stages
                ),
            )

        return self._chains.of((run, devices, count, behind), solved)

    def _in_flight(self, depth: int) -> int:
        """Micro-batches in flight so far from the end, under the schedule that has fewest."""
        lines = (Pipeline(name, depth, self.m, depth) for name in self.schedules)
        return min(in_flight(line, 0) for line in lines)

    # --- devices and stages of each ---

    def _sizes(self, counts: Counts) -> Iterator[tuple[int, ...]]:
        """Devices of each branch and of the trunk, which have so many stages at least."""
        space, total = self.unequal.space, self.unequal.space.cluster.num_devices
        sizes = sorted(space.sizes())
        unit = max((n for n in sizes if n * UNITS <= total), default=sizes[0])
        work = [self._device_s(run) for run in self.runs]
        near = [
            sorted(
                (n for n in range(unit, total, unit) if n >= (count or 1)),
                key=lambda n: abs(n - total * part / sum(work)),
            )[:NEAR]
            for part, count in zip(work, counts, strict=True)
        ]
        for trunk in (0,) if counts[-1] == 0 else near[-1]:
            for first in itertools.product(*near[:-2]):
                if (rest := total - trunk - sum(first)) >= max(unit, counts[-2] or 1):
                    yield (*first, rest, trunk)

    def _device_s(self, run: Run) -> float:
        """Least device-seconds of a run as one stage, an even part where it can't be one."""
        table = self.table
        assert table.fill_s is not None
        seconds = table.devices * (table.fill_s + table.time_s)[:, run[0], run[1]]
        least = float(seconds.min())
        return least if math.isfinite(least) else 1.0

    def _counts(self) -> Iterator[tuple[Counts, tuple[int, ...]]]:
        """Stages of each branch and of the trunk, 0 where it lies beside a branch, with those that
        it may lie beside: of as many device groups in all, or of the depths, that the user asked
        for, else free."""
        restrictions, number = self.unequal.space.restrictions, len(self.runs) - 1
        hosts, free = tuple(range(number)), (None,) * number
        depths, groups = restrictions.branches, restrictions.pp
        if isinstance(depths, Sequence):
            shapes: list[tuple[Counts, tuple[int, ...]]] = [
                ((*shape.branches, shape.trunk), ()) if shape.host is None
                else ((*shape.branches, 0), (shape.host,))
                for shape in shapes_of(depths, number)
            ]  # fmt: skip
        elif groups is None:
            shapes = [((*free, 0), hosts), ((*free, None), ())]
        else:
            shapes = [((*counts, 0), hosts) for counts in compositions(groups, number)]
            shapes += [(counts, ()) for counts in compositions(groups, number + 1)]
        trained = self.unequal.equal.legal[self.runs[-1]]
        for counts, beside in shapes:
            if (beside or trained) and (groups is None or sum(filter(None, counts)) in (0, groups)):
                yield counts, beside


def apart_drafts(
    unequal: UnequalStages,
    m: int,
    setups: Sequence[StageSetup],
    cutoff_s: float,
    deadline: float | None,
) -> Iterator[tuple[list[StageDraft], Pipeline]]:
    """Stages of the best shares of a model's branches, m micro-batches of which go through them,
    under each schedule that takes them."""
    # beside a branch the trunk may have nothing to train
    trunk, legal = unequal.space.branches[-1].stop, unequal.equal.legal.copy()
    legal[unequal.equal.cuts.tolist().index(trunk), -1] = True
    tables, options = unequal.tables(m, setups, legal=legal)
    for names, table in tables.items():
        shares = Shares(
            unequal=unequal, schedules=names, table=table, m=m, cutoff_s=cutoff_s,
            deadline=deadline,
        )  # fmt: skip
        for share in shares.best():
            yield from _in_pipelines(unequal, share, options, names, m)


def _in_pipelines(
    unequal: UnequalStages, share: Share, options: Sequence[Option], names: Sequence[str], m: int
) -> Iterator[tuple[list[StageDraft], Pipeline]]:
    taken = [SCHEDULES[name] for name in names if SCHEDULES[name].branched]
    for offered in unequal.space.schedules(len(set(share.groups)), m):
        if offered.record not in taken:
            continue
        pipeline = offered._replace(
            num_stages=len(share.stages), depths=share.depths, groups=share.groups
        )
        if stages := unequal.stage_drafts(share.stages, options, pipeline):
            yield stages, pipeline
