"""Plans whose stages all have one mesh, ZeRO stage and placement: what experts choose from.

Every combination is estimated from the whole model's sums, divided by the number of stages; the
promising ones are cut into stages exactly (`even_cut.py`), each stage with as little recompute as
its place in the schedule allows (`ladder.py`). `bounds.py` says what no such plan undercuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshwright.costmodel.blocks.stage import FIELDS, StageCosts, scaled
from meshwright.costmodel.operators.cost import Setting
from meshwright.costmodel.schedules.schedule import in_flight
from meshwright.planner.inter_op.equal_meshes import cut_evenly
from meshwright.planner.pricing.chain import Chain
from meshwright.planner.pricing.recompute_levels import Ladder, Share, ladder
from meshwright.planner.pricing.stage_costs import MODES, StageCoster
from meshwright.planner.search.bounds import chained_s, slowest_s
from meshwright.planner.search.space import Mesh, Space

FILLS_LESS = ("zb_v", "dualpipe_v", "zb_h2")
CHAINED = ("gpipe", "1f1b", "eager_1f1b")
TIGHT = 1.05  # estimates where an even cut does not fit, but another may


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a stage runs: its mesh, ZeRO stage, ranks that ZeRO divides among (0: all), and the chain
    that its costs come from."""

    mesh: Mesh
    zero: int
    dp_shard: int
    chain: Chain

    @property
    def setting(self) -> Setting:
        return replace(self.chain.setting, zero=self.zero)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A mesh for each of so many device groups, not priced yet; `bound_s` is no more than the step
    of any plan in it."""

    mesh: Mesh
    num_microbatches: int
    groups: int
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One combination: `estimate_s` of its step orders the search, `bound_s` is no more than the
    step of any plan in it."""

    way: Way
    num_microbatches: int
    schedule: str
    groups: int
    each: int
    estimate_s: float
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """A cut: blocks start..stop-1 of each stage, its way, ladder and the share recomputed."""

    start: int
    stop: int
    way: Way
    ladder: Ladder
    chosen: Share

    @property
    def run(self) -> int:
        """The stage's row in its ladder."""
        at = list(self.way.chain.at)
        return int(self.way.chain.runs.index[at.index(self.start), at.index(self.stop)])

    @property
    def policies(self) -> tuple[str, ...]:
        """The recompute policy of each block, the first ones recomputing most."""
        where, count = self.run, self.stop - self.start
        rung, more = int(self.chosen.rung[where]), round(float(self.chosen.share[where]) * count)
        names = self.ladder.policies
        free = [names[min(rung + (k < more), len(names) - 1)] for k in range(count)]
        return self.settled(free)

    def settled(self, free: Sequence[str]) -> tuple[str, ...]:
        """Policies with those that the user decided."""
        own = self.way.chain.forced[self.start : self.stop]
        return tuple(forced or policy for forced, policy in zip(own, free, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Even:
    """A way with `each` stages on a device group, all alike: rungs of one of them, its states at
    the least; seconds of both passes at the least, of all stages together and of the slowest device
    group."""

    each: int
    steps: Ladder
    states_bytes: float
    least_s: float
    slowest_s: float


@dataclass(slots=True)
class EqualStages:
    """Estimates, bounds and cuts of all plans with equal meshes."""

    space: Space
    coster: StageCoster
    _nodes: dict[Slot, tuple[Node, ...]] = field(default_factory=dict)
    cuts: np.ndarray = field(init=False)
    classes: list[str] = field(init=False)
    parameters: int = field(init=False)
    legal: np.ndarray = field(init=False)
    _ladders: dict[tuple[int, int, tuple[str, ...]], Ladder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cuts = np.array(self.coster.cut_at)
        self.parameters = self.space.graph.num_parameters()
        self.classes = [block.class_id for block in self.space.graph.blocks]
        self.legal = self.at_cuts(self.space.legal_stages())

    def at_cuts(self, stages: np.ndarray) -> np.ndarray:
        """(C, C) of (K+1, K+1): stages between positions that may be cut."""
        return stages[np.ix_(self.cuts, self.cuts)]

    # --- ways ---

    def ways(self, mesh: Mesh, m: int) -> Iterator[Way]:
        """A mesh in every mode that may pay, with every ZeRO stage it may have."""
        by_shard: dict[int, list[int]] = {}
        for zero, shard in self.space.zeros(mesh):
            by_shard.setdefault(shard, []).append(zero)
        for shard, zeros in by_shard.items():
            fast: Chain | None = None
            for mode in MODES if mesh.tp > 1 else MODES[:1]:
                chain = self.chain(mesh, m, shard, mode)
                if fast is not None and _alike(chain, fast):
                    continue
                fast = fast or chain
                yield from (Way(mesh=mesh, zero=z, dp_shard=shard, chain=chain) for z in zeros)

    def _setting(self, mesh: Mesh, m: int, shard: int = 0) -> Setting:
        return self.coster.setting(
            mesh,
            microbatches=m,
            dp_shard=shard,
            rows=self.space.global_batch_size / m / mesh.dp,
            spread=mesh.spread,
        )

    def least(self, mesh: Mesh, m: int) -> np.ndarray:
        """(K,): no more than each block's seconds per micro-batch; inf where it can't run."""
        return self.coster.least_of_blocks(self._setting(mesh, m))

    def chain(self, mesh: Mesh, m: int, shard: int, mode: str) -> Chain:
        """All stages on a mesh."""
        setting = self._setting(mesh, m, shard)
        return self.coster.chain(setting, mode, self.space.restrictions.recompute)

    # --- nodes ---

    def slots(self, m: int) -> Iterator[Slot]:
        """All meshes for m micro-batches, with bounds that need no chain."""
        total = self.space.cluster.num_devices
        for groups in self.space.stage_counts():
            for mesh in self.space.meshes(total // groups, m):
                least = self.least(mesh, m)
                work = float(least.sum()), slowest_s(least, self.classes, groups)
                offered = self.space.schedules(groups, m, 0)
                bounds = [_bound(*work, schedule, m, groups) for schedule, _ in offered]
                if bounds and np.isfinite(min(bounds)):
                    for placed in self.space.placements(mesh, groups):
                        yield Slot(
                            mesh=placed, num_microbatches=m, groups=groups, bound_s=min(bounds)
                        )

    def nodes(self, slot: Slot) -> tuple[Node, ...]:
        """All combinations on a mesh, estimated."""
        if slot not in self._nodes:
            m, groups = slot.num_microbatches, slot.groups
            found = []
            for way in self.ways(slot.mesh, m):
                even: dict[tuple[int, tuple[str, ...]], _Even] = {}
                for schedule, each in self.space.schedules(groups, m, way.zero):
                    key = each, self.space.policies(schedule)
                    if key not in even:
                        even[key] = self._even(slot, way, *key)
                    if even[key].states_bytes * each <= self.room:
                        found.append(self._node(slot, way, schedule, even[key]))
            self._nodes[slot] = tuple(found)
        return self._nodes[slot]

    def _even(self, slot: Slot, way: Way, each: int, policies: Sequence[str]) -> _Even:
        """The sums of the whole model shared out evenly among stages."""
        stages, least = slot.groups * each, self.least(slot.mesh, slot.num_microbatches)
        part = way.chain.whole() if stages == 1 else scaled(way.chain.typical(), 1 / stages)
        steps = ladder(part, way.setting, policies, np.array(len(least) / stages))
        leanest = steps.rungs[-1]
        states = float(leanest.static_bytes - leanest.passing_bytes)
        # in the states that its blocks prefer; a whole stage may have to split more of them
        mesh, whole = slot.mesh, float(part[FIELDS.index("parameters")])
        split = self.parameters / (mesh.tp * mesh.ep * stages)
        return _Even(
            each=each,
            steps=steps,
            least_s=float(least.sum()),
            slowest_s=slowest_s(least, self.classes, slot.groups),
            states_bytes=states * min(1.0, split / max(whole, 1.0)),
        )

    def _node(self, slot: Slot, way: Way, schedule: str, even: _Even) -> Node:
        """One combination, estimated from stages that are all alike."""
        m, groups, each, steps = slot.num_microbatches, slot.groups, even.each, even.steps
        stages = groups * each
        held = _held(schedule, 0, stages, m, groups)
        chosen = steps.share(held, self.room / each)
        tight = not chosen.fits  # on average; a first stage with fewer blocks may fit
        costs = steps.rungs[-1] if tight else steps.at((), chosen)
        uneven = even.slowest_s * groups / even.least_s
        turn = each * (costs.amortised_s(m) + self._sent(way, schedule, stages))
        estimate = m * turn * uneven + (groups - 1) * each * _fill(costs, schedule, m, groups)
        return Node(
            way=way,
            num_microbatches=m,
            schedule=schedule,
            groups=groups,
            each=each,
            estimate_s=estimate * (TIGHT if tight else 1.0),
            bound_s=_bound(even.least_s, even.slowest_s, schedule, m, groups),
        )

    def _sent(self, way: Way, schedule: str, stages: int) -> float:
        """Seconds that sends add to a stage's turn: 1F1B holds too few micro-batches to hide them
        (`costmodel/schedules/simulate.py`)."""
        if schedule != "1f1b":
            return 0.0
        return 2 * float(np.median(way.chain.send_s)) * (stages - 1) / stages

    @property
    def room(self) -> float:
        return self.space.cluster.device.usable_bytes

    # --- cutting ---

    def ladder(self, way: Way, schedule: str) -> Ladder:
        """Every run of blocks (`Runs`) under a way, with the policies that a schedule allows."""
        policies = self.space.policies(schedule)
        key = id(way.chain), way.zero, policies
        if key not in self._ladders:
            runs = way.chain.runs
            self._ladders[key] = ladder(runs.sums, way.setting, policies, runs.blocks)
        return self._ladders[key]

    def forget(self) -> None:
        """Give memory back."""
        self._ladders.clear()

    def solve(self, node: Node, cutoff_s: float) -> tuple[float, list[Drafted]] | None:
        """The objective and the stages of a node's best cut below a cutoff; None where there is
        none. The objective, m turns of the slowest stage and what all but one stage add to fill the
        pipeline, is the step of equal stages."""
        m, way, stages = node.num_microbatches, node.way, node.groups * node.each
        steps = self.ladder(way, node.schedule)
        held = [_held(node.schedule, k, stages, m, node.groups) for k in range(stages)]
        levels = sorted(set(held))
        shares = [steps.share(h, self.room / node.each) for h in levels]
        runs = way.chain.runs
        legal = self.legal & self.allowed(way)
        sent, index = self.sent(way), runs.index
        times, fills = [], []
        for chosen in shares:
            costs = steps.everywhere(chosen)
            turn = np.where(chosen.fits & np.isfinite(runs.seconds), costs.amortised_s(m), np.inf)
            filling = _fill(costs, node.schedule, m, node.groups)
            turn, filling = turn[index], (filling[index] + sent) * (stages - 1) / stages
            times.append(np.where(legal, turn + sent * (node.schedule == "1f1b"), np.inf))
            fills.append(np.where(np.isfinite(times[-1]), filling, np.inf))
        level = [levels.index(h) for h in held]
        found = cut_evenly(
            np.stack(times),
            np.stack(fills),
            np.array(level),
            later=float(m * node.each),
            cutoff=cutoff_s,
        )
        if found is None:
            return None
        return found.objective_s, [
            Drafted(
                start=int(self.cuts[found.cuts[k]]), stop=int(self.cuts[found.cuts[k + 1]]),
                way=way, ladder=steps, chosen=shares[level[k]],
            )
            for k in range(stages)
        ]  # fmt: skip

    def allowed(self, way: Way) -> np.ndarray:
        over, mesh = self.space.restrictions, way.mesh
        mask = np.ones((len(self.space.graph.blocks) + 1,) * 2, dtype=bool)
        chosen = {
            "tp": mesh.tp, "dp": mesh.dp, "cp": mesh.cp, "ep": mesh.ep, "zero": way.zero,
            "dp_shard": way.dp_shard or mesh.dp * mesh.cp,
        }  # fmt: skip
        for name, value in chosen.items():
            if any(own is not None for own in getattr(over, name)):
                if name in ("zero", "dp_shard") and mesh.dp * mesh.cp == 1:
                    continue
                mask &= over.stage_mask(name, value)
        return self.at_cuts(mask)

    def sent(self, way: Way) -> np.ndarray:
        """(C, C): seconds that a stage sends and receives per micro-batch and direction."""
        seconds = way.chain.send_s[self.cuts]
        return seconds[:, None] + seconds[None, :]


def _bound(work: float, slowest: float, schedule: str, m: int, groups: int) -> float:
    """Seconds of a step at least, whatever the rest of the plan is: all groups' `work` per
    micro-batch, and that of the `slowest`."""
    if schedule not in CHAINED:
        return m * slowest
    return max(m * slowest, chained_s(work, m, groups))


def _held(schedule: str, stage: int, stages: int, m: int, groups: int) -> int:
    return in_flight(
        schedule, stage=stage, num_stages=stages, num_microbatches=m, num_devices=groups
    )


def _fill(costs: StageCosts, schedule: str, m: int, groups: int) -> np.ndarray:
    """What one stage adds to the time in which the pipeline fills and drains."""
    whole = costs.forward_s + costs.backward_s
    if schedule in FILLS_LESS:  # with enough micro-batches, not at all
        return whole * max(0.0, 1.0 - (m - 1) / max(1, 2 * groups - 2))
    if schedule == "zb_h1":
        return np.maximum(whole - 2 * costs.weight_s, 0.0)
    return whole


def _alike(chain: Chain, other: Chain) -> bool:
    """Whether two chains of one setting cost the same everywhere: they decide the same."""
    return all(np.array_equal(a, b) for a, b in zip(chain.costs, other.costs, strict=True))
