"""Searches that know nothing but prices: what they find, in what space, and what is said of it."""

import itertools
import math
from functools import cache, partial

import numpy as np
import pytest

from meshwright.arguments import MEMORY_MARGIN
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan.plan import Plan
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.planner.search.search import Search
from scripts import baseline_search as baselines
from scripts.baselines.methods import METHODS, Run
from scripts.baselines.space import Choices, Decision, PlanSpace
from scripts.recording.cases import case, gpt2, nodes
from tests.helpers.tiers import second_tier, tiered


class Table:
    """A space of numbers with two hills, half of it no plans and some without room."""

    decisions = tuple(Decision(f"d{k}", range(6)) for k in range(4))

    def cost(self, choices: Choices) -> tuple[float, bool]:
        if sum(choices) % 5 == 4:
            return math.inf, False
        near = min(math.dist(choices, (1, 4, 0, 5)), 0.5 + math.dist(choices, (5, 0, 3, 1)))
        return 1 + near, choices[0] != 2


@pytest.mark.parametrize("method", tiered(METHODS, "restarts".__eq__, "one of the methods stays"))
def test_finds_the_best_of_all(method: str) -> None:
    space = Table()
    every = (space.cost(c) for c in itertools.product(range(6), repeat=4))
    best = min(cost for cost, fits in every if fits)
    run = Run(space, np.random.default_rng(0), 0.5)
    METHODS[method](run)
    costs = [cost for _, cost, _ in run.found]
    assert costs[-1] == best
    assert costs == sorted(costs, reverse=True) and run.tried > 100
    assert all(space.cost(choices)[1] for _, _, choices in run.found)


def test_a_try_that_ends_late_counts_with_its_plan() -> None:
    """The last plan found is the one of the ratio, whenever its price was known."""
    run = Run(Table(), np.random.default_rng(0), 0.0)
    for choices in ((0, 0, 0, 0), (1, 4, 0, 5)):
        run.cost_s(choices)
    assert run.over and run.found == [
        (0.0, run.found[0][1], (0, 0, 0, 0)),
        (0.0, 1.0, (1, 4, 0, 5)),
    ]


@cache
def searched() -> tuple[Search, PlanSpace]:
    tiny = partial(gpt2, layers=3, hidden=512, length=512, vocab=32000)
    own = case(tiny, nodes("dgx-h100", devices_per_node=4), 12, precision="bf16", optimizer="adamw")
    problem = baselines.problem_of(own)
    search = Search(problem, 12, Overrides(), memory_margin=MEMORY_MARGIN)
    return search, PlanSpace(problem, 12, search.space.memory_bytes)


@second_tier("a method finds the best of a table of numbers; a space of plans needs a search")
def test_most_choices_are_plans_and_cost_what_plans_cost() -> None:
    search, space = searched()
    run = Run(space, np.random.default_rng(0), math.inf)
    choices = [run.drawn() for _ in range(100)]
    legal = [own for own in choices if space.cost(own)[0] < math.inf]
    assert len(legal) > 50
    degrees = set()
    for own in legal[:20]:
        plan = space.plan(own)
        assert plan is not None
        price = Evaluator(search.problem).price(Plan.from_json(plan.to_json())).prediction
        cost, fits = space.cost(own)
        assert fits == (price.fullest_bytes <= space.memory_bytes)
        assert cost == price.step_time_s or (not fits and cost >= 2 * price.step_time_s)
        degrees |= {(len(plan.devices), stage.tp) for stage in plan.stages}
    assert len(degrees) > 4


@second_tier("a method finds the best of a table of numbers; a space of plans needs a search")
def test_a_faster_plan_than_the_searchs_is_a_defect() -> None:
    """Beside a step that is said to be longer than the search's own."""
    search, space = searched()
    step_s = 4 * search.run().best.step_time_s  # few tries on a slow machine beat it, too
    out = baselines.Compared(number=0, name="tiny", step_s=step_s, search_s=0.02)
    for name in METHODS:
        run = Run(space, np.random.default_rng(0), 0.7)
        out.found.append(baselines.by_method(name, space, out, run))
    for found in out.found:
        assert found.ratio() < 1 and found.ratio(0.0) == math.inf
        plan = Plan.from_json(found.defect)
        step_s = Evaluator(search.problem).price(plan).prediction.step_time_s
        assert step_s == pytest.approx(found.ratio() * out.step_s)
    assert baselines.table([out], 100).count(f"{out.found[0].ratio():.3f}") >= 2
