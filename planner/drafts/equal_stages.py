"""Plans whose stages all have one mesh, ZeRO stage and placement: what experts choose from.

Every combination is estimated from the whole model's sums, divided by the number of stages; the
promising ones are cut into stages exactly (`planner.inter_op.equal_meshes`), each stage with as
little recompute as its place in the schedule allows (`planner.stages.recompute_levels`). How long
a pipeline takes to fill and what no plan undercuts is the schedule's (`costmodel.schedules.table`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.mesh import Batch, HostParts, Mesh
from meshwright.costmodel.operators import Setting
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
from meshwright.planner.drafts.memory_floor import MemoryFloor, overfull
from meshwright.planner.drafts.reliefs import Relief
from meshwright.planner.drafts.segments import given_segments
from meshwright.planner.drafts.space import Space
from meshwright.planner.drafts.transports import transports
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
    """A combination, where it may fit; the seconds of its step without recompute, however full
    devices are, and those that it takes at least; whether it `waits` for a relief, as it runs
    blocks again or is `tight`."""

    one: Combination | None
    unhindered_s: float
    bound_s: float
    waits: bool
    tight: bool


@dataclass(slots=True)
class EqualStages:
    """Estimates, bounds and cuts of all plans with equal meshes."""

    space: Space
    programs: BlockPrograms
    # choices of a mesh and device groups, by their numbers of micro-batches
    _placed: dict[tuple[Mesh, int], dict[int, MeshChoice]] = field(default_factory=dict)
    _combinations: dict[MeshChoice, tuple[Combination, ...]] = field(default_factory=dict)
    _waiting: dict[MeshChoice, tuple[Waiting, ...]] = field(default_factory=dict)
    _in_setting: dict[Any, list[Waiting]] = field(default_factory=dict)  # by `_alike_setting`
    _relieved: dict[int, list[Combination]] = field(default_factory=dict)  # by who waited
    _works: dict[tuple[Mesh, int, int], tuple[float, float]] = field(default_factory=dict)
    cuts: np.ndarray = field(init=False)
    classes: list[str] = field(init=False)
    parameters: int = field(init=False)
    floor: MemoryFloor = field(init=False)
    legal: np.ndarray = field(init=False)
    # by chain, sharing, relief, whether validated, policies
    _levels: dict[tuple[Any, ...], RecomputeLevels] = field(default_factory=dict)
    _tried: dict[int, list[int]] = field(default_factory=dict)  # by data-parallel degree

    def __post_init__(self) -> None:
        self.cuts = np.array(self.programs.cut_at)
        self.parameters = self.space.graph.num_parameters()
        self.floor = MemoryFloor(self.space, self.programs)
        self.classes = [block.class_id for block in self.space.graph.blocks]
        self.legal = self.at_cuts(self.space.legal_stages())

    def at_cuts(self, stages: np.ndarray) -> np.ndarray:
        """(C, C) of (K+1, K+1): stages between positions that may be cut."""
        chosen: np.ndarray = stages[np.ix_(self.cuts, self.cuts)]
        return chosen

    # --- setups ---

    def setups(self, mesh: Mesh, m: int, relief: Relief | None = None) -> Iterator[StageSetup]:
        """A mesh in every mode that may pay, with every ZeRO stage it may have, with what the user
        decided to give up for memory, or a `relief`."""
        relief = relief or self.space.reliefs[0]
        validated = bool(self.space.restrictions.validated)
        for transport, ways in transports(self.space, mesh).items():
            fast: Chain | None = None
            for mode in MODES if mesh.tp > 1 else MODES[:1]:
                chain = self.chain(mesh, m, transport, mode)
                if fast is not None and _alike(chain, fast):
                    continue
                fast = fast or chain
                for sharing in ways:
                    yield StageSetup(
                        mesh=mesh, sharing=sharing, chain=chain, relief=relief, validated=validated
                    )

    def _setting(self, mesh: Mesh, m: int, sharing: Sharing = UNSHARED) -> Setting:
        rows = self.space.global_batch_size / m / mesh.dp
        return self.programs.coster.setting(mesh, Batch(rows=rows, microbatches=m), sharing)

    def least(self, mesh: Mesh, m: int) -> np.ndarray:
        """(K,): no more than each block's seconds per micro-batch; inf where it can't run."""
        return self.programs.least_of_blocks(self._setting(mesh, m))

    def chain(self, mesh: Mesh, m: int, sharing: Sharing, mode: str) -> Chain:
        """All stages on a mesh."""
        setting = self._setting(mesh, m, sharing)
        return self.programs.chain(setting, mode, self.space.restrictions.recompute)

    # --- combinations ---

    def mesh_choices(self, m: int) -> Iterator[MeshChoice]:
        """All meshes that try m micro-batches, with bounds that need no chain."""
        total = self.space.cluster.num_devices
        for groups in self.space.stage_counts():
            for mesh in self.space.meshes(total // groups, m):
                if mesh.dp not in self._tried:
                    self._tried[mesh.dp] = self.space.tried_counts(mesh.dp)
                if m in self._tried[mesh.dp]:
                    yield from self.placed(mesh, m, groups)

    def placed(self, mesh: Mesh, m: int, groups: int) -> Iterator[MeshChoice]:
        """A mesh in all its placements, where m micro-batches can run on it and may fit."""
        if not self.floor.allows(mesh, m, groups):
            return
        work = self._work(mesh, m, groups)
        offered = self.space.schedules(groups, m)
        bounds = [own.record.bound_s(*work, m, groups) for own in offered]
        if bounds and np.isfinite(min(bounds)):
            for own in self.space.placements(mesh, groups):
                choice = MeshChoice(
                    mesh=own, num_microbatches=m, groups=groups, bound_s=min(bounds)
                )
                self._placed.setdefault((own, groups), {})[m] = choice
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
            left = [c for c in near if c != choice and c not in self._combinations]
            self._estimate([choice, *left])
        return self._combinations[choice]

    def _estimate(self, choices: Sequence[MeshChoice]) -> None:
        """Estimate all combinations of choices of one mesh."""
        setups = [
            (choice, *own)
            for choice in choices
            for setup in self.setups(choice.mesh, choice.num_microbatches)
            for own in self._scheduled(setup, choice)
        ]
        found = iter(self._estimated([(setup, one) for _, setup, own in setups for one in own]))
        self._combinations |= dict.fromkeys(choices, ())
        self._waiting |= dict.fromkeys(choices, ())
        for choice, setup, offered in setups:
            own = [next(found) for _ in offered]
            self._combinations[choice] += tuple(each.one for each in own if each.one)
            wait = [k for k, each in enumerate(own) if each.waits]
            if wait and len(self.space.reliefs) > 1:
                left = Waiting(
                    setup=setup,
                    offered=tuple(offered[k] for k in wait),
                    estimate_s=min(own[k].unhindered_s for k in wait),
                    bound_s=min(own[k].bound_s for k in wait),
                    tight=any(own[k].tight for k in wait),
                )
                self._waiting[choice] += (left,)
                self._in_setting.setdefault(_alike_setting(setup, choice.groups), []).append(left)

    def _scheduled(
        self, setup: StageSetup, choice: MeshChoice
    ) -> Iterator[tuple[StageSetup, list[Pipeline]]]:
        """A setup, also with steps that are validated afterwards, with the pipelines it may have:
        then those whose devices begin one after the other."""
        offered = self.space.schedules(choice.groups, choice.num_microbatches, setup.sharing)
        yield setup, offered
        if self.space.may_validate and not setup.sharing.gathers:
            later = [own for own in offered if own.record.staggered and own.num_devices > 1]
            yield replace(setup, validated=True), later

    def _estimated(self, offered: Sequence[tuple[StageSetup, Pipeline]]) -> list[_Estimate]:
        """Each of these, on as many device groups, estimated; together those in one setting, but
        for the rows of a micro-batch, with the same recompute policies."""
        groups = dict[Any, list[int]]()
        for k, (setup, one) in enumerate(offered):
            alike = _alike_setting(setup, one.num_devices), setup.relief, self.policies(setup, one)
            groups.setdefault(alike, []).append(k)
        found = dict[int, _Estimate]()
        for (_, _, policies), here in groups.items():
            own = self._estimated_alike([offered[k] for k in here], policies)
            found |= zip(here, own, strict=True)
        return [found[k] for k in range(len(offered))]

    def _estimated_alike(
        self, offered: Sequence[tuple[StageSetup, Pipeline]], policies: Sequence[str]
    ) -> list[_Estimate]:
        """The same in one setting: from the sums of the whole model and `_work`."""
        setups, pipelines = [setup for setup, _ in offered], [own for _, own in offered]
        first, groups = setups[0], pipelines[0].num_devices
        each = np.array([own.each for own in pipelines])
        # stages of one copy of the model per device group
        own_each = np.array([own.each / own.record.copies for own in pipelines])
        wholes = [s.chain.whole() if groups == 1 else s.chain.typical() for s in setups]
        parts, blocks = Sums.shared_out(wholes, groups * own_each), len(self.classes) / groups
        levels = recompute_levels(
            parts, first.setting, policies, blocks / own_each, first.relief.sends
        )
        held = [held_at_peak(own) for own in pipelines]
        average = InFlight(*np.array([np.array(own).mean(axis=0) for own in held]).T)
        chosen = levels.choose(average, self.room, per_device=each)
        costs, over = levels.everywhere(chosen), np.zeros(len(offered), dtype=bool)
        if not chosen.fits.all():  # on average; a first stage with fewer blocks may fit
            costs = of_rows(np.where(chosen.fits, as_rows(costs), as_rows(levels.costs[-1])))
            least = first.sending(levels.sent[-1])
            over = self._overfull(least, levels.policies[-1], parts, offered, held)
        repeats = over | ~chosen.fits | (chosen.level > 0) | (chosen.fraction > 0)
        unhindered: Iterable[float] = repeat(0.0)
        if first.relief == self.space.reliefs[0]:  # else it is one
            unhindered = self._steps_s(offered, levels.costs[0])
        estimates = zip(self._steps_s(offered, costs), unhindered, strict=False)
        found = []
        for k, (expected_s, unhindered_s) in enumerate(estimates):
            setup, pipeline = offered[k]
            tight = not chosen.fits[k]
            work = self._work(setup.mesh, pipeline.num_microbatches, groups)
            bound_s = pipeline.record.bound_s(*work, pipeline.num_microbatches, groups)
            one = Combination(
                setup=setup,
                pipeline=pipeline,
                estimate_s=expected_s * (TIGHT if tight else 1.0),
                bound_s=bound_s,
                tight=tight,
                repeats=bool(repeats[k]),
            )
            found.append(
                _Estimate(
                    one=None if over[k] else one,
                    unhindered_s=unhindered_s,
                    bound_s=bound_s,
                    waits=bool(repeats[k]),
                    tight=bool(over[k] or tight),
                )
            )
        return found

    def _steps_s(
        self, offered: Sequence[tuple[StageSetup, Pipeline]], costs: StageCosts[Floats]
    ) -> Iterator[float]:
        """Seconds of steps whose stages have such costs, an entry for each pipeline."""
        once = costs.reduce_s + costs.optimizer_s
        columns = costs.forward_s, costs.backward_s, costs.weight_s, once
        seconds = zip(*(own.tolist() for own in columns), strict=True)
        for (setup, own), (forward, backward, weight, after) in zip(offered, seconds, strict=True):
            n, groups, each = own.num_microbatches, own.num_devices, own.each / own.record.copies
            work, sent = self._work(setup.mesh, n, groups), 2 * setup.chain.typical_send_s
            uneven = work[1] * groups / work[0] if work[0] else 1.0  # unknown when time is over
            exposed = 0.0 if own.record.hides_sends else sent * (1 - 1 / own.num_stages)
            fill = float(own.record.fill_s(forward, backward, weight, own.shape))
            fill = max(0.0, fill - forward * (setup.validated and own.record.staggered))
            turn = forward + backward + after / n
            even = n * each * (turn + exposed) * uneven + (groups - 1) * fill
            stages = groups * each
            one_s = stages * (forward + backward - weight) + (stages - 1) * sent * (groups > 1)
            yield max(even, in_turn_s(own, one_s * (not setup.paired)))

    def _overfull(
        self,
        least: StageSetup,
        policy: str,
        parts: Sums,
        offered: Sequence[tuple[StageSetup, Pipeline]],
        held: Sequence[Sequence[InFlight]],
    ) -> NDArray[np.bool_]:
        """Whether an even share of the model, `parts`, can't fit even under the policy that keeps
        least, in each pipeline."""
        if segment_policy(policy)[1] > 1:  # passing is the most, not least
            return np.zeros(len(offered), dtype=bool)
        groups, mesh = offered[0][1].num_devices, least.mesh
        kinds = {id(setup): setup for setup, _ in offered}
        of_kinds = {key: self._kinds(setup, groups).array for key, setup in kinds.items()}
        # of buffers not all the most
        rows = np.concatenate([parts.without_maxima().array, *of_kinds.values()])
        costs, count = stage_costs(Sums(rows), least.setting, policy), len(offered)
        ends = np.cumsum([count, *map(len, of_kinds.values())])
        where = {key: slice(*own) for key, own in zip(of_kinds, pairwise(ends), strict=True)}
        states, sure = costs.kept_bytes[:count], 1 - ROUNDING
        each = np.array([own.each for _, own in offered])
        if mesh.tp > 1 and groups > 1:  # as blocks prefer; those of a stage may split more
            copies = np.array([own.record.copies for _, own in offered])
            split = self.parameters / (mesh.tp * mesh.ep * groups * each / copies)
            states = states * np.minimum(1.0, split / np.maximum(costs.parameters[:count], 1.0))
            sure = SPLIT_MORE
        several = offered[0][1].num_microbatches > 1
        in_flight = np.array([min(h.active if several else h.first for h in own) for own in held])
        load = groups * each * (states + in_flight * costs.activation_bytes[:count])
        found = []
        for k, (setup, _) in enumerate(offered):
            passing = costs.half_bytes if held[k][0].split else costs.passing_bytes
            own = passing[where[id(setup)]]
            found.append(overfull(float(load[k]), own, self.room / sure, groups))
        return np.array(found)

    def waiting(self, choice: MeshChoice) -> tuple[Waiting, ...]:
        """Combinations on a mesh that repeat blocks or don't fit, and may be relieved."""
        self.combinations(choice)
        return self._waiting[choice]

    def relieved(self, own: Waiting) -> Sequence[Combination]:
        """Combinations that wait, with each relief that they may have, where that may fit; none
        that gives up more than another with which nothing runs again. Those that wait in the same
        setting and promise nearly as much are relieved with them."""
        if id(own) not in self._relieved:
            alike = self._in_setting.get(_alike_setting(own.setup, own.offered[0].num_devices), [])
            near = [w for w in alike if own.estimate_s <= w.estimate_s < AHEAD * own.estimate_s]
            left = [w for w in near if w is not own and id(w) not in self._relieved]
            self._relieve([own, *left])
        return self._relieved[id(own)]

    def _relieve(self, waiting: Sequence[Waiting]) -> None:
        enough = {id(own): list[HostParts]() for own in waiting}
        self._relieved |= {id(own): [] for own in waiting}
        for relief in self.space.reliefs[1:]:
            host = relief.most
            tried = [
                (own, self._relievable(own, relief))
                for own in waiting
                if (own.tight or not relief.segmented)
                and not (own.setup.validated and host)
                and not (own.setup.sharing.gathers and (host.weights or host.files))
                and not (host.states and own.setup.sharing.sent_otherwise)
                and (host.files or not any(map(host.exceeds, enough[id(own)])))
            ]
            found = iter(self._estimated([one for _, offered in tried for one in offered]))
            for own, offered in tried:
                ones = [each.one for each in (next(found) for _ in offered)]
                may = [one for one in ones if one]
                if len(may) == len(_usable(own, relief)) and not any(one.repeats for one in may):
                    enough[id(own)].append(host)
                self._relieved[id(own)] += may

    def _relievable(self, own: Waiting, relief: Relief) -> list[tuple[StageSetup, Pipeline]]:
        """Those that wait, with a relief."""
        left = _usable(own, relief)
        if relief.fewest:
            held = self._fewest_held(own, relief, left)
            return [
                (replace(own.setup, relief=Relief(host=host)), one)
                for one, host in zip(left, held, strict=True)
                if host != relief.host  # which is another relief
            ]
        if not relief.sends:
            setup = replace(own.setup, relief=relief)
            return [(setup, one) for one in left]
        sent = self._sendable(own, relief, left)
        setups = {
            sends: replace(own.setup, relief=replace(relief, sends=sends))
            for sends in dict.fromkeys(sent)
            if sends  # else it is another relief
        }
        return [(setups[part], one) for one, part in zip(left, sent, strict=True) if part]

    def _fewest_held(
        self, own: Waiting, relief: Relief, offered: Sequence[Pipeline]
    ) -> list[HostParts]:
        """What of a typical stage is in host memory where each pipeline takes least: all of its
        blocks run again by one policy, and as many states, or weights, as that lacks room for are
        there. Seconds and bytes are taken to be linear between `HELD_PARTS`."""
        setup, copies = own.setup, np.array([one.record.copies for one in offered])
        each = np.array([one.each for one in offered])
        policies = [p for p in self.policies(setup, offered[0]) if segment_policy(p)[1] == 1]
        if not policies:
            return [relief.host] * len(offered)
        groups, m = offered[0].num_devices, offered[0].num_microbatches
        whole = setup.chain.whole() if groups == 1 else setup.chain.typical()
        parts = Sums.shared_out([whole] * len(offered), groups * each / copies)
        held = [np.array(held_at_peak(one)).mean(axis=0) for one in offered]
        average, again = InFlight(*np.array(held).T), parts.recompute_by(policies)
        costs = [
            stage_costs(parts, replace(setup, relief=Relief(host=host)).setting, again)
            for host in map(relief.with_last, HELD_PARTS)
        ]
        seconds = np.array([own.amortised_s(m) for own in costs])
        free = np.array([self.room - used_bytes(own, average, each) for own in costs])
        some = (free >= 0).any(axis=0)
        high = np.where(some, (free >= 0).argmax(axis=0), len(costs) - 1)
        ends = np.stack([np.maximum(high - 1, 0), high])
        parts_of, (low_s, high_s), (lacks, has) = (
            np.array(HELD_PARTS)[ends],
            *(np.take_along_axis(own, ends, axis=0) for own in (seconds, free)),
        )
        more = np.clip(-lacks / np.maximum(has - lacks, 1.0), 0.0, 1.0)
        best = np.where(some, low_s + more * (high_s - low_s), np.inf).argmin(axis=0)
        held_part = parts_of[0] + more * (parts_of[1] - parts_of[0])
        best = held_part[best, np.arange(len(offered))]
        steps = np.ceil(best * HELD_STEPS - 1e-9)
        return [relief.with_last(float(step) / HELD_STEPS) for step in steps]

    def _sendable(self, own: Waiting, relief: Relief, offered: Sequence[Pipeline]) -> list[float]:
        """The part of the blocks of a typical stage, whole ones, whose activations the hosts hold
        beside what else a relief has there, in each pipeline."""
        host, typical = self.space.cluster.host, own.setup.chain.typical()
        if host is None:
            return [0.0] * len(offered)
        setting = replace(own.setup, relief=relief).sending(1.0).setting
        per_rank = host.room_bytes / self.space.cluster.devices_per_node
        costs: dict[str, StageCosts[float]] = {}  # by the first policy that may be
        found = []
        for pipeline in offered:
            policy = self.policies(own.setup, pipeline)[0]
            if policy not in costs:
                parts = typical.times(1 / pipeline.num_devices)
                costs[policy] = of_one(stage_costs(parts, setting, policy))
            held = held_at_peak(pipeline)
            active = sum(float(one.active) for one in held) / len(held)
            room = max(0.0, per_rank - costs[policy].host_bytes)
            part = room / max(costs[policy].away_bytes * active, 1.0)
            blocks = len(self.classes) / pipeline.num_stages
            found.append(math.floor(min(part, 1.0) * blocks) / blocks if part < 1 else 1.0)
        return found

    def policies(self, setup: StageSetup, pipeline: Pipeline) -> tuple[str, ...]:
        """The recompute policies that blocks of a setup may have in a pipeline."""
        return self.space.policies(pipeline.record, segmented=setup.relief.segmented)

    def _work(self, mesh: Mesh, m: int, groups: int) -> tuple[float, float]:
        """Least seconds per micro-batch of all stages and of the slowest device group."""
        key = mesh, m, groups
        if key not in self._works:
            least = self.least(mesh, m)
            work = float(least.sum()), slowest_s(least, self.classes, groups)
            if not work[0]:  # no time is left: it may be known later
                return work
            self._works[key] = work
        return self._works[key]

    def _kinds(self, setup: StageSetup, groups: int) -> Sums:
        """Sums of all blocks of each kind; on one device group of the whole model."""
        if groups == 1:
            return Sums(setup.chain.whole().array[None])
        kinds = setup.chain.kinds_typical()
        return Sums(np.stack([kind.sums.times(kind.count).array for kind in kinds]))

    @property
    def room(self) -> float:
        return self.space.room_bytes

    # --- cutting ---

    def levels(self, setup: StageSetup, pipeline: Pipeline) -> RecomputeLevels:
        """Every run of blocks (`Runs`) of a setup, with the policies that a pipeline allows."""
        policies = self.policies(setup, pipeline)
        key = setup.chain, setup.sharing, setup.relief, setup.validated, policies
        if key not in self._levels:
            runs = setup.chain.runs
            self._levels[key] = recompute_levels(
                runs.sums, setup.setting, policies, runs.blocks, setup.relief.sends
            )
        return self._levels[key]

    def forget(self) -> None:
        """Give memory back."""
        self._levels.clear()

    def solve(
        self, combination: Combination, cutoff_s: float, *, less_bytes: float = 0.0
    ) -> tuple[float, list[StageDraft]] | None:
        """The objective and the stages of a combination's best cut below a cutoff; None where there
        is none. The objective, m turns of the slowest device and what all but one device add to
        fill the pipeline, is the step of equal stages. `less_bytes` of each device are for what the
        levels don't know, messages first of all."""
        setup, pipeline = combination.setup, combination.pipeline
        if pipeline.each > 1:
            return self._solve_shared(combination, cutoff_s, less_bytes)
        m, groups, _ = pipeline.shape
        levels, held = self.levels(setup, pipeline), held_at_peak(pipeline)
        counts = sorted(set(held))
        chosen_levels = [levels.choose(h, self.room - less_bytes) for h in counts]
        runs = setup.chain.runs
        legal, sent = self.legal & self.allowed(setup), self.sent(setup)
        others = (groups - 1) / groups
        times, fills = [], []
        for chosen in chosen_levels:
            costs = levels.everywhere(chosen)
            turn = np.where(chosen.fits & np.isfinite(runs.seconds), costs.amortised_s(m), np.inf)
            fill = filling_s(pipeline, costs, validated=setup.validated)
            turn, fill = turn[runs.index], (fill[runs.index] + sent) * others
            times.append(np.where(legal, turn + sent * (not pipeline.record.hides_sends), np.inf))
            fills.append(np.where(np.isfinite(times[-1]), fill, np.inf))
        level = [counts.index(count) for count in held]
        found = cut_evenly(np.stack(times), np.stack(fills), level, later=float(m), cutoff=cutoff_s)
        if found is None:
            return None
        chosen_of = [chosen_levels[k] for k in level]
        return found.objective_s, self._stages(combination, chosen_of, found.cuts)

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
        """The stages of a combination's draft after moves of blocks between them that shorten its
        simulated step to less than a limit; None where none does, or it can hardly be."""
        if draft.step_time_s * (1 - GAIN) >= limit_s:
            return None
        layouts = self._layouts(combination, less_bytes)
        limit_s = min(limit_s, draft.step_time_s * (1 - WORTH))
        if layouts.busiest_s(layouts.starts[0]) >= limit_s:
            return None
        stages = draft.stages[: len(layouts.starts[0]) - 1]
        own = np.searchsorted(self.cuts, [0, *(stage.stop for stage in stages)])
        sends = {edge: sent.seconds for edge, sent in draft.evaluation.transfers.items()}
        cuts, part = layouts.improved(own, sends)
        if draft.step_time_s * part >= limit_s:
            return None
        return self._stages(combination, layouts.chosen(cuts), cuts.tolist())

    def _layouts(self, combination: Combination, less_bytes: float) -> Layouts:
        levels = self.levels(combination.setup, combination.pipeline)
        legal = self.legal & self.allowed(combination.setup)
        sent = self.sent(combination.setup)
        return Layouts.of(combination, levels, legal, sent, self.room - less_bytes)

    def _stages(
        self, combination: Combination, chosen: Sequence[ChosenLevel], cuts: Sequence[int]
    ) -> list[StageDraft]:
        """The stages between cuts on their levels, those of a second copy behind the first's."""
        stages, held = len(cuts) - 1, held_at_peak(combination.pipeline)
        levels = self.levels(combination.setup, combination.pipeline)
        ends = [int(self.cuts[at]) for at in cuts]
        return [
            StageDraft(
                start=ends[k % stages],
                stop=ends[k % stages + 1],
                setup=combination.setup,
                levels=levels,
                chosen=chosen[k],
                given=self.given(ends[k % stages], ends[k % stages + 1]),
                in_flight=held[k],
            )
            for k in range(len(held))
        ]

    def in_turn_s(self, combination: Combination, cut: Sequence[StageDraft]) -> float:
        """Seconds that a cut takes at least, as micro-batches wait for those in flight."""
        setup, pipeline = combination.setup, combination.pipeline
        own = cut[: pipeline.num_stages // pipeline.record.copies]
        costs = [stage.levels.at(stage.run, stage.chosen) for stage in own]
        places = pipeline.device_of
        sends = [
            setup.chain.send_s[stage.stop]
            for stage, here, there in zip(own, places, places[1 : len(own)], strict=False)
            if here != there
        ]
        through_s = sum(each.forward_s + each.backward_s - each.weight_s for each in costs)
        one_s = (through_s + 2 * float(sum(sends))) * (not setup.paired)
        return in_turn_s(pipeline, one_s)

    def spare_bytes(self, combination: Combination, cut: Sequence[StageDraft]) -> float:
        """Bytes that the fullest device of a cut has left as the levels of its stages have it."""
        peaks = device_peaks(
            [own.levels.at(own.run, own.chosen) for own in cut], combination.pipeline
        )
        return max(0.0, self.room - max(peak.nbytes for peak in peaks))

    def given(self, start: int, stop: int) -> int | None:
        """Blocks in a segment of a stage, where the user decided it."""
        return given_segments(self.space.restrictions, start, stop)

    def sends_s(self, combination: Combination) -> float:
        """Seconds of sends that the objective of a cut counts at most."""
        sent = float(self.sent(combination.setup).max())
        m, groups, each = combination.pipeline.shape
        turns = 0 if combination.pipeline.record.hides_sends else m
        return 0.0 if groups == 1 else (turns * each + groups - 1) * sent

    def allowed(self, setup: StageSetup) -> np.ndarray:
        """(C, C): stages whose blocks' overrides allow the setup."""
        over, mesh = self.space.restrictions, setup.mesh
        mask = np.ones((len(self.space.graph.blocks) + 1,) * 2, dtype=bool)
        chosen = {axis: getattr(mesh, axis) for axis in MESH}
        if mesh.holders > 1:
            chosen |= taken(setup.sharing, mesh.holders)
        for name, value in chosen.items():
            if any(own is not None for own in getattr(over, name)):
                mask &= over.stage_mask(name, value)
        return self.at_cuts(mask)

    def sent(self, setup: StageSetup) -> np.ndarray:
        """(C, C): seconds that a stage sends and receives per micro-batch and direction."""
        seconds = setup.chain.send_s[self.cuts]
        both: np.ndarray = seconds[:, None] + seconds[None, :]
        return both


def slowest_s(least: np.ndarray, classes: Sequence[str], groups: int) -> float:
    """Lower bound on the seconds per micro-batch of the slowest of so many device groups.

    `least` are the seconds of each block (K,), `classes` their classes. Some group computes no less
    than an equal share; and as blocks stay whole, of n equal ones no less than ⌈n/groups⌉.
    """
    counts = Counter(classes)
    whole = max(
        -(-counts[own] // groups) * float(seconds)
        for own, seconds in zip(classes, least, strict=True)
    )
    return max(float(least.sum()) / groups, whole)


def _usable(own: Waiting, relief: Relief) -> list[Pipeline]:
    """Pipelines of those that wait that may have a relief: in host memory lies one copy's."""
    return [one for one in own.offered if not relief.most or one.record.copies == 1]


def _alike_setting(setup: StageSetup, groups: int) -> tuple[Any, ...]:
    """What estimates in one setting have in common."""
    setting = setup.chain.setting
    several = setting.batch.microbatches > 1
    return setting.mesh, setup.sharing, setup.validated, several, groups


def _alike(chain: Chain, other: Chain) -> bool:
    """Whether two chains of one setting cost the same everywhere: they decide the same."""
    return all(np.array_equal(a, b) for a, b in zip(chain.costs, other.costs, strict=True))
