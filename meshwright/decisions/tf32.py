"""Prices of fp32 products whose operands GPUs may round to TF32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.costmodel.operators import Problem
from meshwright.profiles.profile import Profile
from meshwright.profiles.steps import NO_CORRECTIONS


def in_tf32(problem: Problem) -> Problem:
    """The problem with fp32 products in TF32, itself where its devices have none. What was measured
    of operators is of fp32, and isn't used; what was measured of collectives is."""
    device = problem.cluster.device.in_tf32()
    if device is problem.cluster.device or problem.precision != "fp32":
        return problem
    cluster = replace(problem.cluster, device=device)
    priced = replace(problem, cluster=cluster, tf32=True)
    profile: Any = problem.profile  # loaded from the cache, if anything
    return replace(priced, profile=_collectives_of(profile) if profile else None)


def _collectives_of(profile: Profile) -> Profile:
    """A profile without what was measured of operators, and without corrections, which hold beside
    that alone."""
    measurements = replace(profile.measurements, operators={})
    return replace(profile, measurements=measurements, corrections=NO_CORRECTIONS)
