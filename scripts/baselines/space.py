"""Plans as choices by number, for searches that know nothing but what a plan costs.

A plan is one number for each of a fixed row of decisions: device groups, degrees, schedule,
micro-batches, ZeRO, placement, and for each stage its cut, tensor-parallel degree, recompute and
offload. Each number stands for a value as near as others allow (a tensor-parallel degree for the
largest that it and the device group divide by), so that most rows of numbers are legal plans.

How operators are split on a tensor axis is not a decision of its own: of each degree the shardings
of whole plans that the search found, with device memory that binds nothing, are choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from meshwright.costmodel.mesh import Mesh
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.recompute import RECOMPUTE
from meshwright.costmodel.schedules import SCHEDULES, Pipeline
from meshwright.planner.drafts import priced_fits
from meshwright.planner.drafts.candidates import place_stages
from meshwright.planner.overrides import Overrides, check_plan_for
from meshwright.planner.plan import (
    Plan,
    PlanError,
    StagePlan,
    divisors,
    fewest_experts,
    fingerprint,
    recompute_of,
    resolve_shardings,
)
from meshwright.planner.pricing import Evaluator
from meshwright.planner.search import Search

MOST_GROUPS = 16
VIRTUAL = (2, 3, 4)
SHIFTS = (0, -1, 1, -2, 2)  # blocks by which a cut differs from the even one
TIMES_TP = (1.0, 0.5, 2.0)  # of the common degree, what a stage's own may be
# policy, the part of a stage's blocks that has it, from the first one on, and blocks in a segment
REPEATS = (
    ("none", 0.0, 1),
    *((policy, part, 1) for policy in RECOMPUTE if policy != "none" for part in (0.5, 1.0)),
    ("full", 1.0, 2),
    ("full", 1.0, 4),
)
AWAY: tuple[Mapping[str, float], ...] = (
    {},
    *({"activations": part} for part in (0.25, 0.5, 0.75, 1.0)),
    *({"optimizer": part} for part in (0.25, 0.5, 1.0)),
    *({"optimizer": 1.0, "activations": part} for part in (0.25, 0.5, 0.75, 1.0)),
    {"optimizer": 1.0, "weights": 1.0},
    {"optimizer": 1.0, "weights": 1.0, "activations": 1.0},
)
BOUNDLESS = 2**60
TOO_LARGE = (
    2.0  # times its seconds, and more by what it lacks, is what a plan costs that has no room
)

Choices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision by its name, and its values; the first is the plainest."""

    name: str
    values: Sequence[Any]


