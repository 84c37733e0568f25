"""What components add to the terms of a step is how corrections of them change its price."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER, MEGATRON
from meshwright.planner.plan.plan import Plan
from meshwright.planner.pricing import Evaluator, priced_terms, terms_of
from meshwright.profiles import steps
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.profile import Profile, no_profile
from tests.helpers.tiers import second_tier, tiered
from tests.parity.parity_cells import Cell
from tests.parity.parity_matrix import ALL
from tests.planner.pricing.test_ledger import CLUSTERS, NUMBERS, problem_of

TINY = 1e-5
H100, _, LOCAL = CLUSTERS
BESIDE = replace(EAGER, name="beside", overlap_tensor=MEGATRON.overlap_tensor)
# what hides behind what: gathers again, parts of a product, a ring, ZeRO, the host's link, copies
HIDDEN = """
llama  dp2xtp2      1f1b m4 regather sequence bf16
llama  tp2          1f1b m2 pointwise+regather sequence bf16
llama  dp2xtp2      1f1b m2 zero3 full seg2
gpt2_tied dp2       1f1b m2 zero1 host50
llama  dp2          1f1b m2 away50
llama  cp2xdp2      1f1b m2 ring
llama  pp2          dualpipe m4
moe    dp4          1f1b m2 zero2
resnet dp2          1f1b m2
llama  pp2          1f1b m2 slices8+8
"""


def agree(cell: Cell, on: Cluster, target: Target = EAGER) -> None:
    plan, problem = problem_of(cell, on, target)
    found = priced_terms(plan, problem, no_profile(on))
    evaluator = Evaluator(problem)
    plain = terms_of(evaluator.price(plan))
    assert {term: own.seconds for term, own in found.items()} == pytest.approx(plain, rel=1e-12)
    for name in steps.COMPONENTS:
        for term, seconds in corrected(evaluator, plan, {name: 1 + TINY}).items():
            part = (seconds - plain[term]) / TINY
            near = pytest.approx(part, rel=1e-6, abs=1e-8 * plain[term])
            assert found[term].parts.get(name, 0.0) == near, (cell.name, name, term)


def profile_of(on: Cluster, factors: Mapping[str, float]) -> Profile:
    found = {n: steps.Correction(factor=f, plans=0, samples=0) for n, f in factors.items()}
    return replace(no_profile(on), corrections=steps.Corrections(by_component=found))


def corrected(evaluator: Evaluator, plan: Plan, factors: Mapping[str, float]) -> dict[str, float]:
    own = evaluator.problem
    profile = profile_of(own.cluster, factors)
    return terms_of(Evaluator(replace(own, profile=profile)).price(plan))


FIRST = ("zero3", "ring", "resnet", "slices")


@pytest.mark.parametrize(
    "line",
    tiered(
        HIDDEN.strip().splitlines(),
        lambda line: any(word in line for word in FIRST),
        "ZeRO and segments, a ring, statistics and slices stay of what hides",
    ),
)
def test_parts_are_what_a_tiny_correction_changes(line: str) -> None:
    agree(Cell.parse(line), H100)
    agree(Cell.parse(line), H100, BESIDE)


@second_tier("the change tier has some of what hides behind what")
@pytest.mark.parametrize("number", NUMBERS)
def test_parts_of_the_matrix_are_what_a_tiny_correction_changes(number: int) -> None:
    for cell in ALL[number :: len(CLUSTERS)]:
        agree(cell, CLUSTERS[number])


TENSOR, DATA, SENT = (
    steps.linked(what, crosses=False)
    for what in (steps.TENSOR_AXIS, steps.DATA_AXIS, steps.MESSAGES)
)
FACTORS = {steps.FORWARD: 1.5, steps.BACKWARD: 0.5, TENSOR: 3.0, DATA: 2.0, SENT: 4.0}
EXPOSED = """
llama  tp2      1f1b m2
llama  dp2      1f1b m2 zero3
llama  dp2xtp2  1f1b m2 zero1
llama  pp2xdp2  1f1b m4
"""


@pytest.mark.parametrize("line", EXPOSED.strip().splitlines())
def test_where_nothing_is_hidden_parts_hold_for_all_corrections(line: str) -> None:
    """On a CPU; whatever the corrections that the profile has. A measured step ends before the
    optimizers', which run at the same time."""
    plan, own = problem_of(Cell.parse(line), LOCAL)
    terms, evaluator = priced_terms(plan, own, no_profile(LOCAL)), Evaluator(own)
    assert terms == priced_terms(plan, own, profile_of(LOCAL, FACTORS))
    priced, found = evaluator.price(plan), corrected(evaluator, plan, FACTORS)
    plain, stages = terms_of(priced), len(plan.stages)
    stepping = sum(costs.optimizer_s for costs in priced.stages) / stages
    assert 0 < stepping == pytest.approx(priced.prediction.step_time_s - plain[steps.STEP])
    assert set(terms) == set(steps.TERMS)
    for term in steps.TERMS if stages == 1 else ("forward", "backward", "reduction"):
        parts = terms[term].parts
        more = sum((FACTORS.get(name, 1.0) - 1) * seconds for name, seconds in parts.items())
        assert terms[term].seconds == plain[term]
        assert found[term] == pytest.approx(plain[term] + more, rel=1e-6, abs=1e-12)
    shown = {name for term in terms.values() for name in term.parts}
    assert {steps.FORWARD, steps.BACKWARD} <= shown
    assert (TENSOR in shown, DATA in shown) == (plan.stages[0].tp > 1, plan.stages[0].dp > 1)
    assert (SENT in terms[steps.STEP].parts) == (stages > 1)
