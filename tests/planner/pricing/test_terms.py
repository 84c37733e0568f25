"""Terms of a step and their parts: what a correction of a component changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.costmodel.operators import Problem
from meshwright.planner.pricing import Evaluator, priced_terms, terms_of
from meshwright.profiles.profile import no_profile
from meshwright.profiles.steps import (
    BACKWARD,
    DATA_AXIS,
    FORWARD,
    MESSAGES,
    STEP,
    TENSOR_AXIS,
    TERMS,
    Correction,
    Corrections,
    linked,
)
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import cut, host, net, plan_for

FACTORS = {
    FORWARD: 1.5,
    BACKWARD: 0.5,
    linked(TENSOR_AXIS, crosses=False): 3.0,
    linked(DATA_AXIS, crosses=False): 2.0,
    linked(MESSAGES, crosses=False): 4.0,
}
CORRECTIONS = Corrections(
    found={name: Correction(factor=f, plans=1, samples=9) for name, f in FACTORS.items()}
)


def problem(devices: int) -> Problem:
    graph, table = cut(net(), rows=4)
    cluster = host(devices)
    return Problem(graph=graph, factors=table, cluster=cluster, precision="fp32")


@pytest.mark.parametrize(
    ("stages", "dp", "tp", "zero"),
    [
        (1, 1, 1, 0),
        (1, 1, 2, 0),
        (1, 2, 2, 1),
        (1, 2, 2, 3),
        (2, 2, 1, 0),
        *(
            pytest.param(*cell, marks=second_tier("every degree, stage and axis stays once"))
            for cell in ((1, 2, 1, 0), (1, 2, 2, 0), (1, 2, 1, 1), (1, 2, 1, 3), (2, 1, 1, 0))
        ),
    ],
)
def test_corrected_prices_are_the_parts_times_their_factors(
    stages: int, dp: int, tp: int, zero: int
) -> None:
    own = problem(stages * dp * tp)
    plan = plan_for(own.graph, stages=stages, dp=dp, tp=tp)
    split = {"layers.*.up": "colwise", "layers.*.down": "rowwise"} if tp > 1 else {}
    plan = replace(plan, stages=tuple(replace(s, zero=zero, shardings=split) for s in plan.stages))
    empty = no_profile(own.cluster)
    terms = priced_terms(plan, own, empty)
    assert set(terms) == set(TERMS)
    corrected = replace(own, profile=replace(empty, corrections=CORRECTIONS))
    found = terms_of(Evaluator(corrected).price(plan))
    plain = terms_of(Evaluator(own).price(plan))
    for term in TERMS if stages == 1 else ("forward", "backward", "reduction"):
        parts = terms[term].parts
        assert terms[term].seconds == plain[term]
        changed = sum(
            (FACTORS[name] - 1) * seconds for name, seconds in parts.items() if name in FACTORS
        )
        assert found[term] == pytest.approx(plain[term] + changed, rel=1e-6, abs=1e-12)
    shown = {name for term in terms.values() for name in term.parts}
    assert {FORWARD, BACKWARD} <= shown
    assert (linked(TENSOR_AXIS, crosses=False) in shown) == (tp > 1)
    assert (linked(MESSAGES, crosses=False) in terms[STEP].parts) == (stages > 1)
    if dp > 1:
        assert linked(DATA_AXIS, crosses=False) in shown


def test_a_measured_step_ends_before_the_optimizers() -> None:
    """Which the device groups run at the same time."""
    own = problem(2)
    plan = plan_for(own.graph, stages=2, dp=1, tp=1)
    found = Evaluator(own).price(plan)
    stepping = sum(costs.optimizer_s for costs in found.stages) / 2
    assert stepping > 0
    assert terms_of(found)[STEP] == pytest.approx(found.prediction.step_time_s - stepping)


def test_corrections_of_the_profile_change_nothing_of_what_is_kept() -> None:
    own = problem(2)
    plan, empty = plan_for(own.graph, dp=2, tp=1), no_profile(own.cluster)
    once = priced_terms(plan, own, empty)
    again = priced_terms(plan, own, replace(empty, corrections=CORRECTIONS))
    assert once == again
