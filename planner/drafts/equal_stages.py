"""Plans whose stages all have one mesh, ZeRO stage and placement.

Every combination is estimated from the whole model's sums, divided by the number of stages; the
promising ones are cut into stages exactly (`planner.inter_op.equal_meshes`), each stage with as
little recompute as its place in the schedule allows (`planner.stages.recompute_levels`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle, islice, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.memo import Memo
from meshwright.costmodel.memory import model_states
from meshwright.costmodel.mesh import Batch, HostParts, Mesh, Stepping
from meshwright.costmodel.operators import Setting, mean_moments
from meshwright.costmodel.recompute import segment_policy
from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.costmodel.stages import (
    Floats,
    InFlight,
    StageCosts,
    Sums,
    as_rows,
    device_peaks,
    fits,
    of_one,
    of_rows,
    stage_costs,
    used_bytes,
)
from meshwright.planner.decisions import MESH, taken
from meshwright.planner.drafts.candidates import PlanDraft
from meshwright.planner.drafts.combinations import (
    Combination,
    MeshChoice,
    StageDraft,
    StageSetup,
    Waiting,
)
from meshwright.planner.drafts.fills import filling_s, held_at_peak, in_turn_s
from meshwright.planner.drafts.layouts import GAIN, WORTH, Layouts
from meshwright.planner.drafts.reliefs import Relief, given_segments, may_segment
from meshwright.planner.drafts.space import Space
from meshwright.planner.inter_op import cut_evenly
from meshwright.planner.stages import (
    MODES,
    BlockPrograms,
    Chain,
    ChosenLevel,
    RecomputeLevels,
    recompute_levels,
)

HELD_PARTS = (1 / 16, 1 / 4, 1 / 2, 3 / 4, 1.0)  # of what may be in host memory, looked at
HELD_STEPS = 16  # of what is in host memory, to which the fewest are rounded up
ROUNDING = 1e-9  # of sums that may fill a device to the last byte
SPLIT_MORE = 0.7  # of typical bytes, what a stage needs at least on a tensor axis
AHEAD = 1.1  # of what one promises, others that are estimated with it
TIGHT = 1.05  # estimates where an even cut does not fit, but another may


class _Estimate(NamedTuple):
    """A combination, its step without recompute, and whether no cut of it can fit."""

    combination: Combination
    unhindered_s: float
    overfull: bool


class EqualStages:
    """Estimates, bounds and cuts of all plans with equal meshes."""

    def __init__(self, space: Space, programs: BlockPrograms) -> None:
        self.space = space
        self.programs = programs
        self.cuts = np.array(programs.cut_at)
        self.floor = MemoryFloor(space, programs)
        self.legal = self.at_cuts(space.legal_stages())
        self._classes = [block.class_id for block in space.graph.blocks]
        self._parameters = space.graph.num_parameters()
        # choices of a mesh and device groups, by their numbers of micro-batches
        self._placed: dict[tuple[Mesh, int], dict[int, MeshChoice]] = {}
        self._combinations: dict[MeshChoice, tuple[Combination, ...]] = {}
        self._waiting: dict[MeshChoice, tuple[Waiting, ...]] = {}
        self._in_setting: dict[Any, list[Waiting]] = {}  # by `_alike_setting`
        self._relieved: dict[int, list[Combination]] = {}  # by who waited
        self._works: dict[tuple[Mesh, int, int], tuple[float, float]] = {}
        # by chain, sharing, relief, stepping, policies
        self._levels = Memo[tuple[Any, ...], RecomputeLevels]()

    def at_cuts(self, stages: np.ndarray) -> np.ndarray:
        """(C, C) of (K+1, K+1): stages between positions that may be cut."""
        return np.asarray(stages[np.ix_(self.cuts, self.cuts)])

    # --- setups ---

    def setups(self, mesh: Mesh, m: int, relief: Relief | None = None) -> Iterator[StageSetup]:
        """Setups of a mesh: modes that may pay, ZeRO stages, a `relief` (the user's by default)."""
        relief = relief or self.space.reliefs[0]
        stepping = self.space.restrictions.steppings[0]
        forced = self.space.restrictions.recompute
        for transport, ways in self.space.transports(mesh).items():
            fast: Chain | None = None
            for mode in MODES if mesh.tp > 1 else MODES[:1]:
                chain = self.programs.chain(self._setting(mesh, m, transport), mode, forced)
                if fast is not None and _alike(chain, fast):
                    continue
                fast = fast or chain
                for sharing in ways:
                    yield StageSetup(
                        mesh=mesh, sharing=sharing, chain=chain, relief=relief, stepping=stepping
                    )

    def _setting(self, mesh: Mesh, m: int, sharing: Sharing = UNSHARED) -> Setting:
        batch = self.space.batch(mesh, m)
        stepping = self.space.restrictions.steppings[0]
        return self.programs.coster.setting(mesh, batch, sharing, stepping=stepping)

    def least(self, mesh: Mesh, m: int) -> np.ndarray:
        """(K,): lower bound on each block's seconds per micro-batch; inf where it can't run."""
        return self.programs.least_of_blocks(self._setting(mesh, m))

    # --- combinations ---

    def mesh_choices(self, m: int) -> Iterator[MeshChoice]:
        """All meshes that try m micro-batches, with bounds that need no chain."""
        for groups in self.space.stage_counts():
            devices = self.space.cluster.num_devices // groups
            for mesh in (*self.space.meshes(devices, m), *self.space.sliced_meshes(devices, m)):
                if self.space.tries(mesh, m, groups):
                    yield from self.placed(mesh, m, groups)

    def placed(self, mesh: Mesh, m: int, groups: int) -> Iterator[MeshChoice]:
        """A mesh in all its placements, where m micro-batches can run on it and may fit."""
        if not self.floor.allows(mesh, m, groups):
            return
        work = self._work(mesh, m, groups)
        schedules = self.space.schedules(groups, m, slices=self.space.slices(mesh, m))
        schedules += self.space.late_schedules(mesh, groups, m)
        bound_s = min((p.record.bound_s(*work, m, groups) for p in schedules), default=math.inf)
        if np.isfinite(bound_s):
            for placed in self.space.placements(mesh, groups):
                choice = MeshChoice(mesh=placed, num_microbatches=m, groups=groups, bound_s=bound_s)
                self._placed.setdefault((placed, groups), {})[m] = choice
                yield choice

    def known(self, choice: MeshChoice) -> bool:
        """Whether the combinations of a mesh are priced."""
        return choice in self._combinations

    def combinations(self, choice: MeshChoice) -> tuple[Combination, ...]:
        """All combinations on a mesh that may fit, estimated; those of the same mesh with other
        numbers of micro-batches that promise nearly as much are estimated with them."""
        if choice not in self._combinations:
            alike = self._placed.get((choice.mesh, choice.groups), {}).values()
            near = [c for c in alike if choice.bound_s <= c.bound_s < AHEAD * choice.bound_s]
            others = [c for c in near if c != choice and c not in self._combinations]
            self._estimate([choice, *others])
        return self._combinations[choice]

    def _estimate(self, choices: Sequence[MeshChoice]) -> None:
        """Estimate all combinations of choices of one mesh."""
        setups = [
            (choice, *scheduled)
            for choice in choices
            for setup in self.setups(choice.mesh, choice.num_microbatches)
            for scheduled in self._scheduled(setup, choice)
        ]
        offered = [(setup, pipeline) for _, setup, pipelines in setups for pipeline in pipelines]
        estimates = iter(self._estimated(offered))
        self._combinations |= dict.fromkeys(choices, ())
        self._waiting |= dict.fromkeys(choices, ())
        for choice, setup, pipelines in setups:
            estimated = list(islice(estimates, len(pipelines)))
            self._combinations[choice] += tuple(e.combination for e in estimated if not e.overfull)
            waits = [e for e in estimated if e.combination.repeats]
            if waits and len(self.space.reliefs) > 1:
                waiting = Waiting(
                    setup=setup,
                    offered=tuple(e.combination.pipeline for e in waits),
                    estimate_s=min(e.unhindered_s for e in waits),
                    bound_s=min(e.combination.bound_s for e in waits),
                    tight=any(e.overfull or e.combination.tight for e in waits),
                )
                self._waiting[choice] += (waiting,)
                alike = _alike_setting(setup, choice.groups)
                self._in_setting.setdefault(alike, []).append(waiting)

    def _scheduled(
        self, setup: StageSetup, choice: MeshChoice
    ) -> Iterator[tuple[StageSetup, list[Pipeline]]]:
        """A setup with its pipelines, then with those whose optimizers may step otherwise."""
        m, slices = choice.num_microbatches, self.space.slices(choice.mesh, choice.num_microbatches)
        pipelines = self.space.schedules(choice.groups, m, setup.sharing, slices)
        yield setup, pipelines
        for stepping in self.space.other_steppings:
            late = self.space.late_schedules(choice.mesh, choice.groups, m, setup.sharing)
            of = late if stepping == "stale" else pipelines
            if may := [p for p in of if self.space.may_step(stepping, p, setup.sharing)]:
                setting = replace(setup.chain.setting, stepping=stepping)
                forced = self.space.restrictions.recompute
                chain = self.programs.chain(setting, setup.chain.mode, forced)
                yield replace(setup, stepping=stepping, chain=chain), may

    def _estimated(self, offered: Sequence[tuple[StageSetup, Pipeline]]) -> list[_Estimate]:
        """Estimates of setups in pipelines, together those in one setting with equal policies."""
        settings = dict[Any, list[int]]()
        for k, (setup, pipeline) in enumerate(offered):
            setting = _alike_setting(setup, pipeline.num_devices)
            key = setting, setup.relief, self.policies(setup, pipeline)
            settings.setdefault(key, []).append(k)
        estimates = dict[int, _Estimate]()
        for (_, _, policies), here in settings.items():
            alike = self._estimated_alike([offered[k] for k in here], policies)
            estimates |= zip(here, alike, strict=True)
        return [estimates[k] for k in range(len(offered))]

    def _estimated_alike(
        self, offered: Sequence[tuple[StageSetup, Pipeline]], policies: Sequence[str]
    ) -> list[_Estimate]:
        """`_estimated` in one setting: from the sums of the whole model and `_work`."""
        setups, pipelines = [setup for setup, _ in offered], [pipeline for _, pipeline in offered]
        first, groups = setups[0], pipelines[0].num_devices
        parts, per_group = self._shares(setups, pipelines)
        blocks = len(self._classes) / groups / per_group
        levels = recompute_levels(parts, first.setting, policies, blocks, first.relief.sends)
        held = [held_at_peak(pipeline) for pipeline in pipelines]
        average = InFlight(*np.array([np.array(stage).mean(axis=0) for stage in held]).T)
        per_device = np.array([pipeline.each for pipeline in pipelines])
        chosen = levels.choose(average, self.space.room_bytes, per_device=per_device)
        costs, over = levels.everywhere(chosen), np.zeros(len(offered), dtype=bool)
        if not chosen.fits.all():  # on average; a first stage with fewer blocks may fit
            costs = of_rows(np.where(chosen.fits, as_rows(costs), as_rows(levels.costs[-1])))
            least = first.sending(levels.sent[-1])
            over = self._overfull(least, levels.policies[-1], parts, offered, held)
        repeats = over | ~chosen.fits | (chosen.level > 0) | (chosen.fraction > 0)
        unhindered: Iterable[float] = repeat(0.0)
        if first.relief == self.space.reliefs[0]:  # else it is one
            unhindered = self._steps_s(offered, levels.costs[0])
        seconds = zip(self._steps_s(offered, costs), unhindered, strict=False)
        estimates = []
        for k, (expected_s, unhindered_s) in enumerate(seconds):
            setup, pipeline = offered[k]
            work = self._work(setup.mesh, pipeline.num_microbatches, groups)
            combination = Combination(
                setup=setup,
                pipeline=pipeline,
                estimate_s=expected_s * (1.0 if chosen.fits[k] else TIGHT),
                bound_s=pipeline.record.bound_s(*work, pipeline.num_microbatches, groups),
                tight=not chosen.fits[k],
                repeats=bool(repeats[k]),
            )
            estimates.append(_Estimate(combination, unhindered_s, bool(over[k])))
        return estimates

    def _shares(
        self, setups: Sequence[StageSetup], pipelines: Sequence[Pipeline]
    ) -> tuple[Sums, Floats]:
        """Sums of an equal stage of each setup in its pipeline; stages per copy and group."""
        groups = pipelines[0].num_devices
        per_group = np.array([p.each / p.record.copies for p in pipelines])
        models = [s.chain.whole() if groups == 1 else s.chain.typical() for s in setups]
        return Sums.shared_out(models, groups * per_group), per_group

    def _steps_s(
        self, offered: Sequence[tuple[StageSetup, Pipeline]], costs: StageCosts[Floats]
    ) -> Iterator[float]:
        """Seconds of steps whose stages have such costs, an entry for each pipeline."""
        once = costs.reduce_s + costs.optimizer_s
        columns = costs.forward_s, costs.backward_s, costs.weight_s, once
        seconds = zip(*(column.tolist() for column in columns), strict=True)
        for (setup, pipeline), (f, b, w, after) in zip(offered, seconds, strict=True):
            record, m, groups = pipeline.record, pipeline.num_microbatches, pipeline.num_devices
            per_group = pipeline.each / record.copies
            work, stages = self._work(setup.mesh, m, groups), round(groups * per_group)
            sent, longest = setup.chain.typical_sends_s(
                self.programs.coster.hops(setup.mesh, pipeline)
            )
            uneven = work[1] * groups / work[0] if work[0] else 1.0  # unknown when time is over
            exposed = 0.0 if record.hides_sends else 2 * sent / stages
            fill = float(record.fill_s(f, b, w, pipeline.shape))
            fill = max(0.0, fill - f * (setup.validated and record.staggered))
            turn = f + b + after / m
            even = m * per_group * (turn + exposed) * uneven + (groups - 1) * fill
            one_s = stages * (f + b - w) + 2 * sent
            yield max(even, in_turn_s(pipeline, one_s * (not setup.paired), longest))

    def _overfull(
        self,
        least: StageSetup,
        policy: str,
        parts: Sums,
        offered: Sequence[tuple[StageSetup, Pipeline]],
        held: Sequence[Sequence[InFlight]],
    ) -> NDArray[np.bool_]:
        """Whether an even share of the model can't fit under the leanest policy, by pipeline."""
        if segment_policy(policy)[1] > 1:  # passing is the most, not least
            return np.zeros(len(offered), dtype=bool)
        groups, mesh = offered[0][1].num_devices, least.mesh
        setups = {id(setup): setup for setup, _ in offered}
        kinds = [self._kinds(setup, groups).array for setup in setups.values()]
        # of buffers not all the most
        rows = np.concatenate([parts.without_maxima().array, *kinds])
        costs, count = stage_costs(Sums(rows), least.setting, policy), len(offered)
        ends = np.cumsum([count, *map(len, kinds)])
        where = {key: slice(*span) for key, span in zip(setups, pairwise(ends), strict=True)}
        states, sure = costs.kept_bytes[:count], 1 - ROUNDING
        per_device = np.array([pipeline.each for _, pipeline in offered])
        if mesh.tp > 1 and groups > 1:  # as blocks prefer; those of a stage may split more
            copies = np.array([pipeline.record.copies for _, pipeline in offered])
            split = self._parameters / (mesh.tp * mesh.ep * groups * per_device / copies)
            states = states * np.minimum(1.0, split / np.maximum(costs.parameters[:count], 1.0))
            sure = SPLIT_MORE
        several, room = offered[0][1].num_microbatches > 1, self.space.room_bytes / sure
        in_flight = np.array([min(h.active if several else h.first for h in hs) for hs in held])
        load = groups * per_device * (states + in_flight * costs.activation_bytes[:count])
        passing = (costs.half_bytes if hs[0].split else costs.passing_bytes for hs in held)
        return np.array(
            [
                overfull(float(nbytes), most[where[id(setup)]], room, groups)
                for (setup, _), nbytes, most in zip(offered, load, passing, strict=True)
            ]
        )

    def waiting(self, choice: MeshChoice) -> tuple[Waiting, ...]:
        """Combinations on a mesh that repeat blocks or don't fit, and may be relieved."""
        self.combinations(choice)
        return self._waiting[choice]

    def relieved(self, waiting: Waiting) -> Sequence[Combination]:
        """Combinations that wait, with each relief that they may have, where that may fit; none
        that gives up more than another with which nothing runs again. Those that wait in the same
        setting and promise nearly as much are relieved with them."""
        if id(waiting) not in self._relieved:
            key = _alike_setting(waiting.setup, waiting.offered[0].num_devices)
            near = [
                other
                for other in self._in_setting.get(key, [])
                if waiting.estimate_s <= other.estimate_s < AHEAD * waiting.estimate_s
                and other is not waiting
                and id(other) not in self._relieved
            ]
            self._relieve([waiting, *near])
        return self._relieved[id(waiting)]

    def _relieve(self, waiting: Sequence[Waiting]) -> None:
        enough = {id(one): list[HostParts]() for one in waiting}
        self._relieved |= {id(one): [] for one in waiting}
        for relief in self.space.reliefs[1:]:
            host = relief.most
            tried = [
                (one, self._relievable(one, relief))
                for one in waiting
                if (one.tight or not relief.segmented)
                and not (one.setup.stepping != "at_end" and host)
                and not (one.setup.sharing.gathers and (host.weights or host.files))
                and not (host.states and one.setup.sharing.sent_otherwise)
                and (host.files or not any(map(host.exceeds, enough[id(one)])))
            ]
            estimates = iter(self._estimated([way for _, offered in tried for way in offered]))
            for one, offered in tried:
                may = [e.combination for e in islice(estimates, len(offered)) if not e.overfull]
                if len(may) == len(_usable(one, relief)) and not any(c.repeats for c in may):
                    enough[id(one)].append(host)
                self._relieved[id(one)] += may

    def _relievable(self, waiting: Waiting, relief: Relief) -> list[tuple[StageSetup, Pipeline]]:
        """Setup and pipeline of the combinations that wait, with a relief."""
        pipelines, setup = _usable(waiting, relief), waiting.setup
        reliefs = [relief] * len(pipelines)
        if relief.fewest:
            held = self._fewest_held(waiting, relief, pipelines)
            reliefs = [Relief(host=host) for host in held]
        elif relief.sends:
            sent = self._sendable(waiting, relief, pipelines)
            reliefs = [replace(relief, sends=part) for part in sent]
        setups = {way: replace(setup, relief=way) for way in reliefs}
        return [
            (setups[way], pipeline)
            for pipeline, way in zip(pipelines, reliefs, strict=True)
            if not (relief.fewest and way.host == relief.host)  # which is another relief
            and not (relief.sends and not way.sends)
        ]

    def _fewest_held(
        self, waiting: Waiting, relief: Relief, offered: Sequence[Pipeline]
    ) -> list[HostParts]:
        """Parts of a typical stage in host memory where each pipeline takes least: all of its
        blocks run again by one policy, and as many states, or weights, as that lacks room for are
        there. Seconds and bytes are taken to be linear between `HELD_PARTS`."""
        setup, m = waiting.setup, waiting.offered[0].num_microbatches
        policies = [p for first in offered[:1] for p in self.policies(setup, first)]
        policies = [p for p in policies if segment_policy(p)[1] == 1]
        if not policies:
            return [relief.host] * len(offered)
        parts, _ = self._shares([setup] * len(offered), offered)
        held = [np.array(held_at_peak(pipeline)).mean(axis=0) for pipeline in offered]
        average, again = InFlight(*np.array(held).T), parts.recompute_by(policies)
        per_device, room = np.array([p.each for p in offered]), self.space.room_bytes
        costs = [
            stage_costs(parts, replace(setup, relief=Relief(host=host)).setting, again)
            for host in map(relief.with_last, HELD_PARTS)
        ]
        seconds = np.array([level.amortised_s(m) for level in costs])
        free = np.array([room - used_bytes(level, average, per_device) for level in costs])
        some = (free >= 0).any(axis=0)
        high = np.where(some, (free >= 0).argmax(axis=0), len(costs) - 1)
        ends = np.stack([np.maximum(high - 1, 0), high])
        low_part, high_part = np.array(HELD_PARTS)[ends]
        low_s, high_s = np.take_along_axis(seconds, ends, axis=0)
        lacks, has = np.take_along_axis(free, ends, axis=0)
        more = np.clip(-lacks / np.maximum(has - lacks, 1.0), 0.0, 1.0)
        best = np.where(some, low_s + more * (high_s - low_s), np.inf).argmin(axis=0)
        held_part = low_part + more * (high_part - low_part)
        steps = np.ceil(held_part[best, np.arange(len(offered))] * HELD_STEPS - 1e-9)
        return [relief.with_last(float(step) / HELD_STEPS) for step in steps]

    def _sendable(
        self, waiting: Waiting, relief: Relief, offered: Sequence[Pipeline]
    ) -> list[float]:
        """The part of a typical stage's blocks that hosts hold the activations of, by pipeline."""
        host, typical = self.space.cluster.host, waiting.setup.chain.typical()
        if host is None:
            return [0.0] * len(offered)
        setting = replace(waiting.setup, relief=relief).sending(1.0).setting
        per_rank = host.room_bytes / self.space.cluster.devices_per_node
        costs: dict[str, StageCosts[float]] = {}  # by the first policy that may be
        sendable = []
        for pipeline in offered:
            policy = self.policies(waiting.setup, pipeline)[0]
            if policy not in costs:
                parts = typical.times(1 / pipeline.num_devices)
                costs[policy] = of_one(stage_costs(parts, setting, policy))
            held = held_at_peak(pipeline)
            active = sum(float(stage.active) for stage in held) / len(held)
            room = max(0.0, per_rank - costs[policy].host_bytes)
            part = room / max(costs[policy].away_bytes * active, 1.0)
            blocks = len(self._classes) / pipeline.num_stages
            sendable.append(math.floor(min(part, 1.0) * blocks) / blocks if part < 1 else 1.0)
        return sendable

    def policies(self, setup: StageSetup, pipeline: Pipeline) -> tuple[str, ...]:
        """The recompute policies that blocks of a setup may have in a pipeline."""
        return self.space.policies(pipeline.record, segmented=setup.relief.segmented)

    def _work(self, mesh: Mesh, m: int, groups: int) -> tuple[float, float]:
        """Least seconds per micro-batch of all stages and of the slowest device group."""
        key = mesh, m, groups
        if key not in self._works:
            least = self.least(mesh, m)
            work = float(least.sum()), slowest_s(least, self._classes, groups)
            if not work[0]:  # no time is left: it may be known later
                return work
            self._works[key] = work
        return self._works[key]

    def _kinds(self, setup: StageSetup, groups: int) -> Sums:
        """Sums of all blocks of each kind; on one device group of the whole model."""
        if groups == 1:
            return Sums(setup.chain.whole().array[None])
        kinds = (kind.sums.times(kind.count).array for kind in setup.chain.kinds_typical())
        return Sums(np.stack([*kinds]))

    # --- cutting ---

    def levels(self, setup: StageSetup, pipeline: Pipeline) -> RecomputeLevels:
        """Every run of blocks (`Runs`) of a setup, with the policies that a pipeline allows."""
        policies, chain = self.policies(setup, pipeline), setup.chain
        return self._levels.of(
            (chain, setup.sharing, setup.relief, setup.stepping, policies),
            lambda: recompute_levels(
                chain.runs.sums, setup.setting, policies, chain.runs.blocks, setup.relief.sends
            ),
        )

    def forget(self) -> None:
        """Give memory back."""
        self._levels.clear()

    def solve(
        self, combination: Combination, cutoff_s: float, less_bytes: float = 0.0
    ) -> tuple[float, list[StageDraft]] | None:
        """The objective and the stages of a combination's best cut below a cutoff; None where there
        is none. The objective, m turns of the slowest device and the seconds that all but one
        device add to fill the pipeline, is the step of equal stages. `less_bytes` of each device
        are for what the levels don't know, messages first of all."""
        setup, pipeline = combination.setup, combination.pipeline
        if pipeline.each > 1:
            return self._solve_shared(combination, cutoff_s, less_bytes)
        m, groups, _ = pipeline.shape
        levels, held, runs = self.levels(setup, pipeline), held_at_peak(pipeline), setup.chain.runs
        counts, room = sorted(set(held)), self.space.room_bytes - less_bytes
        chosen_levels = [levels.choose(h, room) for h in counts]
        legal, sent = self.legal & self.allowed(setup), self.sent(setup)
        times, fills = [], []
        for chosen in chosen_levels:
            costs = levels.everywhere(chosen)
            turn = np.where(chosen.fits & np.isfinite(runs.seconds), costs.amortised_s(m), np.inf)
            fill = filling_s(pipeline, costs, validated=setup.validated)
            turn, fill = turn[runs.index], (fill[runs.index] + sent) * ((groups - 1) / groups)
            times.append(np.where(legal, turn + sent * (not pipeline.record.hides_sends), np.inf))
            fills.append(np.where(np.isfinite(times[-1]), fill, np.inf))
        level = [counts.index(count) for count in held]
        cut = cut_evenly(np.stack(times), np.stack(fills), level, later=float(m), cutoff=cutoff_s)
        if cut is None:
            return None
        chosen_of = [chosen_levels[k] for k in level]
        return cut.objective_s, self._stages(combination, chosen_of, cut.cuts)

    def _solve_shared(
        self, combination: Combination, cutoff_s: float, less_bytes: float
    ) -> tuple[float, list[StageDraft]] | None:
        """`solve` where devices have several stages."""
        layouts = self._layouts(combination, less_bytes)
        if not len(layouts.starts):
            return None
        cuts = layouts.starts[0]
        objective_s = layouts.objective_s(cuts)
        if objective_s >= cutoff_s:
            return None
        return objective_s, self._stages(combination, layouts.chosen(cuts), cuts.tolist())

    def moved(
        self, combination: Combination, draft: PlanDraft, limit_s: float, less_bytes: float
    ) -> list[StageDraft] | None:
        """The stages of a draft after moves of blocks that take its step below a limit, or None."""
        if draft.step_time_s * (1 - GAIN) >= limit_s:
            return None
        layouts = self._layouts(combination, less_bytes)
        limit_s = min(limit_s, draft.step_time_s * (1 - WORTH))
        if layouts.busiest_s(layouts.starts[0]) >= limit_s:
            return None
        stages = draft.stages[: len(layouts.starts[0]) - 1]
        current = np.searchsorted(self.cuts, [0, *(stage.stop for stage in stages)])
        sends = {edge: sent.seconds for edge, sent in draft.evaluation.transfers.items()}
        cuts, part = layouts.improved(current, sends)
        if draft.step_time_s * part >= limit_s:
            return None
        return self._stages(combination, layouts.chosen(cuts), cuts.tolist())

    def _layouts(self, combination: Combination, less_bytes: float) -> Layouts:
        setup, room = combination.setup, self.space.room_bytes - less_bytes
        levels, legal = self.levels(setup, combination.pipeline), self.legal & self.allowed(setup)
        return Layouts.of(combination, levels, legal, self.sent(setup), room)

    def _stages(
        self, combination: Combination, chosen: Sequence[ChosenLevel], cuts: Sequence[int]
    ) -> list[StageDraft]:
        """The stages between cuts on their levels, those of a second copy behind the first's."""
        levels = self.levels(combination.setup, combination.pipeline)
        held = zip(held_at_peak(combination.pipeline), chosen, strict=True)
        spans = cycle(pairwise(int(self.cuts[at]) for at in cuts))
        return [
            StageDraft(
                start=start,
                stop=stop,
                setup=combination.setup,
                levels=levels,
                chosen=level,
                segment_size=given_segments(self.space.restrictions, start, stop),
                in_flight=in_flight,
            )
            for (in_flight, level), (start, stop) in zip(held, spans, strict=False)
        ]

    def in_turn_s(self, combination: Combination, cut: Sequence[StageDraft]) -> float:
        """Seconds that a cut takes at least, as micro-batches wait for those in flight."""
        setup, pipeline = combination.setup, combination.pipeline
        stages = cut[: pipeline.num_stages // pipeline.record.copies]
        hops = zip(stages, self.programs.coster.hops(setup.mesh, pipeline), strict=False)
        sends = [float(setup.chain.sends_s(hop)[stage.stop]) for stage, hop in hops if hop]
        through_s = sum(c.forward_s + c.backward_s - c.weight_s for c in (s.costs for s in stages))
        one_s = (through_s + 2 * sum(sends)) * (not setup.paired)
        return in_turn_s(pipeline, one_s, max(sends, default=0.0))

    def spare_bytes(self, combination: Combination, cut: Sequence[StageDraft]) -> float:
        """Bytes that the fullest device of a cut has left as the levels of its stages have it."""
        peaks = device_peaks([stage.costs for stage in cut], combination.pipeline)
        return max(0.0, self.space.room_bytes - max(peak.nbytes for peak in peaks))

    def sends_s(self, combination: Combination) -> float:
        """Seconds of sends that the objective of a cut counts at most."""
        sent = float(self.sent(combination.setup).max())
        m, groups, per_device = combination.pipeline.shape
        turns = 0 if combination.pipeline.record.hides_sends else m
        return 0.0 if groups == 1 else (turns * per_device + groups - 1) * sent

    def allowed(self, setup: StageSetup) -> np.ndarray:
        """(C, C): stages whose blocks' overrides allow the setup."""
        over, mesh = self.space.restrictions, setup.mesh
        mask = np.ones((len(self._classes) + 1,) * 2, dtype=bool)
        chosen = {axis: getattr(mesh, axis) for axis in MESH}
        if mesh.holders > 1:
            chosen |= taken(setup.sharing, mesh.holders)
        for name, value in chosen.items():
            if any(asked is not None for asked in getattr(over, name)):
                mask &= over.stage_mask(name, value)
        return self.at_cuts(mask)

    def sent(self, setup: StageSetup) -> np.ndarray:
        """(C, C): seconds that a stage sends and receives per micro-batch and direction."""
        seconds = setup.chain.send_s[self.cuts]
        return np.asarray(seconds[:, None] + seconds[None, :])


def slowest_s(least: np.ndarray, classes: Sequence[str], groups: int) -> float:
    """Lower bound on the seconds per micro-batch of the slowest of so many device groups.

    `least` are the seconds of each block (K,), `classes` their classes. Some group computes no less
    than an equal share; and as blocks stay whole, of n equal ones no less than ⌈n/groups⌉.
    """
    counts = Counter(classes)
    blocks_s = (
        -(-counts[kind] // groups) * float(seconds)
        for kind, seconds in zip(classes, least, strict=True)
    )
    return max(float(least.sum()) / groups, *blocks_s)


def _usable(waiting: Waiting, relief: Relief) -> list[Pipeline]:
    """Pipelines that may have a relief: only one copy of the model may lie in host memory."""
    return [p for p in waiting.offered if not relief.most or p.record.copies == 1]


def _alike_setting(setup: StageSetup, groups: int) -> tuple[Any, ...]:
    """Key of estimates in one setting."""
    mesh, batch = setup.chain.setting.mesh, setup.chain.setting.batch
    return mesh, setup.sharing, setup.stepping, batch.microbatches > 1, groups


def _alike(chain: Chain, other: Chain) -> bool:
    """Whether two chains of one setting cost the same everywhere: they decide the same."""
    return all(np.array_equal(a, b) for a, b in zip(chain.costs, other.costs, strict=True))


# --- memory floor ---------------------------------------------------------------------------------

# Least memory of a plan on a mesh, known before its blocks are priced.
#
# All blocks recomputed by the policy that keeps least, with one micro-batch in flight, all of it
# split by the tensor axis. Saved bytes grow linearly with the rows of a micro-batch, and what a
# backward holds besides is the maximum of linear functions, hence convex: extrapolated from 1 and 2
# rows, both are no more than they will be. Meshes on which this doesn't fit are not priced.


SLACK = 0.9  # of the extrapolated bytes: other states than the typical ones may need less
SMALL_ROWS = (1, 2)


@dataclass
class MemoryFloor:
    """Whether a mesh may hold a plan at all."""

    space: Space
    programs: BlockPrograms
    # by `_reference`: blocks of each kind, and the sums of one for each of SMALL_ROWS
    _small: Memo[Mesh, tuple[Floats, tuple[Sums, ...]]] = field(default_factory=Memo)

    @cached_property
    def _trained(self) -> int:
        return self.space.graph.num_trained()

    @cached_property
    def _moments(self) -> float:
        return mean_moments(self.space.problem)

    def allows(self, mesh: Mesh, m: int, groups: int) -> bool:
        """Whether m micro-batches of the model may fit on such a mesh for each device group."""
        if not self._states_fit(mesh, m, groups):
            return False
        counts, kinds = self._extrapolated(mesh, m)
        return not len(counts) or any(
            not overfull(float(held @ counts), passing, self._room, groups)
            for held, passing in self._needs(
                mesh, m, kinds, self.space.restrictions.policies[-1], groups
            )
        )

    def allows_some(self, mesh: Mesh, m: int) -> bool:
        """Whether m micro-batches of some block may fit on a mesh."""
        counts, kinds = self._extrapolated(mesh, m)
        return not len(counts) or any(
            bool(fits(held + passing, self._room).any())
            for policy in self.space.restrictions.policies
            for held, passing in self._needs(mesh, m, kinds, policy)
        )

    @property
    def _room(self) -> float:
        return self.space.room_bytes / SLACK

    def _stepping(self, m: int, groups: int) -> Stepping:
        """The way of stepping an optimizer that may take least."""
        alone = m * groups == 1 and "in_backward" in self.space.restrictions.steppings
        return "in_backward" if alone else "at_end"

    def _states_fit(self, mesh: Mesh, m: int, groups: int) -> bool:
        """Whether the model's states may fit, divided among all axes; gradients that are stepped in
        the backward aside."""
        problem, kept = self.space.problem, self._stepping(m, groups) == "at_end"
        part = self._trained / (mesh.tp * mesh.ep * groups)
        states = (
            model_states(
                part,
                weight_bytes=problem.weight_bytes,
                sharing=sharing,
                dp=sharing.among(mesh.holders),
                optimizer=problem.stepped,
                target=problem.target,
                away=(self.space.most_away.states,) * 2,
                moments=(
                    part * self._moments / (mesh.holders if problem.stepped.matrices else 1),
                    part
                    * self._moments
                    / (mesh.holders if problem.stepped.matrices else sharing.among(mesh.holders)),
                ),
            )
            for sharing in self.space.zeros(mesh)
        )
        bytes_of = (float(s.weights + s.optimizer + kept * s.gradients) for s in states)
        there = self.space.most_away.weights * part * problem.weight_bytes
        return any(fits(needed - there, self.space.room_bytes) for needed in bytes_of)

    def _needs(
        self, mesh: Mesh, m: int, kinds: Sums, policy: str, groups: int = 2
    ) -> list[tuple[Floats, Floats]]:
        """Under each ZeRO stage the bytes that a block of each kind holds, and needs in passing."""
        batch, stepping = self.space.batch(mesh, m), self._stepping(m, groups)
        setting = self.programs.coster.setting(mesh, batch, stepping=stepping)
        ranks = _reference(mesh).devices
        among, frozen = kinds.shard_parameters * ranks, kinds.frozen_shard_bytes * ranks  # on one
        moments = kinds.shard_moments * ranks
        if setting.optimizer.matrices:  # whole matrices lie on one rank each
            kinds.moments = moments / mesh.holders
        host, needs = self.space.most_away, []
        for sharing in self.space.zeros(mesh):
            kinds.shard_parameters = among / sharing.among(mesh.holders)
            kinds.shard_moments = moments / sharing.among(mesh.holders)
            if setting.optimizer.matrices:
                kinds.shard_moments = kinds.moments
            kinds.frozen_shard_bytes = frozen / sharing.among(mesh.holders)
            parts = replace(host, weights=host.weights * (not sharing.gathers))
            shared = replace(setting, sharing=sharing, host=parts)
            costs = stage_costs(kinds.without_maxima(), shared, policy)  # a stage has one buffer
            held = costs.kept_bytes + costs.activation_bytes
            needs.append((held, stage_costs(kinds, shared, policy).passing_bytes))
        return needs

    def _extrapolated(self, mesh: Mesh, m: int) -> tuple[Floats, Sums]:
        """Blocks of each kind, and the sums of one with the rows of m micro-batches; none where
        rows are few, segments may keep less, or shardings that the user decided may need a tensor
        axis."""
        rows = self.space.global_batch_size / m / mesh.dp
        free = any(relief.segmented for relief in self.space.reliefs)
        if (
            rows <= SMALL_ROWS[-1]
            or may_segment(self.space.restrictions, free=free)
            or self.programs.entries
        ):
            return np.zeros(0), Sums.zeros(0)
        reference = _reference(mesh)
        counts, (low, high) = self._small.of(reference, partial(self._few_rows, reference))
        steps = (rows - SMALL_ROWS[0]) / (SMALL_ROWS[1] - SMALL_ROWS[0])
        array = np.maximum(low.array + steps * (high.array - low.array), 0.0)
        return counts, Sums(array / mesh.tp)

    def _few_rows(self, mesh: Mesh) -> tuple[Floats, tuple[Sums, ...]]:
        """Blocks of each kind, and the sums of one for each of SMALL_ROWS."""
        coster, forced = self.programs.coster, self.space.restrictions.recompute
        settings = [coster.setting(mesh, Batch(rows=n, microbatches=2)) for n in SMALL_ROWS]
        chains = [self.programs.chain(setting, forced=forced) for setting in settings]
        kinds = [chain.kinds_typical() for chain in chains]
        none = Sums.zeros(0).array
        return np.array([float(kind.count) for kind in kinds[0]]), tuple(
            Sums(np.concatenate([none, *(kind.sums.array[None] for kind in few)])) for few in kinds
        )


def overfull(load: float, passing: Floats, room: float, groups: int) -> bool:
    """Whether so many device groups can't hold `load` bytes, wherever the blocks lie: beside all of
    a group's load, its last block needs what some kind is `passing`, that of the last group what
    the last kind is."""
    most = (groups - 1) * max(room - float(passing.min()), 0.0)
    return load > most + max(room - float(passing[-1]), 0.0)


def _reference(mesh: Mesh) -> Mesh:
    """The smallest mesh without a tensor axis that splits sequences and experts alike."""
    return replace(mesh.alone, tp=1, spread=1)
