"""Plans whose branches lie apart, from the search: against every placement of small towers, each
priced as a plan; where they pay, and where they rightly don't."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from meshwright.costmodel.operators import Problem
from meshwright.planner.branches import Shape, branches_of, shapes_of
from meshwright.planner.drafts.candidates import place_stages
from meshwright.planner.frameworks.torch_script import ScriptError, torch_script
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.planner.plan import Plan, PlanError, StagePlan, check_plan, fingerprint
from meshwright.planner.plan.flow import crossings, depths
from meshwright.planner.pricing import Evaluator
from meshwright.planner.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers import tiny
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.planning import cut, odd_cluster, problem_of
from tests.helpers.tiers import tiered
from tests.models.models import CASES, traced
from tests.models.tower_models import CLASSES, PIXELS, TOKENS, VOCAB, Pairs, Towers

ROWS = 6
ASKED = Overrides(branches=2, tp=1, zero=0, recompute="none", schedule="1f1b")


def towers(kind: type[Towers] = Towers, **given: Any) -> Any:
    rows = (
        torch.randn(2, PIXELS, 12), torch.randint(VOCAB, (2, TOKENS)), torch.randint(CLASSES, (2,)),
    )  # fmt: skip
    return cut(kind(**given), rows, F.cross_entropy, "fp32")


def slow(devices: int, bandwidth: float) -> Cluster:
    """Devices between which a gradient takes long, of no latency."""
    base = tiny.slow_host(devices)
    link = replace(base.intra_link, bandwidth=bandwidth)
    return replace(base, intra_link=link, inter_link=link)


# --- the oracle -----------------------------------------------------------------------------------


def runs(first: int, last: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """All cuts of a run of blocks."""
    inside = range(first + 1, last)
    for count in range(len(inside) + 1):
        for cuts in itertools.combinations(inside, count):
            yield tuple(itertools.pairwise((first, *cuts, last)))


def every_plan(problem: Problem, branches: Sequence[range]) -> Iterator[Plan]:
    """All plans with a chain of stages for each branch and one stage for the trunk, beside the last
    of a branch or alone, data-parallel each."""
    graph, total = problem.graph, problem.cluster.num_devices
    count = len(graph.blocks)
    chains = [list(runs(run.start, run.stop)) for run in branches]
    trunk = (branches[-1].stop, count)
    for of_branches in itertools.product(*chains):
        parts = [*itertools.chain(*of_branches), trunk]
        ends = [len(of_branches[0]) - 1, len(parts) - 2]
        for host in (None, *ends):
            groups = len(parts) - (host is not None)
            for sizes in itertools.product(range(1, total + 1), repeat=groups):
                if sum(sizes) != total:
                    continue
                ranks = place_stages(sizes, problem.cluster)
                placed = [*ranks, *([] if host is None else [ranks[host]])]
                for m in (1, 2, 3, 6):
                    rows = ROWS // m
                    if any(rows % len(here) for here in placed):
                        continue
                    stages = tuple(
                        StagePlan(
                            blocks=tuple(b.name for b in graph.blocks[a:b]),
                            ranks=here, dp=len(here), tp=1,
                        )
                        for (a, b), here in zip(parts, placed, strict=True)
                    )  # fmt: skip
                    plan = Plan(
                        model=fingerprint(graph), global_batch_size=ROWS, num_microbatches=m,
                        schedule="1f1b", precision="fp32", stages=stages,
                    )  # fmt: skip
                    yield replace(plan, branches=depths(plan, graph))


@pytest.mark.parametrize(
    "seed", tiered(range(12), (0, 11).__contains__, "two of twelve random instances stay")
)
def test_the_search_is_as_fast_as_every_placement(seed: int) -> None:
    of = towers(layers=[(1, 1), (2, 1), (1, 2)][seed % 3])
    problem = problem_of(of, odd_cluster(seed, 4), "fp32")
    price, seconds = Evaluator(problem).price, list[float]()
    for plan in every_plan(problem, branches_of(of.graph, of.table)):
        with suppress(PlanError):  # a stage without a trained parameter
            seconds.append(price(plan).prediction.step_time_s)
    found = Search(problem, ROWS, ASKED).run().best
    assert found.plan.branches and len(seconds) > 50
    assert min(seconds) * (1 - 1e-9) <= found.step_time_s <= 1.001 * min(seconds)


# --- where they pay -------------------------------------------------------------------------------


def test_towers_lie_apart_where_links_are_slow_and_rows_meet() -> None:
    of = towers(Pairs)
    problem = problem_of(of, slow(2, 1e5), "fp32", meetings=())
    free = Search(problem, 4, Overrides()).run().best
    together = Search(problem, 4, Overrides(branches=1)).run().best
    assert free.plan.branches and not together.plan.branches
    assert free.step_time_s < 0.9 * together.step_time_s


def test_towers_of_unequal_work_share_their_devices_where_links_are_fast() -> None:
    of = towers(layers=(6, 1))
    problem = problem_of(of, slow(2, 1e10), "fp32")
    free = Search(problem, 16, Overrides()).run().best
    apart = Search(problem, 16, Overrides(branches=2)).run().best
    assert not free.plan.branches and apart.plan.branches
    assert free.step_time_s < apart.step_time_s


def test_a_lower_bound_is_below_plans_apart() -> None:
    of = towers(Pairs)
    result = Search(problem_of(of, slow(2, 1e5), "fp32"), 4, Overrides(branches=2)).run()
    assert 0 < result.bound_s <= result.best.step_time_s


# --- what is refused ------------------------------------------------------------------------------


def test_other_branches_than_there_are_are_refused() -> None:
    chain = tiny.cut(tiny.net())
    problem = Problem(graph=chain[0], factors=chain[1], cluster=slow(2, 1e5), precision="fp32")
    with pytest.raises(OverrideError, match=r"branches=2: the model has no two .* legal: 1;"):
        Search(problem, 4, Overrides(branches=2)).run()
    two = problem_of(towers(), slow(2, 1e5), "fp32")
    with pytest.raises(OverrideError, match=r"branches=3: the model has 2; legal: 1, 2;"):
        Search(two, 4, Overrides(branches=3)).run()
    with pytest.raises(OverrideError, match=r"branches=2: they need device groups of their own"):
        Search(two, 4, Overrides(branches=2, forbid=["unequal_meshes"])).run()


def test_depths_are_checked_against_the_edges() -> None:
    problem = problem_of(towers(), slow(2, 1e5), "fp32")
    graph, factors = problem.graph, problem.factors
    plan = Search(problem, 4, replace(ASKED, pp=2)).run().best.plan
    assert check_plan(plan, graph, factors)
    assert plan.branches in ((2, 1, 1), (1, 2, 1))
    with pytest.raises(PlanError, match=r"branches=\[9, 9, 9\]; legal: \[[12], [12], 1\]"):
        check_plan(replace(plan, branches=(9, 9, 9)), graph, factors)


def test_depths_are_those_of_the_longest_way() -> None:
    """An encoder whose output all stages of the decoder read."""
    graph = traced(CASES["t5"], 4).graph
    names = [block.name for block in graph.blocks]
    cut = [names.index(f"decoder.block.{k}") for k in (0, 1)]
    plan = build_plan(graph, Knobs(meshes=((1, 1),) * 3, rows=8, num_microbatches=2, cut=cut))
    assert {(0, 1), (0, 2), (1, 2)} <= crossings(plan, graph).keys()
    assert depths(plan, graph) == (3, 2, 1)


def test_stages_that_follow_each_other_are_not_apart() -> None:
    problem = problem_of(towers(), slow(2, 1e5), "fp32")
    chain = Search(problem, 4, Overrides(branches=1, pp=2, tp=1)).run().best.plan
    with pytest.raises(PlanError, match="each stage waits for the one before it"):
        check_plan(replace(chain, branches=(2, 1)), problem.graph, problem.factors)


def test_a_way_that_comes_back_to_its_ranks_is_none() -> None:
    problem = problem_of(towers(layers=(3, 1)), slow(2, 1e5), "fp32")
    graph = problem.graph
    image, text = branches_of(graph, problem.factors)
    ends = (0, image.stop - 1, image.stop, len(graph.blocks))
    names = [tuple(b.name for b in graph.blocks[a:b]) for a, b in itertools.pairwise(ends)]
    stages = tuple(
        StagePlan(blocks=of, ranks=(rank,), dp=1, tp=1)
        for of, rank in zip(names, (0, 1, 0), strict=True)
    )
    plan = Plan(
        model=fingerprint(graph), global_batch_size=4, num_microbatches=2, schedule="1f1b",
        precision="fp32", stages=stages, branches=(2, 1, 2),
    )  # fmt: skip
    assert depths(plan, graph) == () and text
    with pytest.raises(PlanError, match="ranks that no way through the model comes back to"):
        check_plan(plan, graph, problem.factors)


def test_pinned_overrides_give_the_plan_again() -> None:
    problem = problem_of(towers(), slow(2, 1e5), "fp32")
    best = Search(problem, 4, Overrides(branches=2)).run().best
    asked = Overrides(branches=best.plan.branches, pp=len(best.plan.devices))
    again = Search(problem, 4, asked).run().best
    assert again.plan.branches == best.plan.branches
    assert again.step_time_s == pytest.approx(best.step_time_s)


# --- depths as asked for --------------------------------------------------------------------------

# stages of each branch, of the trunk, its host, and their depths, by hand
SHAPES = (
    ((1, 1), 1, None, (2, 2, 1)),
    ((1, 1), 1, 0, (1, 2, 1)),
    ((1, 1), 1, 1, (2, 1, 1)),
    ((2, 1), 1, 0, (2, 1, 2, 1)),
    ((1, 2), 1, None, (2, 3, 2, 1)),
    ((1, 1), 2, None, (3, 3, 2, 1)),
)


@pytest.mark.parametrize(("branches", "trunk", "host", "deep"), SHAPES)
def test_a_shape_is_told_from_its_depths(
    branches: tuple[int, ...], trunk: int, host: int | None, deep: tuple[int, ...]
) -> None:
    shape = Shape(branches, trunk, host)
    assert shape.depths == deep
    assert shapes_of(deep, len(branches)) == [shape]


ASKED_FOR = [deep for *_, trunk, _, deep in SHAPES if trunk == 1]


@pytest.mark.parametrize(
    "deep", tiered(ASKED_FOR, ASKED_FOR[0].__eq__, "what depths mean stays for every shape")
)
def test_depths_without_pp_give_a_plan_of_that_shape(deep: tuple[int, ...]) -> None:
    """Among many devices, where ten better shares are of other shapes."""
    problem = problem_of(towers(layers=(2, 2)), slow(8, 1e5), "fp32")
    asked = replace(ASKED, branches=deep)
    assert Search(problem, 8, asked).run().best.plan.branches == deep


@pytest.mark.parametrize("deep", [(5, 3, 1), (1, 1), (2, 2, 2)])
def test_depths_of_no_chains_are_refused(deep: tuple[int, ...]) -> None:
    problem = problem_of(towers(), slow(4, 1e5), "fp32")
    said = r"the model has 2 and a trunk, each stage of one a device group nearer to the end"
    with pytest.raises(OverrideError, match=rf"branches=.*: {said}; legal: 1, 2;"):
        Search(problem, 4, Overrides(branches=deep)).run()


# --- plans that others write, and read ------------------------------------------------------------


class Frozen(Towers):
    """An image's tower that is trained no more."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.patches, self.image):
            part.requires_grad_(False)


