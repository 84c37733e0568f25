"""The plan that needs the least memory: the closest to fitting where nothing fits.

Each mesh is looked at with its largest number of micro-batches, as smaller ones hold less. A stage
is taken for an equal share of the model and recomputes all it may; a device needs the bytes that
such stages hold at its peak (`costmodel.stages.peak`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter

import numpy as np

from meshwright.costmodel.stages import device_peaks, of_one
from meshwright.planner.drafts import (
    Candidate,
    Combination,
    Drafter,
    EqualStages,
    MeshChoice,
    PlanDraft,
    Space,
    StageSetup,
)
from meshwright.planner.search.explore import Effort, Explorer
from meshwright.planner.search.taste import Taste
from meshwright.planner.stages import recompute_levels

MAX_MESHES = 12  # looked at for a plan that fits, those that divide the weights most
MAX_CUTS = 24  # combinations cut for one, without relief and with
FULL_PIPELINE = 4  # micro-batches of a device group that keep a pipeline nearly full
MAX_DRAFTS = 6  # that fit, of which the fastest is written out


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The bytes by which a setup on a mesh exceeds its fullest device; negative where it fits."""

    choice: MeshChoice
    setup: StageSetup
    excess_bytes: float


def least_memory_choices(space: Space) -> list[MeshChoice]:
    """Meshes with the most micro-batches, those that divide the weights most first."""
    choices: dict[tuple[int, ...], MeshChoice] = {}
    for m in reversed(space.microbatch_counts()):
        for groups in space.stage_counts():
            if not space.schedules(groups, m):
                continue
            for mesh in space.meshes(space.cluster.num_devices // groups, m):
                choice = MeshChoice(mesh=mesh, num_microbatches=m, groups=groups, bound_s=0.0)
                choices.setdefault((mesh.tp, groups, mesh.cp, mesh.ep), choice)
    return sorted(choices.values(), key=lambda s: (-s.mesh.tp * s.groups, s.mesh, s.groups))


def least_memory(equal: EqualStages, choices: Iterable[MeshChoice]) -> MemoryNeed | None:
    """The least need of these meshes; None where there is none."""
    needs = [need for choice in choices for need in memory_needs(equal, choice)]
    return min(needs, key=lambda need: need.excess_bytes, default=None)


def memory_needs(equal: EqualStages, choice: MeshChoice) -> Iterator[MemoryNeed]:
    """Every setup on a mesh, under the schedule that needs least."""
    m, groups = choice.num_microbatches, choice.groups
    for setup in equal.setups(choice.mesh, m):
        needs = []
        for pipeline in equal.space.schedules(
            groups, m, setup.sharing, equal.space.slices(choice.mesh, m)
        ):
            stages, policies = pipeline.num_stages, equal.policies(setup, pipeline)
            part = setup.chain.typical().times(1 / stages)
            levels = recompute_levels(part, setup.setting, policies, np.array(1.0))
            peaks = device_peaks(
                [of_one(levels.costs[-1])] * stages,
                pipeline,
                reserved=equal.space.cluster.device.reserved_bytes,
            )
            needs.append(max(peak.nbytes for peak in peaks))
        if needs:
            excess_bytes = min(needs) - equal.space.memory_bytes
            yield MemoryNeed(choice=choice, setup=setup, excess_bytes=excess_bytes)


# --- a plan that fits, on those meshes ------------------------------------------------------------


def plan_that_fits(drafter: Drafter, choices: Sequence[MeshChoice] = ()) -> Candidate | None:
    """The fastest of a few plans that fit as they are written out; None without any."""
    choices = choices or least_memory_choices(drafter.space)[:MAX_MESHES]
    larger = (_with_larger_microbatches(drafter.equal, choice) for choice in choices)
    drafts = _fitting(drafter, list(dict.fromkeys(chain(larger, choices))))
    near = sorted(islice(drafts, MAX_DRAFTS), key=attrgetter("step_time_s"))
    written = map(drafter.written, chain(near, islice(drafts, MAX_DRAFTS)))
    fitting = next((candidate for candidate in written if candidate.fits), None)
    drafter.forget()
    return fitting


def _with_larger_microbatches(equal: EqualStages, choice: MeshChoice) -> MeshChoice:
    """The mesh with the fewest micro-batches that fit, if not too few for its pipeline."""
    space, mesh, groups = equal.space, choice.mesh, choice.groups
    devices, least = space.cluster.num_devices // groups, FULL_PIPELINE * groups * (groups > 1)

    def of(m: int) -> MeshChoice:
        return replace(choice, num_microbatches=m)

    def fits(m: int) -> bool:
        return any(need.excess_bytes <= 0 for need in memory_needs(equal, of(m)))

    counts = [
        m
        for m in space.microbatch_counts()
        if least <= m < choice.num_microbatches
        and mesh in space.meshes(devices, m)
        and space.schedules(groups, m)
    ]
    at = bisect_left(counts, True, key=fits)
    return of(counts[at]) if at < len(counts) else choice


def some_plan_fits(drafter: Drafter) -> bool:
    """Whether some plan fits as it is written out; no more meshes are asked than it takes."""
    choices = least_memory_choices(drafter.space)[:MAX_MESHES]
    drafts = (draft for choice in choices for draft in _fitting(drafter, [choice]))
    some = any(drafter.written(draft).fits for draft in islice(drafts, 2 * MAX_DRAFTS))
    drafter.forget()
    return some


def _fitting(drafter: Drafter, choices: Sequence[MeshChoice]) -> Iterator[PlanDraft]:
    """Drafts that fit, without a relief, then with one; a few of each, most promising first."""
    equal = drafter.equal
    explorer = Explorer(
        drafter=drafter,
        effort=Effort(drafter.programs.time),
        taste=Taste(coster=drafter.programs.coster, robust=False),
    )

    def drafted(combinations: Iterable[Combination]) -> Iterator[PlanDraft]:
        order = sorted(
            combinations, key=lambda c: (c.tight, c.estimate_s, c.setup.mesh, c.pipeline)
        )
        for combination in order[:MAX_CUTS]:
            if (solved := explorer.cut(combination, math.inf)) is not None:
                before = len(explorer.drafts)
                explorer.simulate(combination, solved[1])
                yield from (draft for draft in explorer.drafts[before:] if draft.fits)

    roomy = [c for c in choices if any(n.excess_bytes <= 0 for n in memory_needs(equal, c))]
    yield from drafted(chain.from_iterable(map(equal.combinations, roomy)))
    waiting = [waiting for choice in choices for waiting in equal.waiting(choice)]
    yield from drafted(chain.from_iterable(map(equal.relieved, waiting)))
