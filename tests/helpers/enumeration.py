"""Every plan of a small model on a small cluster, priced one by one: what a search is held against.

Nothing is solved here but the shardings of each stage, which are those of the block programs. Each
distinct stage is evaluated once, in the first plan that has it; a plan is then simulated from its
stages. Plans of which a device alone computes longer than the fastest plan takes are not simulated.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.schedules.table import stages_of_devices
from meshwright.costmodel.sharding.layouts import Assignment
from meshwright.costmodel.stages.stage import StageCosts
from meshwright.costmodel.target import Target
from meshwright.planner.drafts.candidates import place_stages
from meshwright.planner.plan.plan import Plan, StagePlan, recompute_of
from meshwright.planner.pricing.evaluate import Evaluation, evaluate, price_stages
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.planner.stages.chain import Chain
from meshwright.planner.stages.programs import MODES, BlockPrograms
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import Traced, linears, odd_cluster, problem_of

ZEROS = (0, 1, 2, 3)
# hides nothing, so that no axis is free: the instances ask for plans of every kind
SERIAL = Target(name="serial", counter_dropout=True)
POLICIES = ("none", "selective", "full")
PLAIN = ("1f1b", "gpipe")  # schedules that stages on different meshes may have
# (schedule, stages on each device group) that stages of one mesh and ZeRO stage may have besides
EQUAL = (("zb_h1", 1), ("eager_1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2))
SPLIT = ("zb_h1", "zb_v")  # a backward in two parts, which ZeRO-2 and 3 rule out


def instance(seed: int) -> tuple[Traced, Cluster, int, random.Random]:
    """Two or three linear layers and their loss on two to four devices whose rates differ by orders
    of magnitude, in one node or two."""
    rng = random.Random(seed)
    devices, batch = rng.choice([2, 3, 4]), rng.choice([2, 4, 6])
    layers = rng.choice([2, 3] if devices < 4 else [2, 2, 3])
    of = linears(rng.choice([32, 128, 512]), layers, batch, rng.choice([None, 16, 64]))
    on = odd_cluster(seed, devices)
    if devices == 4 and rng.random() < 0.5:
        far = dataclasses.replace(on.inter_link, bandwidth=on.intra_link.bandwidth / 4)
        on = dataclasses.replace(on, num_nodes=2, devices_per_node=2, inter_link=far)
    return of, on, batch, rng


def limited(on: Cluster, memory_bytes: float) -> Cluster:
    device = dataclasses.replace(on.device, memory_bytes=int(memory_bytes))
    return dataclasses.replace(on, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a stage runs: mesh, ZeRO stage, mode of its shardings."""

    dp: int
    tp: int
    zero: int
    mode: str

    @property
    def devices(self) -> int:
        return self.dp * self.tp


