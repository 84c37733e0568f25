"""What would flip the decision: the factor, against prices just below and above it."""

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest

from meshwright.costmodel.kernels.collectives import collective_time, group_for, p2p_time
from meshwright.planner.alternatives.answers import (
    ENDS,
    KNOBS,
    MEMORY,
    Flip,
    Rival,
    Sensitivity,
    scaled_link,
)
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan.plan import Plan
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import cluster, linears, problem_of
from tests.helpers.tiers import second_tier
from tests.models.models import Traced

BATCH = 8
STEP = 4.0 ** (1 / 2**5)  # the finest step of the interval


def of() -> Traced:
    return linears(256, 4, BATCH, 64)


def evaluator(on: Cluster) -> Evaluator:
    return Evaluator(problem_of(of(), on))


def rival(on: Cluster, **given: object) -> Rival:
    """The best plan under overrides, as it is priced."""
    overrides = Overrides(**given)  # type: ignore[arg-type]
    best = Search(problem_of(of(), on), BATCH, overrides).run().best
    priced = best.evaluation.prediction
    return Rival(
        plan=best.plan, step_time_s=priced.step_time_s, peak_bytes=max(priced.peak_memory_bytes)
    )


def step_s(on: Cluster, plan: Plan) -> float:
    return evaluator(on).price(plan).prediction.step_time_s


@cache
def compared(bandwidth: float) -> tuple[Cluster, Rival, Rival, list[Flip]]:
    """Data parallel against tensor parallel, the faster one chosen, and flips."""
    on = cluster(4, flops=2e12, bandwidth=bandwidth)
    plans = [rival(on, forbid=["tp", "pp"]), rival(on, forbid=["dp", "pp", "cp"])]
    chosen, other = sorted(plans, key=lambda r: r.step_time_s)
    asked = Sensitivity(evaluator=evaluator(on), chosen=chosen, rivals=[other])
    return on, chosen, other, asked.flips()


@second_tier("flips that are clear, and those of memory, stay")
def test_the_other_plan_wins_past_the_factor_and_not_before() -> None:
    """Where nothing flips the chosen one wins at both ends."""
    flipped = []
    for bandwidth in (2e9, 1e10, 3e10):
        on, chosen, other, flips = compared(bandwidth)

        def other_wins(knob: str, factor: float) -> bool:
            there = KNOBS[knob](on, factor)  # noqa: B023
            return step_s(there, other.plan) < step_s(there, chosen.plan)  # noqa: B023

        for flip in (flip for flip in flips if flip.knob in KNOBS):
            flipped.append(flip.factor is not None)
            if flip.factor is None:
                assert not any(other_wins(flip.knob, end) for end in ENDS)
            else:
                before = flip.factor * (STEP**-1.01 if flip.factor > 1 else STEP**1.01)
                assert flip.rival is other
                assert other_wins(flip.knob, flip.factor) and not other_wins(flip.knob, before)
    assert any(flipped) and not all(flipped)


def test_a_plan_that_prices_cannot_tell_apart_is_no_flip() -> None:
    (on, chosen, other, _), tie = compared(1e10), 0.03
    now_s = chosen.step_time_s
    alike = [dataclasses.replace(chosen, step_time_s=now_s * x) for x in (1, 0.98, 0.9)]

    def flips(rivals: list[Rival]) -> list[Flip]:
        asked = Sensitivity(evaluator=evaluator(on), chosen=chosen, rivals=rivals, tie=tie)
        return [flip for flip in asked.flips() if flip.knob in KNOBS]

    assert {flip.factor for flip in flips(alike)} == {None}
    clear = [(KNOBS[flip.knob], flip.factor) for flip in flips([other]) if flip.factor]
    assert clear
    for scale, factor in clear:
        there = scale(on, factor)
        assert step_s(there, other.plan) * (1 + tie) < step_s(there, chosen.plan)