def test_a_branch_that_is_not_trained_is_named() -> None:
    problem = problem_of(towers(Frozen), slow(2, 1e5), "fp32")
    said = r"branches=2: embed.*image.* hold no trained parameter.*; legal: 1;"
    with pytest.raises(OverrideError, match=said):
        Search(problem, 4, Overrides(branches=2)).run()
    assert not Search(problem, 4, Overrides(tp=1)).run().best.plan.branches


@pytest.mark.parametrize(
    "said", tiered([(), (2, 1), (2, 1, 1, 1)], (2, 1).__eq__, "one wrong number of depths stays")
)
def test_stages_that_share_devices_say_how_deep_each_is(said: tuple[int, ...]) -> None:
    problem = problem_of(towers(), slow(2, 1e5), "fp32")
    plan = Search(problem, 4, replace(ASKED, pp=2)).run().best.plan
    words = r"branches=.*: its 3 stages share 2 device groups; legal: \[[12], [12], 1\]"
    with pytest.raises(PlanError, match=words):
        check_plan(replace(plan, branches=said), problem.graph, problem.factors)


def test_no_script_of_torch_has_branches_apart() -> None:
    problem = problem_of(towers(), slow(2, 1e5), "fp32")
    plan = Search(problem, 4, replace(ASKED, pp=2)).run().best.plan
    with pytest.raises(ScriptError, match=r"plan: branches=\[.*\]: stages of torch follow each"):
        torch_script(plan, problem.graph, module="models:towers")
