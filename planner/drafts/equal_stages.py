"""Plans whose stages all have one mesh, ZeRO stage and placement: what experts choose from.

Every combination is estimated from the whole model's sums, divided by the number of stages; the
promising ones are cut into stages exactly (`planner.inter_op.equal_meshes`), each stage with as
little recompute as its place in the schedule allows (`planner.stages.recompute_levels`). How long
a pipeline takes to fill and what no plan undercuts is the schedule's (`costmodel.schedules.table`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.blocks import segment_policy
from meshwright.costmodel.operators import UNSHARED, Batch, HostParts, Mesh, Setting, Sharing
from meshwright.costmodel.schedules import Pipeline
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

ROUNDING = 1e-9  # of sums that may fill a device to the last byte
SPLIT_MORE = 0.7  # of typical bytes, what a stage needs at least on a tensor axis
TIGHT = 1.05  # estimates where an even cut does not fit, but another may


@dataclass(slots=True)
class EqualStages:
    """Estimates, bounds and cuts of all plans with equal meshes."""

    space: Space
    programs: BlockPrograms
    _combinations: dict[MeshChoice, tuple[Combination, ...]] = field(default_factory=dict)
    _waiting: dict[MeshChoice, tuple[Waiting, ...]] = field(default_factory=dict)
    cuts: np.ndarray = field(init=False)
    classes: list[str] = field(init=False)
    parameters: int = field(init=False)
    floor: MemoryFloor = field(init=False)
    legal: np.ndarray = field(init=False)
    _levels: dict[tuple[Chain, Sharing, Relief, tuple[str, ...]], RecomputeLevels] = field(
        default_factory=dict
    )
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
                yield MeshChoice(mesh=own, num_microbatches=m, groups=groups, bound_s=min(bounds))

    def known(self, choice: MeshChoice) -> bool:
        """Whether the combinations of a mesh are priced."""
        return choice in self._combinations

    def combinations(self, choice: MeshChoice) -> tuple[Combination, ...]:
        """All combinations on a mesh that may fit, estimated."""
        if choice not in self._combinations:
            m, groups = choice.num_microbatches, choice.groups
            found, waiting = list[Combination](), list[Waiting]()
            for setup in self.setups(choice.mesh, m):
                offered = self.space.schedules(groups, m, setup.sharing)
                more, left = self._by_policies(setup, offered)
                found, waiting = found + more, waiting + left
            self._combinations[choice], self._waiting[choice] = tuple(found), tuple(waiting)
        return self._combinations[choice]

    def _by_policies(
        self, setup: StageSetup, offered: Sequence[Pipeline]
    ) -> tuple[list[Combination], list[Waiting]]:
        """The same for pipelines that may differ in their policies."""
        found, waiting = list[Combination](), list[Waiting]()
        for policies in dict.fromkeys(self.policies(setup, one) for one in offered):
            alike = [one for one in offered if self.policies(setup, one) == policies]
            more, left = self._estimated(setup, alike)
            found, waiting = found + more, waiting + left
        return found, waiting

    def _estimated(
        self, setup: StageSetup, offered: Sequence[Pipeline]
    ) -> tuple[list[Combination], list[Waiting]]:
        """Combinations of a setup with each of the pipelines `offered`, of as many micro-batches
        and device groups, all under the same recompute policies, of which some device may fit an
        even share: estimated from the sums of the whole model and `_work`. And those that may be
        relieved, together."""
        m, groups, _ = offered[0].shape
        policies, work = self.policies(setup, offered[0]), self._work(setup.mesh, m, groups)
        each = np.array([own.each for own in offered])
        # stages of one copy of the model per device group
        own_each = np.array([own.each / own.record.copies for own in offered])
        whole = setup.chain.whole() if groups == 1 else setup.chain.typical()
        levels = self._even_levels(whole, setup, policies, groups * own_each)
        held = [held_at_peak(own) for own in offered]
        average = InFlight(*np.array([np.array(own).mean(axis=0) for own in held]).T)
        chosen = levels.choose(average, self.room, per_device=each)
        over = [False] * len(offered)
        if not chosen.fits.all():  # on average; a first stage with fewer blocks may fit
            least = setup.sending(levels.sent[-1])
            over = self._overfull(least, levels.policies[-1], groups, each, own_each, held, m)
        uneven = work[1] * groups / work[0] if work[0] else 1.0  # unknown when time is over

        sent_s = 2 * float(np.median(setup.chain.send_s)) if groups > 1 else 0.0

        def estimates_s(costs: StageCosts[Floats], which: Sequence[int]) -> list[float]:
            """Of these pipelines."""
            seconds = costs.forward_s, costs.backward_s, costs.weight_s, costs.amortised_s(m)
            f, b, w, turn = (own[which].tolist() for own in seconds)
            found = []
            for j, k in enumerate(which):
                own, stages = offered[k], float(groups * own_each[k])
                sent = 0.0 if own.record.hides_sends else sent_s * (1 - 1 / own.num_stages)
                fill = float(own.record.fill_s(f[j], b[j], w[j], own.shape))
                even = m * float(own_each[k]) * (turn[j] + sent) * uneven + (groups - 1) * fill
                one_s = stages * (f[j] + b[j] - w[j]) + (stages - 1) * sent_s
                found.append(max(even, in_turn_s(own, one_s * (not setup.paired))))
            return found

        last = levels.costs[-1]
        costs = levels.everywhere(chosen)
        if not chosen.fits.all():
            costs = of_rows(np.where(chosen.fits, as_rows(costs), as_rows(last)))
        sure = [k for k in range(len(offered)) if not over[k]]
        estimate_s = dict(zip(sure, estimates_s(costs, sure), strict=True))
        found, waiting = list[Combination](), list[int]()
        for k, pipeline in enumerate(offered):
            tight = not chosen.fits[k]
            repeats = bool(over[k] or tight or chosen.level[k] or chosen.fraction[k])
            waiting += [k] * repeats
            if not over[k]:
                one = Combination(
                    setup=setup,
                    pipeline=pipeline,
                    estimate_s=estimate_s[k] * (TIGHT if tight else 1.0),
                    bound_s=pipeline.record.bound_s(*work, m, groups),
                    tight=bool(tight),
                    repeats=repeats,
                )
                found.append(one)
        if not waiting or setup.relief != self.space.reliefs[0] or len(self.space.reliefs) == 1:
            return found, []
        left = Waiting(
            setup=setup,
            offered=tuple(offered[k] for k in waiting),
            estimate_s=min(estimates_s(levels.costs[0], waiting)),
            bound_s=min(offered[k].record.bound_s(*work, m, groups) for k in waiting),
            tight=any(over[k] or not chosen.fits[k] for k in waiting),
        )
        return found, [left]

    def _overfull(
        self,
        setup: StageSetup,
        policy: str,
        groups: int,
        each: NDArray[Any],
        own_each: NDArray[Any],
        held: Sequence[Sequence[InFlight]],
        m: int,
    ) -> list[bool]:
        """Whether an even share of the model can't fit even under the policy that keeps least, for
        each number of stages on a device."""
        if segment_policy(policy)[1] > 1:  # passing is the most, not least
            return [False] * len(each)
        whole = setup.chain.whole() if groups == 1 else setup.chain.typical()
        parts = whole.without_maxima().shared_out(groups * own_each)  # of buffers not all the most
        kinds, count = self._kinds(setup, groups), len(each)
        costs = stage_costs(Sums(np.concatenate([parts.array, kinds.array])), setup.setting, policy)
        states, sure = costs.kept_bytes[:count], 1 - ROUNDING
        if setup.mesh.tp > 1 and groups > 1:  # as blocks prefer; those of a stage may split more
            split = self.parameters / (setup.mesh.tp * setup.mesh.ep * groups * own_each)
            states = states * np.minimum(1.0, split / np.maximum(costs.parameters[:count], 1.0))
            sure = SPLIT_MORE
        in_flight = np.array([min(h.active if m > 1 else h.first for h in own) for own in held])
        load = groups * each * (states + in_flight * costs.activation_bytes[:count])
        return [
            overfull(
                float(load[k]),
                (costs.half_bytes if own[0].split else costs.passing_bytes)[count:],
                self.room / sure,
                groups,
            )
            for k, own in enumerate(held)
        ]

    def waiting(self, choice: MeshChoice) -> tuple[Waiting, ...]:
        """Combinations on a mesh that repeat blocks or don't fit, and may be relieved."""
        self.combinations(choice)
        return self._waiting[choice]

    def relieved(self, own: Waiting) -> Iterator[Combination]:
        """Combinations that wait, with each relief that they may have, where that may fit; none
        that gives up more than another with which nothing runs again."""
        sharing = own.setup.sharing
        enough = list[HostParts]()
        for relief in self.space.reliefs[1:]:
            host = relief.most
            if relief.segmented and not own.tight:
                continue
            if (sharing.gathers and (host.weights or host.files)) or (
                host.states and sharing.sent_otherwise
            ):
                continue
            if not host.files and any(map(host.exceeds, enough)):
                continue
            left = [one for one in own.offered if not host or one.record.copies == 1]
            sent = self._sendable(own, relief, left) if relief.sends else [0.0] * len(left)
            found = list[Combination]()
            for sends in dict.fromkeys(sent):
                setup = replace(own.setup, relief=replace(relief, sends=sends))
                alike = [one for one, part in zip(left, sent, strict=True) if part == sends]
                if sends or not relief.sends:  # else it is another relief
                    found += self._by_policies(setup, alike)[0]
            if len(found) == len(left) and not any(one.repeats for one in found):
                enough.append(host)
            yield from found

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
        least = self.least(mesh, m)
        return float(least.sum()), slowest_s(least, self.classes, groups)

    def _kinds(self, setup: StageSetup, groups: int) -> Sums:
        """Sums of all blocks of each kind; on one device group of the whole model."""
        if groups == 1:
            return Sums(setup.chain.whole().array[None])
        kinds = setup.chain.kinds_typical()
        return Sums(np.stack([kind.sums.times(kind.count).array for kind in kinds]))

    def _even_levels(
        self, whole: Sums, setup: StageSetup, policies: Sequence[str], stages: NDArray[Any]
    ) -> RecomputeLevels:
        """A stage of the `whole` model shared out evenly among so many, an entry for each number of
        `stages`."""
        blocks = len(self.classes) / stages
        parts, sends = whole.shared_out(stages), setup.relief.sends
        return recompute_levels(parts, setup.setting, policies, blocks, sends)

    @property
    def room(self) -> float:
        return self.space.room_bytes

    # --- cutting ---

    def levels(self, setup: StageSetup, pipeline: Pipeline) -> RecomputeLevels:
        """Every run of blocks (`Runs`) of a setup, with the policies that a pipeline allows."""
        policies = self.policies(setup, pipeline)
        key = setup.chain, setup.sharing, setup.relief, policies
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


def _alike(chain: Chain, other: Chain) -> bool:
    """Whether two chains of one setting cost the same everywhere: they decide the same."""
    return all(np.array_equal(a, b) for a, b in zip(chain.costs, other.costs, strict=True))
