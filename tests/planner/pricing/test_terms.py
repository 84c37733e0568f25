"""What components add to the terms of a step is how corrections of them change its price."""

from dataclasses import replace

import pytest

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER, MEGATRON
from meshwright.planner.plan.plan import Plan
from meshwright.planner.pricing import Evaluator, priced_terms, terms_of
from meshwright.profiles import steps
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.profile import no_profile
from tests.helpers.tiers import second_tier
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_matrix import ALL

TINY = 1e-5
H100 = Cluster.from_catalog("dgx-h100", num_nodes=2)
CLUSTERS = (
    H100,
    Cluster.from_catalog("pcie-8-rtx-4090", num_nodes=2),
    Cluster.local(8, measure=False),
)
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
"""


def agree(cell: Cell, on: Cluster, target: Target = EAGER) -> None:
    plan, of = plan_of(cell)
    problem = Problem(
        graph=of.graph, factors=of.table, cluster=on, precision=plan.precision, target=target
    )
    found = priced_terms(plan, problem, no_profile(on))
    evaluator = Evaluator(problem)
    plain = terms_of(evaluator.price(plan))
    assert {term: own.seconds for term, own in found.items()} == pytest.approx(plain, rel=1e-12)
    for name in steps.COMPONENTS:
        for term, seconds in corrected(evaluator, plan, name, TINY).items():
            part = (seconds - plain[term]) / TINY
            near = pytest.approx(part, rel=1e-6, abs=1e-8 * plain[term])
            assert found[term].parts.get(name, 0.0) == near, (cell.name, name, term)


def corrected(evaluator: Evaluator, plan: Plan, name: str, more: float) -> dict[str, float]:
    factor = steps.Correction(factor=1 + more, plans=0, samples=0)
    corrections = steps.Corrections(found={name: factor})
    profile = replace(no_profile(evaluator.problem.cluster), corrections=corrections)
    return terms_of(Evaluator(replace(evaluator.problem, profile=profile)).price(plan))


@pytest.mark.parametrize("line", HIDDEN.strip().splitlines())
def test_parts_are_what_a_tiny_correction_changes(line: str) -> None:
    agree(Cell.parse(line), H100)
    agree(Cell.parse(line), H100, BESIDE)


@second_tier("the change tier has what hides behind what")
@pytest.mark.parametrize("number", range(len(CLUSTERS)))
def test_parts_of_the_matrix_are_what_a_tiny_correction_changes(number: int) -> None:
    for cell in ALL[number :: len(CLUSTERS)]:
        agree(cell, CLUSTERS[number])
