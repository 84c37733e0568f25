"""Measured steps of a running plan, folded into what prices of this cluster rest on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import xxhash

from meshwright.costmodel.operators import Problem
from meshwright.executor.errors import StateError
from meshwright.executor.ranks import all_gather_object, gloo_group, launch
from meshwright.monitor import WARM_UP, Monitor
from meshwright.planner.plan import Plan, seconds
from meshwright.planner.pricing import Evaluator, priced_terms, terms_of
from meshwright.profiles.profile import Profile, cores_busy, load_profile, no_profile
from meshwright.profiles.steps import STEP, Corrections, RunKind, StepTiming
from meshwright.profiles.store import DeviceId, Measurements, Store

log = logging.getLogger(__name__)

LEAST_STEPS = 5  # observed, so that a median is one
MEASURED = {
    "forward": "forward_s",
    "backward": "backward_s",
    "reduction": "reduction_s",
    STEP: "train_step_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibration:
    """Change of prices by measured steps: the `train_step` of this plan as measured over `samples`
    steps, priced `before_s`, without any correction, and `after_s`; the corrections that hold from
    now on; `cache` is where they are kept, None where it could not be written."""

    measured_s: float
    before_s: float
    after_s: float
    samples: int
    corrections: Corrections
    cache: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"train_step takes {seconds(self.measured_s)} (median of {self.samples} steps), priced "
            f"{seconds(self.before_s)} without corrections, {seconds(self.after_s)} from now on",
            *(f"  {line}" for line in self.corrections.lines()),
            f"kept in {self.cache}" if self.cache else "kept in this process alone",
        ]
        return "\n".join(lines)


def with_corrections(problem: Problem, corrections: Corrections) -> Problem:
    """The same problem at corrected prices."""
    return replace(problem, profile=replace(_profile(problem), corrections=corrections))


def recalibrated(
    plan: Plan, problem: Problem, monitor: Monitor, device: torch.device
) -> Recalibration:
    """Keep what the ranks measured of their steps on a `device`, and find what it says of prices.
    Collective. StateError, on all ranks, before `LEAST_STEPS` were observed."""
    group = gloo_group() if launch.running() and launch.world_size() > 1 else None
    gathered = all_gather_object(group, monitor.medians())
    samples = min(count for count, _ in gathered)
    if samples < LEAST_STEPS:
        raise StateError(
            f"{samples} steps of whole batches were observed",
            place="recalibrate",
            legal=f"{LEAST_STEPS} observed steps, after {WARM_UP} that warm up",
            way_out=f"train at least {LEAST_STEPS - samples} more steps of "
            f"{plan.global_batch_size} rows before",
        )
    medians = [median for _, median in gathered]
    return launch.agree_on(lambda: _folded(plan, problem, medians, samples, device))


def _folded(
    plan: Plan,
    problem: Problem,
    medians: Sequence[Mapping[str, float]],
    samples: int,
    device: torch.device,
) -> Recalibration:
    """On rank 0: the rows of this plan, stored, and the corrections by all that are known."""
    profile = _profile(problem)
    run = RunKind(precision=problem.products, target=problem.target.name)
    steps = step_timings(plan, problem, profile, medians, samples)
    here = DeviceId.here(device.type, cores_busy(problem.cluster))
    store, cache = Store(), None
    try:
        store.add(Measurements(device=here, steps=steps))
        cache = str(store.path)
    except OSError as error:
        log.warning("the measured steps hold in this process alone: %s", error)
    loaded = load_profile(problem.cluster, store, run) if cache else None
    # what was read elsewhere may rest on other measurements than this run's prices
    same = loaded is not None and loaded.basis == profile.basis
    corrections = (
        loaded.corrections if loaded and same else profile.corrected(steps, run).corrections
    )
    after = Evaluator(with_corrections(problem, corrections)).price(plan)
    full_step = next(step for step in steps if step.term == STEP)
    return Recalibration(
        measured_s=full_step.measured_s,
        before_s=full_step.predicted_s,
        after_s=terms_of(after)[STEP],
        samples=samples,
        corrections=corrections,
        cache=cache,
    )


def step_timings(
    plan: Plan,
    problem: Problem,
    profile: Profile,
    medians: Sequence[Mapping[str, float]],
    samples: int,
) -> tuple[StepTiming, ...]:
    """Timings of a plan's steps, from the `medians` of each rank over `samples` steps: of the ranks
    of a device group, which do the same, the mean counts."""

    def of_group(ranks: tuple[int, ...], name: str) -> float:
        return sum(medians[rank][name] for rank in ranks) / len(ranks)

    measured = {
        term: sum(of_group(ranks, name) for ranks in plan.devices)
        for term, name in MEASURED.items()
    }
    measured[STEP] /= len(plan.devices)
    return tuple(
        StepTiming(
            backend=problem.cluster.backend,
            precision=problem.precision,
            target=problem.target.name,
            basis=profile.basis,
            plan=xxhash.xxh64_hexdigest(plan.to_json().encode()),
            term=term,
            measured_s=measured[term],
            predicted_s=priced.seconds,
            parts=priced.parts,
            samples=samples,
        )
        for term, priced in priced_terms(plan, problem, profile).items()
    )


def _profile(problem: Problem) -> Profile:
    """The problem's profile; an empty one where it has none."""
    profile = problem.profile
    return profile if isinstance(profile, Profile) else no_profile(problem.cluster)