class PlanSpace:
    """The plans of a problem, a batch and so much memory a device; what each costs, as far as
    `priced` by now."""

    def __init__(self, problem: Problem, global_batch_size: int, memory_bytes: float) -> None:
        self.problem = problem
        self.global_batch_size = global_batch_size
        self.memory_bytes = memory_bytes
        self.shardings = {
            tp: _shardings(problem, global_batch_size, tp)
            for tp in divisors(problem.cluster.devices_per_node)
            if tp > 1
        }
        self._counts = [1] if problem.meetings else divisors(global_batch_size)
        self._model = fingerprint(problem.graph)
        self._within: dict[tuple[int, int, int, int], dict[str, str]] = {}
        self.decisions = tuple(self._decisions())
        self.forget()

    def forget(self) -> None:
        """Price anew from here on."""
        self.evaluator = Evaluator(self.problem)
        self.priced: dict[Choices, tuple[float, bool]] = {}

    def _decisions(self) -> Iterator[Decision]:
        cluster, graph = self.problem.cluster, self.problem.graph
        groups = [p for p in divisors(cluster.num_devices) if p <= MOST_GROUPS]
        groups = [p for p in groups if p <= len(graph.blocks)]
        yield Decision("groups", groups)
        yield Decision("tp", divisors(cluster.devices_per_node))
        yield Decision("ep", divisors(fewest_experts(graph, self.problem.factors) or 1))
        yield Decision("schedule", self._schedules())
        yield Decision("microbatches", self._counts)
        yield Decision("zero", (0, 1, 2, 3))
        yield Decision("in node", (False, True) if cluster.num_nodes > 1 else (False,))
        yield Decision("shards", (False, True) if cluster.num_nodes > 1 else (False,))
        most = max([len(own) for own in self.shardings.values()], default=1)
        yield Decision("shardings", range(most))
        yield Decision("repeats", REPEATS)
        away = AWAY if cluster.host is not None and self.problem.target.gradients_come else AWAY[:1]
        yield Decision("away", away)
        for k in range(min(max(groups), MOST_GROUPS)):
            yield Decision(f"cut {k}", SHIFTS)
            yield Decision(f"tp {k}", TIMES_TP)
            yield Decision(f"repeats {k}", (None, *REPEATS))
            yield Decision(f"away {k}", (None, *away))

    def _schedules(self) -> list[tuple[str, int]]:
        excluded = self.problem.target.excludes
        return [
            (name, each)
            for name, schedule in SCHEDULES.items()
            if name not in excluded and not schedule.on_request
            for each in ((schedule.stages_per_device,) if schedule.stages_per_device else VIRTUAL)
        ]

    # --- what a plan costs ---

    def cost(self, choices: Choices) -> tuple[float, bool]:
        """Seconds of a step, and whether it fits; more seconds where it does not, by what it lacks;
        inf where the choices are no plan."""
        if choices not in self.priced:
            self.priced[choices] = self._cost(choices)
        return self.priced[choices]

    def _cost(self, choices: Choices) -> tuple[float, bool]:
        plan = self.plan(choices)
        if plan is None:
            return math.inf, False
        try:
            check_plan_for(plan, self.problem.target)
            priced = self.evaluator.price(plan)
        except PlanError:
            return math.inf, False
        found = priced.prediction
        if priced_fits(priced, self.problem.cluster, self.memory_bytes):
            return found.step_time_s, True
        lacks = max(0.0, found.fullest_bytes / self.memory_bytes - 1)
        return found.step_time_s * (TOO_LARGE + lacks), False

    # --- from choices to a plan ---

    def plan(self, choices: Choices) -> Plan | None:
        """The plan of so many choices; None where there is none, as for cuts that cross."""
        own = {d.name: d.values[c] for d, c in zip(self.decisions, choices, strict=True)}
        groups = own["groups"]
        schedule, each = own["schedule"] if groups > 1 else ("1f1b", 1)
        count, blocks = groups * each, len(self.problem.graph.blocks)
        if count > blocks:
            return None
        meshes = self._meshes(own, groups, alike=not SCHEDULES[schedule].unequal_meshes)
        rows = math.lcm(*(mesh.dp for mesh in meshes))
        counts = [m for m in self._counts if self.global_batch_size // m % rows == 0]
        if not counts:
            return None
        m = min(counts, key=lambda m: abs(math.log(m / own["microbatches"])))
        ends = [round(k * blocks / count) for k in range(count + 1)]
        for k in range(1, count):
            ends[k] += own.get(f"cut {k}", 0)
        if any(start >= stop for start, stop in pairwise(ends)):
            return None
        of = Pipeline(schedule, count, m, groups).device_of
        ranks = self._ranks(meshes)
        stages = [
            self._stage(own, k, ends[k : k + 2], meshes[of[k]], schedule, ranks[of[k]])
            for k in range(count)
        ]
        return Plan(
            model=self._model,
            global_batch_size=self.global_batch_size,
            num_microbatches=m,
            schedule=schedule,
            precision=self.problem.precision,
            stages=tuple(stages),
        )

    def _meshes(self, own: Mapping[str, Any], groups: int, *, alike: bool) -> list[Mesh]:
        """The mesh of each device group."""
        size, found = self.problem.cluster.num_devices // groups, []
        for k in range(groups):
            times = 1.0 if alike else own.get(f"tp {k}", 1.0)
            tp = math.gcd(size, max(1, round(own["tp"] * times)))
            tp = math.gcd(tp, self.problem.cluster.devices_per_node)
            found.append(Mesh(dp=size // tp, tp=tp, ep=math.gcd(own["ep"], size // tp)))
        node, inner = self.problem.cluster.devices_per_node, found[0].tp
        if own["in node"] and len(set(found)) == 1 and found[0].dp > 1 and found[0].ep == 1:
            spread = math.gcd(groups, node // inner)
            found = [replace(mesh, spread=spread) for mesh in found]
        return found

    def _ranks(self, meshes: Sequence[Mesh]) -> list[tuple[int, ...]]:
        if meshes[0].spread > 1:
            return [mesh.ranks_of(group) for group, mesh in enumerate(meshes)]
        return place_stages([mesh.devices for mesh in meshes], self.problem.cluster)

    def _stage(
        self,
        own: Mapping[str, Any],
        k: int,
        ends: Sequence[int],
        mesh: Mesh,
        schedule: str,
        ranks: tuple[int, ...],
    ) -> StagePlan:
        record, graph = SCHEDULES[schedule], self.problem.graph
        names = tuple(block.name for block in graph.blocks[ends[0] : ends[1]])
        zero = own["zero"] if record.gathers else min(own["zero"], 2)
        zero = zero if mesh.dp > 1 else 0
        policy, part, size = own.get(f"repeats {k}") or own["repeats"]
        if record.recomputed is not None and policy not in record.recomputed:
            policy, size = "none", 1
        first = round(part * len(names))
        policies = [policy] * first + ["none"] * (len(names) - first)
        away = own.get(f"away {k}")
        away = dict(own["away"] if away is None else away)
        if zero == 3:
            away.pop("weights", None)
        inside = self.problem.cluster.devices_per_node // (mesh.tp * mesh.spread)
        parts = own["shards"] and zero and mesh.ep == 1 and 1 < inside < mesh.dp
        return StagePlan(
            blocks=names,
            ranks=ranks,
            dp=mesh.dp,
            tp=mesh.tp,
            ep=mesh.ep,
            zero=zero,
            dp_shard=inside if parts and mesh.dp % inside == 0 else None,
            recompute=recompute_of(names, policies),
            segments=size if size <= len(names) else 1,
            offload=away,
            shardings=self._of_stage(mesh.tp, own["shardings"], *ends),
        )

    def _of_stage(self, tp: int, which: int, start: int, stop: int) -> dict[str, str]:
        """Of the shardings of a degree those that name something in these blocks."""
        known = self.shardings.get(tp)
        if not known:
            return {}
        key = tp, which % len(known), start, stop
        if key not in self._within:
            graph = self.problem.graph
            blocks = graph.blocks[start:stop]
            self._within[key] = {
                pattern: decision
                for pattern, decision in known[key[1]].items()
                if _names_something(graph, blocks, pattern, decision)
            }
        return self._within[key]


def _names_something(graph: Any, blocks: Sequence[Any], pattern: str, decision: str) -> bool:
    try:
        resolve_shardings(graph, blocks, {pattern: decision})
    except PlanError:
        return False
    return True


def _shardings(problem: Problem, batch: int, tp: int) -> list[Mapping[str, str]]:
    """Different shardings on a tensor axis of so many ranks: of plans of one stage with many rows
    in a micro-batch and few, weights whole and divided; of any plan where rows don't divide so."""
    device = replace(problem.cluster.device, memory_bytes=BOUNDLESS)
    roomy = replace(problem, cluster=replace(problem.cluster, device=device))
    data = problem.cluster.num_devices // tp
    counts = [] if problem.meetings else [m for m in divisors(batch) if batch // m % data == 0]
    asked: list[dict[str, Any]] = [
        {"pp": 1, "num_microbatches": m, "zero": zero}
        for m in dict.fromkeys((*counts[:1], *counts[-1:]))
        for zero in ((None, 3) if data > 1 else (None,))
    ]
    found: list[Mapping[str, str]] = []
    for given in asked or [{}]:
        over = Overrides(tp=tp, forbid=["offload"], **given)
        try:
            plan = Search(roomy, batch, over).run().best.plan
        except ValueError:  # none has this degree
            continue
        found += [max((s.shardings for s in plan.stages), key=len)]
    return [own for k, own in enumerate(found) if own not in found[:k]]