Stage = tuple[int, int, How, tuple[str, ...]]  # blocks start..stop-1, and the policy of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A plan before it is simulated: no step of it takes less than `least_s`, and its fullest
    device holds no less than `least_bytes`."""

    stages: tuple[Stage, ...]
    num_microbatches: int
    schedule: str
    each: int
    least_s: float
    least_bytes: float


@dataclass(slots=True, kw_only=True)
class Enumeration:
    """All plans for one model, cluster and batch, whatever the memory, of up to `most_stages`
    stages; recompute is one policy per stage, or one per block."""

    of: Traced
    cluster: Cluster
    batch: int
    most_stages: int = 99
    by_block: bool = False
    plans: list[Bounded] = field(init=False)
    _programs: BlockPrograms = field(init=False)
    _assigned: dict[Any, dict[str, Assignment]] = field(default_factory=dict)
    _costs: dict[tuple[int, Stage], StageCosts] = field(default_factory=dict)
    _priced: dict[int, Evaluation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._programs = BlockPrograms(
            StageCoster(problem_of(self.of, self.cluster, target=SERIAL))
        )
        self.plans = sorted(self._every(), key=lambda plan: plan.least_s)

    # --- the answers ---

    def fastest(self, memory_bytes: float) -> Evaluation | None:
        """The fastest plan within so many bytes per device; None where none fits."""
        best: Evaluation | None = None
        for plan in self.plans:
            if best is not None and plan.least_s >= best.prediction.step_time_s:
                break
            if plan.least_bytes <= memory_bytes:
                found = self.price(plan)
                if max(found.prediction.peak_memory_bytes) <= memory_bytes and (
                    best is None or found.prediction.step_time_s < best.prediction.step_time_s
                ):
                    best = found
        return best

    def peaks(self, count: int) -> list[int]:
        """Bytes per device of so many plans, from lean ones to the ones that need most."""
        ordered = sorted(self.plans, key=lambda plan: plan.least_bytes)
        some = ordered[:: max(1, len(ordered) // count)]
        return sorted(max(self.price(plan).prediction.peak_memory_bytes) for plan in some)

    def price(self, plan: Bounded) -> Evaluation:
        """A plan, simulated."""
        if id(plan) not in self._priced:
            what = plan.stages, plan.num_microbatches, plan.schedule, plan.each
            written, costs = self._plan(*what), self._costs_of(*what)
            self._priced[id(plan)] = price_stages(written, self._programs.coster, costs)
        return self._priced[id(plan)]

    # --- what there is ---

    def _every(self) -> Iterator[Bounded]:
        for m in (n for n in range(1, self.batch + 1) if self.batch % n == 0):
            hows = self._hows(m)
            for stages in self._partitions(hows, self.cluster.num_devices, 0):
                for schedule in PLAIN[: 2 if len(stages) > 1 else 1]:
                    yield self._bounded(stages, m, schedule, 1)
            for (schedule, each), groups in itertools.product(
                EQUAL, range(2, self.cluster.num_devices + 1)
            ):
                for stages in self._alike(hows, groups, each, schedule):
                    yield self._bounded(stages, m, schedule, each)

    def _hows(self, m: int) -> list[How]:
        rows, node = self.batch // m, self.cluster.devices_per_node
        degrees = range(1, self.cluster.num_devices + 1)
        return [
            How(dp=dp, tp=tp, zero=zero, mode=mode)
            for dp, tp in itertools.product(degrees, degrees)
            if dp * tp <= degrees[-1] and rows % dp == 0 and node % tp == 0
            for mode in MODES[: 1 + (tp > 1)]
            if self._nests(dp * tp) and self._chain(dp, tp, m, mode) is not None
            for zero in ZEROS[: 4 if dp > 1 else 1]
        ]

    def _nests(self, devices: int) -> bool:
        """Whether stages of this size leave no part of a node over."""
        node, nodes = self.cluster.devices_per_node, self.cluster.num_nodes
        whole = devices % node == 0 and nodes % (devices // node) == 0
        return nodes == 1 or whole or node % devices == 0

    def _policies(self, blocks: int) -> list[tuple[str, ...]]:
        if self.by_block:
            return list(itertools.product(POLICIES, repeat=blocks))
        return [(policy,) * blocks for policy in POLICIES]

    def _trains(self, start: int, stop: int) -> bool:
        return any(b.parameters for b in self.of.graph.blocks[start:stop])

    def _partitions(
        self, hows: Sequence[How], devices: int, start: int, before: int = 0
    ) -> Iterator[tuple[Stage, ...]]:
        """Every cut of blocks start.. into stages that train something, on exactly `devices`."""
        count = len(self.of.graph.blocks)
        if start == count and devices == 0:
            yield ()
        if before == self.most_stages:
            return
        for stop in range(start + 1, count + 1):
            if not self._trains(start, stop):
                continue
            for how in hows:
                if how.devices <= devices:
                    rests = list(self._partitions(hows, devices - how.devices, stop, before + 1))
                    for policies, rest in itertools.product(self._policies(stop - start), rests):
                        yield ((start, stop, how, policies), *rest)

    def _alike(
        self, hows: Sequence[How], groups: int, each: int, schedule: str
    ) -> Iterator[tuple[Stage, ...]]:
        """Every cut into `each` stages on each of so many equal device groups."""
        count, total = len(self.of.graph.blocks), self.cluster.num_devices
        if total % groups or not groups * each <= min(count, self.most_stages):
            return
        for inner in itertools.combinations(range(1, count), groups * each - 1):
            spans = list(itertools.pairwise((0, *inner, count)))
            policies = [
                [p for p in self._policies(j - i) if schedule not in SPLIT or set(p) == {"none"}]
                for i, j in spans
            ]
            for how in hows if all(self._trains(i, j) for i, j in spans) else ():
                if how.devices * groups == total and not (how.zero > 1 and schedule in SPLIT):
                    for chosen in itertools.product(*policies):
                        stages = zip(spans, chosen, strict=True)
                        yield tuple((i, j, how, own) for (i, j), own in stages)

    # --- what it costs ---

    def _chain(self, dp: int, tp: int, m: int, mode: str) -> Chain | None:
        setting = self._programs.coster.setting(
            Mesh(dp=dp, tp=tp), Batch(rows=self.batch / m / dp, microbatches=m)
        )
        return self._programs.chain(setting, mode)

    def _assignments(self, stage: Stage, m: int) -> dict[str, Assignment]:
        start, stop, how, _ = stage
        key = start, stop, m, how.dp, how.tp, how.mode
        if key not in self._assigned:
            chain = self._chain(how.dp, how.tp, m, how.mode)
            assert chain is not None
            self._assigned[key] = chain.assignments(start, stop)
        return self._assigned[key]

    def _plan(self, stages: Sequence[Stage], m: int, schedule: str, each: int) -> Plan:
        sizes = [how.devices for _, _, how, _ in stages]
        ranks = place_stages(sizes, self.cluster)
        if each > 1:
            count = len(stages)
            groups = Pipeline(schedule, count, m, count // each).device_of
            ranks = [tuple(range(g * n, (g + 1) * n)) for g, n in zip(groups, sizes, strict=True)]
        written = []
        for (i, j, how, policies), own in zip(stages, ranks, strict=True):
            names = tuple(block.name for block in self.of.graph.blocks[i:j])
            recompute = recompute_of(names, policies)
            written.append(
                StagePlan(
                    blocks=names,
                    ranks=own,
                    dp=how.dp,
                    tp=how.tp,
                    zero=how.zero,
                    recompute=recompute,
                )
            )
        return Plan(
            model=self._programs.coster.fingerprint,
            global_batch_size=self.batch,
            num_microbatches=m,
            schedule=schedule,
            precision="bf16",
            stages=tuple(written),
        )

    def _costs_of(
        self, stages: Sequence[Stage], m: int, schedule: str, each: int
    ) -> list[StageCosts]:
        """Components of every stage, evaluated in the first plan that has one not seen before."""
        keys = [(m, stage) for stage in stages]
        if any(key not in self._costs for key in keys):
            priced = evaluate(
                self._plan(stages, m, schedule, each),
                self._programs.coster.problem,
                [self._assignments(stage, m) for stage in stages],
                self._programs.coster,
            )
            self._costs |= dict(zip(keys, priced.stages, strict=True))
        return [self._costs[key] for key in keys]

    def _bounded(self, stages: tuple[Stage, ...], m: int, schedule: str, each: int) -> Bounded:
        """A plan and what it takes and holds under any order of its computes."""
        costs, groups = self._costs_of(stages, m, schedule, each), len(stages) // each
        placed = stages_of_devices(schedule, num_stages=len(stages), num_devices=groups)
        busy = [m * sum(costs[k].forward_s + costs[k].backward_s for k in own) for own in placed]
        used = [sum(costs[k].fixed_bytes for k in own) for own in placed]
        return Bounded(
            stages=stages,
            num_microbatches=m,
            schedule=schedule,
            each=each,
            least_s=float(max(busy)),
            least_bytes=float(max(used)),
        )