def test_links_that_are_not_there_are_not_asked() -> None:
    single = {flip.knob for flip in compared(1e10)[-1]}
    assert "inter-node bandwidth" not in single and "intra-node bandwidth" in single
    on = cluster(1, nodes=4)
    chosen = rival(on, forbid=["tp", "pp"])
    alone = Sensitivity(evaluator=evaluator(on), chosen=chosen, rivals=[]).flips()
    assert "intra-node bandwidth" not in {flip.knob for flip in alone}


# --- memory --------------------------------------------------------------------------------------


def test_memory_flips_where_the_chosen_plan_just_fits() -> None:
    on = cluster(4)
    kept = on.device.memory_bytes // 10
    on = dataclasses.replace(on, device=dataclasses.replace(on.device, reserved_bytes=kept))
    base = rival(on)
    room = on.device.usable_bytes
    chosen = dataclasses.replace(base, peak_bytes=kept + int(room * 0.5))
    slow_s, quick_s = base.step_time_s * 2, base.step_time_s / 2
    small = dataclasses.replace(base, step_time_s=slow_s, peak_bytes=kept + int(room * 0.3))
    big = dataclasses.replace(base, step_time_s=quick_s, peak_bytes=kept + room * 3)
    huge = dataclasses.replace(big, peak_bytes=kept + room * 5)

    def flips(rivals: list[Rival], bigger: list[Rival]) -> list[tuple[float | None, Rival | None]]:
        asked = Sensitivity(
            evaluator=evaluator(on), chosen=chosen, rivals=rivals, bigger=bigger
        ).flips()
        return [(f.factor, f.rival) for f in asked if f.knob == MEMORY]

    assert flips([small], [big]) == [(pytest.approx(0.5), small), (pytest.approx(3.0), big)]
    assert flips([], [huge]) == [(pytest.approx(0.5), None)]
    chosen = dataclasses.replace(chosen, peak_bytes=kept + int(room * 0.2))
    assert flips([small], [huge]) == [(None, None)]


# --- what a factor means -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h100-sxm", "p3.16xlarge"])
@pytest.mark.parametrize("nbytes", [1e4, 1e9])
def test_a_link_of_twice_the_bandwidth_takes_half_the_time(name: str, nbytes: float) -> None:
    on = Cluster.from_catalog(name, num_nodes=2)

    def still(cluster: Cluster) -> Cluster:
        """Nothing but bytes takes time."""
        quick = {
            name: dataclasses.replace(getattr(cluster, name), latency_s=0.0, switch_latency_s=0.0)
            for name in ("intra_link", "inter_link")
        }
        device = dataclasses.replace(cluster.device, launch_overhead_s=0.0)
        return dataclasses.replace(cluster, device=device, **quick)

    def times(on: Cluster) -> list[float]:
        wide = group_for(on, size=on.num_devices, stride=1)
        near = group_for(on, size=on.devices_per_node, stride=1)
        return [
            collective_time("all_reduce", nbytes, wide, on),
            collective_time("all_gather", nbytes, near, on),
            p2p_time(nbytes, on, crosses_node=True, concurrent=1),
        ]

    twice = dataclasses.replace(
        on, intra_link=scaled_link(on.intra_link, 2.0), inter_link=scaled_link(on.inter_link, 2.0)
    )
    for once, half in zip(times(still(on)), times(still(twice)), strict=True):
        assert half == pytest.approx(once / 2)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("FLOP/s", lambda c: c.device.flops("bf16")),
        ("memory bandwidth", lambda c: c.device.memory_bandwidth),
        ("inter-node bandwidth", lambda c: c.inter_link.bandwidth),
        ("intra-node bandwidth", lambda c: c.intra_link.bandwidth),
    ],
)
def test_a_factor_scales_one_property(knob: str, value: Callable[[Cluster], float]) -> None:
    on = Cluster.from_catalog("h100-sxm", num_nodes=2)
    there = KNOBS[knob](on, 0.5)
    assert value(there) == pytest.approx(value(on) / 2)
    assert KNOBS[knob](there, 2.0) == on
